"""What the rollouts of a run looked like, window by window, and what its frozen rule says of them.

Works from the run's rollout records (rollouts/*.jsonl), the steps in metrics.csv, validation.csv and criterion.json;
nothing is taken from the windows the run wrote itself. Figures are explained at rlvr_pl.core.windows.figures.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlvr_pl.analysis.command import Result, Table, add_output_arguments
from rlvr_pl.analysis.run_records import RunRecords
from rlvr_pl.core.windows import StepFacts, figures, tally
from rlvr_pl.errors import UserError

EPILOG = """\
JSON keys: run, updates, windows: [{first_update, last_update, updates, and every figure}], verdict {collapsed,
rule, first_update, last_update, value, sha256} (null when the run has no criterion.json); for several runs
runs: [that object for each].

example: rlvr-pl rollout-stats runs/orl --window 20 --json"""
# title -> figure -> heading; eight narrow columns fit into 80 characters
TABLES = {
    "Rollouts": {
        "reward": "reward",
        "eos": "eos",
        "truncation": "cut",
        "loop": "loop",
        "soup": "soup",
        "soup_of_truncated": "of cut",
        "uniform_groups": "uniform",
    },
    "Mean length": {
        "length": "all",
        "length_correct": "right",
        "length_wrong": "wrong",
        "length_truncated": "cut",
        "mixed_length_correct": "right, mixed",
        "mixed_length_wrong": "wrong, mixed",
    },
    "Signed mass": {
        "m_plus": "M+",
        "m_minus": "M-",
        "m_ratio": "M-/M+",
        "m_truncated": "cut of M-",
        "plain_m_ratio": "plain",
        "sequence_ratio": "per seq.",
    },
    "Gradients": {
        "grad_norm_median": "norm",
        "grad_norm_p5": "5th",
        "grad_norm_p95": "95th",
        "clipped": "clipped",
        "nonzero": "nonzero",
        "changed_share": "changed",
    },
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--window", type=int, default=10, help="updates in a window (default: %(default)s)")
    parser.epilog = EPILOG
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    if args.window < 1:
        raise UserError(f"--window {args.window}: must be at least 1")
    records = [RunRecords(path) for path in args.runs]
    found = [statistics(r, args.window) for r in records]
    tables = [table for one in found for table in _tables(one)]
    notes = [f"{one['run']}: {_spoken(one['verdict'])}" for one in found]
    return Result(found[0] if len(found) == 1 else {"runs": found}, tables, notes)


def statistics(records: RunRecords, window: int) -> dict[str, Any]:
    """Windows and verdict of one run."""
    rollouts, steps = records.rollouts, records.steps()
    windows = []
    for first in range(1, len(rollouts) + 1, window):
        last = min(first + window - 1, len(rollouts))
        done = range(first, last + 1)
        known: list[StepFacts] = [steps[u] for u in done if u in steps]
        row = figures([tally(rollouts[u - 1]) for u in done], known if len(known) == len(done) else ())
        windows.append({"first_update": first, "last_update": last, "updates": len(done), **row})
    return {"run": str(records.path), "updates": len(rollouts), "windows": windows, "verdict": records.verdict()}


def _tables(found: dict[str, Any]) -> list[Table]:
    return [
        Table(
            f"{title} of {found['run']}",
            ("updates", *columns.values()),
            [[f"{w['first_update']}-{w['last_update']}", *(w[name] for name in columns)] for w in found["windows"]],
        )
        for title, columns in TABLES.items()
    ]


def _spoken(verdict: dict[str, Any] | None) -> str:
    if verdict is None:
        return "no criterion.json, so no verdict"
    if not verdict["collapsed"]:
        return f"no collapse by its rule (sha256 {verdict['sha256'][:12]})"
    span = f"updates {verdict['first_update']}-{verdict['last_update']}"
    return f"collapsed in {span} by the {verdict['rule']} rule (sha256 {verdict['sha256'][:12]})"
