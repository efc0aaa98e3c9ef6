"""Train the embedded default with the supplied recipe and compare before and after on held-out questions.

Writes RUN/summary.json and RUN/learning_curve.png. A finished run is reported again, never trained over.

JSON keys: before, after (correct answers of n), n, delta_pp, ci_low, ci_high (paired 95% interval, percentage points),
updates, seconds, plot.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rlvr_pl.analysis.command import Result, Table, add_output_arguments
from rlvr_pl.analysis.learning_curve import draw
from rlvr_pl.errors import UserError
from rlvr_pl.records import RunFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, default=Path("runs/quickstart"), help="run folder (default: %(default)s)")
    add_output_arguments(parser, table=False)


def run(args: argparse.Namespace) -> Result:
    folder = RunFolder(args.run)
    state = folder.read_json("run.json")
    if state is None or state["state"] != "finished":
        from rlvr_pl.configs import find_config
        from rlvr_pl.fit import fit

        fit(["--config", str(find_config("quickstart.yaml")), "--run", str(folder.path)])
    else:
        print(f"rlvr-pl: {folder.path} is finished; this is its report", file=sys.stderr)
    summary = summarize(folder)
    folder.write_json("summary.json", summary)
    return Result(summary, [_table(summary)], [f"Learning curve: {summary['plot']}", f"Run folder: {folder.path}"])


def summarize(folder: RunFolder) -> dict[str, Any]:
    """Compare the first and the last validation of a run and draw its learning curve."""
    from rlvr_pl.core.paired import compare

    files = sorted(folder.items.glob("val-*.jsonl"))
    if len(files) < 2:
        raise UserError(f"{folder.path}: needs a validation before and after training; remove the folder and try again")
    before, after = _correct(files[0]), _correct(files[-1])
    result = compare(before, after)
    rows = folder.table("metrics.csv").rows()
    plot = folder.path / "learning_curve.png"
    validation = folder.table("validation.csv").rows()
    draw(rows, validation, plot)
    return {
        "before": sum(before),
        "after": sum(after),
        "n": result.n,
        "delta_pp": result.delta_pp,
        "ci_low": result.ci_low,
        "ci_high": result.ci_high,
        "updates": len(rows),
        "seconds": round(folder.read_json("cost.json")["wall_seconds"], 1),
        "plot": str(plot),
    }


def _correct(path: Path) -> list[int]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row["correct"] for row in rows if row.get("record") != "items"]


def _table(summary: dict[str, Any]) -> Table:
    n = summary["n"]
    row = [
        f"{summary['before']}/{n} ({100 * summary['before'] / n:.1f}%)",
        f"{summary['after']}/{n} ({100 * summary['after'] / n:.1f}%)",
        f"{summary['delta_pp']:+.1f} pp [{summary['ci_low']:+.1f}, {summary['ci_high']:+.1f}]",
        summary["updates"],
        summary["seconds"],
    ]
    columns = ["before", "after", "change [paired 95% interval]", "updates", "seconds"]
    return Table("Held-out questions answered right, greedy", columns, [row])
