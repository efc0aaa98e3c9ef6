"""What the commands that sample have in common: their options, the policy behind them, a progress bar."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from rlvr_pl.analysis.command import counting, progress_console
from rlvr_pl.errors import UserError
from rlvr_pl.sampling import NAMES

if TYPE_CHECKING:
    from rlvr_pl.expert_iteration.explorer import Explorer
    from rlvr_pl.sampling.base import Sampler


def add_explorer_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that `open_explorer` reads, and ``--out``."""
    parser.add_argument(
        "--checkpoint", required=True, help="embedded:base, embedded:start, a model folder or a hub name"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="records; an unfinished file goes on")
    add_sampling_arguments(parser)


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """How to sample and grade."""
    parser.add_argument("--seed", type=int, default=0, help="names every draw (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.8, help="of sampling (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=0.9, help="nucleus mass (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, help="cap on a completion (default: the policy's own, or 1024)")
    parser.add_argument(
        "--batch-tokens", type=int, default=32_768, help="rows x (prompt + cap) sampled together (default: %(default)s)"
    )
    add_sampler_argument(parser)
    parser.add_argument("--grader", default="math", help="math, exact, supplied or module:function (default: math)")
    parser.add_argument("--untie-embeddings", action="store_true", help="load the head as its own parameter")


def add_sampler_argument(parser: argparse.ArgumentParser) -> None:
    """``--sampler``, a name that `named_sampler` knows, and the servers of ``vllm-server``."""
    parser.add_argument(
        "--sampler", choices=NAMES, default="torch", help="what draws the tokens; part of every record (default: torch)"
    )
    parser.add_argument("--server", action="append", default=[], metavar="URL", help="of vllm-server; once for each")
    parser.add_argument("--server-folder", metavar="FOLDER", help="through which servers get their weights")


def sampler_of(args: argparse.Namespace, max_batch_tokens: int | None = None) -> Sampler:
    """The sampler that `add_sampler_argument`'s options name."""
    from rlvr_pl.sampling import named_sampler

    return named_sampler(args.sampler, max_batch_tokens, args.server, args.server_folder)


@contextlib.contextmanager
def open_explorer(args: argparse.Namespace, checkpoint: str | Path, hint: str | None = None) -> Iterator[Explorer]:
    """The policy, sampler and grader of `add_sampling_arguments`; released on leaving."""
    check_sampling(args)
    from dataclasses import replace

    from rlvr_pl.expert_iteration.explorer import Explorer
    from rlvr_pl.grading import named_grader
    from rlvr_pl.policy import best_device, load_policy
    from rlvr_pl.prompts import make_template
    from rlvr_pl.sampling.base import Decoding

    grader, sampler = named_grader(args.grader), sampler_of(args, args.batch_tokens)
    policy = load_policy(checkpoint, untie_embeddings=args.untie_embeddings, device=best_device())
    if hint is not None:
        policy = replace(policy, template=make_template({**policy.template.spec(), "hint": hint}, policy.tokenizer))
    decoding = Decoding(args.temperature, args.top_p, args.max_new_tokens or policy.default_max_new_tokens)
    try:
        sampler.sync(policy)
        yield Explorer(policy, sampler, grader, decoding, args.seed, args.batch_tokens)
    finally:
        grader.close()
        sampler.close()


def check_sampling(args: argparse.Namespace) -> None:
    """UserError for an option that cannot be."""
    if args.temperature <= 0 or not 0 < args.top_p <= 1:
        raise UserError(f"--temperature {args.temperature} must be above 0, and --top-p {args.top_p} in (0, 1]")
    check_counts(args, "batch_tokens", "max_new_tokens")


def check_counts(args: argparse.Namespace, *names: str) -> None:
    """UserError for a count below 1; options that were left out pass."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least 1")


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar with ETA on stderr, or a line every half minute where that is no terminal; the function is told how many
    are done."""
    if progress_console().is_terminal:
        with counting(what, total) as tick:
            yield tick
    else:
        yield _SpokenProgress(what, total)


class _SpokenProgress:
    """Prints how many are done and how long the rest will take, as fast as it went since the first call."""

    SECONDS = 30.0

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total = what, total
        self.first: tuple[int, float] | None = None
        self.last = time.monotonic()

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = done, now
        if now - self.last < self.SECONDS or done <= self.first[0]:
            return
        self.last = now
        left = (now - self.first[1]) / (done - self.first[0]) * (self.total - done)
        print(f"{self.what} {done}/{self.total}  {timedelta(seconds=round(left))} left", file=sys.stderr, flush=True)
