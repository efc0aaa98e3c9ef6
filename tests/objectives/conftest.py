"""How these tests make batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from rlvr_pl.types import (
    Completion,
    Grade,
    GradeStatus,
    Rollout,
    RolloutBatch,
    StopReason,
    build_batch,
)


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., RolloutBatch]:
    """A function: completions as token ids and their rewards -> a batch of groups of `group_size`, FP64 fields."""

    def make(
        token_ids: Sequence[Sequence[int]],
        rewards: Sequence[float | None],
        group_size: int,
        truncated: Sequence[int] = (),
        **fields: Any,
    ) -> RolloutBatch:
        rollouts = [
            Rollout(
                uid=f"q{i // group_size}",
                sample=i % group_size,
                prompt_ids=(1,),
                completion=Completion(tuple(ids), StopReason.LENGTH if i in truncated else StopReason.EOS),
                text="",
                grade=Grade(
                    GradeStatus.CORRECT if reward else GradeStatus.WRONG, math.nan if reward is None else reward
                ),
            )
            for i, (ids, reward) in enumerate(zip(token_ids, rewards, strict=True))
        ]
        return build_batch(rollouts, group_size, **{"cap": 16, **fields})

    return make


@pytest.fixture(scope="session")
def pad() -> Callable[..., torch.Tensor]:
    """A function: ragged rows -> FP64 [N, T], NaN for None and beyond the end of a row."""

    def padded(rows: Sequence[Sequence[float | None]]) -> torch.Tensor:
        width = max(map(len, rows))
        return torch.tensor(
            [[math.nan if x is None else x for x in row] + [math.nan] * (width - len(row)) for row in rows],
            dtype=torch.float64,
        )

    return padded
