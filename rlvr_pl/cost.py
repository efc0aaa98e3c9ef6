"""What a run cost: one ledger for RL, search, rationalization and distillation, so that arms compare token for token.

Only what a run learns from is counted, not its validation or other measurements (the seconds of `fit` hold these too).
Work that a kill destroyed before it was recorded is in nobody's ledger.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from rlvr_pl.errors import UserError
from rlvr_pl.records import atomic_write_text
from rlvr_pl.text_file import read_json

FILE_NAME = "cost.json"
COSTS = ("sampled_tokens", "prefill_tokens", "graded", "trained_tokens", "optimizer_steps")
"""The counts of a ledger. Its clock reading, `wall_seconds`, is the one figure that two equal runs do not share."""


@dataclass(frozen=True)
class CostLedger:
    """Costs of a run or of a part of it; ledgers of parts add up.

    Attributes:
        sampled_tokens: tokens drawn, end-of-sequence tokens included.
        prefill_tokens: tokens of prompts and prefixes read before drawing, once for all completions that share them.
        graded: answers graded.
        trained_tokens: completion tokens that went through forward and backward, once a pass.
        optimizer_steps: steps of the optimizer.
        wall_seconds: time spent, on whatever machine it was.
    """

    sampled_tokens: int = 0
    prefill_tokens: int = 0
    graded: int = 0
    trained_tokens: int = 0
    optimizer_steps: int = 0
    wall_seconds: float = 0.0

    def __add__(self, other: CostLedger) -> CostLedger:
        return CostLedger(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def as_dict(self) -> dict[str, int | float]:
        """The counts, then the seconds to the millisecond."""
        return {**asdict(self), "wall_seconds": round(self.wall_seconds, 3)}

    def write(self, path: Path) -> None:
        """Replace the ledger file."""
        atomic_write_text(path, json.dumps(self.as_dict(), indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> CostLedger:
        """A ledger file, that of `fit` included. Raises UserError when it is none."""
        content = read_json(path)
        names = [f.name for f in fields(cls)]
        if not isinstance(content, dict) or any(name not in content for name in names):
            raise UserError(f"{path}: not a cost ledger; one has {', '.join(names)}")
        for name in names:
            _check_amount(path, name, content[name])
        return cls(**{name: content[name] for name in names})


def _check_amount(path: Path, name: str, value: Any) -> None:
    kinds = (int, float) if name == "wall_seconds" else (int,)
    if type(value) not in kinds or not 0 <= value < math.inf:
        raise UserError(f"{path}: {name} is {value!r}; it must be a count of at least 0")


def ledger_path(source: Path) -> Path:
    """Where the ledger of a run folder or of a file of records lies: ``RUN/cost.json``, ``samples.cost.json``."""
    if source.is_dir():
        return source / FILE_NAME
    return source.with_name(f"{source.name.removesuffix('.jsonl')}.{FILE_NAME}")


def spread(ledgers: Mapping[str, CostLedger]) -> dict[str, float]:
    """For each cost the largest over the smallest amount of the arms: 1 where all are equal (none spent any, too),
    infinity where only some spent any."""
    found = {}
    for name in (f.name for f in fields(CostLedger)):
        amounts = [getattr(ledger, name) for ledger in ledgers.values()]
        low, high = min(amounts), max(amounts)
        found[name] = 1.0 if low == high else high / low if low else math.inf
    return found
