"""The supplied recipe's grader, against the package itself."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlvr_pl.errors import UserError
from rlvr_pl.grading import GradeRequest, SuppliedGrader
from rlvr_pl.types import GradeStatus, Question

CASES = [
    (r"so \boxed{1/2}", r"\frac{1}{2}"),
    (r"so \boxed{0.5}", r"\frac{1}{2}"),
    (r"so \boxed{\dfrac{3}{6}}", r"\frac{1}{2}"),
    (r"\boxed{(x+1)^2}", "x^2+2x+1"),
    (r"\boxed{(1, 2)}", "(1,2)"),
    (r"\boxed{(2, 1)}", "(1,2)"),
    (r"\boxed{max(3, 2)}", "3"),
    (r"\boxed{abs(-3)}", "3"),
    (r"\boxed{2 \sqrt{3}}", r"\sqrt{12}"),
    (r"\boxed{sin(x)**2 + cos(x)**2}", "1"),
    (r"\boxed{204_5}", "2045"),  # Python reads an underscore between digits as nothing: the recipe's quirk is kept
    (r"\boxed{42} or \boxed{43", "42"),
    (r"\boxed{}", "42"),
    ("the answer is 42", "42"),
    ("no number", "no number"),
    (r"\boxed{1,234}", "1234"),
    (r"\boxed{\text{Monday}}", "monday"),
    (r"\boxed{1/0}", "1"),
    (r"\boxed{\frac}", r"\frac"),
]


@pytest.fixture(scope="module")
def grader() -> Iterator[SuppliedGrader]:
    pytest.importorskip("reasoning_from_scratch")
    grader = SuppliedGrader(cpu_limit=2.0)
    yield grader
    grader.close()


def requests(cases: list[tuple[str, str]]) -> list[GradeRequest]:
    return [GradeRequest(response, Question("q", "?", gold)) for response, gold in cases]


@pytest.mark.parametrize("require_box", [True, False])
def test_verdicts_and_answers_are_those_of_the_package(grader: SuppliedGrader, require_box: bool) -> None:
    from reasoning_from_scratch.ch03 import extract_final_candidate, grade_answer
    from reasoning_from_scratch.ch06 import reward_rlvr

    fallback = None if require_box else "number_then_full"
    for (response, gold), grade in zip(CASES, grader.grade(requests(CASES), require_box=require_box)):
        answer = extract_final_candidate(response, fallback=fallback)
        correct = bool(answer) and grade_answer(answer, gold)
        assert (grade.answer, grade.reward) == (answer or None, float(correct)), response
        assert (grade.status is GradeStatus.NO_ANSWER) is (not answer)
        if require_box:
            assert grade.reward == reward_rlvr(response, gold)


def test_code_in_an_answer_is_not_run(grader: SuppliedGrader, tmp_path: Path) -> None:
    made = tmp_path / "made"
    codes = [
        f"__import__('os').system('touch {made}')",
        "().__class__.__base__.__subclasses__()",
        "exec(chr(112)+chr(97)+chr(115)+chr(115))",
        "print(x)",
        "sympify(x)",
        "(lambda: 42)()",
        "x.args",
    ]
    grades = grader.grade(requests([(rf"\boxed{{{code}}}", "42") for code in codes]), require_box=True)
    assert {g.status for g in grades} == {GradeStatus.WRONG}
    assert not made.exists()


def test_an_endless_answer_is_a_timeout(grader: SuppliedGrader) -> None:
    grades = grader.grade(requests([(r"\boxed{9**9**9**9}", "42"), (r"\boxed{42}", "42")]), require_box=True)
    assert [g.status for g in grades] == [GradeStatus.TIMEOUT, GradeStatus.CORRECT]


def test_a_missing_package_is_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "rlvr-pl\[supplied\]"'):
        SuppliedGrader()
