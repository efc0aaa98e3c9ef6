"""The public cases: answers with known verdicts, and answers made to break a grader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("math_verify")

from rlvr_pl.grading import GradeRequest, MathGrader
from rlvr_pl.types import Grade, GradeStatus, Question

KNOWN_DIFFERENCES = {
    "g0077": "The last box holds an intermediate result and a sentence after it the answer; the last box counts.",
    "os8": "Gold and answer are the same text; equal text is equal (nothing is run).",
}
POLICY_DIFFERENCES = {
    "g0006": "0.33 is not 1/3: rounded decimals are other numbers, in a matrix too.",
    "g0123": "A comma in a gold separates a list (0,111 is 0 and 111); it is no decimal comma.",
    "g0206": "Boxes with words between them other than and, or and commas are several answers; the last one counts.",
    "g0234": "A list without brackets is a set.",
    "g0241": "A list without brackets is a set.",
    "g0279": "3.33333333 is not 10/3: a decimal equals a fraction only with 10 to 17 significant digits.",
    "g0285": "What is thought counts as said: the last box is graded wherever it stands.",
    "g0722": "(1,000) in round brackets is a pair, not a thousand.",
    "g0726": "Units are dropped, so 15 m is 15 cm.",
    "g0806": "Without a closed box, evaluation grades the last number (training gives no reward).",
    "g0831": "Without a closed box, evaluation grades the last number (training gives no reward).",
}
COSTLY = {"cmp", "frac100", "frac1000", "int2", "lim", "mat100", "minus", "prod", "prodtower", "sqrt500", "towerdiff"}
LIMIT = 2.0  # CPU seconds an answer
UNDECIDED = (GradeStatus.TIMEOUT, GradeStatus.ERROR)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def graded(pairs: list[tuple[str, str]], require_box: bool) -> list[Grade]:
    grader = MathGrader(cpu_limit=LIMIT, workers=2)
    try:
        requests = [GradeRequest(response, Question("", "", gold)) for response, gold in pairs]
        return grader.grade(requests, require_box=require_box)
    finally:
        grader.close()


def test_known_verdicts(shared: Path) -> None:
    rows = read(shared / "cases" / "grader_cases.jsonl")
    grades = graded([(r["response"], r["gold"]) for r in rows], require_box=False)
    assert not [r["id"] for r, g in zip(rows, grades) if g.status in UNDECIDED]
    differs = [r for r, g in zip(rows, grades) if (g.status is GradeStatus.CORRECT) != r["expected"]]
    assert {r["id"] for r in differs if "policy" not in r} == KNOWN_DIFFERENCES.keys() - {"os8"}
    assert {r["id"] for r in differs if "policy" in r} == POLICY_DIFFERENCES.keys()
    assert len(POLICY_DIFFERENCES) <= 0.2 * sum("policy" in r for r in rows)

    # where algebra decided: answers as golds and golds as answers, both in boxes, may not change the verdict
    answers = [(g.answer, r["gold"]) for r, g in zip(rows, grades) if g.answer and g.seconds]
    there = graded([(rf"\boxed{{{answer}}}", gold) for answer, gold in answers], require_box=True)
    back = graded([(rf"\boxed{{{gold}}}", answer) for answer, gold in answers], require_box=True)
    assert [pair for pair, x, y in zip(answers, there, back) if x.status != y.status] == []


@pytest.mark.parametrize("costly", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_hostile_answers(shared: Path, costly: bool) -> None:
    """The costly ones use up their limit, and each then takes the start of a fresh worker."""
    canary = Path("/tmp/rlvr-canary")
    before = sorted(canary.iterdir()) if canary.exists() else None
    rows = read(shared / "cases" / "hostile_answers.jsonl")
    rows = [r for r in rows if (r["id"] in COSTLY) is costly]
    honest = [(r"\boxed{\frac{1}{2}x}", r"\frac{x}{2}"), (r"\boxed{x+2}", "x+3")]
    pairs = [(r["response"], r["gold"]) for r in rows]
    middle = len(pairs) // 2
    grades = graded([honest[0], *pairs[:middle], honest[1], *pairs[middle:]], require_box=True)
    assert grades.pop(middle + 1).status is GradeStatus.WRONG
    assert grades.pop(0).status is GradeStatus.CORRECT

    assert max(g.seconds for g in grades) <= LIMIT
    found = {r["id"]: g.status for r, g in zip(rows, grades)}
    differs = {r["id"] for r in rows if (found[r["id"]] is GradeStatus.CORRECT) != r["expected"]}
    assert differs == KNOWN_DIFFERENCES.keys() & found.keys()
    assert costly or not {id for id, status in found.items() if status in UNDECIDED}
    assert (sorted(canary.iterdir()) if canary.exists() else None) == before
