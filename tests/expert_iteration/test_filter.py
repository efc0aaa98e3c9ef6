"""Which samples become solutions: hand-worked groups, and what holds for every group."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr_pl.errors import UserError
from rlvr_pl.expert_iteration.files import read_solutions, write_solutions
from rlvr_pl.expert_iteration.filter import FATES, Distinct, SolutionFilter, normalised


def sample(i: int, correct: int = 1, stop: str = "eos", ids: list[int] | None = None, text: str | None = None) -> dict:
    ids = [i, 1] if ids is None else ids
    return {
        "uid": "q",
        "sample": i,
        "subject": "algebra",
        "level": 2,
        "problem": "1+1?",
        "gold": "2",
        "correct": correct,
        "stop_reason": stop,
        "token_ids": ids,
        "text": f"text {i}" if text is None else text,
    }


def test_hand_worked_group():
    # 8 samples, 4 verified: success rate 0.5 is hard, so up to 4 are kept; one verified sample was cut off, and two are
    # the same text: that leaves one of these two and one other
    rows = [
        *(sample(i, correct=0) for i in range(4)),
        sample(4, stop="length"),
        sample(5, text="It is  TWO"),
        sample(6, text="it is two "),
        sample(7),
    ]
    fates = SolutionFilter().fates(rows)
    assert fates[:5] == ["wrong"] * 4 + ["truncated"]
    assert sorted(fates[5:7]) == ["duplicate", "solution"]
    assert fates[7] == "solution"


@pytest.mark.parametrize(
    ("right", "kept"),
    [(1, 1), (3, 3), (4, 4), (5, 1), (8, 1)],  # of 8: up to 4/8 = 0.5 hard, at most 4; above it easy, 1
)
def test_hard_questions_keep_four_and_easy_ones_keep_one(right, kept):
    rows = [sample(i, correct=int(i < right)) for i in range(8)]
    found, counts = SolutionFilter().select(rows)
    assert len(found) == counts["solution"] == kept
    assert counts["surplus"] == right - kept
    assert counts["wrong"] == 8 - right


def test_a_solution_is_the_whole_completion_under_its_question():
    found, _ = SolutionFilter().select([sample(3, ids=[7, 8, 1])])
    assert found[0].token_ids == (7, 8, 1)
    assert (found[0].question.problem, found[0].question.answer, found[0].question.level) == ("1+1?", "2", 2)
    assert found[0].source == "search"


GROUPS = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(["eos", "length"]), st.integers(0, 3), st.integers(0, 3)),
    min_size=1,
    max_size=12,
).map(lambda rows: [sample(i, c, s, [a, 1], f"t{b}") for i, (c, s, a, b) in enumerate(rows)])
SETTINGS = st.builds(
    SolutionFilter,
    keep_hard=st.integers(0, 4),
    keep_easy=st.integers(0, 3),
    hard_rate=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    seed=st.integers(0, 3),
)


@given(GROUPS, SETTINGS, st.randoms(use_true_random=False))
def test_what_holds_for_every_group(rows, keep, random):
    found, counts = keep.select(rows)
    assert sum(counts.values()) == len(rows) and set(counts) == set(FATES)
    hard = sum(row["correct"] for row in rows) / len(rows) <= keep.hard_rate
    assert len(found) <= (keep.keep_hard if hard else keep.keep_easy)
    assert len({s.token_ids for s in found}) == len({normalised(s.text) for s in found}) == len(found)
    good = {(tuple(r["token_ids"]), r["text"]) for r in rows if r["correct"] and r["stop_reason"] == "eos"}
    assert {(s.token_ids, s.text) for s in found} <= good
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert {s.token_ids for s in keep.select(shuffled)[0]} == {s.token_ids for s in found}


def test_the_seed_names_which_ones_are_kept():
    rows = [sample(i) for i in range(8)]  # all right: one is kept
    kept = [SolutionFilter(seed=seed).select(rows)[0][0].token_ids[0] for seed in range(40)]
    assert kept == [SolutionFilter(seed=seed).select(rows)[0][0].token_ids[0] for seed in range(40)]
    # 40 fair draws of 8 show only 3 values with probability at most C(8,3) (3/8)^40 = 5e-16
    assert len(set(kept)) >= 4


def test_equal_in_ids_or_in_text_is_equal():
    seen = Distinct()
    assert seen.add([1, 2], "a b")
    assert not seen.add([1, 2], "other words")
    assert not seen.add([3], "A  B")
    assert seen.add([4], "c")


def test_settings_that_cannot_be():
    for wrong in ({"keep_hard": -1}, {"keep_easy": -1}, {"hard_rate": 1.5}):
        with pytest.raises(UserError, match="keep_hard"):
            SolutionFilter(**wrong)


# ---- files ---------------------------------------------------------------------------------------------------------

HEADER = {"version": 1, "tokenizer_sha256": "t", "checkpoint_sha256": "c"}


def write(path, header: dict, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in (header, *rows)))
    return str(path)


def test_samples_rationales_and_solutions_are_read_together(tmp_path):
    samples = write(
        tmp_path / "s.jsonl", {**HEADER, "record": "samples", "seed": 1}, [sample(0, 0), sample(1), sample(2)]
    )
    more = write(tmp_path / "s2.jsonl", {**HEADER, "record": "samples", "seed": 2}, [sample(0, ids=[9, 1], text="new")])
    bridges = [
        {**sample(0, ids=[5, 1], text="hint"), "stage": "rationale", "fate": "bridged"},
        {**sample(0, ids=[6, 1], text="bridge"), "stage": "continuation", "fate": "solution"},
        {**sample(1, ids=[8, 1], text="no"), "stage": "continuation", "fate": "wrong"},
    ]
    rationales = write(tmp_path / "r.jsonl", {**HEADER, "record": "rationales"}, bridges)
    found = read_solutions([rationales, samples, more], SolutionFilter(hard_rate=1.0))
    # shards of one question are one group: 4 samples, 3 of them right
    assert found.samples == Counter(wrong=1, solution=3, truncated=0, duplicate=0, surplus=0)
    assert sorted((s.source, s.token_ids) for s in found.solutions) == [
        ("bridge", (6, 1)),
        ("search", (1, 1)),
        ("search", (2, 1)),
        ("search", (9, 1)),
    ]
    assert (found.tokenizers, found.policies) == ({"t"}, {"c"})
    write_solutions(tmp_path / "all.jsonl", found)
    again = read_solutions([tmp_path / "all.jsonl"], SolutionFilter(keep_hard=0))
    assert again == replace(found, samples=None)  # solutions are not filtered again


def test_the_same_solution_from_two_files_is_learned_once(tmp_path):
    one = write(tmp_path / "a.jsonl", {**HEADER, "record": "samples", "seed": 1}, [sample(0)])
    write_solutions(tmp_path / "b.jsonl", read_solutions([one], SolutionFilter()))
    assert len(read_solutions([one, tmp_path / "b.jsonl"], SolutionFilter()).solutions) == 1


@pytest.mark.parametrize(
    ("header", "rows", "told"),
    [
        ({"record": "items"}, [sample(0)], "not a file of solutions, samples or rationales"),
        ({**HEADER, "record": "samples", "version": 2}, [sample(0)], "version 1"),
        ({"record": "samples", "version": 1}, [sample(0)], "tokenizer_sha256"),
        ({**HEADER, "record": "samples", "questions": 2}, [sample(0)], "unfinished, 1 of 2 questions"),
        ({**HEADER, "record": "samples"}, [], "no rows"),
        ({**HEADER, "record": "samples"}, [sample(0), sample(0)], "already in line"),
        ({**HEADER, "record": "samples"}, [{**sample(0), "token_ids": [1, "x"]}], ":2: 'token_ids'"),
        ({**HEADER, "record": "samples"}, [{k: v for k, v in sample(0).items() if k != "problem"}], "'problem'"),
    ],
)
def test_faulty_files_are_told(tmp_path, header, rows, told):
    path = write(tmp_path / "s.jsonl", header, rows)
    with pytest.raises(UserError, match=told):
        read_solutions([path], SolutionFilter())


def test_one_shard_named_twice_is_told(tmp_path):
    rows, header = [sample(0)], {**HEADER, "record": "samples", "seed": 1}
    paths = [write(tmp_path / name, header, rows) for name in ("a.jsonl", "b.jsonl")]
    with pytest.raises(UserError, match="as well"):
        read_solutions(paths, SolutionFilter())


def test_rationales_of_no_question_are_no_fault(tmp_path):
    samples = write(tmp_path / "s.jsonl", {**HEADER, "record": "samples"}, [sample(0)])
    empty = write(tmp_path / "r.jsonl", {**HEADER, "record": "rationales", "questions": 0}, [])
    assert len(read_solutions([samples, empty], SolutionFilter()).solutions) == 1
