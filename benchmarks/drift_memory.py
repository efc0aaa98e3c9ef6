"""Memory of the drift monitor at a vocabulary of 151,936: peak beside weights and stored hidden states.

    python benchmarks/drift_memory.py [--hidden 1024] [--tokens 1024 2048] [--json]

A random-weight Qwen3 model of one layer with an untied BF16 head of 151,936 rows. The start's side is kept as hidden
states and head, as by default. Peak is the process's resident high-water mark during one measurement minus what it
held just before (Linux). The goal is under 300 MiB whatever the number of tokens; all the logits of 2,048 tokens would
take 1.2 GiB in FP32, for each side.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlvr_pl.callbacks.drift import Contexts, DriftMeter
from rlvr_pl.policy import Policy

VOCABULARY = 151_936


def build(hidden: int) -> Policy:
    """A policy without a tokenizer: contexts are ids already."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=hidden // 8,
        intermediate_size=2 * hidden,
        tie_word_embeddings=False,
    )
    model: Any = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).eval()
    nothing: Any = None
    return Policy(
        model=model, tokenizer=nothing, template=nothing, eos_ids=(0,), pad_id=0,
        max_context=4096, default_max_new_tokens=256, name="random", sha256="random",
    )  # fmt: skip


def contexts(tokens: int, length: int = 256) -> Contexts:
    generator = torch.Generator().manual_seed(1)
    count = max(1, tokens // length)
    ids = torch.randint(1, VOCABULARY, (count, length + 8), generator=generator).tolist()
    prompts = tuple(tuple(row[:8]) for row in ids)
    return Contexts(tuple(map(str, range(count))), prompts, tuple(tuple(row[8:]) for row in ids), "random")


def resident(field: str) -> float:
    """MiB of this process: VmRSS now, or VmHWM, the most since the mark was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) / 1024


def measure(policy: Policy, tokens: int) -> dict[str, float]:
    meter = DriftMeter(contexts(tokens), policy)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before, begin = resident("VmRSS"), time.process_time()
    figures = meter.measure(policy)
    return {
        "tokens": meter.tokens,
        "added_mib": resident("VmHWM") - before,
        "cpu_s": time.process_time() - begin,
        **figures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not sys.platform.startswith("linux"):
        sys.exit("drift_memory.py reads the resident high-water mark from /proc and needs Linux")
    torch.set_num_threads(1)
    policy = build(args.hidden)
    rows = [measure(policy, tokens) for tokens in args.tokens]
    if args.json:
        print(json.dumps(rows))
        return
    print("| completion tokens | added, MiB | CPU-s | KL of equal weights |\n|---:|---:|---:|---:|")
    for row in rows:
        print(f"| {row['tokens']} | {row['added_mib']:.0f} | {row['cpu_s']:.1f} | {row['kl']:.1e} |")


if __name__ == "__main__":
    main()
