"""Which questions an update asks: a pure function of the pool, the order and the update's number.

Nothing is consumed and nothing has to be restored: after a resume, `batch(update)` gives what it would have given.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Sequence

import numpy as np

from rlvr_pl.data.pools import listed, read_uids
from rlvr_pl.errors import UserError
from rlvr_pl.sampling.base import uniforms
from rlvr_pl.types import Question


class QuestionSchedule:
    """Questions by update, pass after pass over the pool.

    Without an order each pass is a new permutation, drawn from the key (seed, pass). With an order its questions are
    asked in that order, again and again. Every pass asks every question once; an update may span two passes.

    Args:
        questions: the pool, with distinct uids.
        per_update: questions in one update.
        order: uids that fix the order (they may be a part of the pool), or a JSON file of them; None shuffles.
        start: questions of the first pass that are passed over before update 1 (the paper's ``--start``).
        seed: of the shuffles.

    Raises:
        UserError: an order with uids that the pool lacks, or `start` beyond the first pass.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        per_update: int,
        *,
        order: str | os.PathLike[str] | Sequence[str] | None = None,
        start: int = 0,
        seed: int = 0,
    ) -> None:
        if per_update < 1 or not questions:
            raise ValueError(f"{per_update} questions an update of a pool of {len(questions)}")
        self.questions = tuple(questions if order is None else _ordered(questions, order))
        self.per_update = per_update
        self.start = start
        self.seed = seed
        self.shuffled = order is None
        if not 0 <= start < len(self.questions):
            raise UserError(
                f"data.start is {start}, but a pass has the {len(self.questions)} questions 0 to "
                f"{len(self.questions) - 1}"
            )

    def batch(self, update: int) -> list[Question]:
        """The questions of update `update`, counted from 1."""
        if update < 1:
            raise ValueError(f"updates are counted from 1, not {update}")
        first = self.start + (update - 1) * self.per_update
        size = len(self.questions)
        return [self._at(place // size, place % size) for place in range(first, first + self.per_update)]

    @property
    def updates_of_all(self) -> int:
        """So many updates have asked every question at least once: they reach the end of the second pass, for the first
        begins at `start`."""
        return -(-(2 * len(self.questions) - self.start) // self.per_update)

    @functools.cached_property
    def sha256(self) -> str:
        """Of everything that decides which question comes when, texts and golds included: the identity of the data."""
        content = [[q.uid, q.problem, q.answer] for q in self.questions]
        how = [self.per_update, self.start, self.seed if self.shuffled else None]
        return hashlib.sha256(json.dumps([how, content], ensure_ascii=False).encode()).hexdigest()

    def _at(self, turn: int, index: int) -> Question:
        if self.shuffled:
            index = int(_permutation(self.seed, turn, len(self.questions))[index])
        return self.questions[index]


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, turn: int, size: int) -> np.ndarray:
    """[size] the permutation of pass `turn`: the order of that many uniforms, which no version of numpy changes."""
    return np.argsort(uniforms(("order", seed, turn), size), kind="stable")


def _ordered(questions: Sequence[Question], order: str | os.PathLike[str] | Sequence[str]) -> list[Question]:
    by_uid = {q.uid: q for q in questions}
    is_file = isinstance(order, (str, os.PathLike))
    uids, where = (read_uids(order), os.fspath(order)) if is_file else (list(order), "order")
    if absent := [uid for uid in uids if uid not in by_uid]:
        raise UserError(f"{where}: {len(absent)} uids are not in the pool: {listed(absent)}")
    return [by_uid[uid] for uid in uids]
