"""Answers of a user's own grader class, checked wherever grades are asked for."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rlvr_pl.cli import main
from rlvr_pl.errors import UserError
from rlvr_pl.grading import Grader, GradeRequest, WeightedSum
from rlvr_pl.grading.base import ask
from rlvr_pl.types import Grade, GradeStatus, Question

GOOD = Grade(GradeStatus.CORRECT, 1.0)
ASKED = [GradeRequest(str(i), Question(f"q{i}", "?", "1")) for i in range(3)]
WRONG: list[tuple[Any, str]] = [
    ([GOOD, GOOD], "expected 3 grades, one per request, got 2"),
    ([GOOD] * 4, "expected 3 grades, one per request, got 4"),
    ([], "expected 3 grades, one per request, got 0"),
    (None, "expected a list of 3 grades, got NoneType"),
    ({}, "expected a list of 3 grades, got dict"),
    ([GOOD, np.zeros((2, 2)), GOOD], "expected a Grade for row 1, got array([[0., 0.], [0., 0.]])"),
    ([GOOD, 1.0, GOOD], "expected a Grade for row 1, got 1.0"),
    ([GOOD, GOOD, Grade("correct", 1.0)], "expected a GradeStatus as the status of row 2, got 'correct'"),  # type: ignore[arg-type]
    ([Grade(GradeStatus.CORRECT, None), GOOD, GOOD], "NaN as the reward of row 0, got None"),  # type: ignore[arg-type]
    ([GOOD, Grade(GradeStatus.CORRECT, "1"), GOOD], "NaN as the reward of row 1, got '1'"),  # type: ignore[arg-type]
    ([GOOD, Grade(GradeStatus.CORRECT, math.inf), GOOD], "NaN as the reward of row 1, got inf"),
]


class Mine(Grader):
    """Returns what it is told to."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def grade(self, requests: Any, *, require_box: bool) -> Any:
        return self.answer


@pytest.mark.parametrize(("answer", "message"), WRONG)
@pytest.mark.parametrize("wrap", [lambda mine: mine, lambda mine: WeightedSum([Mine([GOOD] * 3), mine])])
def test_an_answer_that_is_no_list_of_grades_is_refused_by_name(
    wrap: Callable[[Grader], Grader], answer: Any, message: str
) -> None:
    with pytest.raises(UserError) as refused:
        ask(wrap(Mine(answer)), ASKED, require_box=True)
    assert str(refused.value).startswith("grader Mine: ") and message in str(refused.value)


def test_numbers_of_any_kind_are_rewards_and_nan_is_not_scorable() -> None:
    rewards: list[Any] = [1, np.float32(0.5), math.nan]
    grades = ask(Mine(tuple(Grade(GradeStatus.WRONG, r) for r in rewards)), ASKED, require_box=True)
    assert [type(g.reward) for g in grades] == [float] * 3
    assert [g.reward for g in grades[:2]] == [1.0, 0.5] and math.isnan(grades[2].reward)


@pytest.mark.parametrize("when", ["require_box", "not require_box"])
def test_a_run_and_its_validation_end_with_one_line(tmp_path, monkeypatch, capsys, when):
    """The training rule asks for a box and the evaluation rule does not; one grade is missing in either alone."""
    monkeypatch.chdir(tmp_path)
    count = 4 if when == "require_box" else 64
    (tmp_path / f"short_by_one_of_{count}.py").write_text(
        textwrap.dedent(f"""
        from rlvr_pl import Grade, GradeStatus
        from rlvr_pl.grading import Grader

        class Short(Grader):
            def grade(self, requests, *, require_box):
                n = len(requests) - (1 if {when} else 0)
                return [Grade(GradeStatus.WRONG, float(i % 2)) for i in range(n)]
        """)
    )
    words = ["--policy.name=embedded:base", "--data.updates=1", "--data.validation=embedded:drift"]
    words += ["--model.group_size=4", "--model.max_new_tokens=12", f"--grader=short_by_one_of_{count}.Short", "--run=r"]
    assert main(["fit", *words]) == 2
    told = capsys.readouterr().err
    assert told.strip().splitlines()[-1] == (
        f"rlvr-pl: grader Short: expected {count} grades, one per request, got {count - 1}"
    )
    assert "Traceback" not in told
    assert json.loads((tmp_path / "r" / "run.json").read_text())["state"] == "stopped"
