"""The arithmetic questions: right answers, disjoint splits, the same every time."""

from __future__ import annotations

import re

import pytest

from rlvr_pl.data import arithmetic
from rlvr_pl.errors import UserError


def operands(question):
    a, b = (int(x) for x in re.findall(r"\d+", question.problem))
    return question.subject, a, b


def test_answers_are_right():
    solve = {"sum": lambda a, b: a + b, "difference": lambda a, b: a - b, "product": lambda a, b: a * b}
    for question in arithmetic.questions("train") + arithmetic.questions("val"):
        subject, a, b = operands(question)
        assert question.answer == str(solve[subject](a, b))


def test_splits_share_no_problem_and_are_balanced():
    train, val = arithmetic.questions("train"), arithmetic.questions("val")
    assert (len(train), len(val)) == (4000, 200)
    assert not {operands(q) for q in train} & {operands(q) for q in val}
    assert len({q.uid for q in train + val}) == 4200
    assert {(q.subject, q.level) for q in val} == {(s, n) for s in arithmetic.WORDINGS for n in range(1, 6)}


def test_unknown_split_names_the_known():
    with pytest.raises(UserError, match="arithmetic:train and arithmetic:val"):
        arithmetic.questions("test")
