"""The base class: what a new objective must and need not write, and what is checked before a step."""

from __future__ import annotations

import importlib
import math
import re
from pathlib import Path

import pytest
import torch

from rlvr_pl.analysis.objectives import objective_classes
from rlvr_pl.core.advantage import leave_one_out
from rlvr_pl.errors import UserError
from rlvr_pl.objectives import GRPO, RLOO, Clipped, KLPenalty, Objective
from rlvr_pl.objectives.base import check_weights


class LeaveOneOut(Objective):
    """A user's objective."""

    equation = "-1/N sum_i (r_i - mean of the others) sum_t log p_it"

    def token_weights(self, batch):
        advantage = leave_one_out(batch.rewards, batch.group_size)
        return advantage[:, None] * batch.mask / batch.totals.rollouts


@pytest.fixture
def batch(make_batch):
    return make_batch([[1, 2], [3]], [1, 0], 2)


def test_an_objective_of_one_method(batch) -> None:
    objective = LeaveOneOut()
    weights = objective.token_weights(batch)
    check_weights(objective, weights, batch)
    assert weights.tolist() == [[0.5, 0.5], [-0.5, 0.0]]
    # -(0.5 (-1) + 0.5 (-2) - 0.5 (-4)) = -0.5
    assert objective.loss(torch.tensor([[-1.0, -2.0], [-4.0, math.nan]]), weights, batch) == -0.5
    assert objective.linear
    assert not objective.every_row
    assert not objective.needs
    assert objective.samples
    assert objective.resample_rounds == 0
    assert objective.requests(batch) == ()
    assert objective.prepare(batch) == {}
    assert objective.metrics(batch, weights) == {}
    assert objective.state_dict() == {}


def test_who_is_linear() -> None:
    class OwnLoss(GRPO):
        def loss(self, logprobs, weights, batch):
            return super().loss(logprobs, weights, batch)

    class ClippedRLOO(Clipped, RLOO):
        pass

    assert GRPO().linear
    assert not GRPO().every_row
    assert not GRPO(kl=KLPenalty()).linear
    assert GRPO(kl=KLPenalty()).every_row
    assert not OwnLoss().linear
    assert not ClippedRLOO().linear
    assert not ClippedRLOO().every_row  # rows of weight 0 need no forward here either


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (torch.zeros(2, 3), r"LeaveOneOut.token_weights returned shape \(2, 3\).*\(2, 2\)"),
        (torch.zeros(2), r"shape \(2,\)"),
        ([[0.0, 0.0]], "list"),
        (None, "NoneType"),
        (torch.tensor([[0, math.nan], [0, 0]]), "not finite .*question 'q0' sample 0 .*position 1"),
        (torch.tensor([[0, 0], [math.inf, 0]]), "not finite .*question 'q0' sample 1 .*position 0"),
        (torch.tensor([[0, 0], [0, 2.5]]), r"on padding \(2.5\).*question 'q0' sample 1 .*position 1"),
    ],
)
def test_wrong_weights_name_the_class_and_the_rollout(batch, weights, message) -> None:
    with pytest.raises(UserError, match=message) as error:
        check_weights(LeaveOneOut(), weights, batch)
    assert "LeaveOneOut" in str(error.value)
    assert "\n" not in str(error.value)


def test_every_class_states_its_equation_and_its_edge_cases() -> None:
    """In its docstring, or in that of a class it derives from: what a uniform group (or update), a group of one, an
    all-truncated batch and an empty completion give, and how it departs from the supplied loss."""
    for cls in objective_classes():
        assert cls.__dict__.get("equation"), cls
        assert "\n" not in cls.equation
        docs = [base.__doc__ or "" for base in cls.__mro__ if issubclass(base, Objective) and base is not Objective]
        told = " ".join(" ".join(docs).split())
        for word in ("uniform", "of one", "truncated", "empty completion", "Departs from supplied"):
            assert word in told, (cls, word)


def test_the_example_of_the_docs_is_complete_and_right(batch, tmp_path, monkeypatch) -> None:
    text = (Path(__file__).parents[2] / "docs" / "objectives.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "my_file.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    objective = importlib.import_module("my_file").LeaveOneOut(scale=2.0)
    weights = objective.token_weights(batch)
    check_weights(objective, weights, batch)
    assert torch.equal(weights, 2 * RLOO().token_weights(batch))
