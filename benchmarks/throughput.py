"""Rollouts: tokens per CPU-second of the torch sampler, of vLLM in process, and of transformers' generate.

    make test-vllm                                   # makes .venv-vllm
    .venv-vllm/bin/python benchmarks/throughput.py [POLICY ...] [--questions 16] [--group 8] [--cap 64] [--runs 3]

Policies (default embedded:start) are real ones that end their answers; all three sample the same questions with
temperature 0.8 and top-p 0.9, in the policy's own dtype (the torch sampler as it chooses). Tokens are those up to the
end of each answer, EOS included. CPU-seconds are those of the whole process on one thread, medians of interleaved runs
after one that is not counted. Needs vLLM; `--without vllm` leaves it out.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from rlvr_pl.data.pools import load_questions
from rlvr_pl.policy import Policy, load_policy
from rlvr_pl.sampling import named_sampler
from rlvr_pl.sampling.base import Decoding, SampleRequest

SAMPLERS = ("torch", "vllm", "transformers")


def with_sampler(name: str, policy: Policy, prompts: Sequence[tuple[int, ...]], group: int, decoding: Decoding) -> Any:
    """A function that draws every group once more and returns the number of tokens, and the sampler behind it."""
    sampler = named_sampler(name)
    sampler.sync(policy)

    def draw(run: int) -> int:
        requests = [SampleRequest(p, (run, i, k)) for i, p in enumerate(prompts) for k in range(group)]
        return sum(len(c.token_ids) for c in sampler.generate(requests, decoding))

    return draw, sampler


def with_transformers(
    policy: Policy, prompts: Sequence[tuple[int, ...]], group: int, decoding: Decoding
) -> Callable[[int], int]:
    """The same with transformers' own generate, the whole batch at once."""
    model = cast("Any", policy.model)
    width = max(map(len, prompts))
    ids = torch.tensor([[policy.pad_id] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])

    def draw(run: int) -> int:
        torch.manual_seed(run)
        out = model.generate(
            ids, attention_mask=mask, num_return_sequences=group, max_new_tokens=decoding.max_new_tokens,
            do_sample=True, temperature=decoding.temperature, top_p=decoding.top_p, top_k=0, pad_token_id=policy.pad_id,
        )[:, width:]  # fmt: skip
        ends = torch.isin(out, torch.tensor(policy.eos_ids))
        lengths = torch.where(ends.any(1), ends.int().argmax(1) + 1, out.shape[1])
        return int(lengths.sum())

    return draw


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Median tokens per CPU-second of each sampler on one policy."""
    policy = load_policy(name)
    prompts = [policy.prompt_ids(q) for q in load_questions("embedded:train")[: args.questions]]
    decoding = Decoding(0.8, 0.9, args.cap)
    used = [s for s in SAMPLERS if s not in args.without]
    made = {s: with_sampler(s, policy, prompts, args.group, decoding) for s in used if s != "transformers"}
    draws = {s: draw for s, (draw, _) in made.items()}
    if "transformers" in used:
        draws["transformers"] = with_transformers(policy, prompts, args.group, decoding)
    rates: dict[str, list[float]] = {s: [] for s in used}
    tokens = dict.fromkeys(used, 0)
    for run in range(args.runs + 1):
        for sampler in used:
            begin = time.process_time()
            tokens[sampler] = draws[sampler](run)
            if run:
                rates[sampler].append(tokens[sampler] / (time.process_time() - begin))
    for _, sampler in made.values():
        sampler.close()
    return {
        "policy": name,
        "parameters": sum(p.numel() for p in policy.model.parameters()),
        "dtype": str(policy.head.dtype).removeprefix("torch."),
        "rollouts": args.questions * args.group,
        "tokens": tokens,
        "tokens_per_cpu_second": {s: round(statistics.median(values)) for s, values in rates.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policies", nargs="*", default=["embedded:start"], metavar="POLICY")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--cap", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--without", nargs="*", choices=SAMPLERS, default=[])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = [measure(name, args) for name in args.policies]
    if args.json:
        print(json.dumps({"machine": platform.processor() or platform.machine(), "policies": rows}))
        return 0
    for row in rows:
        print(f"{row['policy']} ({row['parameters'] / 1e6:.1f}M, {row['dtype']}), {row['rollouts']} rollouts")
        for sampler, rate in row["tokens_per_cpu_second"].items():
            print(f"  {sampler:<13} {rate:>7} tokens per CPU-second  ({row['tokens'][sampler]} tokens)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
