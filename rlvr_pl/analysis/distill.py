"""Learn stored solutions: `rlvr-pl fit` with ExpertIterationSFT on files of samples, rationales or solutions.

Samples pass the filter of the config (ended, verified, distinct, few of each question); what was learned is kept as
RUN/solutions.jsonl. All other settings are those of the config; --set changes single ones. An unfinished run with the
same settings is continued.

JSON keys: solutions, questions, sources {search, bridge: solutions}, samples (what became of each, null without sample
files), updates, trained_tokens, held_out {n, before, after, gained, lost, delta_pp, ci_low, ci_high} (paired, first
against last validation; null without one), cost {...}, run.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlvr_pl.analysis.command import Result, Table, add_output_arguments
from rlvr_pl.cost import CostLedger, ledger_path
from rlvr_pl.errors import UserError
from rlvr_pl.records import RunFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("solutions", nargs="+", metavar="FILE", help="samples, rationales or solutions, together")
    parser.add_argument("--start", metavar="POLICY", help="policy to train (default: the config's)")
    parser.add_argument("--run", type=Path, required=True, help="run folder")
    add_fit_arguments(parser)
    add_output_arguments(parser, table=False)


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the settings of the distillation come from."""
    parser.add_argument("--config", metavar="FILE", help="settings of `fit` (default: configs/expert_iteration.yaml)")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of `fit`, such as optimizer.lr=2e-6"
    )


def run(args: argparse.Namespace) -> Result:
    for path in args.solutions:
        if not os.path.lexists(path):
            raise UserError(f"{path}: no such file of samples, rationales or solutions")
    distill(args.solutions, args.run, args, args.start)
    data = summarize(args.run)
    return Result(data, tables(data), [f"Run folder: {args.run}"])


def distill(files: Sequence[str | Path], folder: Path, args: argparse.Namespace, start: str | None) -> None:
    """Run the fit, or what is left of it."""
    import json

    from rlvr_pl.configs import find_config
    from rlvr_pl.fit import fit

    words = ["--config", args.config or str(find_config("expert_iteration.yaml")), "--run", str(folder)]
    words += ["--data.solutions", json.dumps([str(file) for file in files])]
    words += [] if start is None else ["--start", start]
    for pair in args.set:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UserError(f"--set {pair}: write NAME=VALUE, such as optimizer.lr=2e-6")
        words.append(f"--{name.lstrip('-')}={value}")
    fit(words)


def summarize(folder: Path) -> dict[str, Any]:
    """What a distillation learned and did, from its run folder."""
    from rlvr_pl.jsonl import read_records

    header, solutions = read_records(
        folder / "solutions.jsonl", "solutions", keep=("uid", "source"), required={"uid": str, "source": str}
    )
    cost = CostLedger.read(ledger_path(folder))
    items = sorted((folder / "items").glob("val-*.jsonl"))
    return {
        "solutions": len(solutions),
        "questions": len({row["uid"] for row in solutions}),
        "sources": dict(Counter(row["source"] for row in solutions)),
        "samples": (header or {}).get("samples"),
        "updates": RunFolder(folder).read_json("run.json")["updates"],
        "trained_tokens": cost.trained_tokens,
        "held_out": compare_items(items[0], items[-1]) if len(items) > 1 else None,
        "cost": cost.as_dict(),
        "run": str(folder),
    }


def compare_items(before: Path, after: Path) -> dict[str, Any]:
    """The paired comparison of two item files of the same questions."""
    from rlvr_pl.analysis.items import load_panel
    from rlvr_pl.core.paired import compare

    correct = load_panel([before, after]).correct
    found = compare(correct[0], correct[1])
    return {
        "n": found.n,
        "before": int(correct[0].sum()),
        "after": int(correct[1].sum()),
        "gained": found.gained,
        "lost": found.lost,
        "delta_pp": found.delta_pp,
        "ci_low": found.ci_low,
        "ci_high": found.ci_high,
    }


def tables(data: dict[str, Any]) -> list[Table]:
    """What became of the samples, what was learned, and what it did to held-out questions."""
    found = []
    if data["samples"]:
        found.append(Table("Samples", list(data["samples"]), [list(data["samples"].values())]))
    keys = ("solutions", "questions", "updates", "trained_tokens")
    found.append(Table("Distillation", keys, [[data[key] for key in keys]]))
    if data["held_out"]:
        found.append(paired_table({"held out": data["held_out"]}))
    return found


def paired_table(panels: dict[str, dict[str, Any]]) -> Table:
    """Greedy accuracy before and after on panels of questions."""
    rows = [
        [
            name,
            *(f"{p[key]}/{p['n']}" for key in ("before", "after")),
            f"{p['gained']} / {p['lost']}",
            f"{p['delta_pp']:+.1f} [{p['ci_low']:+.1f}, {p['ci_high']:+.1f}]",
        ]
        for name, p in panels.items()
    ]
    columns = ["questions", "before", "after", "gained / lost", "change, pp [paired 95% interval]"]
    return Table("Greedy accuracy", columns, rows)
