"""Rollouts a second and the time of an update on a GPU, for a random-weight Qwen3-0.6B in BF16.

    python benchmarks/gpu.py [--prompts 4] [--group 8] [--tokens 1024] [--runs 3] [--json]

Runs the torch sampler and, where vLLM and our sampler for it are installed, vLLM, at full length (no completion ends
early), then gradient and optimizer step of AdamW on the BF16 weights, embeddings untied as in the paper. The paper
reports about 1.6 rollouts a second for the supplied PyTorch sampler on one RTX 4090, cap 1,024 tokens, where most
completions end before the cap. Without a GPU this says so and ends with status 0: it gives no figure that was not
measured.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

PAPER = 1.6  # rollouts a second
VOCABULARY, CONTEXT, PROMPT = 151_936, 4096, 64
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "max_position_embeddings": CONTEXT,
}


def timed(function: Callable[[], Any], runs: int) -> float:
    """Median wall seconds, after one call that does not count."""
    seconds = []
    for _ in range(runs + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def build_policy() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rlvr_pl.model_weights import cast_weights
    from rlvr_pl.policy import Policy

    torch.manual_seed(0)
    config = Qwen3Config(**SHAPE, rope_theta=1e6, tie_word_embeddings=False, pad_token_id=None, eos_token_id=None)
    model: Any = Qwen3ForCausalLM(config).eval()
    cast_weights(model, torch.bfloat16)
    return Policy(model.to("cuda"), None, None, (), 0, CONTEXT, 1024, "random Qwen3-0.6B", "")  # type: ignore[arg-type]


def samplers() -> dict[str, Any]:
    from rlvr_pl.sampling.torch import TorchSampler

    found: dict[str, Any] = {"torch": TorchSampler(max_batch_tokens=2**20)}
    if find_spec("vllm") and find_spec("rlvr_pl.sampling.vllm"):
        found["vllm"] = importlib.import_module("rlvr_pl.sampling.vllm").VLLMSampler()
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    from rlvr_pl.objectives import GRPO
    from rlvr_pl.sampling.base import Decoding, SampleRequest
    from rlvr_pl.types import Grade, GradeStatus, Rollout, build_batch
    from rlvr_pl.update import update_once

    policy = build_policy()
    decoding = Decoding(0.8, 0.9, args.tokens)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(VOCABULARY, (args.prompts, PROMPT), generator=generator).tolist()
    rows = [(q, s) for q in range(args.prompts) for s in range(args.group)]
    requests = [SampleRequest(tuple(prompts[q]), ("gpu", q, s)) for q, s in rows]
    report: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "paper_rollouts_per_s": PAPER, "samplers": {}}
    completions: list[Any] = []
    for name, sampler in samplers().items():
        sampler.sync(policy)

        def sample(sampler: Any = sampler) -> None:
            completions[:] = sampler.generate(requests, decoding)

        seconds = timed(sample, args.runs)
        tokens = sum(len(c.token_ids) for c in completions)
        report["samplers"][name] = {"rollouts_per_s": len(rows) / seconds, "tokens_per_s": tokens / seconds}
        sampler.close()
    rollouts = [
        Rollout(str(q), s, tuple(prompts[q]), c, "", Grade(GradeStatus.CORRECT, float(s % 2)))
        for (q, s), c in zip(rows, completions)
    ]
    batch = build_batch(rollouts, args.group, update=1, cap=args.tokens)
    weights = GRPO().token_weights(batch)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=1e-6)
    torch.cuda.reset_peak_memory_stats()
    report["update_s"] = timed(lambda: update_once(policy, GRPO(), batch, weights, optimizer), args.runs)
    report["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=1024, help="new tokens of every completion")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print(json.dumps({"gpu": None}) if args.json else "gpu: there is no GPU here, so nothing was measured")
        return 0
    report = measure(args)
    if args.json:
        print(json.dumps(report))
        return 0
    print(f"{report['gpu']}: {args.prompts} x {args.group} rollouts of {args.tokens} tokens, Qwen3-0.6B, BF16")
    for name, x in report["samplers"].items():
        rates = f"{x['rollouts_per_s']:.2f} rollouts/s, {x['tokens_per_s']:.0f} tokens/s"
        print(f"{name}: {rates} (the paper, supplied sampler on an RTX 4090: {PAPER} rollouts/s)")
    print(f"gradient and step: {report['update_s']:.2f} s, {report['peak_gib']:.1f} GiB at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
