"""What a report is about: a run, or the runs of a study, with whatever they recorded."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rlvr_pl.analysis.rollout_stats import statistics
from rlvr_pl.analysis.run_records import RunRecords
from rlvr_pl.core.collapse import CollapseCriterion
from rlvr_pl.cost import CostLedger, ledger_path
from rlvr_pl.errors import UserError
from rlvr_pl.records import RunFolder
from rlvr_pl.study.folder import FROZEN, StudyFolder
from rlvr_pl.study.outcome import item_files
from rlvr_pl.study.plan import START

WINDOW = 20
"""Updates in a window where no rule says otherwise (the paper's Table 4b)."""


@dataclass(frozen=True)
class ReportedRun:
    """One run. `arm` and `seed` name it in a study; alone it has its folder's name. `verdict` is of the study's rule,
    or of the run's own; None without a rule."""

    path: Path
    arm: str
    seed: int | None
    window: int
    verdict: dict[str, Any] | None

    @property
    def label(self) -> str:
        return self.arm if self.seed is None else f"{self.arm}, seed {self.seed}"

    @cached_property
    def records(self) -> RunRecords:
        return RunRecords(self.path)

    @cached_property
    def state(self) -> dict[str, Any]:
        """``run.json``."""
        state = RunFolder(self.path).read_json("run.json")
        if state is None:
            raise UserError(f"{self.path}: no run folder (run.json is missing)")
        return state

    @cached_property
    def items(self) -> dict[int, Path]:
        """Item records by update."""
        return item_files(self.path)

    @cached_property
    def windows(self) -> dict[str, Any]:
        """What `rlvr-pl rollout-stats --window WINDOW` says of the run."""
        return statistics(self.records, self.window)

    @cached_property
    def whole(self) -> dict[str, Any]:
        """The same figures over all updates together."""
        return statistics(self.records, max(1, self.windows["updates"]))["windows"][0]

    @cached_property
    def drift(self) -> dict[int, dict[str, float]]:
        """Rows of ``drift.csv`` by update."""
        return {int(row["update"]): row for row in self.records.rows("drift.csv")}

    @cached_property
    def ledgers(self) -> list[Path]:
        """The ledgers of everything that led to this run: its own, and those of records beside its folder."""
        beside = sorted(self.path.parent.glob(f"{self.path.name}.*cost.json"))
        return [*beside, *([ledger_path(self.path)] if ledger_path(self.path).exists() else [])]

    @cached_property
    def cost(self) -> CostLedger:
        return sum((CostLedger.read(path) for path in self.ledgers), CostLedger())

    @cached_property
    def config(self) -> str:
        """``config.yaml``, or nothing."""
        path = self.path / "config.yaml"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    @property
    def config_sha256(self) -> str:
        return hashlib.sha256(self.config.encode()).hexdigest()

    @cached_property
    def stored(self) -> bool:
        """Whether the run learned stored solutions and sampled nothing itself."""
        own = ledger_path(self.path)
        return own.exists() and CostLedger.read(own).sampled_tokens == 0

    def exposure(self, update: int) -> tuple[int, int]:
        """Rollouts and their tokens up to an update; at the end all that was graded and sampled for the run, searches
        and branches included."""
        if update == self.windows["updates"] and self.ledgers:
            return self.cost.graded, self.cost.sampled_tokens
        done = [] if self.stored else self.records.rollouts[:update]
        return sum(map(len, done)), sum(fact.length for facts in done for fact in facts)


@dataclass(frozen=True)
class Subject:
    """A run or a study.

    Attributes:
        path: its folder.
        runs: what there is to report of, finished runs of a study in the order of its arms.
        start_items: item records of the start; None for a run that was not validated before update 1.
        criterion: the frozen rule, if there is one.
        study: None for a run.
    """

    path: Path
    runs: Sequence[ReportedRun]
    start_items: Path | None
    criterion: CollapseCriterion | None
    study: StudyFolder | None = None

    @property
    def name(self) -> str:
        return self.path.resolve().name if self.study is None else self.study.content["name"]

    @property
    def arms(self) -> list[str]:
        """Arms with runs, in order."""
        return list(dict.fromkeys(run.arm for run in self.runs))

    def of(self, arm: str) -> list[ReportedRun]:
        return [run for run in self.runs if run.arm == arm]

    @property
    def standing(self) -> list[Path]:
        """Item records of policies of similar accuracy: of a study's runs that did not collapse the final one, of a run
        every one above the rule's floor."""
        floor = -1 if self.criterion is None or self.criterion.val_floor is None else self.criterion.val_floor
        found = []
        for run in self.runs:
            if self.study is not None and (run.verdict or {}).get("collapsed"):
                continue
            correct = run.records.validation()
            updates = [max(run.items)] if self.study is not None else sorted(run.items)
            found += [run.items[u] for u in updates if correct.get(u, 0) > floor]
        return found


def read_subject(path: Path) -> Subject:
    """Find out what a folder holds. Raises UserError for one that holds neither a run nor a study, or nothing yet."""
    if (path / FROZEN).exists():
        study = StudyFolder(path)
        window = study.criterion.window
        runs = [
            ReportedRun(one.folder, arm, one.seed, window, one.verdict)
            for arm, found in study.outcomes.items()
            for one in found
            if arm != START and one.folder is not None
        ]
        if not runs:
            raise UserError(f"{path}: no run of this study has finished yet")
        return Subject(path, runs, study.start_items, study.criterion, study)
    if not (path / "run.json").exists():
        raise UserError(f"{path}: neither a run folder (run.json) nor a study ({FROZEN})")
    records = RunRecords(path)
    rule = records.criterion()
    criterion = rule[0] if rule else None
    window = criterion.window if criterion else WINDOW
    run = ReportedRun(path, path.resolve().name, None, window, records.verdict())
    return Subject(path, [run], run.items.get(0), criterion)
