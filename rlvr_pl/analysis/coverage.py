"""Paired pass@k differences of two policies' samples, and the overlap of what they never solve.

The numbers of samples may differ; differences are paired by question and resampled over questions.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from rlvr_pl.analysis.command import Result, Table, add_output_arguments
from rlvr_pl.analysis.items import Samples, add_resample_arguments, check_headers, load_samples, match_uids
from rlvr_pl.analysis.passk import add_k_argument, chosen_k
from rlvr_pl.core.passk import compare_coverage

EPILOG = """\
JSON keys: questions, deltas: [{k, pass_a, pass_b (percent), delta_pp, ci_low, ci_high}] (B minus A),
never_solved_a, never_solved_b, never_solved_both (questions), a_on_never_b and b_on_never_a: {questions,
solved (questions with a correct sample), success (share of the samples that are correct; null without
questions)}, mean_length_a, mean_length_b.

example: rlvr-pl coverage base_samples.jsonl start_samples.jsonl --k 1,4,16,64"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="sample records of A")
    parser.add_argument("b", metavar="B", help="sample records of B, on the same questions")
    add_k_argument(parser)
    add_resample_arguments(parser, "questions")
    parser.add_argument("--allow-mixed", action="store_true", help="accept samples of different engines or batch sizes")
    parser.epilog = EPILOG
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    a, b = load_samples(args.a), load_samples(args.b)
    match_uids(a.name, a.counts, b.name, b.counts)
    check_headers([(a.name, a.header), (b.name, b.header)], args.allow_mixed)
    counts_a, counts_b = list(a.counts.values()), [b.counts[uid] for uid in a.counts]
    deltas = [
        asdict(compare_coverage(counts_a, counts_b, k, resamples=args.resamples, seed=args.seed))
        for k in chosen_k(args.k, [a, b])
    ]
    never_a, never_b = _never(a), _never(b)
    data = {
        "questions": len(counts_a),
        "deltas": deltas,
        "never_solved_a": len(never_a),
        "never_solved_b": len(never_b),
        "never_solved_both": len(never_a & never_b),
        "a_on_never_b": _success(a, never_b),
        "b_on_never_a": _success(b, never_a),
        "mean_length_a": a.mean_length,
        "mean_length_b": b.mean_length,
    }
    columns = ("k", "pass_a", "pass_b", "delta_pp", "ci_low", "ci_high")
    table = Table(f"B = {b.name} against A = {a.name}", columns, [[d[c] for c in columns] for d in deltas])
    notes = [
        f"Never solved: A {len(never_a)}, B {len(never_b)}, both {len(never_a & never_b)} of {len(counts_a)}.",
        f"B solves {data['b_on_never_a']['solved']} of A's; A solves {data['a_on_never_b']['solved']} of B's.",
    ]
    return Result(data, [table], notes)


def _never(samples: Samples) -> set[str]:
    return {uid for uid, (_, c) in samples.counts.items() if c == 0}


def _success(samples: Samples, uids: set[str]) -> dict[str, Any]:
    picked = [samples.counts[uid] for uid in uids]
    return {
        "questions": len(picked),
        "solved": sum(c > 0 for _, c in picked),
        "success": sum(c for _, c in picked) / sum(n for n, _ in picked) if picked else None,
    }
