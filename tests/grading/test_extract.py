"""Where the answer of a response stands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr_pl.grading.extract import boxes, extract, last_boxed


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed {42}", "42"),
        (r"\boxed{ 42 }", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{42} and then \boxed{4", "42"),  # the last box never closes
        (r"\boxed{ \boxed{42}", "42"),  # the first one never closes
        (r"\boxed{\boxed{42}}", r"\boxed{42}"),  # outermost
        (r"\fbox{7}", "7"),
        (r"\boxed{}", ""),
        (r"\boxed{42\}", None),  # an escaped brace closes nothing
        (r"\\boxed{42}", None),  # a line break and a word
        (r"\\\boxed{42}", "42"),  # a line break and a box
        (r"\boxed 42", None),
        ("boxed{42}", None),
        ("", None),
    ],
)
def test_last_closed_box(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_positions_of_boxes() -> None:
    text = r"a \boxed{1} b \boxed{{2}}"
    assert boxes(text) == [(2, 11, "1"), (14, 25, "{2}")]


@pytest.mark.parametrize(
    ("text", "readings"),
    [
        (r"\boxed{1}, \boxed{2} and \boxed{3}", ("3", "1,2,3")),
        (r"$\boxed{1}$ or $\boxed{2}$", ("2", "1,2")),
        (r"\boxed{0} is wrong. It is $\boxed{1}$ or $\boxed{2}$", ("2", "1,2")),
        (r"\boxed{1} is not it; \boxed{2}", ("2",)),
    ],
)
def test_a_run_of_joined_boxes_may_be_read_as_a_list(text: str, readings: tuple[str, ...]) -> None:
    assert extract(text, require_box=True).readings == readings


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("First 3, then 12 apples", "12"),
        ("It costs $1,234.50 in all.", "1,234.50"),
        ("so 3/4 of it", "3/4"),
        ("A: -7", "-7"),
        (r"Thus $x \ge 5$ holds", r"x \ge 5"),
        (r"the pair is \( (3, 4) \).", "(3, 4)"),
        ("$$\n\\frac{1}{2}\n$$", r"\frac{1}{2}"),
        (r"\[ 10 \] items, but 4 remain", "4"),  # the last number stands outside the formula
        ("He had $8 and then $9.\nA: 31", "31"),  # dollars of another line
        (r"It costs \$5 and \$7 now", "7"),
        ("no idea", "no idea"),
        (r"\boxed{42", "42"),  # as the paper: an unclosed box is no box
    ],
)
def test_evaluation_falls_back_to_the_last_number_and_its_formula_and_to_the_full_text(text: str, answer: str) -> None:
    found = extract(text, require_box=False)
    assert (found.answer, found.boxed) == (answer, False)
    assert extract(text, require_box=True).answer is None


@pytest.mark.parametrize("require_box", [True, False])
@pytest.mark.parametrize(
    ("text", "boxed"), [(r"\boxed{} 42", True), (r"\boxed{ } 42", True), ("  \n", False), ("", False)]
)
def test_nothing_to_grade(text: str, boxed: bool, require_box: bool) -> None:
    found = extract(text, require_box=require_box)
    assert (found.answer, found.readings, found.boxed) == (None, (), boxed)


pieces = st.sampled_from(
    ["\\", "boxed", "{", "}", "\\boxed{", "$", "\\[", "\\]", "\\(", "\\)", "1", ",", " and ", "\n", "x"]
)


@given(st.lists(pieces, max_size=40).map("".join))
def test_any_text_is_extracted_and_a_box_is_what_it_says(text: str) -> None:
    for start, end, content in boxes(text):
        assert text[start:end].startswith((r"\boxed", "\\"))
        assert text[start:end].endswith("{" + content + "}")
    assert extract(text, require_box=True).readings == () or extract(text, require_box=False).boxed
