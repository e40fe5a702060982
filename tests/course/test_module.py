"""Module 202 has the parts, the names and the durations of its specification, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from wrong import COURSE

MODULE = COURSE / "module-202"
TEXTS = sorted(path for path in MODULE.rglob("*.md") if "example" not in path.parts)
# What must be taught, and how a text may write it.
NAMES = {
    "synchronous data parallelism": r"synchronous",
    "asynchronous data parallelism": r"asynchronous",
    "hybrid": r"hybrid",
    "ZeRO": r"\bZeRO\b",
    "ZeRO-Offload": r"ZeRO-Offload",
    "gradient checkpointing": r"gradient checkpointing|activation checkpointing",
    "compression": r"compress",
    "overlap": r"overlap",
    "topology-aware": r"topolog",
    "full checkpoints": r"\*\*Full\*\*",
    "incremental checkpoints": r"incremental",
    "sharded checkpoints": r"sharded",
    "scaling efficiency": r"scaling efficiency|efficiency",
    "cost": r"\bcosts?\b",
    "NVLink": r"NVLink",
    "operators of Kubernetes": r"operator",
    **{name: re.escape(name) for name in ("Prometheus", "Grafana", "TensorBoard", "DCGM", "NFS", "Lustre", "py-spy")},
    "object storage": r"object stor",
    "PyTorch Profiler": r"torch\.profiler|PyTorch Profiler",
    "Nsight Systems": r"Nsight Systems",
    "Ray Tune": r"Ray Tune",
    "population-based training": r"[Pp]opulation[- ]based training",
    "DeepSpeed": r"DeepSpeed",
    "Megatron-LM": r"Megatron-LM",
    "FSDP": r"FSDP",
}
# The four topics of each lecture, each by words that its headings or text have.
TOPICS = {
    "01": ("data parallelism", "model parallelism", "scaling law", "synchronis"),
    "02": ("actor", "Ray Train", "Ray Tune", "Kubernetes"),
    "03": ("MPI", "reducer", "TensorFlow", "DeepSpeed"),
    "04": ("all-reduce", "RDMA", "topology", "NVLink"),
    "05": ("BF16", "autocast", "loss scal", "memory"),
    "06": ("checkpoint", "elastic", "detect", "state"),
    "07": ("profil", "bottleneck", "communication", "memory"),
}
LINK = re.compile(r"\]\(([^)\s]+)\)")


def lectures() -> dict[str, str]:
    return {path.name[:2]: path.read_text() for path in (MODULE / "lecture-notes").glob("*.md")}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_taught_in_a_lecture(name):
    found = [number for number, text in lectures().items() if re.search(NAMES[name], text, re.IGNORECASE)]
    assert found, f"no lecture has {name}"


@pytest.mark.parametrize("number", TOPICS)
def test_a_lecture_has_its_four_topics(number):
    text = lectures()[number].lower()
    assert [topic for topic in TOPICS[number] if text.count(topic.lower()) < 2] == []


def test_the_front_page_has_every_part():
    text = (MODULE / "README.md").read_text()
    parts = ("Overview", "Learning objectives", "Prerequisites", "Duration", "Structure", "Topics", "Learning outcomes")
    parts += ("Tools", "Success criteria", "Checklist", "Next steps", "Resources", "Getting help")
    for part in parts:
        assert f"\n## {part}\n" in text, part
    hours = [int(row[1]) for row in re.findall(r"^\| ([a-z ]+) \| (\d+) \|$", text, re.MULTILINE)]
    assert hours == [20, 25, 2, 8]
    assert text.count("- [ ]") == 9
    assert "Module 203" in text
    assert "Module 204" in text
    assert text.rstrip().endswith(
        "[lecture-notes/01-distributed-fundamentals.md](lecture-notes/01-distributed-fundamentals.md)."
    )


@pytest.mark.parametrize("lab", ["lab-01-ray-train", "lab-02-horovod", "lab-03-fault-tolerant", "lab-04-profiling"])
def test_a_lab_has_its_parts(lab):
    folder = MODULE / "labs" / lab
    text = (folder / "README.md").read_text()
    for part in (r"^## Goal|\*\*Goal\*\*", r"^\**Time\**:", "^## Troubleshooting", "^## Extension"):
        assert re.search(part, text, re.MULTILINE), part
    assert text.count("```text") >= 2, "what one will see"
    assert f"phalanx learn check {lab[:6]}" in text
    for place in ("starter", "solution"):
        assert list((folder / place).iterdir()), place


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(MODULE)))
def test_links_inside_the_repository_lead_to_files(path: Path):
    prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    places = [link.partition("#")[0] for link in LINK.findall(prose) if not link.startswith(("http", "#", "mailto:"))]
    assert [place for place in places if not (path.parent / place).exists()] == []
