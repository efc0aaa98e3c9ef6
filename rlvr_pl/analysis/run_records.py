"""Reads what a run left behind, strictly: rollouts, steps, validation, drift, criterion."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from rlvr_pl.core.collapse import CollapseCriterion
from rlvr_pl.core.windows import RolloutFacts, StepFacts
from rlvr_pl.errors import UserError
from rlvr_pl.jsonl import read_jsonl
from rlvr_pl.records import RunFolder
from rlvr_pl.types import GradeStatus, RolloutClass, StopReason

REQUIRED = {
    "update": int,
    "group": int,
    "uid": str,
    "length": int,
    "stop_reason": frozenset(reason.value for reason in StopReason),
    "status": frozenset(status.value for status in GradeStatus),
    "class": frozenset(kind.value for kind in RolloutClass),
}
OPTIONAL = {"reward": float, "detector": str, "m_plus": float, "m_minus": float}


class RunRecords:
    """The records of one run folder. Raises UserError, with file and line, for what cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._folder = RunFolder(path)
        if not path.is_dir():
            raise UserError(f"{path}: no run folder there")

    @cached_property
    def rollouts(self) -> list[list[RolloutFacts]]:
        """Facts of the rollouts of updates 1, 2, ... (first index 0)."""
        files = sorted(self._folder.rollouts.glob("*-*.jsonl"))
        if not files:
            raise UserError(f"{self.path}: no rollout records (rollouts/*.jsonl); the run was made without a recorder")
        updates: dict[int, list[RolloutFacts]] = {}
        for path in files:
            for row in read_jsonl(path, required=REQUIRED, optional=OPTIONAL):
                updates.setdefault(row["update"], []).append(_facts(row))
        missing = sorted(set(range(1, max(updates) + 1)) - set(updates))
        if missing or min(updates) < 1:
            raise UserError(f"{self._folder.rollouts}: no rows of updates {missing[:5]}, or rows before update 1")
        return [updates[u] for u in sorted(updates)]

    def steps(self) -> dict[int, StepFacts]:
        """What the optimizer did, by update, from ``metrics.csv``; empty without one."""
        found: dict[int, StepFacts] = {}
        for row in self.rows("metrics.csv"):
            if "grad_norm" in row:
                clipped = bool(row.get("clipped"))
                found[int(row["update"])] = StepFacts(row["grad_norm"], clipped, row.get("changed_share", 0.0))
        return found

    def validation(self) -> dict[int, int]:
        """Correct answers by update, from ``validation.csv``."""
        return {int(row["update"]): int(row["correct"]) for row in self.rows("validation.csv")}

    def rows(self, name: str) -> list[dict[str, float]]:
        """The rows of a CSV table as numbers, empty cells left out; no rows where the run has no such table."""
        return [dict(_numbers(row, self.path / name, i)) for i, row in enumerate(self._folder.table(name).rows())]

    def criterion(self) -> tuple[CollapseCriterion, str] | None:
        """The frozen rule and its hash, if the run has one. Raises UserError if the file was tampered with."""
        stored = self._folder.read_json("criterion.json")
        if stored is None:
            return None
        try:
            criterion, sha256 = CollapseCriterion(**stored["criterion"]), stored["sha256"]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{self.path / 'criterion.json'}: not a criterion ({error})") from None
        if criterion.sha256 != sha256:
            raise UserError(f"{self.path / 'criterion.json'}: the criterion does not have the hash written beside it")
        return criterion, sha256

    def verdict(self) -> dict[str, Any] | None:
        """The verdict of the frozen rule on the recorded truncation and validation; None without a rule."""
        rule = self.criterion()
        if rule is None:
            return None
        criterion, sha256 = rule
        truncation = [sum(fact.truncated for fact in update) / len(update) for update in self.rollouts]
        return {**asdict(criterion.judge(truncation, self.validation())), "sha256": sha256}


def _facts(row: dict[str, Any]) -> RolloutFacts:
    reward = row.get("reward")
    return RolloutFacts(
        group=row["group"],
        reward=math.nan if reward is None else float(reward),
        correct=row["status"] == GradeStatus.CORRECT.value,
        length=row["length"],
        truncated=row["stop_reason"] == StopReason.LENGTH.value,
        rollout_class=row["class"],
        detector=row.get("detector"),
        m_plus=row.get("m_plus"),
        m_minus=row.get("m_minus"),
    )


def _numbers(row: dict[str, str], path: Path, index: int) -> Iterator[tuple[str, float]]:
    for name, text in row.items():
        if not text:
            continue
        try:
            yield name, float(text)
        except ValueError:
            raise UserError(f"{path}:{index + 2}: {name} is {text!r}, not a number") from None
