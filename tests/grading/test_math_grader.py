"""The math grader as a whole, and `grade`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("math_verify")

from rlvr_pl.errors import UserError
from rlvr_pl.grading import ExactGrader, GradeRequest, MathGrader, grade, named_grader
from rlvr_pl.types import Grade, GradeStatus, Question

CORRECT, WRONG, NO_ANSWER, TIMEOUT = (
    GradeStatus.CORRECT,
    GradeStatus.WRONG,
    GradeStatus.NO_ANSWER,
    GradeStatus.TIMEOUT,
)
TOWER = r"\boxed{9^{9^{9^{9}}}}"


def request(response: str, gold: str) -> GradeRequest:
    return GradeRequest(response, Question("q", "?", gold))


def statuses(grader: MathGrader | ExactGrader, *pairs: tuple[str, str], require_box: bool = True) -> list[GradeStatus]:
    return [g.status for g in grader.grade([request(*p) for p in pairs], require_box=require_box)]


@pytest.fixture(scope="module")
def grader() -> Iterator[MathGrader]:
    grader = MathGrader(cpu_limit=2.0, workers=2)
    yield grader
    grader.close()


def test_statuses_and_rewards(grader: MathGrader) -> None:
    grades = grader.grade(
        [
            request(r"\boxed{x+1}", "1+x"),
            request(r"\boxed{x+1}", "1-x"),
            request("x+1", "1+x"),
            request(r"\boxed{}", "1+x"),
        ],
        require_box=True,
    )
    assert [(g.status, g.reward, g.answer, g.boxed) for g in grades] == [
        (CORRECT, 1.0, "x+1", True),
        (WRONG, 0.0, "x+1", True),
        (NO_ANSWER, 0.0, None, False),
        (NO_ANSWER, 0.0, None, True),
    ]


def test_the_box_is_needed_in_training_only(grader: MathGrader) -> None:
    assert statuses(grader, ("so 42", "42"), require_box=True) == [NO_ANSWER]
    assert statuses(grader, ("so 42", "42"), require_box=False) == [CORRECT]


def test_several_boxes_count_by_the_last_or_together(grader: MathGrader) -> None:
    both = r"$\boxed{1+\sqrt{2}}$ and $\boxed{1-\sqrt{2}}$"
    assert statuses(grader, (both, r"1\pm\sqrt{2}"), (both, r"1-\sqrt2"), (both, r"1+\sqrt2")) == [
        CORRECT,
        CORRECT,
        WRONG,
    ]


def test_an_empty_gold_is_never_met(grader: MathGrader) -> None:
    assert statuses(grader, (r"\boxed{0}", ""), ("", ""), (r"\boxed{}", ""), require_box=False) == [
        WRONG,
        NO_ANSWER,
        NO_ANSWER,
    ]


def test_plain_numbers_start_no_process() -> None:
    grader = MathGrader()

    def refuse(jobs: object) -> None:
        raise AssertionError("a worker was asked")

    grader._pool.map = refuse  # type: ignore[method-assign]
    assert statuses(grader, (r"\boxed{7}", "7"), (r"\boxed{8}", "7"), (r"\boxed{1/2}", "0.5"), (TOWER[:-2], "7")) == [
        CORRECT,
        WRONG,
        CORRECT,
        NO_ANSWER,
    ]


def test_a_verdict_is_remembered_and_the_memory_bounded(grader: MathGrader) -> None:
    small = MathGrader(cache_size=2, workers=1)
    asked: list[object] = []
    whole = small._pool.map
    small._pool.map = lambda jobs: (asked.extend(jobs), whole(jobs))[1]  # type: ignore[method-assign]
    for answer in ("x+1", "x+2", "x+1", "x+3", "x+2"):
        statuses(small, (rf"\boxed{{{answer}}}", "1+x"))
    assert [job[0][0] for job in asked] == ["x+1", "x+2", "x+3", "x+2"]  # x+2 was the oldest when x+3 came
    small.close()


def test_grader_hang(grader: MathGrader) -> None:
    """Hostile answers end as timeouts, honest ones in their batch keep their verdicts, the pool lives on."""
    hostile = [(rf"\boxed{{9^{{9^{{9^{{{k}}}}}}}}}", "42") for k in (7, 8, 9)]
    mixed = [hostile[0], (r"\boxed{\sqrt{4}}", "2"), *hostile[1:], (r"\boxed{x}", "y"), (TOWER, TOWER[7:-1])]
    found = statuses(grader, *mixed)
    assert found == [TIMEOUT, CORRECT, TIMEOUT, TIMEOUT, WRONG, CORRECT]
    assert all(g.seconds <= 2 * 2.0 for g in grader.grade([request(*h) for h in hostile], require_box=True))
    assert statuses(grader, (r"\boxed{\sqrt{9}}", "3")) == [CORRECT]


def test_grader_thread(grader: MathGrader) -> None:
    """The same verdicts, and the same limits, from a thread and from an event loop's thread."""
    pairs = [(r"\boxed{42}", "42"), (r"\boxed{\frac{84}{x}x}", "84"), (r"\boxed{9^{9^{9^{5}}}}", "42")]
    here = statuses(grader, *pairs)
    found: list[list[GradeStatus]] = []
    thread = threading.Thread(target=lambda: found.append(statuses(grader, *pairs)))
    thread.start()
    thread.join()
    found.append(asyncio.run(asyncio.to_thread(statuses, grader, *pairs)))
    assert found == [here, here] == [[CORRECT, CORRECT, TIMEOUT]] * 2


def test_grader_unboxed_equation(grader: MathGrader) -> None:
    assert statuses(grader, ("3x + 4y + 14=0", "3x-y+13=0"), require_box=False) == [WRONG]
    assert statuses(grader, ("$3x + 4y + 14=0$", "3x-y+13=0"), require_box=False) == [WRONG]


@pytest.mark.parametrize("require_box", [True, False])
def test_code_is_never_run(grader: MathGrader, tmp_path: Path, require_box: bool) -> None:
    made = tmp_path / "made"
    code = f"__import__('os').system('touch {made}')"
    texts = [code, f"(lambda: {code})()", f"open('{made}','w')", "().__class__.__base__.__subclasses__()"]
    pairs = [(rf"\boxed{{{t}}}", "42") for t in texts] + [(t, "42") for t in texts] + [(r"\boxed{42}", texts[0])]
    assert CORRECT not in statuses(grader, *pairs, require_box=require_box)
    assert not made.exists()


def test_importing_the_graders_is_light() -> None:
    code = "import sys, rlvr_pl.grading; print([m for m in ('torch', 'sympy', 'math_verify') if m in sys.modules])"
    root = Path(__file__).resolve().parents[2]
    shown = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert shown.stdout.strip() == "[]"


def test_grade_by_name() -> None:
    assert grade(r"\boxed{0.5}", r"\frac12") == Grade(CORRECT, 1.0, "0.5", True, 0.0)
    assert grade(r"\boxed{0.5}", r"\frac12", grader="exact").status is WRONG
    assert grade("0.5", "0.5", require_box=True).status is NO_ANSWER
    assert named_grader("math") is named_grader("math")
    with pytest.raises(UserError, match="no grader 'maths': choose exact, math, supplied"):
        grade("1", "1", grader="maths")


def test_exact_grader_compares_text() -> None:
    pairs = [(r"\boxed{a  b}", " a b "), (r"\boxed{b a}", "a b"), ("a b", "a b")]
    assert statuses(ExactGrader(), *pairs) == [CORRECT, WRONG, NO_ANSWER]
    assert statuses(ExactGrader(), ("the 7", "7"), require_box=False) == [CORRECT]
