"""How far an update is from the least time that this machine could take for it.

    python benchmarks/floor.py [--case tiny64-128 ... | --case all] [--runs 5] [--json]

For every stage of an update, the arithmetic and the memory traffic that no implementation can leave out are counted
from the model's shape and the lengths drawn, and divided by what one core of this machine was measured to do: the rate
of large FP32 matrix products, and the bandwidth of a copy as large as what the stage goes through (so that what fits
into the caches counts at their speed). The larger of the two times is the floor. Cases are those of `peers.py`.

What is counted, with w bytes a number, B weights in the blocks' matrices, V x h in the head:
  prefill, decode   2 (B + V h) operations a token, 4 q d L a token attended to; each step reads the weights and the
                    cache of its rows once, and writes and reads its logits once
  gradient          three times the forward's operations over prompt and completion of every rollout with a weight, the
                    head's over completions alone; the weights read twice, their gradient written once
  optimizer         AdamW: weight, gradient and two moments read, three of them written, the gradient read for its norm
Not counted, so that the floor is low rather than high: norms, rotations, softmax, drawing, activations (a backward
could keep them in caches), Python, and all that Lightning does.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peer_task import CASES, GROUP, PROMPTS, SHAPES
from peers import HERE, Implementation

from rlvr_pl.core.products import product, quick

WIDTH = 4  # bytes of FP32
PROMPT = 10  # tokens of every question of `peer_task`


def spent(function: Callable[[], object], repeats: int) -> float:
    """CPU-seconds of one call: the least of several, because whatever disturbs only adds."""
    best = float("inf")
    for _ in range(repeats):
        began = time.process_time()
        function()
        best = min(best, time.process_time() - began)
    return best


def gemm_rates() -> dict[str, float]:
    """FP32 operations a second of a product of 1024 x 1024 x 1024, torch's own and oneDNN's."""
    n = 1024
    a, b, out = (torch.randn(n, n) for _ in range(3))
    ways: dict[str, Callable[[], object]] = {"torch": lambda: torch.mm(a, b, out=out)}
    if quick(a, b):
        ways["oneDNN"] = lambda: product(a, b)
    return {name: 2 * n**3 / spent(way, 15) for name, way in ways.items()}


def bandwidth(size: int) -> float:
    """Bytes a second, read and written ones added, of copies within `size` bytes of memory."""
    source = torch.ones(max(1024, size // (2 * WIDTH)))
    target = torch.empty_like(source)
    copies = max(1, 2**26 // size)

    def copy() -> None:
        for _ in range(copies):
            target.copy_(source)

    return 2 * WIDTH * len(source) * copies / spent(copy, 9)


class Counts:
    """Operations and bytes of one update's stages for a model of this shape."""

    def __init__(self, shape: dict[str, int], lengths: Sequence[int], learned: Sequence[int]) -> None:
        self.lengths, self.learned = lengths, learned
        self.layers, hidden = shape["num_hidden_layers"], shape["hidden_size"]
        self.queries = shape["num_attention_heads"] * shape["head_dim"]
        self.keys = shape["num_key_value_heads"] * shape["head_dim"]
        attention = hidden * 2 * (self.queries + self.keys)
        self.blocks = self.layers * (attention + 3 * hidden * shape["intermediate_size"])
        self.vocabulary, self.head = shape["vocab_size"], shape["vocab_size"] * hidden
        self.weights = WIDTH * (self.blocks + self.head)

    def _attention(self, first: int, last: int) -> int:
        """Operations of tokens at places `first` to `last - 1`, each attending to all up to itself."""
        attended = (last * (last + 1) - first * (first + 1)) // 2
        return 4 * self.queries * self.layers * attended

    def generation(self) -> tuple[int, int, int]:
        """Operations, bytes, and bytes that a step goes through."""
        operations = PROMPTS * (2 * (self.blocks * PROMPT + self.head) + self._attention(0, PROMPT))
        traffic = self.weights
        for length in self.lengths:
            operations += 2 * (self.blocks + self.head) * (length - 1) + self._attention(PROMPT, PROMPT + length - 1)
        cache = 2 * WIDTH * self.keys * self.layers
        most = max(self.lengths)
        for step in range(1, most):
            rows = sum(length > step for length in self.lengths)
            traffic += self.weights + rows * (cache * (PROMPT + step) + 2 * WIDTH * self.vocabulary)
        return operations, traffic, self.weights + len(self.lengths) * cache * (PROMPT + most)

    def gradient(self) -> tuple[int, int, int]:
        operations = 0
        for length in self.learned:
            forward = 2 * self.blocks * (PROMPT + length - 1) + self._attention(0, PROMPT + length - 1)
            operations += 3 * (forward + 2 * self.head * length)
        return operations, 3 * self.weights, 2 * self.weights

    def optimizer(self) -> tuple[int, int, int]:
        return 0, 8 * self.weights, 4 * self.weights


