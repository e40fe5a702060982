"""The breakdown of a rank's memory: its arithmetic, what grew, and the changes that it proposes."""

from __future__ import annotations

import dataclasses

import pytest

from phalanx.diagnosis.memory_breakdown import MemoryBreakdown, read_breakdown, write_breakdown

GB = 1e9
BREAKDOWN = MemoryBreakdown("cuda", 80 * GB, 14 * GB, 14 * GB, 28 * GB, 20 * GB, ranks=8, batch_size=8, blocks=32)
HALF, BF16 = ("batch_size=4, gradient_accumulation_steps=2", 10.0), ("mixed_precision='bf16'", 10.0)


def changed(**fields) -> MemoryBreakdown:
    return dataclasses.replace(BREAKDOWN, **fields)


@pytest.mark.parametrize(
    ("breakdown", "needed", "expected"),
    [
        (BREAKDOWN, 0, [HALF, BF16, ("memory=True", 31.0)]),
        (BREAKDOWN, 40 * GB, [HALF, BF16, ("strategy='fsdp'", 49.0)]),
        (changed(batch_size=1, precision="bf16", recomputes=True, strategy="fsdp"), 0, [("offload='cpu'", 56.0)]),
        (changed(batch_size=1, precision="bf16", blocks=0, ranks=1), 0, []),
        (changed(device="cpu", batch_size=3, ranks=2, local_ranks=2, blocks=0), 0,
         [("batch_size=1, gradient_accumulation_steps=2", 40 / 3), ("strategy='fsdp'", 28.0), ("num_workers=1", 56.0)]),
    ],
)  # fmt: skip
def test_changes_come_by_price_and_one_that_suffices_is_among_them(breakdown, needed, expected):
    found = [(change.setting, change.saves / GB) for change in breakdown.changes(needed)]
    assert [setting for setting, _ in found] == [setting for setting, _ in expected]
    assert [saved for _, saved in found] == pytest.approx([saved for _, saved in expected], rel=1e-2)


def test_memory_that_is_kept_between_steps_is_a_finding():
    assert "32 MB per step" in changed(held=((1, 1.0 * GB), (11, 1.32 * GB))).growth
    assert changed(held=((1, 1.0 * GB), (11, 1.01 * GB))).growth == ""
    assert changed(held=((1, 1.0 * GB),)).growth == ""


def test_a_bill_is_read_back_and_a_damaged_one_is_not_there(tmp_path):
    breakdown = changed(held=((1, 2.0), (3, 4.0)))
    write_breakdown(breakdown, tmp_path, 3)
    assert read_breakdown(tmp_path, 3) == breakdown
    (tmp_path / "rank-3.memory.json").write_text("{")
    assert read_breakdown(tmp_path, 3) is None
    assert read_breakdown(tmp_path, 4) is None


def test_the_lines_show_every_part_once():
    text = "\n".join(BREAKDOWN.lines())
    for part in (
        "memory per rank: 76 GB known, of 80 GB",
        "parameters",
        "14 GB",
        "optimizer states",
        "28 GB",
        "what to change",
    ):
        assert part in text
    assert "not measured" in "\n".join(changed(activations=0.0).lines())
