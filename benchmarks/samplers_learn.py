"""Do runs that differ in their sampler alone learn the same? Held-out accuracy and training reward by engine.

    for seed in 7 8 9; do for sampler in Torch VLLM; do
      .venv-vllm/bin/rlvr-pl fit --config configs/quickstart.yaml --seed $seed --sampler $sampler \\
        --validation.every_n_updates 10 --run runs/samplers/$sampler-$seed
    done; done
    python benchmarks/samplers_learn.py runs/samplers/* --png samplers.png

Prints, for each engine, the mean over its runs and their range (lowest to highest).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from rlvr_pl.records import RunFolder

SMOOTH = 10  # updates in a mean of training rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    right: dict[str, list[list[float]]] = defaultdict(list)
    reward: dict[str, list[list[float]]] = defaultdict(list)
    updates: list[int] = []
    for path in args.runs:
        folder = RunFolder(path)
        engine = folder.read_json("run.json")["engine"]
        rows = folder.table("validation.csv").rows()
        updates = [int(row["update"]) for row in rows]
        right[engine].append([100 * float(row["accuracy"]) for row in rows])
        rewards = np.array([float(row["reward"]) for row in folder.table("metrics.csv").rows()])
        reward[engine].append(list(rewards[: len(rewards) // SMOOTH * SMOOTH].reshape(-1, SMOOTH).mean(1)))
    for title, table, at in (
        ("held-out accuracy, %", right, updates),
        (f"training reward, mean of {SMOOTH} updates", reward, [SMOOTH * (i + 1) for i in range(99)]),
    ):
        width = len(next(iter(table.values()))[0])
        print(f"| {title}, update | {' | '.join(map(str, at[:width]))} |\n|---|{'---:|' * width}")
        for engine, runs in table.items():
            a = np.array(runs)
            digits = 1 if table is right else 2
            cells = [
                f"{m:.{digits}f} ({x:.{digits}f}-{y:.{digits}f})" for m, x, y in zip(a.mean(0), a.min(0), a.max(0))
            ]
            print(f"| {engine}, {len(runs)} seeds | {' | '.join(cells)} |")
        print()
    if args.png is not None:
        draw(right, updates, args.png)


def draw(right: dict[str, list[list[float]]], updates: list[int], out: Path) -> None:
    """Every run a thin line, the mean of each engine's a thick one."""
    figure, axes = plt.subplots(figsize=(7, 4), constrained_layout=True)
    for colour, (engine, runs) in zip(("#0072B2", "#D55E00", "#009E73"), right.items()):
        for run in runs:
            axes.plot(updates, run, color=colour, linewidth=0.8, alpha=0.6)
        mean = np.array(runs).mean(0)
        axes.plot(updates, mean, "o-", color=colour, linewidth=2, label=f"{engine}, mean of {len(runs)} seeds")
    axes.set(xlabel="update", ylabel="held-out accuracy, greedy (%)", ylim=(0, None), title="One config, two samplers")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(out, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
