"""What gradient checkpointing, the attention implementation and torch.compile cost and give: one update's forward and
backward over the same made-up rollouts, each variant a process of its own with one thread.

    python benchmarks/comforts.py models/smollm2 [--rows 16] [--tokens 112] [--runs 3] [--json]

`first` is the first pass (compilation included), `pass` the median CPU-seconds of the later ones, `added MiB` the most
resident memory that the passes added to the loaded policy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "sdpa": {},
    "eager": {"attn_implementation": "eager"},
    "sdpa, checkpointing": {"gradient_checkpointing": True},
    "sdpa, compile": {"compile": True},
}


def measure(args: argparse.Namespace) -> dict[str, float]:
    import torch
    from peer_task import resident

    from rlvr_pl.objectives import GRPO
    from rlvr_pl.policy import load_policy
    from rlvr_pl.types import Completion, Grade, GradeStatus, Rollout, StopReason, build_batch
    from rlvr_pl.update import GradientSum, accumulate_gradient

    torch.set_num_threads(1)
    policy = load_policy(args.model, dtype=args.dtype, **VARIANTS[args.variant])
    torch.manual_seed(0)
    ids = torch.randint(10, policy.head.shape[0], (args.rows, args.tokens + 16)).tolist()
    grades = [Grade(GradeStatus.CORRECT, 1.0), Grade(GradeStatus.WRONG, 0.0)]
    rows = [
        Rollout("q", i, tuple(x[:16]), Completion(tuple(x[16:]), StopReason.LENGTH), "", grades[i % 2])
        for i, x in enumerate(ids)
    ]
    batch, objective = build_batch(rows, args.rows, update=1), GRPO()
    weights = objective.token_weights(batch)
    parameters = [(p, p) for p in policy.model.parameters()]
    total = GradientSum(parameters)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    seconds = []
    for _ in range(args.runs + 1):
        began = time.process_time()
        accumulate_gradient(policy, objective, batch, weights, total, max_tokens=args.max_tokens)
        seconds.append(time.process_time() - began)
    return {
        "first": seconds[0],
        "pass": statistics.median(seconds[1:]),
        "added_mib": resident("VmHWM") - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=112, help="of each completion, after a prompt of 16")
    parser.add_argument("--max-tokens", type=int, default=2048, help="padded tokens in a micro-batch")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--variant", choices=list(VARIANTS), help="measure this one in this process")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.variant:
        print(json.dumps(measure(args)))
        return
    found = {}
    for variant in VARIANTS:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found[variant] = json.loads(done.stdout.splitlines()[-1])
        if not args.json:
            figures = "  ".join(f"{name} {value:.2f}" for name, value in found[variant].items())
            print(f"{variant:<22} {figures}", flush=True)
    if args.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
