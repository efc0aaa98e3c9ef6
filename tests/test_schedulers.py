"""Learning rates of every update, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rlvr_pl.schedulers import WarmupCosine


def rates(warmup: int, updates: int, lr: float = 1.0) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = WarmupCosine(optimizer, warmup)
    scheduler.plan(updates)
    found = []
    for _ in range(updates):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_hand_worked():
    # 2 updates of warm-up: 1/2, 1; then shares 0/4, 1/4, 2/4, 3/4 of a half cosine
    half = math.sqrt(0.5)  # the tolerance is five units in the last place: a cosine and four roundings
    assert rates(2, 6, lr=8.0) == pytest.approx([4, 8, 8, 4 * (1 + half), 4, 4 * (1 - half)], rel=1e-15)


@pytest.mark.parametrize(("warmup", "updates"), [(5, 84), (0, 3), (5, 5), (5, 2), (1, 1)])
def test_no_update_has_rate_zero_and_none_exceeds_the_full_rate(warmup, updates):
    found = rates(warmup, updates)
    assert all(0 < rate <= 1 for rate in found)
    peak = found.index(max(found))
    assert found[: peak + 1] == sorted(found[: peak + 1])
    assert found[peak:] == sorted(found[peak:], reverse=True)


def test_state_survives_a_resume():
    parameter = torch.nn.Parameter(torch.zeros(1))
    first = WarmupCosine(torch.optim.SGD([parameter], lr=1.0), 2, updates=9)
    for _ in range(4):
        first.optimizer.step()
        first.step()
    second = WarmupCosine(torch.optim.SGD([parameter], lr=1.0), 2)
    second.load_state_dict(first.state_dict())
    second.optimizer.step()
    second.step()
    first.step()
    assert second.get_last_lr() == first.get_last_lr()


def test_an_unplanned_cosine_says_so():
    scheduler = WarmupCosine(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), 1)
    scheduler.optimizer.step()
    scheduler.step()
    with pytest.raises(RuntimeError, match="plan"):
        scheduler.step()
    with pytest.raises(ValueError, match="warmup"):
        WarmupCosine(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), -1)
