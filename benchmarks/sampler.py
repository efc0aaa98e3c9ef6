"""Sampling: tokens per CPU-second of the torch sampler beside transformers' generate, same model, prompts and lengths.

    python benchmarks/sampler.py [--case tiny64] [--rows 32] [--max-new-tokens 128] [--dtype auto] [--runs 5] [--json]

Cases are random-weight Qwen3 models: `embedded` (vocabulary 1,200, hidden 64, 2 layers: the shape of the shipped tiny
policies), `tiny64` (64, 128, 4 layers), `bigvocab` (151,936, 256, 2 layers), `medium` (8,192, 256, 6 layers), `smollm2`
(49,152, 576, 30 layers). No row ends early, so that both sides draw the same number of tokens. `--model FOLDER` takes a
model of your own, and `--sharpen X` multiplies the head: with large X the nucleus is a few tokens, with 1 it is most of
the vocabulary.
CPU-seconds are process CPU-seconds on one thread, medians of interleaved runs.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from rlvr_pl.sampling.base import Decoding, SampleRequest
from rlvr_pl.sampling.torch import TorchSampler

# vocabulary, hidden, layers, query heads, key-value heads, head size, inner size
CASES = {
    "embedded": (1_200, 64, 2, 4, 2, 16, 192),
    "tiny64": (64, 128, 4, 4, 2, 32, 384),
    "bigvocab": (151_936, 256, 2, 4, 2, 64, 768),
    "medium": (8_192, 256, 6, 8, 2, 32, 768),
    "smollm2": (49_152, 576, 30, 9, 3, 64, 1_536),
}


def build(case: str) -> Any:
    vocabulary, hidden, layers, heads, kv, size, inner = CASES[case]
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv,
            head_dim=size,
            intermediate_size=inner,
            max_position_embeddings=2048,
            tie_word_embeddings=case != "embedded",
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def cpu_seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), default="embedded")
    parser.add_argument("--model", help="a folder instead of a case")
    parser.add_argument("--sharpen", type=float, default=1.0)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=8, help="tokens of a prompt")
    parser.add_argument("--max-new-tokens", type=int, default=80)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.9)
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of our products")
    parser.add_argument("--weights", choices=["float32", "bfloat16"], default="float32", help="dtype of the model")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--alone", action="store_true", help="ours only")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    model = AutoModelForCausalLM.from_pretrained(args.model) if args.model else build(args.case)
    model = model.to(getattr(torch, args.weights)).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(args.sharpen)
    policy = SimpleNamespace(model=model, eos_ids=(), max_context=2048)
    sampler = TorchSampler(dtype=args.dtype, max_batch_tokens=2**30)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, model.config.vocab_size, (args.rows // args.group, args.prompt), generator=generator)
    rows = prompts.repeat_interleave(args.group, 0)
    decoding = Decoding(args.temperature, args.top_p, args.max_new_tokens)
    requests = [SampleRequest(tuple(row), ("benchmark", i)) for i, row in enumerate(rows.tolist())]
    config = GenerationConfig(
        do_sample=True,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=0,
        max_new_tokens=args.max_new_tokens,
        pad_token_id=0,
        eos_token_id=None,
    )

    def ours() -> None:
        sampler.sync(cast(Any, policy))
        sampler.generate(requests, decoding)

    def theirs() -> None:
        model.generate(input_ids=rows, attention_mask=torch.ones_like(rows), generation_config=config)

    methods = {"rlvr-pl": ours} | ({} if args.alone else {"transformers": theirs})
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for run in range(args.runs + 1):
        for name, function in methods.items():
            spent = cpu_seconds(function)
            if run:
                seconds[name].append(spent)
    tokens = args.rows * args.max_new_tokens
    table = {
        name: {"cpu_s": statistics.median(values), "tokens_per_cpu_s": tokens / statistics.median(values)}
        for name, values in seconds.items()
    }
    if args.json:
        json.dump({"arguments": vars(args), "tokens": tokens, "methods": table}, sys.stdout)
        print()
        return
    print(f"{args.model or args.case}, {args.rows} rows x {args.max_new_tokens} tokens, torch {torch.__version__}")
    print("| sampler | CPU-s | tokens per CPU-s | times transformers |\n|---|---|---|---|")
    for name, row in table.items():
        ratio = table["transformers"]["cpu_s"] / row["cpu_s"] if "transformers" in table else float("nan")
        print(f"| {name} | {row['cpu_s']:.3f} | {row['tokens_per_cpu_s']:.0f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
