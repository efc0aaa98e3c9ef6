"""Faults that users of other trainers reported and that only whole runs can show (see ``tests/test_bug_cases.py``)."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch

import rlvr_pl.module
from rlvr_pl.callbacks.checkpoint import latest_checkpoint

CRASH = """
from lightning.pytorch import Callback

class Killed(BaseException):
    "Passes through everything that handles errors, as the end of the process does."

class Crash(Callback):
    "Fails at the start of the updates that the file `crashes` lists, each once."

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        left = open("crashes").read().split()
        if left and int(left[0]) == module.updates_done + 1:
            with open("crashes", "w") as f:
                f.write(" ".join(left[1:]))
            raise Killed("crash")
"""
MIXED = """
def mixed(completions):
    return [float(i % 2) for i in range(len(completions))]
"""


@pytest.fixture(autouse=True)
def files(tmp_path):
    """The user's own callback and reward function, in the working folder."""
    (tmp_path / "crash.py").write_text(CRASH)
    (tmp_path / "mixed.py").write_text(MIXED)
    (tmp_path / "crashes").touch()


def column(run: Path, name: str) -> list[str]:
    with (run / "metrics.csv").open() as f:
        return [row[name] for row in csv.DictReader(f)]


def uids(run: Path) -> list[str]:
    (file,) = (run / "rollouts").iterdir()
    return [json.loads(line)["uid"] for line in file.read_text().splitlines()]


def weights(run: Path) -> bytes:
    return (run / "snapshots" / "final" / "model.safetensors").read_bytes()


def test_resume_lr(fit, tmp_path) -> None:
    """Warm-up 2, then a cosine to 10; saved at 4; resumed twice. The rate of update u is 1e-4 times u/2 up to 2, then
    (1 + cos(pi (u - 3) / 8)) / 2."""
    words = [
        "--data.updates=10", "--checkpoint.every_n_updates=4", "--trainer.callbacks+=crash.Crash",
        "--lr_scheduler=WarmupCosine", "--lr_scheduler.warmup=2", "--model.max_new_tokens=8",
    ]  # fmt: skip
    assert fit("--run=whole", *words) == 0
    (tmp_path / "crashes").write_text("6 7")
    for _ in range(2):
        with pytest.raises(BaseException, match="crash"):
            fit("--run=r", *words)
    assert fit("--run=r", *words) == 0
    rates = column(tmp_path / "r", "lr")
    assert rates == column(tmp_path / "whole", "lr") and len(rates) == 10
    factors = [0.5, 1.0, *((1 + float(torch.cos(torch.tensor(torch.pi * k / 8)))) / 2 for k in range(8))]
    assert [float(r) / 3e-4 for r in rates] == pytest.approx(factors, abs=1e-6)  # FP32 cosine
    assert weights(tmp_path / "r") == weights(tmp_path / "whole")


def test_resume_mid_accumulation(fit, outcome, tmp_path, monkeypatch) -> None:
    """Two steps an update (`inner_epochs`), killed between them: a checkpoint holds whole updates only, so the update
    is sampled afresh, and gives what it gave."""
    words = [
        "--objective=ClippedGRPO", "--objective.inner_epochs=2", "--grader=FunctionGrader",
        "--grader.path=mixed.py:mixed", "--model.max_new_tokens=12",
    ]  # fmt: skip
    assert fit("--run=whole", *words) == 0
    real, calls = rlvr_pl.module.update_once, []

    def killed(*args, **kwargs):
        calls.append(real(*args, **kwargs))
        if len(calls) == 5:  # the first of the two steps of update 3
            raise BaseException("crash")
        return calls[-1]

    monkeypatch.setattr(rlvr_pl.module, "update_once", killed)
    with pytest.raises(BaseException, match="crash"):
        fit("--run=r", *words)
    monkeypatch.setattr(rlvr_pl.module, "update_once", real)
    assert all(step.stepped for step in calls)
    newest = latest_checkpoint(tmp_path / "r" / "checkpoints")
    assert newest is not None and newest.name == "update-000002.ckpt"
    assert fit("--run=r", *words) == 0
    assert outcome(tmp_path / "r") == outcome(tmp_path / "whole")
    assert outcome(tmp_path / "r")["cost"]["optimizer_steps"] == 8


