"""Errors that say only that another rank was lost, as gloo raises them."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from phalanx.host.lost_peers import lost_peers


def wait_in_vain() -> list[tuple[str, bool]]:
    """Begin three all-reduces that rank 1 never enters, wait for each, and begin one more."""
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    errors: list[tuple[str, bool]] = []
    if dist.get_rank() == 0:
        works = [dist.all_reduce(torch.ones(1024), group=group, async_op=True) for _ in range(3)]
        for wait in (*(work.wait for work in works), lambda: dist.all_reduce(torch.ones(1), group=group)):
            try:
                wait()
            except RuntimeError as error:
                errors.append((str(error), lost_peers(error)))
    dist.barrier()
    return errors


def test_calls_that_wait_behind_one_that_timed_out_report_a_lost_rank(ranks):
    errors = ranks(wait_in_vain, world_size=2)[0]
    assert len(errors) == 4, "each has failed"
    assert any("pair closure" in text for text, _ in errors), errors
    assert all(lost for _, lost in errors), errors
