"""The processes of one run: who has which share of the work, and how their results come together.

Group statistics, credits and stop decisions need the whole update. So every rank gets every rollout, and only what is
dear is divided: sampling, grading, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch import Tensor

from rlvr_pl.errors import RunFailure

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among all: its number, from 0, and how many there are. One process alone is `Ranks()`."""

    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, trainer: Any) -> Ranks:
        """Those of a Lightning trainer, as far as they hold different questions."""
        return cls(trainer.global_rank, trainer.world_size)

    @classmethod
    def here(cls) -> Ranks:
        """Those of this process as torch.distributed has them; one process alone where it was not started."""
        started = dist.is_available() and dist.is_initialized()
        return cls(dist.get_rank(), dist.get_world_size()) if started else cls()

    def part(self, count: int) -> slice:
        """This rank's share of `count` items in a row: as equal as can be, and together all of them, in order."""
        return slice(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def together(self, compute: Callable[[], Sequence[T]]) -> list[T]:
        """What `compute` gives on every rank, one rank after the other. An error on one of them is raised on all."""
        if self.size == 1:
            return list(compute())
        try:
            mine: tuple[Sequence[T], Exception | None] = (compute(), None)
        except Exception as error:
            mine = ((), _portable(error))
        everyone = cast("list[tuple[Sequence[T], Exception | None]]", [None] * self.size)
        dist.all_gather_object(everyone, mine)
        for _, error in everyone:
            if error is not None:
                raise error
        return [item for items, _ in everyone for item in items]

    def add(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place; every rank gets the same bits."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor


ALONE = Ranks()


def _portable(error: Exception) -> Exception:
    """The error as every rank can read it: made again from its own words, which is what arrives there; without what
    else it carries."""
    plain = all(isinstance(word, (str, int, float, type(None))) for word in error.args)
    plain = plain and "<locals>" not in type(error).__qualname__
    try:
        if plain:
            return type(error)(*error.args)
    except Exception:  # its class asks for more than its words
        return RunFailure(str(error))
    return RunFailure(f"{type(error).__name__}: {error}")
