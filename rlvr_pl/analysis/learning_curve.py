"""Draw the learning curve of a run: training reward of every update, and held-out accuracy with its 95% interval.

JSON keys: plot, updates, reward_first, reward_last (means of the first and last ten updates), validation: [{update, n,
correct}].
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlvr_pl.analysis.command import Result, add_output_arguments
from rlvr_pl.analysis.plot import write_figure
from rlvr_pl.errors import UserError
from rlvr_pl.records import RunFolder, check_place

SMOOTH = 10  # updates in the running mean


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--png", type=Path, metavar="FILE", help="where to draw (default: RUN/learning_curve.png)")
    add_output_arguments(parser, table=False)


def run(args: argparse.Namespace) -> Result:
    folder = RunFolder(args.run)
    rows = folder.table("metrics.csv").rows()
    if not rows:
        raise UserError(f"{args.run}: no update is recorded here (no rows in metrics.csv)")
    validation = folder.table("validation.csv").rows()
    out = args.png or folder.path / "learning_curve.png"
    if out.suffix != ".png" or not out.parent.is_dir():
        raise UserError(f"--png {out}: must be a .png file in a folder that exists")
    check_place(out, "--png")
    draw(rows, validation, out)
    reward = [float(r["reward"]) for r in rows]
    data = {
        "plot": str(out),
        "updates": len(rows),
        "reward_first": _mean(reward[:SMOOTH]),
        "reward_last": _mean(reward[-SMOOTH:]),
        "validation": [{k: int(float(r[k])) for k in ("update", "n", "correct")} for r in validation],
    }
    return Result(data, [], [f"Learning curve: {out}"])


def draw(rows: list[dict[str, str]], validation: list[dict[str, str]], out: Path) -> None:
    """Draw rows of metrics.csv and validation.csv to a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    updates = [int(r["update"]) for r in rows]
    reward = [float(r["reward"]) for r in rows]
    width = max(1, min(SMOOTH, len(reward) // 3))
    mean = [_mean(reward[max(0, i + 1 - width) : i + 1]) for i in range(len(reward))]
    figure, axes = plt.subplots(figsize=(7, 4), constrained_layout=True)
    axes.plot(updates, reward, ".", color="#999999", markersize=5, label="training reward, one update")
    axes.plot(updates, mean, color="#0072B2", linewidth=2, label=f"training reward, mean of {width} updates")
    if validation:
        n = np.array([float(r["n"]) for r in validation])
        accuracy = np.array([float(r["accuracy"]) for r in validation])
        error = 1.96 * np.sqrt(accuracy * (1 - accuracy) / n)
        at = [int(r["update"]) for r in validation]
        label = "held-out accuracy, greedy (95% interval)"
        axes.errorbar(at, accuracy, error, fmt="s-", color="#D55E00", capsize=4, label=label)
    axes.set(xlabel="update", ylabel="share of right answers", ylim=(-0.03, 1.03), title="Learning curve")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", fontsize=8)
    write_figure(figure, out, dpi=150)
    plt.close(figure)


def _mean(values: list[float]) -> float:
    known: list[Any] = [v for v in values if v == v]
    return sum(known) / len(known) if known else float("nan")
