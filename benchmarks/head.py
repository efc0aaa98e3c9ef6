"""Cost of the vocabulary head: log-probs and gradients, ours beside the plain way, in one process on one thread.

    python benchmarks/head.py [--rows 1024 --hidden 256 --vocabulary 151936] [--dtype float32] [--plain] [--json]

CPU-seconds are process CPU-seconds, medians of interleaved runs. "added" is the growth of peak resident memory over
the inputs, measured in a fresh process for each method. The floor is the matrix products that cannot be avoided (one
for log-probs, three with gradients) at the rate of a well-shaped product measured here.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable

import torch

from rlvr_pl.core.logprobs import chunked_logprobs, entropy_and_kl, linear_loss

# matrix products of [rows, hidden] x [hidden, vocabulary] size that a method cannot do without
PRODUCTS = {"logprobs": 1, "logprobs+entropy": 1, "chunked backward": 4, "linear": 3, "plain backward": 3, "drift": 2}


def methods(rows: int, width: int, vocabulary: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """The inputs, and one function a method."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator).to(dtype).requires_grad_()
    head = (torch.randn(vocabulary, width, generator=generator) * 0.02).to(dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    weights = torch.randn(rows, generator=generator)

    def logprobs(entropy: bool) -> object:
        with torch.no_grad():
            return chunked_logprobs(hidden, head, targets, temperature=0.8, with_entropy=entropy)

    def chunked() -> object:
        loss = -(weights * chunked_logprobs(hidden, head, targets, temperature=0.8)).sum()
        return torch.autograd.grad(loss, [hidden, head])

    def linear() -> object:
        return torch.autograd.grad(linear_loss(hidden, head, targets, weights, temperature=0.8), [hidden, head])

    def plain() -> object:
        logits = (hidden @ head.T).float() / 0.8
        loss = (weights * torch.nn.functional.cross_entropy(logits, targets, reduction="none")).sum()
        return torch.autograd.grad(loss, [hidden, head])

    return {
        "logprobs": lambda: logprobs(False),
        "logprobs+entropy": lambda: logprobs(True),
        "chunked backward": chunked,
        "linear": linear,
        "plain backward": plain,
        "drift": lambda: entropy_and_kl(hidden.detach(), head.detach(), hidden.detach(), head.detach(), targets),
    }


def rss_mib(field: str) -> float:
    """Resident memory of this process now ("VmRSS") or at its peak ("VmHWM")."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) / 1024


def added_mib(name: str, arguments: tuple, queue: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    function = methods(*arguments)[name]
    torch.ones(64, 64) @ torch.ones(64, 64)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak of making the inputs
    before = rss_mib("VmRSS")
    function()
    queue.put(rss_mib("VmHWM") - before)


def product_rate(width: int, dtype: torch.dtype) -> float:
    """FLOP per CPU-second of a product whose operands stay in the cache."""
    a, b = torch.randn(256, width).to(dtype), torch.randn(2048, width).to(dtype)
    seconds = min(cpu_seconds(lambda: [a @ b.T for _ in range(50)]) for _ in range(5))
    return 50 * 2 * 256 * 2048 * width / seconds


def cpu_seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="also run the plain way, which holds all the logits")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtype = getattr(torch, args.dtype)
    arguments = (args.rows, args.hidden, args.vocabulary, dtype)
    functions = methods(*arguments)
    if not args.plain:
        del functions["plain backward"]
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for run in range(args.runs + 1):
        for name, function in functions.items():
            spent = cpu_seconds(function)
            if run:
                seconds[name].append(spent)
    floor = 2 * args.rows * args.hidden * args.vocabulary / product_rate(args.hidden, dtype)
    context = multiprocessing.get_context("spawn")
    table = []
    for name, values in seconds.items():
        queue = context.Queue()
        process = context.Process(target=added_mib, args=(name, arguments, queue))
        process.start()
        memory = queue.get()
        process.join()
        median = statistics.median(values)
        table.append(
            {"method": name, "cpu_s": median, "over_floor": median / (floor * PRODUCTS[name]), "added_mib": memory}
        )
    if args.json:
        json.dump({"arguments": vars(args), "product_cpu_s": floor, "methods": table}, sys.stdout)
        print()
        return
    print(
        f"{args.rows} rows, hidden {args.hidden}, vocabulary {args.vocabulary}, {args.dtype}, torch {torch.__version__}"
    )
    print("| method | CPU-s | x floor | added MiB |\n|---|---|---|---|")
    for row in table:
        print(f"| {row['method']} | {row['cpu_s']:.4f} | {row['over_floor']:.2f} | {row['added_mib']:.0f} |")


if __name__ == "__main__":
    main()
