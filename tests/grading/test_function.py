"""User reward functions, called as TRL calls them."""

from __future__ import annotations

import asyncio
import math
import pickle
import signal
from pathlib import Path

import numpy as np
import pytest

from rlvr_pl.errors import UserError
from rlvr_pl.evaluation import header
from rlvr_pl.grading import FunctionGrader, GradeRequest, MathGrader, WeightedSum
from rlvr_pl.sampling.base import Decoding
from rlvr_pl.sampling.torch import TorchSampler
from rlvr_pl.types import GradeStatus, Question

REWARDS = """
import asyncio

def by_length(completions, **kwargs):
    return [float(len(c)) for c in completions]

def only_what_it_names(completions, answer, source):
    return [float(a in c and s == "book") for c, a, s in zip(completions, answer, source)]

def all_arguments(**kwargs):
    all_arguments.seen = kwargs
    return [0] * len(kwargs["completions"])

async def slow(completions, **kwargs):
    await asyncio.sleep(0)
    return [1.0] * len(completions)

def zero_truncated(completions, truncated, **kwargs):
    return [0.0 if t else 1.0 for t in truncated]

def interrupts(completions, **kwargs):
    raise KeyboardInterrupt

def fails(completions, **kwargs):
    raise KeyError("no such column")

def constant(value):
    def reward(completions, **kwargs):
        return value
    return reward

none_among = constant([1, None, 0, 0.5])
nan_among = constant([1.0, 0.0, float("nan"), 0.0])
text_among = constant([1.0, "good", 0.0, 0.0])
one_for_all = constant([1.0])
seven = constant([1.0] * 7)
nine = constant([1.0] * 9)
scalar = constant(1.0)
mapping = constant({"reward": 1.0})
not_callable = 3
"""


