"""NaN and Inf, wherever they first show: nothing of the update is kept but the rollouts that made them."""

from __future__ import annotations

import json
import math
import textwrap

import pytest
import torch

from rlvr_pl.callbacks.checkpoint import latest_checkpoint
from rlvr_pl.objectives import GRPO
from rlvr_pl.records import RunFolder
from rlvr_pl.types import Completion, Grade, GradeStatus, Rollout, StopReason, build_batch
from rlvr_pl.update import NonFiniteError, measured, update_once

CULPRITS = """
    import torch
    from lightning.pytorch import Callback
    from rlvr_pl.objectives import SignedReinforce

    class Logits(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if module.updates_done == 2:
                with torch.no_grad():
                    module.policy.head[5] = float("nan")
                module._synced = False

    class Loss(SignedReinforce):
        def loss(self, logprobs, weights, batch):
            return -(weights * logprobs).sum() * (float("inf") if batch.update == 3 else 1.0)

    class Gradient(SignedReinforce):
        "The value of sqrt(0) is 0 and its slope infinite."
        def loss(self, logprobs, weights, batch):
            plain = -(weights * logprobs).sum()
            return plain + (logprobs * 0).sum().sqrt() if batch.update == 3 else plain
"""
CASES = {
    "logits": (
        ["--trainer.callbacks+=culprits.Logits"],
        "the logits of request 0 are not finite at completion token 1",
    ),
    "loss": (["--objective=culprits.Loss"], "the loss of rollouts "),
    "gradient": (["--objective=culprits.Gradient"], "the gradient norm is nan"),
    "weights": (
        ["--optimizer=SGD", "--optimizer.lr=3e38", "--model.max_grad_norm=null"],
        "gave weights that are not finite",
    ),
}


@pytest.mark.parametrize("what", CASES)
def test_a_run_stops_in_one_line_and_keeps_the_rollouts(fit, tmp_path, capsys, what):
    (tmp_path / "culprits.py").write_text(textwrap.dedent(CULPRITS))
    words, told = CASES[what]
    assert fit("--run=r", "--checkpoint.every_n_updates=1", *words) == 1
    err = capsys.readouterr().err
    message = err.splitlines()[-1]
    assert "Traceback" not in err and message.startswith("rlvr-pl: update ") and told in message
    run = tmp_path / "r"
    update = int(message.split()[2].rstrip(":"))
    assert f"the run ends with update {update - 1} as its last good one" in message
    (evidence,) = (run / "nonfinite").iterdir()
    assert evidence.name == f"update-{update:06d}.jsonl" and str(evidence.relative_to(tmp_path)) in message
    rows = [json.loads(line) for line in evidence.read_text().splitlines()]
    assert 1 <= len(rows) <= 4 and all(row["prompt_ids"] and row["uid"].startswith("walk") for row in rows)
    assert what == "logits" or all(row["token_ids"] for row in rows)
    # nothing of that update was recorded, and the checkpoint is that of the one before
    assert len(RunFolder(run).table("metrics.csv").rows()) == update - 1
    newest = latest_checkpoint(run / "checkpoints")
    assert newest is None if update == 1 else newest is not None and newest.name == f"update-{update - 1:06d}.ckpt"
    if newest is not None:
        state = torch.load(newest, weights_only=True)["state_dict"]
        assert all(bool(w.isfinite().all()) for w in state.values())


def batch():
    grades = [Grade(GradeStatus.CORRECT, 1.0), Grade(GradeStatus.WRONG, 0.0)]
    return build_batch(
        [Rollout("q", i, (2, 3), Completion((4 + i, 1), StopReason.EOS), "", g) for i, g in enumerate(grades)], 2
    )


def test_log_probs_that_are_not_finite_are_found_when_measured(tiny_policy):
    policy = tiny_policy()
    with torch.no_grad():
        policy.head[7] = math.inf
    with pytest.raises(NonFiniteError, match="log-probs of rollouts q#") as caught:
        measured(policy, batch(), max_tokens=100, temperature=1.0)
    assert set(caught.value.rows) <= {0, 1}


def test_a_gradient_that_is_not_finite_leaves_weights_and_optimizer_alone(tiny_policy):
    class Steep(GRPO):
        def loss(self, logprobs, weights, batch):
            return super().loss(logprobs, weights, batch) + (logprobs * 0).sum().sqrt()

    policy = tiny_policy()
    optimizer = torch.optim.AdamW(policy.model.parameters())
    before = [p.detach().clone() for p in policy.model.parameters()]
    with pytest.raises(NonFiniteError, match="gradient norm is nan"):
        update_once(policy, Steep(), batch(), GRPO().token_weights(batch()), optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.model.parameters()))
    assert not optimizer.state
