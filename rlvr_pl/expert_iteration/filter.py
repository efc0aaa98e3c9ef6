"""Which samples become solutions."""

from __future__ import annotations

import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlvr_pl.errors import UserError
from rlvr_pl.expert_iteration.records import Row
from rlvr_pl.sampling.base import uniforms
from rlvr_pl.types import Completion, Grade, GradeStatus, Question, Rollout, StopReason

if TYPE_CHECKING:
    from rlvr_pl.policy import Policy

FATES = ("wrong", "truncated", "duplicate", "surplus", "solution")
"""What becomes of a sample: not verified; verified but cut off at the cap; the same as another one; beyond the number
that its question may keep; kept."""


@dataclass(frozen=True, slots=True)
class Solution:
    """A verified completion that ended by itself, to be learned under the question's ordinary prompt. `source` is
    "search" or "bridge"."""

    question: Question
    token_ids: tuple[int, ...]
    text: str
    source: str

    def rollout(self, policy: Policy, sample: int) -> Rollout:
        """The solution as a rollout that was sampled from `policy`'s prompt and graded."""
        return Rollout(
            uid=self.question.uid,
            sample=sample,
            prompt_ids=policy.prompt_ids(self.question),
            completion=Completion(self.token_ids, StopReason.EOS),
            text=self.text,
            grade=Grade(GradeStatus.CORRECT, 1.0, self.question.answer, True),
        )

    @classmethod
    def of(cls, row: Mapping[str, Any], source: str) -> Solution:
        """The solution in a record of a sample, a bridge or a solution."""
        question = Question(
            row["uid"], row["problem"], row["gold"], row.get("subject"), row.get("level"), place=row.get("place", "")
        )
        return cls(question, tuple(row["token_ids"]), row["text"], source)

    def record(self) -> Row:
        """The solution as a record of its own."""
        q = self.question
        return {
            "uid": q.uid,
            "subject": q.subject,
            "level": q.level,
            "problem": q.problem,
            "gold": q.answer,
            "source": self.source,
            "length": len(self.token_ids),
            "token_ids": list(self.token_ids),
            "text": self.text,
        }


@dataclass(frozen=True)
class SolutionFilter:
    """Keeps samples that verify and ended by themselves, all distinct, few of each question (paper section 3).

    Two completions are the same when their token ids are, or their normalised texts (`normalised`). Which of a
    question's distinct solutions are kept is drawn from the key ("filter", seed, uid).

    Args:
        keep_hard: solutions of a question whose success rate is at most `hard_rate`.
        keep_easy: solutions of any other solved question.
        hard_rate: share of verified samples up to which a question is hard.
        seed: names the draws.
    """

    keep_hard: int = 4
    keep_easy: int = 1
    hard_rate: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.keep_hard, self.keep_easy) < 0 or not 0 <= self.hard_rate <= 1:
            raise UserError(
                f"keep_hard {self.keep_hard} and keep_easy {self.keep_easy} must be at least 0, hard_rate "
                f"{self.hard_rate} in [0, 1]"
            )

    def fates(self, samples: Sequence[Row]) -> list[str]:
        """What becomes of each of the samples of one question (see `FATES`); in any order, the same ones are kept."""
        by_name = sorted(range(len(samples)), key=lambda i: (samples[i]["sample"], samples[i]["token_ids"]))
        draws = uniforms(("filter", self.seed, samples[0]["uid"]), len(samples))
        order = [by_name[i] for i in np.argsort(draws, kind="stable")]
        rate = sum(row["correct"] for row in samples) / len(samples)
        limit = self.keep_hard if rate <= self.hard_rate else self.keep_easy
        fates = [""] * len(samples)
        seen = Distinct()
        kept = 0
        for i in order:
            row = samples[i]
            if not row["correct"]:
                fates[i] = "wrong"
            elif row["stop_reason"] != "eos":
                fates[i] = "truncated"
            elif not seen.add(row["token_ids"], row["text"]):
                fates[i] = "duplicate"
            else:
                kept += 1
                fates[i] = "solution" if kept <= limit else "surplus"
        return fates

    def select(self, samples: Iterable[Row]) -> tuple[list[Solution], Counter[str]]:
        """The solutions, questions in the order of their first sample, and how many samples had each fate."""
        groups: dict[str, list[Row]] = defaultdict(list)
        for row in samples:
            groups[row["uid"]].append(row)
        kept: list[Solution] = []
        counts: Counter[str] = Counter(dict.fromkeys(FATES, 0))
        for rows in groups.values():
            fates = self.fates(rows)
            counts.update(fates)
            kept += [Solution.of(row, "search") for row, fate in zip(rows, fates) if fate == "solution"]
        return kept, counts


class Distinct:
    """Completions seen so far."""

    def __init__(self) -> None:
        self._ids: set[tuple[int, ...]] = set()
        self._texts: set[str] = set()

    def add(self, token_ids: Sequence[int], text: str) -> bool:
        """Whether it is unlike all before it, in token ids and in normalised text."""
        ids, text = tuple(token_ids), normalised(text)
        new = ids not in self._ids and text not in self._texts
        self._ids.add(ids)
        self._texts.add(text)
        return new


def normalised(text: str) -> str:
    """Text without differences of case, of white space and between forms of one character (NFKC)."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
