"""CPU-seconds that each objective takes for the weights of one update, beside the update itself.

    python benchmarks/weights.py [--policy embedded:start] [--rollouts 512] [--tokens 1024] [--json]

A share is of the update's training part: forward and backward of a sample of the same rollouts on the policy, cut to
its context and scaled to all their tokens. Attention grows faster than that, and sampling and grading, which every
objective also waits for, are left out, so the shares are too high.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from rlvr_pl.analysis.objectives import objective_classes
from rlvr_pl.errors import UserError
from rlvr_pl.objectives import GRPO, ForkCredit, Objective
from rlvr_pl.types import Branch, RolloutBatch, Totals

GROUP = 8
TRAINED = 4  # rollouts that the update is measured on


def make_batch(rollouts: int, tokens: int, vocabulary: int) -> RolloutBatch:
    """Rollouts of full length whose tree has about as many forks as a real group's: each shares some eight tokens."""
    rng = torch.Generator().manual_seed(0)
    shape = (rollouts, tokens)
    token_ids = torch.randint(0, vocabulary, shape, generator=rng)
    token_ids[:, :8] = torch.randint(0, 2, (rollouts, 8), generator=rng)
    logprobs = -torch.rand(shape, generator=rng)
    truncated = torch.rand(rollouts, generator=rng) < 0.2
    return RolloutBatch(
        uids=tuple(f"q{i // GROUP}" for i in range(rollouts)),
        samples=tuple(i % GROUP for i in range(rollouts)),
        group_size=GROUP,
        prompt_ids=((1, 2, 3),) * rollouts,
        token_ids=token_ids,
        mask=torch.ones(shape, dtype=torch.bool),
        rewards=torch.randint(0, 2, (rollouts,), generator=rng).double(),
        truncated=truncated,
        totals=Totals(rollouts, rollouts * tokens, int(truncated.sum()) * tokens),
        cap=tokens,
        old_logprobs=logprobs,
        start_logprobs=logprobs,
        sampling_logprobs=logprobs,
        entropy=3 * torch.rand(shape, generator=rng),
        sampling_entropy=3 * torch.rand(shape, generator=rng),
    )


def cpu_seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """The least of a few runs."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def weigh(objective: Objective, batch: RolloutBatch) -> None:
    """All that an update computes of an objective before its passes."""
    branches = (Branch(r, (1.0,) * r.count, (False,) * r.count, 1) for r in objective.requests(batch))
    batch = batch.replace(branches=tuple(branches))
    batch = batch.replace(extras=objective.prepare(batch))
    objective.token_weights(batch)


def update_seconds(policy_name: str, batch: RolloutBatch) -> float:
    """Forward and backward of `TRAINED` rollouts, as long as the policy can read, scaled to the tokens of all."""
    from rlvr_pl.policy import load_policy
    from rlvr_pl.update import GradientSum, accumulate_gradient

    policy = load_policy(policy_name)
    rows = batch.select(range(TRAINED))
    length = min(rows.mask.shape[1], policy.max_context - len(rows.prompt_ids[0]))
    token_ids = rows.token_ids[:, :length] % policy.head.shape[0]
    rows = rows.replace(token_ids=token_ids, mask=rows.mask[:, :length])
    weights = torch.ones(rows.mask.shape, dtype=torch.float64)
    pairs = [(p, p) for p in policy.model.parameters()]
    work = lambda: accumulate_gradient(policy, GRPO(), rows, weights, GradientSum(pairs), max_tokens=8192)  # noqa: E731
    work()
    return cpu_seconds(work, 2) * batch.totals.tokens / (TRAINED * length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="embedded:start", help="name or folder of the policy that is trained")
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch = make_batch(args.rollouts, args.tokens, 64)
    try:
        update = update_seconds(args.policy, batch)
    except UserError as error:
        print(f"the update was not measured: {error}", file=sys.stderr)
        update = None
    cases: dict[str, Objective] = {cls.__name__: cls() for cls in objective_classes()}
    cases["ForkCredit (branch)"] = ForkCredit(source="branch")
    seconds = {
        name: cpu_seconds(lambda objective=objective: weigh(objective, batch)) for name, objective in cases.items()
    }
    if args.json:
        print(json.dumps({"update_seconds": update, "weights_seconds": seconds}))
        return
    trained = "not measured" if update is None else f"{update:.1f} CPU-s"
    print(f"{args.rollouts} rollouts of {args.tokens} tokens; training part of the update: {trained}")
    for name, value in seconds.items():
        share = f"{100 * value / update:6.2f}%" if update else ""
        print(f"{name:28s}{1000 * value:9.1f} ms {share}")


if __name__ == "__main__":
    main()
