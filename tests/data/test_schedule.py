from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr_pl.data.schedule import QuestionSchedule
from rlvr_pl.errors import UserError
from rlvr_pl.types import Question


def pool(n: int) -> list[Question]:
    return [Question(f"q{i}", f"p{i}", "1") for i in range(n)]


def uids(schedule: QuestionSchedule, first: int, last: int) -> list[str]:
    return [q.uid for update in range(first, last + 1) for q in schedule.batch(update)]


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 5))
def test_every_pass_asks_every_question_once(n, per_update, seed):
    asked = uids(QuestionSchedule(pool(n), per_update, seed=seed), 1, 3 * n)
    for turn in range(len(asked) // n):
        assert sorted(asked[turn * n : (turn + 1) * n]) == sorted(q.uid for q in pool(n))


def test_passes_and_seeds_differ_and_the_same_seed_repeats():
    asked = uids(QuestionSchedule(pool(20), 4, seed=3), 1, 10)
    assert asked[:20] != asked[20:]
    assert asked == uids(QuestionSchedule(pool(20), 4, seed=3), 1, 10)
    assert asked != uids(QuestionSchedule(pool(20), 4, seed=4), 1, 10)


def test_the_permutation_is_a_fixed_fact():
    """Recorded from this code: a change would silently give every old seed another order."""
    recorded = [2, 4, 0, 1, 3, 6, 5, 7, 2, 1, 6, 5, 3, 4, 0, 7]
    assert uids(QuestionSchedule(pool(8), 8, seed=11), 1, 2) == [f"q{i}" for i in recorded]


def test_resume_data():
    """10 questions, 2 an update, shuffled; continued after update 3 up to update 12, which crosses two passes."""
    whole = uids(QuestionSchedule(pool(10), 2, seed=5), 1, 12)
    assert uids(QuestionSchedule(pool(10), 2, seed=5), 4, 12) == whole[6:]


def test_resume_skip_each_epoch():
    """5 updates a pass, continued after update 3: the first pass goes on with 4 and 5, later passes are whole."""
    asked = uids(QuestionSchedule(pool(10), 2), 4, 15)
    assert len(asked) == 4 + 10 + 10
    assert len(set(asked[4:14])) == len(set(asked[14:24])) == 10


def test_an_order_file_and_its_offset(tmp_path):
    order = ["q3", "q0", "q4", "q1"]
    (tmp_path / "order.json").write_text(json.dumps(order))
    schedule = QuestionSchedule(pool(5), 2, order=tmp_path / "order.json", start=1)
    assert uids(schedule, 1, 3) == ["q0", "q4", "q1", "q3", "q0", "q4"]
    assert uids(QuestionSchedule(pool(5), 2, order=order, start=1), 1, 3) == uids(schedule, 1, 3)


def test_an_offset_into_a_shuffled_pass_only_moves_the_beginning():
    plain = uids(QuestionSchedule(pool(7), 1, seed=2), 1, 14)
    assert uids(QuestionSchedule(pool(7), 1, seed=2, start=3), 1, 11) == plain[3:]


def test_an_order_with_foreign_uids_lists_them(tmp_path):
    (tmp_path / "order.json").write_text(json.dumps([f"x{i}" for i in range(7)] + ["q0"]))
    with pytest.raises(UserError, match=r"order\.json: 7 uids are not in the pool: 'x0', .* and 2 more"):
        QuestionSchedule(pool(2), 1, order=tmp_path / "order.json")


@pytest.mark.parametrize("start", [-1, 5, 1064])
def test_an_offset_beyond_the_pass_is_refused(start):
    with pytest.raises(UserError, match=rf"data\.start is {start}"):
        QuestionSchedule(pool(5), 1, start=start)


def test_updates_are_counted_from_one():
    with pytest.raises(ValueError, match="from 1"):
        QuestionSchedule(pool(5), 1).batch(0)
    with pytest.raises(ValueError, match="pool of 0"):
        QuestionSchedule([], 1)


def test_resume_other_data():
    """The identity sees texts, golds, sequence, offset and batch, but no question that an order leaves out."""
    questions = pool(6)
    changed = [dataclasses.replace(questions[0], answer="2"), *questions[1:]]
    same = QuestionSchedule(questions, 2, seed=1).sha256
    assert QuestionSchedule(pool(6), 2, seed=1).sha256 == same
    others = [
        QuestionSchedule(questions, 2, seed=2),
        QuestionSchedule(questions, 3, seed=1),
        QuestionSchedule(questions, 2, seed=1, start=1),
        QuestionSchedule(questions[:-1], 2, seed=1),
        QuestionSchedule(questions[::-1], 2, seed=1),
        QuestionSchedule(changed, 2, seed=1),
        QuestionSchedule(questions, 2, seed=1, order=[q.uid for q in questions]),
    ]
    assert len({same, *(x.sha256 for x in others)}) == 8
    order = ["q2", "q1"]
    assert QuestionSchedule(pool(6), 2, order=order, seed=1).sha256 == QuestionSchedule(pool(4), 2, order=order).sha256


@given(st.integers(1, 9), st.integers(1, 12), st.data())
def test_so_many_updates_have_asked_every_question(n, per_update, data):
    schedule = QuestionSchedule(pool(n), per_update, start=data.draw(st.integers(0, n - 1)))
    assert set(uids(schedule, 1, schedule.updates_of_all)) == {q.uid for q in pool(n)}
