"""The rule that says when a run has collapsed, frozen and hashed before the run starts.

The paper's rule (section 4.4, Table 4b): a run collapses if any 20-update window has a truncation rate of at least 0.5,
or if greedy validation falls to a floor that is the same for every arm of a study. Pure Python, no torch.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MODES = ("tumbling", "rolling")

# Rates are counts over counts. A mean of such doubles can miss a threshold it equals by a few units in the last place
# (at most window * 2**-53, far below 1e-12); rounding both sides to 12 decimals makes "at least 0.5" mean what it says.
_DECIMALS = 12


@dataclass(frozen=True)
class Verdict:
    """What `CollapseCriterion.judge` found.

    Attributes:
        collapsed: whether a rule fired.
        rule: "truncation" or "validation", the rule that could first be decided (truncation on a tie); None if neither.
        first_update: first update of the rule's first damaged window, or the update of its first validation at or
            below the floor.
        last_update: last update of the rule's last damaged window, or of its last validation at or below the floor.
        value: what fired the rule first: the window's mean truncation rate, or the number of correct answers.
    """

    collapsed: bool
    rule: str | None = None
    first_update: int | None = None
    last_update: int | None = None
    value: float | None = None


@dataclass(frozen=True)
class CollapseCriterion:
    """A collapse rule as a value: two criteria are the same rule exactly if they are equal and share a `sha256`.

    Args:
        window: updates in a window, at least 1.
        truncation: a window whose mean truncation rate is at least this is damaged; in (0, 1].
        val_floor: validation at or below this many correct answers is damage. One number for all arms of a study: the
            same weights scored 147-164 of 350 on vLLM, so an arm's own first value is no base. None: no such rule.
        mode: "tumbling" judges updates 1-20, 21-40, ... as Table 4b does; "rolling" judges the last `window` updates
            after every update. A window that is not full is never judged.

    Raises ValueError for a value out of range.

    Example:
        >>> rule = CollapseCriterion.from_start(149, window=2)
        >>> rule.val_floor, rule.judge([0.1, 0.2, 0.6, 0.4]).first_update
        (111, 3)
    """

    window: int = 20
    truncation: float = 0.5
    val_floor: int | None = None
    mode: str = "tumbling"

    def __post_init__(self) -> None:
        if isinstance(self.window, bool) or int(self.window) != self.window or self.window < 1:
            raise ValueError(f"window={self.window}: must be a whole number of updates, at least 1")
        if not 0 < self.truncation <= 1:
            raise ValueError(f"truncation={self.truncation}: must be a rate in (0, 1]")
        if self.val_floor is not None and (int(self.val_floor) != self.val_floor or self.val_floor < 0):
            raise ValueError(f"val_floor={self.val_floor}: must be a whole number of correct answers, or None")
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r}: must be one of {', '.join(MODES)}")
        # one spelling of each value, so that 1 and 1.0 cannot give one rule two hashes
        object.__setattr__(self, "window", int(self.window))
        object.__setattr__(self, "truncation", float(self.truncation))
        object.__setattr__(self, "val_floor", None if self.val_floor is None else int(self.val_floor))

    @classmethod
    def from_start(cls, start_correct: int, fraction: float = 0.75, **kwargs: Any) -> CollapseCriterion:
        """A criterion whose floor is ``floor(fraction * start_correct)``: 149 correct at the start give 111.

        Call it once, with one measurement of the shared start, and give the result to every arm.
        """
        if start_correct < 0 or not 0 <= fraction <= 1:
            raise ValueError(f"start_correct={start_correct}, fraction={fraction}: need a count and a share in [0, 1]")
        return cls(val_floor=math.floor(round(fraction * start_correct, 9)), **kwargs)  # 0.29 * 100 is 28.999...96

    @property
    def canonical(self) -> str:
        """The JSON of every field, keys sorted, no spaces: the text that is hashed."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @property
    def sha256(self) -> str:
        """Hexadecimal SHA-256 of `canonical`."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()

    def windows(self, updates: int) -> Iterator[tuple[int, int]]:
        """First and last update (1-based) of every full window among the first `updates` updates, in order."""
        step = self.window if self.mode == "tumbling" else 1
        for last in range(self.window, updates + 1, step):
            yield last - self.window + 1, last

    def judge(self, truncation_per_update: Sequence[float], validation: Mapping[int, int] | None = None) -> Verdict:
        """The verdict on a run so far.

        Args:
            truncation_per_update: truncation rate of updates 1, 2, ..., each in [0, 1]. The mean of a window weighs
                its updates equally.
            validation: correct answers by update (0 is the start); updates without a validation are simply missing.

        Raises ValueError for a rate outside [0, 1] (NaN included) or a negative update number.
        """
        rates = [float(x) for x in truncation_per_update]
        for i, rate in enumerate(rates):
            if not 0 <= rate <= 1:
                raise ValueError(f"truncation of update {i + 1} is {rate}: must be a rate in [0, 1]")
        firings = {
            "truncation": self._damaged_windows(rates),
            "validation": self._damaged_validations(validation or {}),
        }
        # decided first, at the last update of its first firing; min keeps the earlier entry on a tie
        rule = min((name for name, found in firings.items() if found), key=lambda n: firings[n][0][1], default=None)
        if rule is None:
            return Verdict(False)
        found = firings[rule]
        return Verdict(True, rule, first_update=found[0][0], last_update=found[-1][1], value=found[0][2])

    def _damaged_windows(self, rates: list[float]) -> list[tuple[int, int, float]]:
        found = []
        for first, last in self.windows(len(rates)):
            mean = round(math.fsum(rates[first - 1 : last]) / self.window, _DECIMALS)
            if mean >= round(self.truncation, _DECIMALS):
                found.append((first, last, mean))
        return found

    def _damaged_validations(self, validation: Mapping[int, int]) -> list[tuple[int, int, float]]:
        if any(update < 0 for update in validation):
            raise ValueError(f"validation of update {min(validation)}: updates count from 0, the start")
        if self.val_floor is None:
            return []
        return [
            (update, update, correct) for update, correct in sorted(validation.items()) if correct <= self.val_floor
        ]
