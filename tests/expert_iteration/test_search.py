"""Search on the embedded default: the same samples in every order and shard, graded, costed, continued."""

from __future__ import annotations

import json

import pytest

from rlvr_pl.analysis.items import load_samples
from rlvr_pl.cost import CostLedger
from rlvr_pl.errors import UserError
from rlvr_pl.expert_iteration.search import cost, search, solved, yields
from rlvr_pl.grading import grade
from rlvr_pl.types import Question


def read(path) -> tuple[dict, list[dict]]:
    header, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return header, rows


def test_records_of_a_search(tmp_path, explorer, policy, questions):
    ticks = []
    found = search(explorer, questions[:9], 3, tmp_path / "s.jsonl", ticks.append)
    header, rows = read(tmp_path / "s.jsonl")
    assert (header["record"], header["version"], header["k"], header["seed"]) == ("samples", 1, 3, 1)
    assert header["checkpoint_sha256"] == policy.sha256
    assert [(r["uid"], r["sample"]) for r in rows] == [(q.uid, i) for q in questions[:9] for i in range(3)]
    for row, q in zip(rows, (q for q in questions[:9] for _ in range(3))):
        assert (row["problem"], row["gold"], row["subject"], row["level"]) == (q.problem, q.answer, q.subject, q.level)
        assert row["length"] == len(row["token_ids"]) <= 80
        assert (row["token_ids"][-1] in policy.eos_ids) == (row["stop_reason"] == "eos")
        assert row["text"] == policy.decode(row["token_ids"])
        assert row["correct"] == (grade(row["text"], q.answer, require_box=True).status.value == "correct")
    # the three samples of a question share one reading of its 11 tokens
    assert found.cost.prefill_tokens == 9 * 11
    assert found.cost.graded == found.added == 27
    assert found.cost.sampled_tokens == sum(r["length"] for r in rows)
    assert ticks[-1] == 27 and ticks == sorted(ticks)
    assert {r["uid"] for r in rows if r["correct"]} == solved(found.rows)


def test_pass_at_k_reads_the_records(tmp_path, explorer, questions):
    found = search(explorer, questions[:4], 2, tmp_path / "s.jsonl")
    counts = load_samples(tmp_path / "s.jsonl").counts
    assert {uid: n for uid, (n, _) in counts.items()} == {q.uid: 2 for q in questions[:4]}
    assert sum(c for _, c in counts.values()) == sum(r["correct"] for r in found.rows)


def test_a_sample_has_its_tokens_in_every_order_shard_and_batch(tmp_path, explorer, questions):
    """Equal tokens, since draws are named and this machine's rounding moves no draw over a boundary here."""
    whole, one, two = (tmp_path / f"{name}.jsonl" for name in ("whole", "one", "two"))
    search(explorer, questions[:8], 3, whole)
    search(explorer, questions[4:8][::-1], 3, one)
    search(explorer, questions[:4], 3, two)
    tokens = {(r["uid"], r["sample"]): r["token_ids"] for r in read(whole)[1]}
    shards = {(r["uid"], r["sample"]): r["token_ids"] for r in read(one)[1] + read(two)[1]}
    assert tokens == shards
    assert len({tuple(ids) for ids in tokens.values()}) > 12  # of 24, so the samples of a question differ


def test_parts_keep_to_the_token_budget_and_depend_on_what_came_before_alone(explorer, questions):
    parts = list(explorer.parts(questions, 3))
    assert [q for part in parts for q in part] == questions
    # 11 prompt tokens and a cap of 80: 3 x 91 = 273 tokens a question, 7 questions within 2000
    assert [len(part) for part in parts] == [7, 7, 7, 7, 7, 5]
    assert list(explorer.parts(questions[:21], 3)) == parts[:3]
    assert [len(part) for part in explorer.parts(questions[:3], 100)] == [1, 1, 1]
    assert list(explorer.parts([], 3)) == []


def test_cost_is_hand_worked():
    rows = [
        {"length": 10, "prompt_length": 7, "sample": 0},
        {"length": 20, "prompt_length": 7, "sample": 1},
        {"length": 5, "prompt_length": 9, "sample": 0},
        {"length": 5, "prompt_length": 9, "sample": 1},
    ]
    assert cost(rows) == CostLedger(sampled_tokens=40, prefill_tokens=16, graded=4)


def test_yields_are_by_value_in_order():
    rows = [
        {"uid": "a", "level": 2, "correct": 1},
        {"uid": "a", "level": 2, "correct": 0},
        {"uid": "b", "level": 2, "correct": 0},
        {"uid": "b", "level": 2, "correct": 0},
        {"uid": "c", "level": None, "correct": 1},
        {"uid": "d", "level": 1, "correct": 0},
    ]
    assert yields(rows, "level") == [(1, 1, 0, 0.0), (2, 2, 1, 0.25), (None, 1, 1, 1.0)]


def test_a_prompt_without_room_is_told_before_anything_is_written(tmp_path, explorer):
    long = Question("long", "How " * 450, "1")  # 450 tokens and 80 more exceed the context of 512
    with pytest.raises(UserError, match="question long: its prompt has 450 tokens and leaves room for 62"):
        search(explorer, [long], 2, tmp_path / "s.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_another_policy_or_setting_is_refused(tmp_path, explorer, questions):
    search(explorer, questions[:2], 2, tmp_path / "s.jsonl")
    before = (tmp_path / "s.jsonl").read_bytes()
    with pytest.raises(UserError, match="k was 2, now 3"):
        search(explorer, questions[:2], 3, tmp_path / "s.jsonl")
    with pytest.raises(UserError, match="questions_sha256"):
        search(explorer, questions[1:3], 2, tmp_path / "s.jsonl")
    assert (tmp_path / "s.jsonl").read_bytes() == before
