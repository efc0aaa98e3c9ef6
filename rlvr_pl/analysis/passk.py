"""Unbiased pass@k of sample records, with its interval over questions and the questions never solved."""

from __future__ import annotations

import argparse

from rlvr_pl.analysis.command import Result, Table, add_output_arguments
from rlvr_pl.analysis.items import Samples, add_resample_arguments, load_samples
from rlvr_pl.core.passk import mean_pass_at_k
from rlvr_pl.errors import UserError

EPILOG = """\
JSON keys: questions, samples, min_samples, max_samples (a question), pass_at_k {k: percent}, ci {k: [low,
high]}, never_solved (questions), never_solved_uids, mean_length (tokens; null when the records have no
length).

example: rlvr-pl passk samples.jsonl --k 1,4,16,64"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "samples", metavar="SAMPLES", help="sample records: {uid, sample, correct, ...}, several a question"
    )
    add_k_argument(parser)
    add_resample_arguments(parser, "questions")
    parser.epilog = EPILOG
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    samples = load_samples(args.samples)
    ks = chosen_k(args.k, [samples])
    counts = list(samples.counts.values())
    estimates = {k: mean_pass_at_k(counts, k, resamples=args.resamples, seed=args.seed) for k in ks}
    never = [uid for uid, (_, c) in samples.counts.items() if c == 0]
    sizes = [n for n, _ in counts]
    data = {
        "questions": len(counts),
        "samples": sum(sizes),
        "min_samples": min(sizes),
        "max_samples": max(sizes),
        "pass_at_k": {str(k): value for k, (value, _, _) in estimates.items()},
        "ci": {str(k): [low, high] for k, (_, low, high) in estimates.items()},
        "never_solved": len(never),
        "never_solved_uids": never,
        "mean_length": samples.mean_length,
    }
    rows = [[k, value, low, high] for k, (value, low, high) in estimates.items()]
    table = Table(f"pass@k of {samples.name}", ("k", "percent", "ci_low", "ci_high"), rows)
    note = f"{len(never)} of {len(counts)} questions never solved in {min(sizes)} to {max(sizes)} samples each."
    return Result(data, [table], [note])


def add_k_argument(parser: argparse.ArgumentParser) -> None:
    """``--k 1,4,16``."""
    parser.add_argument(
        "--k", type=_whole_numbers, metavar="K,K", help="values of k (default: 1, 4, 16, ... as samples allow)"
    )


def chosen_k(asked: list[int] | None, files: list[Samples]) -> list[int]:
    """The values of k asked for, or powers of 4; UserError when a question has fewer than k samples."""
    fewest, name, uid = min((n, s.name, uid) for s in files for uid, (n, _) in s.counts.items())
    if asked is None:
        return [4**i for i in range(20) if 4**i <= fewest]
    if max(asked) > fewest:
        raise UserError(f"{name}: --k {max(asked)} needs that many samples of every question; {uid!r} has {fewest}")
    return asked


def _whole_numbers(text: str) -> list[int]:
    try:
        values = sorted({int(part) for part in text.split(",")})
    except ValueError:
        values = [0]
    if values[0] < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: whole numbers of at least 1 are needed, such as 1,4,16")
    return values
