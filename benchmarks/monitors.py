"""What the monitors cost: CPU and wall seconds of each callback over those of the updates themselves, in one run.

    python benchmarks/monitors.py [--updates 120] [--questions 8] [--drift-every 10] [--json]

The embedded default (8 questions x 8 rollouts, cap 80, BF16), one thread, with every monitor at its defaults: drift
every 10 updates, statistics with the surprise detector, recorder with texts, stop rule, canary, snapshots every 40,
completion table every 20, progress line. The goal is under 5% of update time together. Checkpoints and validation are
not monitors and are left out.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import contextlib
import io
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer

from rlvr_pl import callbacks
from rlvr_pl.data.module import QuestionData
from rlvr_pl.grading.exact import ExactGrader
from rlvr_pl.module import RLVRModule
from rlvr_pl.objectives import GRPO
from rlvr_pl.policy import load_policy
from rlvr_pl.precision import BF16Precision
from rlvr_pl.sampling.torch import TorchSampler


class Meter:
    """Adds up CPU and wall seconds of the calls it wraps, by name."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}

    def wrap(self, name: str, owner: Any, method: str) -> None:
        inner: Callable[..., Any] = getattr(owner, method)
        spent = self.spent.setdefault(name, [0.0, 0.0])

        def measured(*args: Any, **kwargs: Any) -> Any:
            cpu, wall = time.process_time(), time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                spent[0] += time.process_time() - cpu
                spent[1] += time.perf_counter() - wall

        setattr(owner, method, measured)


def monitors(args: argparse.Namespace) -> list[Callback]:
    return [
        callbacks.DriftMonitor(every_n_updates=args.drift_every),
        callbacks.RolloutStats(max_surprise=3.0),
        callbacks.RolloutRecorder(texts=True),
        callbacks.DamageStop(),
        callbacks.SamplerCanary(),
        callbacks.Snapshots(),
        callbacks.CompletionTable(),
        callbacks.TimeLimit(),
        callbacks.RunProgress(),
    ]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    policy = load_policy("embedded:start")
    module = RLVRModule(policy, GRPO(), TorchSampler(), ExactGrader(), max_new_tokens=80, seed=1)
    data = QuestionData(validation=None, updates=args.updates, questions_per_update=args.questions)
    watched = monitors(args)
    meter = Meter()
    meter.wrap("update", module, "training_step")
    for callback in watched:
        meter.wrap(type(callback).__name__, callback, "on_train_batch_end")
    canary = next(c for c in watched if isinstance(c, callbacks.SamplerCanary))
    meter.wrap("SamplerCanary", canary, "_check")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=1,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_model_summary=False,
            logger=False,
            default_root_dir=folder,
            plugins=[BF16Precision()],
            callbacks=watched,
        )
        trainer.fit(module, datamodule=data)
    update = meter.spent.pop("update")
    inside = meter.spent["SamplerCanary"]  # the canary works inside the update; what it costs is not the update's own
    update = [u - c for u, c in zip(update, inside)]
    shares = {name: [100 * s / u for s, u in zip(spent, update)] for name, spent in meter.spent.items()}
    return {
        "updates": args.updates,
        "update_cpu_s": update[0] / args.updates,
        "update_wall_s": update[1] / args.updates,
        "cpu_percent": {name: share[0] for name, share in shares.items()},
        "wall_percent": {name: share[1] for name, share in shares.items()},
        "total_cpu_percent": sum(share[0] for share in shares.values()),
        "total_wall_percent": sum(share[1] for share in shares.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--questions", type=int, default=8)
    parser.add_argument("--drift-every", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args)
    if args.json:
        print(json.dumps(found))
        return
    print(f"one update: {found['update_cpu_s']:.3f} CPU-s, {found['update_wall_s']:.3f} s\n")
    print("| callback | CPU, % of update | wall, % |\n|---|---:|---:|")
    for name, share in found["cpu_percent"].items():
        print(f"| {name} | {share:.2f} | {found['wall_percent'][name]:.2f} |")
    print(f"| all | {found['total_cpu_percent']:.2f} | {found['total_wall_percent']:.2f} |")


if __name__ == "__main__":
    main()
