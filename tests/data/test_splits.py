from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr_pl.data.splits import SLICES, make_splits, require_disjoint, stratified
from rlvr_pl.errors import UserError
from rlvr_pl.types import Question


def pool(n: int, subjects: int = 2, levels: int = 5) -> list[Question]:
    return [Question(f"q{i:05}", f"problem {i}", "1", f"s{i % subjects}", i // subjects % levels + 1) for i in range(n)]


def of_levels(*sizes: int) -> list[Question]:
    levels = [level for level, size in enumerate(sizes, 1) for _ in range(size)]
    return [Question(f"q{i}", f"p{i}", "1", "s", level) for i, level in enumerate(levels)]


def test_levels_get_their_share_by_largest_remainder():
    # 10 of 25: shares 10*(12, 7, 6)/25 = 4.8, 2.8, 2.4 -> floors 4, 2, 2 and the two left go to .8 and .8.
    assert Counter(q.level for q in stratified(of_levels(12, 7, 6), 10, ("k",))) == {1: 5, 2: 3, 3: 2}


@given(st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any), st.data())
def test_a_stratified_draw_has_the_count_and_no_level_strays_by_one(sizes, data):
    questions = of_levels(*sizes)
    count = data.draw(st.integers(0, len(questions)))
    drawn = stratified(questions, count, ("k",))
    assert len(drawn) == len({q.uid for q in drawn}) == count
    for level, size in enumerate(sizes, 1):
        assert abs(sum(q.level == level for q in drawn) - size * count / len(questions)) < 1


def test_a_missing_level_is_a_level_of_its_own():
    questions = [Question(f"q{i}", f"p{i}", "1", "s", None if i < 5 else 1) for i in range(10)]
    assert Counter(q.level for q in stratified(questions, 4, ("k",))) == {None: 2, 1: 2}


def test_the_parts_cover_the_pool_and_do_not_overlap():
    questions = pool(400)
    used = [f"q{i:05}" for i in range(7)]
    splits = make_splits(questions, per_subject=20, panel_per_subject=3, exclude=used)
    validation, order = ({q.uid for q in part} for part in (splits.validation, splits.order))
    assert Counter(q.subject for q in splits.validation) == {"s0": 20, "s1": 20}
    assert Counter(q.subject for q in splits.panel) == {"s0": 3, "s1": 3}
    assert {q.uid for q in splits.panel} <= validation
    assert list(splits.excluded) == used
    assert validation | order | set(used) == {q.uid for q in questions}
    assert len(validation) + len(order) + len(used) == 400


def test_slices_are_the_places_of_the_order_that_exist():
    splits = make_splits(pool(1200), per_subject=10)
    assert set(splits.slices) == {"trained320", "drift64"}
    assert splits.slices["trained320"] == splits.order[:320]
    assert splits.slices["drift64"] == splits.order[1000:1064]
    assert SLICES["entropy_grad_1"][1] == SLICES["entropy_grad_2"][0] == 7528


def test_the_draw_depends_on_the_seed_and_not_on_the_order_of_rows():
    questions = pool(300)
    shuffled = random.Random(0).sample(questions, len(questions))
    first, again, other = (
        make_splits(x, per_subject=10, seed=s) for x, s in ((questions, 1), (shuffled, 1), (questions, 2))
    )
    assert first.order == again.order
    assert {q.uid for q in first.validation} == {q.uid for q in again.validation}
    assert first.order != other.order
    assert first.validation != other.validation


def test_questions_with_the_text_of_a_validation_question_are_not_trained_on():
    questions = [*pool(60), Question("twin", " Problem\n5", "1", "s0", 1)]
    splits = make_splits(questions, validation=["q00005"], panel_per_subject=1)
    assert splits.twins == ("twin",)
    assert "twin" not in {q.uid for q in splits.order}


def test_a_given_validation_split_is_kept():
    splits = make_splits(pool(60), validation=["q00007", "q00003"], panel_per_subject=1)
    assert [q.uid for q in splits.validation] == ["q00003", "q00007"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"validation": ["q00001", "q00002"], "exclude": ["q00002"]},
            "validation and --exclude overlap in 1 questions: 'q00002'",
        ),
        ({"exclude": ["x", "q00002"]}, "--exclude: 1 uids are not in the pool: 'x'"),
        ({"validation": ["x"]}, "--validation: 1 uids are not in the pool: 'x'"),
        ({"per_subject": 31}, "subject s0: 30 questions, but 31 were asked for"),
    ],
)
def test_a_cut_that_cannot_be_is_refused(settings, words):
    with pytest.raises(UserError) as error:
        make_splits(pool(60), **{"panel_per_subject": 1, **settings})
    assert words in str(error.value)


def test_overlap_names_both_parts():
    require_disjoint({"a": ["x", "y"], "b": ["z"], "c": []})
    with pytest.raises(UserError, match="a and c overlap in 2 questions: 'x', 'y'"):
        require_disjoint({"a": ["x", "y"], "b": ["z"], "c": ["y", "x"]})
