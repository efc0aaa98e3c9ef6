"""Expectations: statements about a study's outcome that a machine can check, written before the first update.

Three forms, each a mapping in the study file::

    {arm: supplied, collapsed: true}                  # in every seed, by the study's rule
    {order: [mask, seqmean, supplied], by: entropy}   # in every seed, strictly, smallest first
    {arm: mask, against: start, gain: false}          # or loss; by the paired 95% interval over seeds and items
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rlvr_pl.errors import UserError

if TYPE_CHECKING:
    from rlvr_pl.study.outcome import Outcome

MEASURES = {
    "entropy": "entropy on fixed contexts at the end",
    "kl": "KL from the start at the end",
    "first_update": "first update of the collapse",
    "final_correct": "correct answers at the end",
}
Runs = Mapping[str, Sequence["Outcome"]]
"""Finished runs of each arm, in the order of the seeds; "start" is the evaluated start, once."""


@dataclass(frozen=True)
class Judgement:
    """`held`: None while runs are missing. `detail`: the figures behind it."""

    held: bool | None
    detail: str


@dataclass(frozen=True)
class Expectation:
    """A statement; `row` is what the study file says."""

    row: Mapping[str, Any]

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms it speaks of, "start" left out."""
        raise NotImplementedError

    def __str__(self) -> str:
        raise NotImplementedError

    def judge(self, runs: Runs, seeds: int) -> Judgement:
        """Whether it held, once every arm it speaks of has `seeds` finished runs."""
        missing = [arm for arm in self.arms if len(runs.get(arm, ())) < seeds]
        if missing:
            return Judgement(None, f"not finished: {', '.join(missing)}")
        return self.check(runs)

    def check(self, runs: Runs) -> Judgement:
        """`judge` with all runs there."""
        raise NotImplementedError


class Collapse(Expectation):
    """An arm collapses, or does not, in every seed."""

    @property
    def arms(self) -> tuple[str, ...]:
        return (self.row["arm"],)

    def __str__(self) -> str:
        return f"{self.row['arm']} {'collapses' if self.row['collapsed'] else 'does not collapse'}"

    def check(self, runs: Runs) -> Judgement:
        found = runs[self.row["arm"]]
        collapsed = [run for run in found if run.verdict["collapsed"]]
        at = ", ".join(f"{run.verdict['first_update']}" for run in collapsed)
        detail = f"{len(collapsed)} of {len(found)} seeds collapsed" + (f" (from updates {at})" if at else "")
        return Judgement(len(collapsed) == (len(found) if self.row["collapsed"] else 0), detail)


class Order(Expectation):
    """Arms in the order of a measure, smallest first, in every seed; a run that never collapsed comes last."""

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(self.row["order"])

    def __str__(self) -> str:
        return f"{MEASURES[self.row['by']]}: {' < '.join(self.arms)}"

    def check(self, runs: Runs) -> Judgement:
        kept, shown = [], []
        for at_seed in zip(*(runs[arm] for arm in self.arms)):
            values = [run.measure(self.row["by"]) for run in at_seed]
            known = [math.inf if value is None and self.row["by"] == "first_update" else value for value in values]
            kept.append(None not in known and all(a < b for a, b in pairwise(known)))  # type: ignore[operator]
            shown.append(" / ".join("never" if v == math.inf else _number(v) for v in known))
        return Judgement(all(kept), f"{sum(kept)} of {len(kept)} seeds ({'; '.join(shown)})")


class Difference(Expectation):
    """An arm's final accuracy lies above (gain) or below (loss) another's: the paired 95% interval excludes zero."""

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(arm for arm in (self.row["arm"], self.row["against"]) if arm != "start")

    @property
    def kind(self) -> str:
        return "gain" if "gain" in self.row else "loss"

    def __str__(self) -> str:
        verb = {"gain": ("gains on", "shows no gain over"), "loss": ("loses against", "shows no loss against")}
        return f"{self.row['arm']} {verb[self.kind][not self.row[self.kind]]} {self.row['against']}"

    def check(self, runs: Runs) -> Judgement:
        from rlvr_pl.core.paired import compare_seeds

        a, b = ([run.correct for run in runs[self.row[side]]] for side in ("against", "arm"))
        result = compare_seeds(a, b)
        found = result.ci_low > 0 if self.kind == "gain" else result.ci_high < 0
        delta, low, high = (f"{x:+.1f}".replace("-", "−") for x in (result.delta_pp, result.ci_low, result.ci_high))
        return Judgement(found == self.row[self.kind], f"{delta} pp [{low}, {high}]")


FORMS: dict[frozenset[str], type[Expectation]] = {
    frozenset({"arm", "collapsed"}): Collapse,
    frozenset({"order", "by"}): Order,
    frozenset({"arm", "against", "gain"}): Difference,
    frozenset({"arm", "against", "loss"}): Difference,
}


def read_expectation(row: Any, arms: Sequence[str], where: str) -> Expectation:
    """Check one statement of a study file. Raises UserError that begins with `where`."""
    form = FORMS.get(frozenset(row)) if isinstance(row, dict) else None
    if form is None:
        known = ", ".join("{" + ", ".join(sorted(keys)) + "}" for keys in FORMS)
        raise UserError(f"{where}: {row!r} has none of the forms {known}")
    if form is Order:
        named = row["order"]
        if not isinstance(named, list) or len(named) < 2 or len(set(map(str, named))) < len(named):
            raise UserError(f"{where}: order is {named!r}; it needs a list of two arms or more, each once")
    else:
        named = [row[side] for side in ("arm", "against") if side in row]
    allowed = [*arms, "start"] if form is Difference else list(arms)
    for arm in named:
        if arm not in allowed:
            raise UserError(f"{where}: no arm {arm!r}; there are {', '.join(allowed)}")
    for key in ("collapsed", "gain", "loss"):
        if key in row and not isinstance(row[key], bool):
            raise UserError(f"{where}: {key} is {row[key]!r}; it must be true or false")
    if "by" in row and row["by"] not in MEASURES:
        raise UserError(f"{where}: by is {row['by']!r}; it must be one of {', '.join(MEASURES)}")
    return form(row)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
