"""What two newcomers do: one at a prompt, who stops a training and goes on, and one who brings a LightningModule.

A third, with a cluster, is in `tests/faults/test_submit_slurm.py`, on a real Slurm.
"""

from __future__ import annotations

import re
import sys

import pytest
import torch
from long_proofs import long_proof
from torch import nn
from torch.nn.functional import cross_entropy
from waiting import LIMIT_SECONDS

from phalanx import Trainer
from phalanx.errors import UsageError
from phalanx.zoo.data import load

PROMPT = ">>> "


class Prompt:
    """A Python prompt on a terminal of its own."""

    def __init__(self, folder) -> None:
        pexpect = pytest.importorskip("pexpect")
        self.child = pexpect.spawn(
            sys.executable,
            ["-i", "-q"],
            cwd=str(folder),
            timeout=LIMIT_SECONDS,
            encoding="utf-8",
            dimensions=(40, 150),
            env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "TERM": "dumb", "PYTHONPATH": ":".join(sys.path)},
        )
        self.child.expect_exact(PROMPT)

    def type(self, line: str) -> str:
        """Type a line and return what was printed until the next prompt."""
        self.child.sendline(line)
        self.child.expect_exact(PROMPT)
        return str(self.child.before)

    def type_and_stop(self, line: str, after: str) -> str:
        """Type a line, press Ctrl-C once something was printed, and return what was printed until the next prompt."""
        self.child.sendline(line)
        self.child.expect(after)
        seen = str(self.child.before)
        self.child.sendintr()
        self.child.expect_exact(PROMPT)
        return seen + str(self.child.before)


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=long_proof)])
def test_the_notebook_user(ranks, tmp_path):
    """Fit, Ctrl-C, evaluate, fit again: the weights at the Ctrl-C are there and are trained further."""
    prompt = Prompt(tmp_path)
    prompt.type("import torch; from torch import nn; from phalanx import Trainer; from phalanx.zoo.data import load")
    prompt.type("_ = torch.manual_seed(0); train, val = load('digits'), load('digits', split='val')")
    prompt.type("model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))")
    prompt.type("opt = torch.optim.AdamW(model.parameters(), lr=3e-3)")
    prompt.type(
        f"t = Trainer(model, opt, loss_fn=nn.CrossEntropyLoss(), num_workers={ranks}, device='cpu', batch_size=32)"
    )
    before = _accuracy(prompt.type("print(t.evaluate(val))"))
    stopped = prompt.type_and_stop("h = t.fit(train, val, epochs=2000)", after=r"epoch +3")
    assert "KeyboardInterrupt: stopped" in stopped, stopped
    assert "Exception ignored" not in stopped
    after = _accuracy(prompt.type("print(t.evaluate(val))"))
    assert before < 0.3 < 0.8 < after
    assert "True" in prompt.type("print(len(opt.state) == 4 and all(s['step'] > 0 for s in opt.state.values()))")
    assert "2" in prompt.type("h = t.fit(train, val, epochs=2); print(len(h.epochs))")
    assert _accuracy(prompt.type("print(t.evaluate(val))")) > 0.8
    prompt.child.sendeof()
    prompt.child.wait()
    assert prompt.child.exitstatus == 0


def _accuracy(printed: str) -> float:
    found = re.search(r"'accuracy': ([\d.]+)", printed)
    assert found, printed
    return float(found[1])


def test_the_lightning_convert(tmp_path, monkeypatch, fork_server):
    """A LightningModule is refused with what to write; with that written, it trains."""
    monkeypatch.chdir(tmp_path)
    lightning = pytest.importorskip("lightning", reason="pip install 'phalanx[bench]'")

    class Digits(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

        def forward(self, images):
            return self.layers(images)

        def training_step(self, batch, index):
            return cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    module = Digits()
    with pytest.raises(UsageError, match="is a LightningModule") as refused:
        Trainer(module, device="cpu")
    assert "loss_fn=" in refused.value.hint
    assert "training_step=" in refused.value.hint
    train, val = load("digits"), load("digits", split="val")
    settings = {"device": "cpu", "num_workers": 2, "batch_size": 32, "epochs": 2, "verbosity": "quiet"}
    optimizer = module.configure_optimizers()
    history = Trainer(module, loss_fn=cross_entropy, optimizer=optimizer, **settings).fit(train, val)
    assert history.epochs[-1].val["accuracy"] > 0.8
