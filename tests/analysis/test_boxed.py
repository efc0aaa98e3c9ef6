"""`rlvr-pl boxed`: the formatting decomposition of the paper's section 4.1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr_pl.analysis.boxed import decompose

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "paper_tables.json").read_text())["boxed_share_of_gain"]


def test_the_papers_sampled_gain(write_samples, command) -> None:
    # 70 x 16 = 1,120 samples: 850 boxed (75.9%), 177 of them right (20.8%); 933 (83.3%), 473 right (50.7%)
    def samples(boxed: int, right: int) -> dict:
        rows = [{"correct": int(i < right), "boxed": int(i < boxed)} for i in range(1120)]
        return {f"q{q}": rows[q::70] for q in range(70)}

    data = command("boxed", write_samples("base", samples(850, 177)), write_samples("start", samples(933, 473)))
    assert data["kind"] == "samples"
    assert [round(x, 3) for x in data["boxed_rate"]] == GOLDEN["boxed_rate"]
    assert [round(x, 3) for x in data["accuracy_given_boxed"]] == GOLDEN["accuracy_given_boxed"]
    assert round(data["gain_pp"], 1) == GOLDEN["sampled_gain_pp"]
    assert round(data["explained_pp"], 1) == GOLDEN["explained_pp"]
    assert round(data["explained_share"], 2) == GOLDEN["explained_share"]


def test_the_papers_gained_items(write_items, command) -> None:
    # state in base (boxed, terminated), right in base, right in start: how many of the 350 items
    groups = [
        (1, "eos", 0, 1, 86),
        (0, "eos", 0, 1, 23),
        (0, "length", 0, 1, 3),
        (1, "eos", 1, 1, 40),
        (1, "eos", 1, 0, 9),
        (0, "eos", 1, 1, 2),
        (0, "eos", 1, 0, 3),
        (1, "eos", 0, 0, 149),
        (0, "eos", 0, 0, 26),
        (0, "length", 0, 0, 9),
    ]
    items = [group for group in groups for _ in range(group[4])]
    base = write_items("a", [g[2] for g in items], boxed=[g[0] for g in items], stop_reason=[g[1] for g in items])
    start = write_items("b", [g[3] for g in items], boxed=[0] * 3 + [1] * 347, stop_reason=["eos"] * 350)
    data = command("boxed", base, start)
    assert (data["gained"], data["gained_unboxed"]) == (112, 26)
    assert {(s["boxed"], s["terminated"]): s["items"] for s in data["gained_by_state"]} == {
        (True, True): 86,
        (True, False): 0,
        (False, True): 23,
        (False, False): 3,
    }
    assert data["boxed_rate"][0] == pytest.approx(284 / 350)
    assert data["fallback_correct"] == [5, 3]
    assert data["gain_pp"] == pytest.approx(100 * (154 - 54) / 350)


shares = st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)).map(
    lambda x: (x[0] * x[1] + (1 - x[0]) * x[2], x[0], x[0] * x[1])  # accuracy, boxed, boxed and right
)


@given(a=shares, b=shares)
def test_the_parts_add_up(a: tuple, b: tuple) -> None:
    data = decompose(a, b)
    if data["explained_pp"] is None:
        assert a[1] == 0
    else:
        parts = data["explained_pp"] + data["answers_pp"] + data["fallback_pp"]
        assert parts == pytest.approx(data["gain_pp"], abs=1e-9)  # sums of five numbers below 100


def test_no_box_at_all_is_undefined_not_zero() -> None:
    data = decompose((0.2, 0.0, 0.0), (0.4, 0.5, 0.4))
    assert (data["explained_pp"], data["explained_share"], data["accuracy_given_boxed"][0]) == (None, None, None)
    assert data["gain_pp"] == pytest.approx(20)


def test_records_without_boxes_or_of_two_kinds(write_items, write_samples, refused) -> None:
    bare, boxed = write_items("a", [1, 0]), write_items("b", [1, 0], boxed=[1, 1])
    assert "no 'boxed' field" in refused("boxed", boxed, bare)
    assert "sample records" in refused("boxed", boxed, write_samples("s", {"q0": [1], "q1": [0]}))
