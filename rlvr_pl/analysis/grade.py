"""grade responses against golds"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from rlvr_pl.analysis.command import Result, Table, add_output_arguments, progress_bar
from rlvr_pl.grading import GradeRequest, named_grader
from rlvr_pl.jsonl import read_jsonl
from rlvr_pl.types import Grade, Question

_CHUNK = 64  # rows graded between two steps of the progress bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="JSON Lines: {id, gold, response}")
    parser.add_argument(
        "--grader",
        default="math",
        metavar="NAME",
        help="math (default), exact, supplied, or a reward function package.module:function",
    )
    parser.add_argument(
        "--require-box", action="store_true", help="grade as in training: without a closed box there is no answer"
    )
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    rows = read_jsonl(
        args.file,
        required={"id": (str, int), "gold": str, "response": str},
        unique=("id",),
        lone_surrogates=True,
    )
    grades = _grade([(row["response"], row["gold"]) for row in rows], args.grader, args.require_box)
    data = [{"id": row["id"], **_record(grade)} for row, grade in zip(rows, grades)]
    counts = Counter(str(row["status"]) for row in data)
    table = Table(
        "grades",
        ["id", "status", "reward", "answer", "seconds"],
        [[row["id"], row["status"], row["reward"], _short(row["answer"]), row["seconds"]] for row in data],
    )
    notes = [f"{len(data)} answers: " + ", ".join(f"{n} {status}" for status, n in counts.most_common())]
    return Result({"rows": data, "counts": dict(counts)}, [table], notes)


def _grade(pairs: list[tuple[str, str]], name: str, require_box: bool) -> list[Grade]:
    grader = named_grader(name)
    requests = [GradeRequest(response, Question("", "", gold)) for response, gold in pairs]
    grades: list[Grade] = []
    try:
        with progress_bar() as progress:
            for start in progress.track(range(0, len(requests), _CHUNK), description="grading"):
                grades += grader.grade(requests[start : start + _CHUNK], require_box=require_box)
    finally:
        grader.close()
    return grades


def _record(grade: Grade) -> dict[str, object]:
    fields = asdict(grade)
    fields.pop("parts")  # of several graders, and here is one
    return {**fields, "status": grade.status.value}


def _short(answer: object) -> str:
    """An answer for a table cell: in one line, cut, and printable whatever it holds."""
    text = " ".join(str(answer if answer is not None else "").split())
    return (text if len(text) <= 40 else text[:37] + "...").encode("ascii", "backslashreplace").decode()