def test_pl_resume_mid_epoch(fit, tmp_path) -> None:
    """Ten updates, a checkpoint at 3, then a crash: it goes on with update 4 of the same order."""
    words = ["--data.updates=10", "--checkpoint.every_n_updates=3", "--trainer.callbacks+=crash.Crash"]
    words += ["--model.max_new_tokens=8"]
    assert fit("--run=whole", *words) == 0
    (tmp_path / "crashes").write_text("5")
    with pytest.raises(BaseException, match="crash"):
        fit("--run=r", *words)
    assert fit("--run=r", *words) == 0
    assert column(tmp_path / "r", "update") == [str(i) for i in range(1, 11)]
    assert uids(tmp_path / "r") == uids(tmp_path / "whole")
    assert weights(tmp_path / "r") == weights(tmp_path / "whole")


def test_pl_manual_checkpoint(fit, tmp_path) -> None:
    """Checkpoints after optimizer steps 2, 4 and 6; each step is counted once; the weights are those after the step."""
    assert fit("--run=r", "--data.updates=6", "--checkpoint.keep=3", "--model.max_new_tokens=8") == 0
    files = sorted((tmp_path / "r" / "checkpoints").glob("*.ckpt"))
    assert [f.name for f in files] == [f"update-{u:06d}.ckpt" for u in (2, 4, 6)]
    saved = [torch.load(f, weights_only=True) for f in files]
    assert [c["global_step"] for c in saved] == [2, 4, 6]
    assert [c["rlvr"]["cost"]["optimizer_steps"] for c in saved] == [2, 4, 6]
    from safetensors.torch import load_file

    final = load_file(tmp_path / "r" / "snapshots" / "final" / "model.safetensors")
    assert all(torch.equal(saved[-1]["state_dict"][f"model.{name}"], w) for name, w in final.items())


def test_pl_accum_short_epoch(fit, tmp_path, capsys) -> None:
    """An update is one batch and one step, so that no last batch of an epoch can be shorter than an accumulation."""
    refused(fit, tmp_path, capsys, "--trainer.accumulate_grad_batches=4", "data.questions_per_update")
    assert fit("--run=r", "--data.updates=3", "--data.questions_per_update=2", "--model.max_new_tokens=8") == 0
    assert json.loads((tmp_path / "r" / "cost.json").read_text())["optimizer_steps"] == 3


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("--trainer.accumulate_grad_batches=4", "data.questions_per_update"),
        ("--trainer.gradient_clip_val=1.0", "model.max_grad_norm"),
    ],
)
def test_pl_manual_clip_accum(fit, tmp_path, capsys, word, remedy) -> None:
    refused(fit, tmp_path, capsys, word, remedy)


def test_pl_reload_schedule(fit, tmp_path, capsys) -> None:
    refused(fit, tmp_path, capsys, "--trainer.reload_dataloaders_every_n_epochs=2", "before the first")


def refused(fit, folder: Path, capsys, word: str, words: str) -> None:
    """Status 2 and one line with these words, and nothing written."""
    before = set(folder.iterdir())
    assert fit("--run=refused", word) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and words in err, err
    assert set(folder.iterdir()) == before


def test_cli_class_path(fit, tmp_path, capsys) -> None:
    """A class that replaces another says what of the old one is left out; a wrong key, name or base is refused with
    the names that would be right."""
    (tmp_path / "a.yaml").write_text("objective:\n  class_path: ForkCredit\n  init_args: {credit: rankc}\n")
    assert fit("--run=r", "--config=a.yaml", "--objective=RLOO", "--data.updates=1", "--model.max_new_tokens=8") == 0
    assert "--objective: RLOO takes the place of ForkCredit; left out: credit" in capsys.readouterr().err
    assert "class_path: rlvr_pl.objectives.RLOO" in (tmp_path / "r" / "config.yaml").read_text()
    (tmp_path / "b.yaml").write_text("objective:\n  class_path: ForkCredit\n  init_kwargs: {credit: rankc}\n")
    for word, words in {
        "--config=b.yaml": "no setting 'init_kwargs.credit'",
        "--objective=ForkCredits": "ForkCredit",
        "--data.class_path=Nope": "data",
        "--objective=torch.nn.Linear": "subclass of Objective",
        "--data.class_path=rlvr_pl.objectives.GRPO": "subclass of RunData",
    }.items():
        refused(fit, tmp_path, capsys, word, words)


def test_cli_optimizer_override(fit, tmp_path) -> None:
    """The module's own default is AdamW at 1e-5; the settings win."""
    assert fit("--run=r", "--optimizer=SGD", "--optimizer.lr=1e-4", "--data.updates=1", "--model.max_new_tokens=8") == 0
    assert column(tmp_path / "r", "lr") == ["0.0001"]
    newest = latest_checkpoint(tmp_path / "r" / "checkpoints")
    (group,) = torch.load(newest, weights_only=True)["optimizer_states"][0]["param_groups"]
    assert group["lr"] == 1e-4 and "momentum" in group and "betas" not in group
