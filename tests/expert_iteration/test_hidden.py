"""Prefixes that give their answer away, by text or by value, and phrases that give a hint away."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr_pl.errors import UserError
from rlvr_pl.expert_iteration.hidden import holds_answer, leak, read_phrases, values
from rlvr_pl.grading import ExactGrader
from rlvr_pl.types import Question

HELD = [
    ("so x is 12 and", "12"),
    ("so x is 112 and", "12"),  # the paper's rule: the answer string is in it
    ("a total of 1,000 marbles", "1000"),
    ("a total of 1{,}000 marbles", "1000"),
    ("a total of 10,\\!000 marbles", "10000"),
    ("a total of 2\\,500 marbles", "2500"),
    ("that is 0.5 of them", "\\frac{1}{2}"),
    ("that is 1/2 of them", "\\frac{1}{2}"),
    ("that is $\\frac{2}{4}$ of them", "1/2"),
    ("so $p = \\dfrac12$ holds", "\\frac{1}{2}"),
    ("we get \\boxed{ 7 } so", "7"),
    ("a chance of 28% here", "0.28"),
    ("at 05:07 we", "7"),
    ("the value 7.0 then", "7"),
    ("so $x = 3 + 4$ apples", "7"),
    ("then \\(y=\\sqrt{49}\\) so", "7"),
    ("the set is ( 1 , 2 ] here", "(1,2]"),
    ("it is \\text{Even} so", "\\text{even}"),
    ("clearly \\left( 3, 4 \\right) is", "(3,4)"),
    ("−7 is the root", "-7"),
]
HIDDEN = [
    ("first add 3 and 4", "7"),
    ("so x + 1 = 6", "7"),
    ("half of them", "\\frac{1}{2}"),
    ("the fraction is $\\frac{1}{3}$", "\\frac{1}{2}"),
    ("it is odd", "\\text{even}"),
    ("the pair $(4, 3)$", "(3,4)"),
    ("stage 1 17:30", "11"),
    ("", "7"),
]


@pytest.mark.parametrize(("text", "gold"), HELD)
def test_held(text, gold, grader):
    assert holds_answer([text], [Question("q", "", gold)], grader) == [True]


@pytest.mark.parametrize(("text", "gold"), HIDDEN)
def test_hidden(text, gold, grader):
    assert holds_answer([text], [Question("q", "", gold)], grader) == [False]


def test_many_at_once_in_order(grader):
    rows = [*HELD, *HIDDEN, *HELD[::-1]]
    found = holds_answer([text for text, _ in rows], [Question("q", "", gold) for _, gold in rows], grader)
    assert found == [row in HELD for row in rows]


NUMBERS = ["3", "-3", "0.5", "1/2", "12", "7.0", "2,500", "2{,}500", "10,\\!000", "08", "3/4", "1,234,567.25"]


@given(st.lists(st.sampled_from([*NUMBERS, "so", "x =", "and", "$y$", "(", "\\boxed{x}"]), max_size=8))
def test_every_number_of_a_text_is_among_its_values(words):
    """Read independently, word by word, as exact fractions."""
    there = {Fraction(re.sub(r"[,{}!\\]", "", word)) for word in words if word in NUMBERS}
    found = {Fraction(v.replace(",", "")) for v in values(" ".join(words)) if re.fullmatch(r"-?[\d,.]+(/\d+)?", v)}
    assert there <= found


def test_an_undecided_comparison_counts_as_held():
    class Stuck(ExactGrader):
        def grade(self, requests, *, require_box):
            from rlvr_pl.types import Grade, GradeStatus

            return [Grade(GradeStatus.TIMEOUT, 0.0) for _ in requests]

    questions = [Question("q", "", "7")] * 2
    assert holds_answer(["so 8 is", "no number"], questions, Stuck()) == [True, False]


def test_values_lists_every_candidate_once():
    text = "then $a = b + 1$ and \\boxed{4} or 3/6, 05:30, 50%, \\frac{2}{3}"
    found = values(text)
    assert {"a = b + 1", "a", "b + 1", "4", "3/6", "3", "6", "05", "30", "50%", "50", "\\frac{2}{3}"} <= set(found)
    assert len(found) == len(set(found))


# ---- leak phrases --------------------------------------------------------------------------------------------------


def test_the_shipped_list():
    phrases = read_phrases(None)
    assert len(phrases) > 20 and all(phrase == phrase.casefold().strip() for phrase in phrases)
    assert leak("Since we  KNOW the\nanswer is 3, ...", phrases) == "we know the answer"
    assert leak("As the given answer says", phrases) == "given answer"
    for innocent in (
        "Therefore the answer is \\boxed{3}.",
        "The correct answer is 3.",
        "Given that x is 3, we know x.",
    ):
        assert leak(innocent, phrases) is None


def test_a_list_of_ones_own(tmp_path):
    (tmp_path / "mine.txt").write_text("# mine\n\n  Tickets   UNDER \nrailway\nrailway\n")
    phrases = read_phrases(tmp_path / "mine.txt")
    assert phrases == ("tickets under", "railway")
    assert leak("buy tickets\nunder our tariff", phrases) == "tickets under"
    with pytest.raises(UserError, match="--leak-phrases"):
        read_phrases(tmp_path / "none.txt")
