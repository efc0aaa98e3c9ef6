"""The supplied recipe's own loss function, run on given numbers, against the default objective."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlvr_pl.objectives import GRPO, ORL

REWARDS = [1.0, 0.0, 0.0, 1.0]
LOGPROBS = [[-0.3, -1.2, -0.1], [-2.0], [-0.7, -0.2], [-0.5, -0.5, -0.5, -0.1]]


def test_loss_and_gradient_equal_the_supplied_code(monkeypatch, make_batch, pad) -> None:
    supplied = pytest.importorskip("reasoning_from_scratch.ch06")
    theirs = pad(LOGPROBS).requires_grad_()
    rollouts = iter(range(len(REWARDS)))

    def sample_response(**_):
        i = next(rollouts)
        return torch.tensor([i] * (2 + len(LOGPROBS[i]))), 2, str(i)

    monkeypatch.setattr(supplied, "sample_response", sample_response)
    monkeypatch.setattr(supplied, "reward_rlvr", lambda text, answer: REWARDS[int(text)])
    monkeypatch.setattr(
        supplied, "sequence_logprob", lambda model, ids, prompt: theirs[ids[0], : len(ids) - prompt].sum()
    )
    model = SimpleNamespace(training=False, eval=lambda: None)
    example = {"problem": "1+1", "answer": "2"}
    found = supplied.compute_grpo_loss(model, None, example, "cpu", num_rollouts=len(REWARDS))

    batch = make_batch([[5] * len(row) for row in LOGPROBS], REWARDS, len(REWARDS))
    ours = pad(LOGPROBS).requires_grad_()
    for objective in (GRPO(), ORL()):
        loss = objective.loss(ours, objective.token_weights(batch), batch)
        gradients = (
            torch.autograd.grad(loss, ours)[0],
            torch.autograd.grad(found["loss_tensor"], theirs, retain_graph=True)[0],
        )
        # The supplied code holds rewards and advantages in float32: eps 1.2e-7 on values of size 1, a few operations.
        assert loss.item() == pytest.approx(found["loss"], abs=2e-6)
        torch.testing.assert_close(*(g * batch.mask for g in gradients), rtol=0, atol=2e-6)