def measured(case: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Updates of ours, the first two left out."""
    ours = Implementation("ours", args, case)
    try:
        rounds = [ours.update() for _ in range(args.runs + 2)][2:]
    finally:
        ours.close()
    return rounds


def floors(case: str, rounds: list[dict[str, Any]], rate: float) -> dict[str, Any]:
    """For each stage its median CPU-seconds, the floor of the same rollouts, and their ratio."""
    names = {"generation": "generation", "gradient": "gradient", "optimizer": "optimizer"}
    found: dict[str, Any] = {}
    for stage, name in names.items():
        times, least, bound = [], [], ""
        for update in rounds:
            lengths = [len(ids) for ids in update["rollouts"]]
            groups = [update["rewards"][i : i + GROUP] for i in range(0, len(lengths), GROUP)]
            learned = [n for i, n in enumerate(lengths) if len(set(groups[i // GROUP])) > 1]
            operations, traffic, through = getattr(Counts(SHAPES[CASES[case].model], lengths, learned), stage)()
            arithmetic, memory = operations / rate, traffic / bandwidth(through)
            bound = "arithmetic" if arithmetic > memory else "memory"
            least.append(max(arithmetic, memory))
            times.append(update["stages"][name])
        ours, floor = statistics.median(times), statistics.median(least)
        found[stage] = {"ours": ours, "floor": floor, "ratio": ours / floor, "bound": bound}
    whole = statistics.median(update["cpu"] for update in rounds)
    floor = sum(stage["floor"] for stage in found.values())
    return found | {"update": {"ours": whole, "floor": floor, "ratio": whole / floor, "bound": ""}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[*CASES, "all"], default="tiny64-128")
    parser.add_argument("--runs", type=int, default=5, help="updates that count")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", type=Path, default=HERE.parent / "models" / "benchmarks")
    args = parser.parse_args()
    args.python, args.bf16 = Path(sys.executable), False
    torch.set_num_threads(1)
    args.models.mkdir(parents=True, exist_ok=True)
    rates = gemm_rates()
    gflops = {name: rate / 1e9 for name, rate in rates.items()}
    report: dict[str, Any] = {"gemm_gflops": gflops, "copy_gb_s": bandwidth(2**29) / 1e9, "cases": {}}
    for case in CASES if args.case == "all" else (args.case,):
        model = args.models / CASES[case].model
        if not model.is_dir():
            subprocess.run([args.python, HERE / "peer_task.py", model.name, model], check=True)
        report["cases"][case] = floors(case, measured(case, args), max(rates.values()))
    if args.json:
        print(json.dumps(report))
        return
    products = ", ".join(f"{name} {rate:.0f}" for name, rate in gflops.items())
    print(f"FP32 products, Gflop/s: {products}; copies in memory {report['copy_gb_s']:.1f} GB/s")
    for case, stages in report["cases"].items():
        print(f"\n| {case}, CPU-s | ours | floor | ours / floor | bound by |\n|---|---:|---:|---:|---|")
        for name, x in stages.items():
            print(f"| {name} | {x['ours']:.3f} | {x['floor']:.3f} | {x['ratio']:.1f} | {x['bound']} |")


if __name__ == "__main__":
    main()
