"""Put the costs of runs side by side and say which are matched and which are not.

An arm is a run folder, a file of records (its ledger lies beside it) or a ledger; parts of one arm are joined by
commas, and NAME= names it: `rlvr-pl cost orl=runs/orl expit=samples.jsonl,rationales.jsonl,runs/distill`. A cost is
matched when its largest amount exceeds its smallest by at most --tolerance. Validation is in no ledger.

JSON keys: tolerance, arms {name: {sampled_tokens, prefill_tokens, graded, trained_tokens, optimizer_steps,
wall_seconds}}, ratio {cost: largest / smallest, null where an arm has none}, matched {cost: true or false}, unfinished
[names].
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from rlvr_pl.analysis.command import Result, Table, add_output_arguments
from rlvr_pl.cost import FILE_NAME, CostLedger, ledger_path, spread
from rlvr_pl.errors import UserError
from rlvr_pl.records import RunFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arms", nargs="+", metavar="[NAME=]RUN[,RUN]", help="run folder, records or ledger")
    parser.add_argument(
        "--tolerance", type=float, default=0.05, help="relative difference that still matches (default: %(default)s)"
    )
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    if not 0 <= args.tolerance < math.inf:
        raise UserError(f"--tolerance {args.tolerance}: must be at least 0")
    arms = dict(_arm(word) for word in args.arms)
    if len(arms) < len(args.arms):
        raise UserError("two arms have the same name; name them, as in first=runs/a second=runs/b")
    ledgers = {name: sum((_read(path) for path in paths), CostLedger()) for name, paths in arms.items()}
    ratio = spread(ledgers)
    matched = {name: value <= 1 + args.tolerance for name, value in ratio.items()}
    unfinished = [name for name, paths in arms.items() if not all(map(_is_finished, paths))]
    data = {
        "tolerance": args.tolerance,
        "arms": {name: ledger.as_dict() for name, ledger in ledgers.items()},
        "ratio": ratio,
        "matched": matched,
        "unfinished": unfinished,
    }
    rows = [
        [
            cost,
            *(data["arms"][name][cost] for name in ledgers),
            _times(value),
            "matched" if matched[cost] else "NOT matched",
        ]
        for cost, value in ratio.items()
    ]
    notes = [f"Matched: within {100 * args.tolerance:g}% of each other. Seconds depend on the machine."]
    notes += [f"{name} has not finished." for name in unfinished]
    return Result(data, [Table("Cost", ["", *ledgers, "largest / smallest", ""], rows)], notes)


def _arm(word: str) -> tuple[str, list[Path]]:
    """(name, paths) of one argument; a path that exists as written is taken so, whatever is in its name."""
    if Path(word).exists():
        return Path(word).name, [Path(word)]
    name, equals, rest = word.partition("=")
    paths = [Path(part) for part in (rest if equals else word).split(",")]
    return (name if equals else paths[0].name), paths


def _read(path: Path) -> CostLedger:
    if not path.exists():
        raise UserError(f"{path}: no such run folder or file")
    ledger = path if path.name.endswith(FILE_NAME) else ledger_path(path)
    if not ledger.exists():
        raise UserError(f"{path}: no ledger ({ledger} is missing); it is written by fit, search and rationalize")
    return CostLedger.read(ledger)


def _is_finished(path: Path) -> bool:
    state = RunFolder(path).read_json("run.json") if path.is_dir() else None
    return state is None or state["state"] == "finished"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if math.isfinite(ratio) else "-"
