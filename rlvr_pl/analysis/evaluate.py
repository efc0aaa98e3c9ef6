"""Answer questions greedily with a policy, grade the answers, and write item records.

The batch size is part of the result: the same weights at another batch size flip near-ties (8% of items in the paper,
section 4.2). Keep it fixed in every comparison; --noise-floor measures what it does to your panel.

JSON keys: n, correct, accuracy, boxed, truncated, mean_length, engine, batch_size, checkpoint_sha256, seconds; with
--noise-floor also noise_floor: {batch_sizes, correct, discordant, discordance_rate}.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from rlvr_pl.analysis.command import Result, Table, add_output_arguments, check_file, counting
from rlvr_pl.analysis.explore import add_sampler_argument, sampler_of
from rlvr_pl.analysis.splits import COLUMNS_FLAG, columns_of
from rlvr_pl.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("policy", help="embedded:base, embedded:start, a model folder or a hub name")
    parser.add_argument("--questions", default="embedded:val350", help="question set or file (default: %(default)s)")
    parser.add_argument("--columns", nargs="+", default=[], metavar="FIELD=NAME", help="our field = the file's column")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write item records (JSON lines) to FILE")
    parser.add_argument("--overwrite", action="store_true", help="allow --out to replace an existing file")
    parser.add_argument("--batch-size", type=int, default=64, help="questions decoded together (default: %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, help="cap on an answer (default: the policy's own)")
    add_sampler_argument(parser)
    parser.add_argument("--grader", default="math", choices=["math", "exact", "supplied"])
    parser.add_argument("--limit", type=int, help="only the first LIMIT questions")
    parser.add_argument("--untie-embeddings", action="store_true", help="load the head as its own parameter")
    parser.add_argument("--noise-floor", action="store_true", help="repeat at half the batch size, count the flips")
    add_output_arguments(parser, table=False)


def run(args: argparse.Namespace) -> Result:
    _check(args)
    from rlvr_pl.data.pools import load_questions
    from rlvr_pl.evaluation import evaluate_questions, header, summarize, write_items
    from rlvr_pl.grading import named_grader
    from rlvr_pl.policy import best_device, load_policy
    from rlvr_pl.sampling.base import Decoding

    sampler, grader = sampler_of(args), named_grader(args.grader)
    questions = load_questions(args.questions, columns=columns_of(args.columns), naming=COLUMNS_FLAG)[: args.limit]
    policy = load_policy(args.policy, untie_embeddings=args.untie_embeddings, device=best_device())
    decoding = Decoding(0.0, 1.0, args.max_new_tokens or policy.default_max_new_tokens)
    begin = time.perf_counter()

    def evaluate(batch_size: int) -> list[dict[str, Any]]:
        with counting(f"batch {batch_size}", len(questions)) as tick:
            return evaluate_questions(
                policy, sampler, grader, questions, decoding, batch_size=batch_size, progress=tick
            )

    try:
        items = evaluate(args.batch_size)
        again = evaluate(max(1, args.batch_size // 2)) if args.noise_floor else None
    finally:
        grader.close()
        sampler.close()
    head = header(
        sampler=sampler,
        grader=grader,
        batch_size=args.batch_size,
        decoding=decoding,
        checkpoint=policy.name,
        sha256=policy.sha256,
    )
    data = {
        **summarize(items),
        "engine": head["engine"],
        "batch_size": args.batch_size,
        "checkpoint_sha256": policy.sha256,
        "seconds": time.perf_counter() - begin,
    }
    notes = []
    if again is not None:
        data["noise_floor"] = floor = _noise_floor(args.batch_size, items, again)
        notes.append(
            f"Noise floor: batch {floor['batch_sizes'][0]} and {floor['batch_sizes'][1]} disagree on "
            f"{floor['discordant']} of {len(items)} items ({100 * floor['discordance_rate']:.1f}%) at equal weights."
        )
    if args.out is not None:
        write_items(args.out, head, items)
        notes.append(f"Items: {args.out}")
    return Result(data, [_table(policy.name, data)], notes)


def _check(args: argparse.Namespace) -> None:
    if args.batch_size < 1:
        raise UserError(f"--batch-size {args.batch_size}: must be at least 1")
    for name in ("limit", "max_new_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if args.out is not None:
        check_file(args.out, args.overwrite)


def _noise_floor(batch_size: int, items: list[dict[str, Any]], again: list[dict[str, Any]]) -> dict[str, Any]:
    discordant = sum(a["correct"] != b["correct"] for a, b in zip(items, again))
    return {
        "batch_sizes": [batch_size, max(1, batch_size // 2)],
        "correct": [sum(i["correct"] for i in items), sum(i["correct"] for i in again)],
        "discordant": discordant,
        "discordance_rate": discordant / len(items),
    }


def _table(name: str, data: dict[str, Any]) -> Table:
    row = [
        name,
        f"{data['correct']}/{data['n']}",
        *(f"{100 * data[k]:.1f}%" for k in ("accuracy", "boxed", "truncated")),
        f"{data['mean_length']:.1f}",
    ]
    return Table("Greedy evaluation", ["policy", "correct", "accuracy", "boxed", "truncated", "mean tokens"], [row])
