"""Sample questions k times each, grade the samples, and record them question by question.

Questions are taken in the order in which `fit` would ask them with the same pool, --order and --order-seed, so that
--start 0 --n-questions 640 is what 160 updates of 4 questions see. Shards (other --start or --seed) go to files of
their own. An interrupted search goes on where it stopped, to the bytes of one that was never interrupted; a finished
one is only reported. What it cost is in FILE.cost.json.

JSON keys: questions, solved (by at least one sample), samples, correct, truncated, sampled_tokens, added (records that
this call wrote), cost {...}, by_subject and by_level: [{value, questions, solved, rate}], out.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from rlvr_pl.analysis.command import Result, Table, add_output_arguments
from rlvr_pl.analysis.explore import add_explorer_arguments, check_counts, open_explorer, progress
from rlvr_pl.analysis.splits import COLUMNS_FLAG, columns_of
from rlvr_pl.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlvr_pl.expert_iteration.records import Filled
    from rlvr_pl.types import Question


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_explorer_arguments(parser)
    add_question_arguments(parser)
    add_output_arguments(parser, table=False)


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    """Which questions to sample, and how often."""
    parser.add_argument("--questions", default="embedded:train", help="question set or file (default: %(default)s)")
    parser.add_argument("--columns", nargs="+", default=[], metavar="FIELD=NAME", help="our field = the file's column")
    parser.add_argument("--drop-empty-gold", action="store_true", help="leave out questions without an answer")
    parser.add_argument("--order", metavar="FILE", help="JSON list of uids that fixes the order")
    parser.add_argument("--order-seed", type=int, default=0, help="of the shuffle, without --order (default: 0)")
    parser.add_argument("--start", type=int, default=0, help="place in the order to begin at (default: 0)")
    parser.add_argument("--n-questions", type=int, metavar="N", help="how many (default: all that are left)")
    parser.add_argument("--k", type=int, default=8, help="samples of each question (default: %(default)s)")


def run(args: argparse.Namespace) -> Result:
    check_counts(args, "k", "n_questions")
    questions = chosen_questions(args, args.start, args.n_questions)
    with open_explorer(args, args.checkpoint) as explorer:
        from rlvr_pl.expert_iteration.search import search

        with progress("samples", len(questions) * args.k) as tick:
            found = search(explorer, questions, args.k, args.out, tick)
    data = {**summarize(found), "out": str(args.out)}
    return Result(data, tables(data), [f"Records: {args.out}"])


def chosen_questions(args: argparse.Namespace, start: int, count: int | None) -> Sequence[Question]:
    """`count` questions from place `start` of the order."""
    from rlvr_pl.data.pools import load_questions
    from rlvr_pl.data.schedule import QuestionSchedule

    columns = columns_of(args.columns)
    questions = load_questions(
        args.questions, columns=columns, drop_empty_gold=args.drop_empty_gold, naming=COLUMNS_FLAG
    )
    pool = QuestionSchedule(questions, 1, order=args.order, seed=args.order_seed)
    size = len(pool.questions)
    end = size if count is None else start + count
    if not 0 <= start < end <= size:
        raise UserError(
            f"--start {start} --n-questions {end - start}: {args.order or args.questions} has {size} questions"
        )
    return [pool.batch(place + 1)[0] for place in range(start, end)]


def summarize(found: Filled) -> dict[str, Any]:
    """What a search found, as a JSON object."""
    from rlvr_pl.expert_iteration.search import solved, yields

    rows = found.rows

    def table(column: str) -> list[dict[str, Any]]:
        return [dict(zip(("value", "questions", "solved", "rate"), row)) for row in yields(rows, column)]

    return {
        "questions": len({row["uid"] for row in rows}),
        "solved": len(solved(rows)),
        "samples": len(rows),
        "correct": sum(row["correct"] for row in rows),
        "truncated": sum(row["stop_reason"] == "length" for row in rows),
        "sampled_tokens": found.cost.sampled_tokens,
        "added": found.added,
        "cost": found.cost.as_dict(),
        "by_subject": table("subject"),
        "by_level": table("level"),
    }


def tables(data: dict[str, Any]) -> list[Table]:
    """Totals, then yields by subject and level where these are known."""
    keys = ("questions", "solved", "samples", "correct", "truncated", "sampled_tokens")
    found = [Table("Search", keys, [[data[key] for key in keys]])]
    for name in ("subject", "level"):
        groups = data[f"by_{name}"]
        if [group["value"] for group in groups] != [None]:
            rows = [[g["value"], g["questions"], g["solved"], f"{100 * g['rate']:.1f}%"] for g in groups]
            found.append(Table(f"Yield by {name}", [name, "questions", "solved", "samples correct"], rows))
    return found
