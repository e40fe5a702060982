"""`phalanx.verify`: the proof from Python."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from phalanx.config import DistributedConfig, resolve
from phalanx.verification.proofs import DEFAULTS, Proof
from phalanx.verification.report import Verdict
from phalanx.verification.subject import GivenSubject, Subject


def verify(
    model: Any, data: Any, loss_fn: Any = None, *, resume: bool = False, reshard: str | None = None, **settings: Any
) -> Verdict:
    """Prove that a layout trains a model as one process does; the settings are those of `DistributedConfig`.

    `model` is a module or a function that makes one, `data` a data set or a DataLoader over one. The verdict is true
    when they agree, and printing it shows the tables. With `resume` a stopped and resumed run is
    compared with one that never stopped, with `reshard="fsdp:4"` the checkpoint is loaded on another layout.
    """
    name = getattr(model, "__name__", type(model).__name__)
    config = resolve(settings, recipe=DEFAULTS, recipe_name="verify").config
    return prove(GivenSubject(name, model, data, loss_fn), config, resume=resume, reshard=reshard)


def prove(subject: Subject, config: DistributedConfig, *, resume: bool = False, reshard: str | None = None) -> Verdict:
    """Run the proof that was asked for."""
    with closing(Proof(subject, config)) as proof:
        if reshard is not None:
            return proof.against_layout(reshard)
        return proof.against_resumption() if resume else proof.against_one_process()
