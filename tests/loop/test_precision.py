"""What `mixed_precision` means on a CPU, depending on what it supports; and the message about it."""

from __future__ import annotations

import warnings

import pytest
import torch

from phalanx.config import settings as precision
from phalanx.loop.formation import Formation

CPUS = {
    "processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 sse\n": True,
    "flags\t\t: fpu avx512f amx_bf16 amx_tile\n": True,
    "flags\t\t: fpu avx512f avx2\nmodel name\t: bf16\n": False,
    "Features\t: fp asimd bf16 i8mm\n": True,
    "Features\t: fp asimd asimdhp\n": False,
}


@pytest.fixture
def cpu(tmp_path, monkeypatch):
    """Be on a machine with such a /proc/cpuinfo."""

    def become(text: str) -> None:
        (tmp_path / "cpuinfo").write_text(text)
        monkeypatch.setattr(precision, "_CPU_INFO", tmp_path / "cpuinfo")
        precision.cpu_has_bf16.cache_clear()

    yield become
    precision.cpu_has_bf16.cache_clear()


@pytest.mark.parametrize(("text", "has"), CPUS.items())
def test_true_is_bf16_only_where_the_cpu_has_it(cpu, text, has):
    cpu(text)
    assert precision.precision_name(True, "cpu") == ("bf16" if has else "fp32")
    asked = [("bf16", "cpu"), (False, "cpu"), (True, "cuda"), ("bf16", "cuda"), ("fp16", "cuda"), (False, "cuda")]
    assert [precision.precision_name(*given) for given in asked] == ["bf16", "fp32", "fp16", "bf16", "fp16", "fp32"]


def test_a_cpu_without_bf16_says_what_it_does_instead(cpu):
    cpu("Features\t: fp asimd\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        formation = Formation(device="cpu", mixed_precision=True)
    assert formation.notes == [
        "mixed_precision = true: this CPU has no bf16 arithmetic, so it computes in fp32, which is faster"
    ]
    with pytest.warns(UserWarning, match="emulates bf16, at least 60 times slower"):
        formation = Formation(device="cpu", mixed_precision="bf16")
    with warnings.catch_warnings(record=True) as warned, formation.autocast():
        torch.nn.Linear(8, 8)(torch.ones(8, 8))  # torch's message about it, where this machine has no bf16
    assert not warned


def test_a_cpu_with_bf16_says_nothing(cpu):
    cpu("Features\t: fp asimd bf16\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Formation(device="cpu", mixed_precision="bf16").notes == []