@pytest.fixture(scope="module")
def rewards(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("user") / "rewards.py"
    path.write_text(REWARDS)
    return str(path)


def requests(n: int) -> list[GradeRequest]:
    questions = [Question(f"u{i}", f"problem {i}", str(i), "Algebra", 3, {"source": "book"}) for i in range(n)]
    return [GradeRequest(rf"text \boxed{{{i}}}", q) for i, q in enumerate(questions)]


def rewarded(path: str, n: int) -> list[float]:
    return [g.reward for g in FunctionGrader(path).grade(requests(n), require_box=True)]


def test_rewards_and_statuses(rewards: str) -> None:
    grades = FunctionGrader(f"{rewards}:by_length", correct_at=15.0).grade(
        [GradeRequest(r"a \boxed{42}", Question("u", "p", "42")), GradeRequest("abc", Question("u", "p", "42"))],
        require_box=True,
    )
    assert [(g.reward, g.status, g.answer, g.boxed) for g in grades] == [
        (12.0, GradeStatus.WRONG, "42", True),
        (3.0, GradeStatus.WRONG, None, False),
    ]
    assert FunctionGrader(f"{rewards}:by_length", correct_at=12.0).grade(requests(1), require_box=True)[0].status is (
        GradeStatus.CORRECT
    )


def test_every_argument_is_a_list_with_one_entry_a_completion(rewards: str) -> None:
    grader = FunctionGrader(f"{rewards}:all_arguments")
    asked = [
        GradeRequest("a", Question("u0", "p0", "1", columns={"source": "book"}), "prompt 0", (5, 6)),
        GradeRequest("b", Question("u1", "p1", "2", "Algebra", 2, {"year": 1999}), "prompt 1", (7,), True),
    ]
    grader.grade(asked, require_box=False)
    assert grader._function.seen == {  # type: ignore[attr-defined]
        "completions": ["a", "b"],
        "prompts": ["prompt 0", "prompt 1"],
        "completion_ids": [[5, 6], [7]],
        "truncated": [False, True],
        "uid": ["u0", "u1"],
        "problem": ["p0", "p1"],
        "answer": ["1", "2"],
        "subject": [None, "Algebra"],
        "level": [None, 2],
        "source": ["book", None],
        "year": [None, 1999],
    }


def test_without_kwargs_a_function_gets_what_it_names(rewards: str) -> None:
    assert rewarded(f"{rewards}:only_what_it_names", 3) == [1.0, 1.0, 1.0]


def test_async_functions_run_with_and_without_a_running_loop(rewards: str) -> None:
    assert rewarded(f"{rewards}:slow", 2) == [1.0, 1.0]

    async def inside() -> list[float]:
        return rewarded(f"{rewards}:slow", 2)

    assert asyncio.run(inside()) == [1.0, 1.0]


def test_arrays_are_lists(rewards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grader = FunctionGrader(f"{rewards}:by_length")
    monkeypatch.setattr(grader, "_function", lambda completions: np.array([0.25, 1.0]))
    assert [g.reward for g in grader.grade(requests(2), require_box=True)] == [0.25, 1.0]


def test_reward_none_nan(rewards: str) -> None:
    """None is not scorable (NaN, for the update to leave out); NaN is an error that names function and row."""
    grades = FunctionGrader(f"{rewards}:none_among").grade(requests(4), require_box=True)
    assert [g.reward for g in grades if not math.isnan(g.reward)] == [1.0, 0.0, 0.5]
    assert math.isnan(grades[1].reward)
    assert grades[1].status is GradeStatus.NO_ANSWER
    with pytest.raises(UserError, match=r"nan_among: expected a finite number or None for row 2, got nan"):
        rewarded(f"{rewards}:nan_among", 4)
    with pytest.raises(UserError, match=r"text_among: expected a finite number or None for row 1, got 'good'"):
        rewarded(f"{rewards}:text_among", 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_for_all", "expected 8 rewards, got 1"),
        ("seven", "expected 8 rewards, got 7"),
        ("nine", "expected 8 rewards, got 9"),
        ("scalar", "expected a list of 8 numbers, got float"),
        ("mapping", "expected a list of 8 numbers, got dict"),
        ("fails", "raised KeyError: 'no such column'"),
    ],
)
def test_reward_wrong_length(rewards: str, name: str, message: str) -> None:
    with pytest.raises(UserError, match=rf"rewards\.py:{name}: {message}"):
        rewarded(f"{rewards}:{name}", 8)


def test_verifier_zero_truncated(rewards: str) -> None:
    """Truncation is told row by row: one truncated completion of four loses its own reward only."""
    asked = [GradeRequest("x", Question("u", "p", "x"), truncated=i == 3) for i in range(4)]
    grades = FunctionGrader(f"{rewards}:zero_truncated").grade(asked, require_box=False)
    assert [g.reward for g in grades] == [1.0, 1.0, 1.0, 0.0]


def test_no_completions_ask_nothing(rewards: str) -> None:
    assert FunctionGrader(f"{rewards}:fails").grade([], require_box=True) == []


def test_import_paths(rewards: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(rewards).parent)
    assert rewarded("rewards:by_length", 1) == [float(len(r"text \boxed{0}"))]
    assert rewarded("rewards.by_length", 1) == [float(len(r"text \boxed{0}"))]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("reward", "write package.module:function or file.py:function"),
        ("no_such_package.rewards:f", "cannot import no_such_package.rewards"),
        ("/no/such/file.py:f", "there is no file /no/such/file.py"),
        ("math:no_such_function", "math has no function no_such_function"),
        ("math:pi", "math has no function pi"),
    ],
)
def test_a_bad_path_is_told_at_once(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        FunctionGrader(path)


def test_a_copy_loads_its_function_again(rewards: str) -> None:
    copy = pickle.loads(pickle.dumps(FunctionGrader(f"{rewards}:by_length", 2.0)))
    assert (copy.path, copy.correct_at) == (f"{rewards}:by_length", 2.0)
    assert len(copy.grade(requests(2), require_box=True)) == 2


def test_ctrl_c_in_a_function_is_no_mistake_of_it_while_python_handles_the_signal(rewards: str) -> None:
    grader = FunctionGrader(f"{rewards}:interrupts")
    with pytest.raises(KeyboardInterrupt):
        grader.grade(requests(1), require_box=False)
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        with pytest.raises(UserError, match="interrupts: raised KeyboardInterrupt"):
            grader.grade(requests(1), require_box=False)
    finally:
        signal.signal(signal.SIGINT, before)


def test_several_functions_with_weights(rewards: str) -> None:
    names = ("none_among", "zero_truncated")
    total = WeightedSum([FunctionGrader(f"{rewards}:{name}") for name in names], [2.0, 0.5])
    # 2 * [1, None, 0, 0.5] + 0.5 * [1, 1, 1, 1]; what one cannot score is left out of that row
    assert [g.reward for g in total.grade(requests(4), require_box=True)] == [2.5, 0.5, 0.5, 1.5]


def test_records_name_the_function_and_the_parts_of_a_sum(rewards: str) -> None:
    grader = FunctionGrader(f"{rewards}:by_length")
    assert grader.described == f"function {rewards}:by_length"
    assert WeightedSum([MathGrader(), grader], [1.0, 0.5]).described == (
        f"weighted-sum(1 math, 0.5 function {rewards}:by_length)"
    )
    settings = {"batch_size": 1, "decoding": Decoding(), "checkpoint": "c", "sha256": "0"}
    head = header(sampler=TorchSampler(), grader=grader, **settings)
    assert head["grader"] == f"function {rewards}:by_length"


@pytest.mark.parametrize("value", ["1.0", b"1.0"])
def test_a_number_in_writing_is_no_number(rewards: str, monkeypatch: pytest.MonkeyPatch, value: object) -> None:
    grader = FunctionGrader(f"{rewards}:by_length")
    monkeypatch.setattr(grader, "_function", lambda completions: [1.0, value])
    with pytest.raises(UserError, match=r"expected a finite number or None for row 1, got b?'1\.0'"):
        grader.grade(requests(2), require_box=True)
