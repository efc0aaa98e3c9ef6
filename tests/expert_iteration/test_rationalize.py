"""Rationalization with prefix bridging: hand-written rationales, and the embedded default read independently."""

from __future__ import annotations

import json
import re
from fractions import Fraction

import pytest

from rlvr_pl.cost import CostLedger
from rlvr_pl.errors import UserError
from rlvr_pl.expert_iteration.rationalize import (
    CONTINUATION_FATES,
    RATIONALE_FATES,
    Bridge,
    cost,
    funnel,
    rationalize,
    unsolved,
)
from rlvr_pl.expert_iteration.search import search
from rlvr_pl.grading import grade
from rlvr_pl.types import Question

END = "so \\boxed{9} . Done <eos>"
WRONG = "so \\boxed{8} . Done <eos>"


def read(path) -> tuple[dict, list[dict]]:
    header, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return header, rows


# ---- hand-written --------------------------------------------------------------------------------------------------

QUESTION = Question("q", "How many tickets from 04:15 forward to 05:45 by 45min?", "9", "45min", 1)
RATIONALES = {
    0: f"1 05:00 2 05:45 {END}",  # verified: bridged
    1: f"1 05:00 2 05:45 {WRONG}",
    2: f"1 05:00 {END.removesuffix(' <eos>')}",  # verified, but cut off
    3: f"1 05:00 tickets under our railway tariff of May 1921 . {END}",  # tells of the hint, by the list below
    4: f"9 05:00 2 05:45 {END}",  # its first half holds the answer
}
CONTINUATIONS = {0: END, 1: END, 2: WRONG, 3: f"for {END}", 4: END.removesuffix(" <eos>")}


def script(request) -> str:
    kind, *_, number = request.key
    return RATIONALES[number] if kind == "rationale" else CONTINUATIONS[number]


@pytest.fixture
def by_hand(tmp_path, scripted):
    bridge = Bridge(rationales=5, continuations=5, phrases=("railway tariff",))
    found = rationalize(scripted(script), [QUESTION], bridge, tmp_path / "r.jsonl")
    return found, read(tmp_path / "r.jsonl")


def test_fates_by_hand(by_hand):
    _, (_, rows) = by_hand
    assert [r["fate"] for r in rows[:5]] == ["bridged", "wrong", "truncated", "leak", "answer_in_prefix"]
    # one prefix, five continuations: the second repeats the first
    assert [r["fate"] for r in rows[5:]] == ["solution", "duplicate", "wrong", "solution", "truncated"]
    assert {r["rationale"] for r in rows[5:]} == {0}


def test_the_target_is_half_the_rationale_and_its_continuation_under_the_ordinary_prompt(by_hand, policy):
    _, (_, rows) = by_hand
    # 4 words of the walk, so \boxed{ 9 } . Done <eos>: 11 tokens, of which the first int(11 / 2) = 5
    assert rows[0]["length"] == 11 and rows[0]["prefix_length"] == 5
    prefix = policy.encode("1 05:00 2 05:45 so")
    assert tuple(rows[5]["token_ids"]) == prefix + policy.encode(END)
    assert rows[5]["prompt_length"] == len(policy.prompt_ids(QUESTION)) == 11
    # "must buy 9" in front of the problem tells the answer
    assert rows[0]["prompt_length"] == 14


def test_the_funnel_by_hand(by_hand):
    found, _ = by_hand
    assert funnel(found.rows) == {
        "questions": 1,
        "with_rationale": 1,
        "with_prefix": 1,
        "with_solution": 1,
        "solutions": 2,
        "rationales": {"wrong": 1, "truncated": 1, "leak": 1, "answer_in_prefix": 1, "bridged": 1},
        "continuations": {"wrong": 1, "truncated": 1, "duplicate": 1, "solution": 2},
    }


def test_cost_by_hand():
    rationale = {"stage": "rationale", "length": 12, "prefix_length": 6, "prompt_length": 20}
    bridge = {"stage": "continuation", "length": 16, "prefix_length": 6, "prompt_length": 11}
    rows = [{**rationale, "sample": 0}, {**rationale, "sample": 1}, {**bridge, "sample": 0}, {**bridge, "sample": 1}]
    # sampled: 12 + 12 + (16 - 6) + (16 - 6); read: the hinted prompt once, and the ordinary one with its prefix once
    assert cost(rows) == CostLedger(sampled_tokens=44, prefill_tokens=20 + 11 + 6, graded=4)


