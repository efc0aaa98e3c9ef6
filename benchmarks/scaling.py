"""How the cost of an update grows: with completion length, rollouts, vocabulary, model size and cores.

    python benchmarks/scaling.py [--over length rollouts group vocabulary width layers cores] [--runs 3] [--json]

One update is sampling, gradient and optimizer step of a random Qwen3 policy in FP32 (rewards cost nothing), on one
thread. Each row of a table is a size, the stages' CPU-seconds (medians of interleaved runs) and the slope against the
row before, d log(cost) / d log(size); the last line is the exponent fitted to all rows by least squares. Cores are wall
seconds. Where the exponent is small, fixed costs rule; attention makes a completion's cost grow a little faster than
its length, towards 2 for lengths far above the model's width.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlvr_pl.objectives import GRPO
from rlvr_pl.policy import Policy
from rlvr_pl.sampling.base import Decoding, SampleRequest
from rlvr_pl.sampling.torch import TorchSampler
from rlvr_pl.types import Grade, GradeStatus, Rollout, build_batch
from rlvr_pl.update import update_once

PROMPT = 10
STAGES = ("sample", "gradient", "optimizer")


@dataclass(frozen=True)
class Size:
    """What is varied. Rollouts are ``questions * group``."""

    length: int = 64
    questions: int = 4
    group: int = 8
    vocabulary: int = 512
    width: int = 128
    layers: int = 4
    threads: int = 1


BASE = Size()
SWEEPS: dict[str, list[Size]] = {
    "length": [replace(BASE, length=n) for n in (32, 64, 128, 256, 512)],
    "rollouts": [replace(BASE, questions=n) for n in (2, 4, 8, 16, 32)],
    "group": [replace(BASE, group=n) for n in (4, 8, 16, 32)],
    "vocabulary": [replace(BASE, vocabulary=n, length=32) for n in (2_048, 8_192, 32_768, 131_072)],
    "width": [replace(BASE, width=n) for n in (64, 128, 256, 512)],
    "layers": [replace(BASE, layers=n) for n in (2, 4, 8, 16)],
    "cores": [replace(BASE, width=512, vocabulary=8_192, threads=n) for n in (1, 2)],
}
FIELDS = {"rollouts": "questions", "cores": "threads"}


class Update:
    """Updates of one size, one at a time."""

    def __init__(self, size: Size) -> None:
        self.size = size
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            num_hidden_layers=size.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=size.width // 4,
            intermediate_size=3 * size.width,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
        model = Qwen3ForCausalLM(config).eval()
        self.policy = Policy(model, None, None, (), 0, 2048, size.length, "random", "")  # type: ignore[arg-type]
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-12)  # no weight moves: all updates are alike
        self.sampler = TorchSampler(max_batch_tokens=2**30)
        generator = torch.Generator().manual_seed(0)
        self.prompts = torch.randint(size.vocabulary, (size.questions, PROMPT), generator=generator).tolist()

    def run(self) -> dict[str, tuple[float, float]]:
        """Stage -> (CPU, wall) seconds of one update."""
        size, found = self.size, Clock()
        torch.set_num_threads(size.threads)
        with found.stage("sample"):
            self.sampler.sync(self.policy)
            rows = [(q, s) for q in range(size.questions) for s in range(size.group)]
            requests = [SampleRequest(tuple(self.prompts[q]), ("scaling", q, s)) for q, s in rows]
            completions = self.sampler.generate(requests, Decoding(0.8, 0.9, size.length))
        rollouts = [
            Rollout(str(q), s, tuple(self.prompts[q]), c, "", Grade(GradeStatus.CORRECT, float(s % 2)))
            for (q, s), c in zip(rows, completions)
        ]
        batch = build_batch(rollouts, size.group, update=1, cap=size.length)
        weights = GRPO().token_weights(batch)
        update_once(self.policy, GRPO(), batch, weights, self.optimizer, span=found.stage)
        return found.seconds


class Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, tuple[float, float]] = {}

    def stage(self, name: str) -> Any:
        return _Stage(self.seconds, name)


@dataclass
class _Stage:
    seconds: dict[str, tuple[float, float]]
    name: str

    def __enter__(self) -> None:
        self.began = time.process_time(), time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.name] = time.process_time() - self.began[0], time.perf_counter() - self.began[1]


def sweep(name: str, runs: int) -> dict[str, Any]:
    """Medians of every size, and the exponents fitted to them."""
    sizes = SWEEPS[name]
    updates = [Update(size) for size in sizes]
    rounds = [[update.run() for update in updates] for _ in range(runs + 1)][1:]
    clock = 1 if name == "cores" else 0
    table = {
        stage: [statistics.median(one[k][stage][clock] for one in rounds) for k in range(len(sizes))]
        for stage in STAGES
    }
    table["update"] = [
        statistics.median(sum(s[clock] for s in one[k].values()) for one in rounds) for k in range(len(sizes))
    ]
    xs = [getattr(size, FIELDS.get(name, name)) for size in sizes]
    exponents = {stage: float(np.polyfit(np.log(xs), np.log(ys), 1)[0]) for stage, ys in table.items()}
    return {"sizes": xs, "seconds": table, "exponents": exponents}


def markdown(name: str, found: dict[str, Any]) -> str:
    stages = [*STAGES, "update"]
    kind = "wall s" if name == "cores" else "CPU-s"
    lines = [f"| {name}, {kind} | {' | '.join(stages)} | slope |", "|---:" * (len(stages) + 2) + "|"]
    for k, x in enumerate(found["sizes"]):
        ys = [found["seconds"][stage][k] for stage in stages]
        slope = ""
        if k:
            whole = found["seconds"]["update"]
            slope = f"{np.log(whole[k] / whole[k - 1]) / np.log(x / found['sizes'][k - 1]):.2f}"
        lines.append(f"| {x} | {' | '.join(f'{y:.3f}' for y in ys)} | {slope} |")
    exponents = " | ".join(f"{found['exponents'][stage]:.2f}" for stage in stages)
    return "\n".join([*lines, f"| exponent | {exponents} | |"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--over", nargs="+", choices=list(SWEEPS), default=list(SWEEPS))
    parser.add_argument("--runs", type=int, default=3, help="updates of each size that count")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report = {}
    for name in args.over:
        report[name] = sweep(name, args.runs)
        if not args.json:
            print(markdown(name, report[name]), flush=True)
    if args.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