def test_unsolved_are_those_without_a_right_sample():
    def sample(uid: str, correct: int) -> dict:
        return {"uid": uid, "problem": f"{uid}?", "gold": "1", "correct": correct, "subject": "a", "level": 3}

    rows = [sample("b", 0), sample("b", 1), sample("c", 0), sample("c", 0), sample("a", 0)]
    assert unsolved(rows) == [Question("c", "c?", "1", "a", 3), Question("a", "a?", "1", "a", 3)]


def test_a_hint_without_words_for_it_is_refused(tmp_path, explorer):
    from dataclasses import replace

    policy = explorer.policy
    told = replace(policy, template=replace(policy.template, hint="{problem} (it is {answer})"))
    with pytest.raises(UserError, match="does not know"):
        rationalize(replace(explorer, policy=told), [QUESTION], Bridge(), tmp_path / "r.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_settings_that_cannot_be():
    for wrong in ({"rationales": 0}, {"continuations": 0}, {"fraction": 0.0}, {"fraction": 1.0}):
        with pytest.raises(UserError, match="--fraction"):
            Bridge(**wrong)


# ---- the embedded default ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bridged(tmp_path_factory, explorer):
    """Rationalization of what one sample of each of 240 questions left unsolved."""
    from rlvr_pl.data.pools import load_questions

    folder = tmp_path_factory.mktemp("bridged")
    questions = load_questions("embedded:train")[:240]
    hard = unsolved_of(search(explorer, questions, 1, folder / "s.jsonl").rows, questions)
    found = rationalize(explorer, hard, Bridge(), folder / "r.jsonl")
    return hard, found, *read(folder / "r.jsonl")


def unsolved_of(rows: list[dict], questions: list[Question]) -> list[Question]:
    solved = {row["uid"] for row in rows if row["correct"]}
    return [q for q in questions if q.uid not in solved]


def test_solutions_hide_their_answer_and_verify(bridged, policy):
    hard, _, _, rows = bridged
    by_uid = {q.uid: q for q in hard}
    rationales = {(r["uid"], r["sample"]): r for r in rows if r["stage"] == "rationale"}
    solutions = [r for r in rows if r["fate"] == "solution"]
    assert solutions
    for row in solutions:
        question, ids = by_uid[row["uid"]], row["token_ids"]
        prefix = policy.decode(ids[: row["prefix_length"]])
        assert question.answer not in prefix
        assert "boxed" not in prefix
        assert Fraction(question.answer) not in {Fraction(n) for n in re.findall(r"\d+", prefix)}
        origin = rationales[row["uid"], row["rationale"]]
        assert ids[: row["prefix_length"]] == origin["token_ids"][: len(origin["token_ids"]) // 2]
        assert row["prompt_length"] == len(policy.prompt_ids(question))
        assert ids[-1] in policy.eos_ids and len(ids) <= 80
        assert grade(policy.decode(ids), question.answer, require_box=True).status.value == "correct"


def test_dropped_prefixes_do_hold_their_answer(bridged, policy):
    hard, _, _, rows = bridged
    gold = {q.uid: q.answer for q in hard}
    dropped = [r for r in rows if r["fate"] == "answer_in_prefix"]
    assert dropped
    for row in dropped:
        assert gold[row["uid"]] in policy.decode(row["token_ids"][: row["prefix_length"]])


def test_the_funnel_adds_up(bridged):
    hard, found, _, rows = bridged
    told = funnel(found.rows)
    assert tuple(told["rationales"]) == RATIONALE_FATES and tuple(told["continuations"]) == CONTINUATION_FATES
    assert told["questions"] == len(hard)
    assert sum(told["rationales"].values()) == 4 * len(hard)
    assert sum(told["continuations"].values()) == 4 * told["rationales"]["bridged"]
    assert told["solutions"] == told["continuations"]["solution"] == sum(r["fate"] == "solution" for r in rows)
    assert told["questions"] >= told["with_rationale"] >= told["with_prefix"] >= told["with_solution"] > 0
    assert found.cost == CostLedger(**{**cost(rows).as_dict(), "wall_seconds": found.cost.wall_seconds})


def test_cut_at_any_row_and_continued_it_has_the_same_bytes(bridged, tmp_path, explorer):
    hard, _, header, rows = bridged
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in (header, *rows)]
    path = tmp_path / "r.jsonl"
    for kept in (1, len(lines) // 2, len(lines) - 1):
        path.write_text("".join(lines[:kept]) + lines[kept][:40], encoding="utf-8")
        rationalize(explorer, hard, Bridge(), path)
        assert path.read_text(encoding="utf-8") == "".join(lines)
