"""Stored solutions as the data of a run: epochs, partial batches, what is refused."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from rlvr_pl.data.solutions import SolutionData, SolutionSchedule
from rlvr_pl.errors import UserError
from rlvr_pl.expert_iteration.files import Found, write_solutions
from rlvr_pl.expert_iteration.filter import Solution
from rlvr_pl.expert_iteration.records import tokenizer_sha256
from rlvr_pl.objectives import ExpertIterationSFT
from rlvr_pl.policy import load_policy
from rlvr_pl.types import Question, build_batch


@pytest.fixture(scope="module")
def policy():
    torch.set_num_threads(1)
    return load_policy("embedded:start")


def solution(i: int, length: int = 3, end: int = 1) -> Solution:
    question = Question(f"q{i}", "How many tickets from 04:15 forward to 05:45 by 45min?", "2")
    return Solution(question, (*range(20, 20 + length - 1), end), f"text {i}", "search")


def test_each_epoch_has_every_solution_once_and_an_order_of_its_own():
    schedule = SolutionSchedule([solution(i) for i in range(37)], 16, seed=5)
    assert schedule.per_epoch == 3
    sizes = [len(schedule.batch(update)) for update in range(1, 7)]
    assert sizes == [16, 16, 5, 16, 16, 5]
    epochs = [[s.question.uid for u in range(3 * e + 1, 3 * e + 4) for s in schedule.batch(u)] for e in range(2)]
    assert Counter(epochs[0]) == Counter(epochs[1]) == Counter({f"q{i}": 1 for i in range(37)})
    assert epochs[0] != epochs[1]
    assert epochs[0] == [s.question.uid for u in (1, 2, 3) for s in schedule.batch(u)]


def test_the_order_is_the_seeds():
    solutions = [solution(i) for i in range(37)]
    one, other = (SolutionSchedule(solutions, 16, seed=seed) for seed in (5, 6))
    assert one.batch(1) != other.batch(1)
    assert one.sha256 != other.sha256
    assert one.sha256 == SolutionSchedule(solutions, 16, seed=5).sha256
    assert one.sha256 != SolutionSchedule(solutions[::-1], 16, seed=5).sha256


def test_a_partial_update_has_the_mean_of_its_own_tokens(policy):
    schedule = SolutionSchedule([solution(i, length=2 + i) for i in range(5)], 3, seed=0)
    for update, size in ((1, 3), (2, 2)):
        rows = [s.rollout(policy, i) for i, s in enumerate(schedule.batch(update))]
        batch = build_batch(rows, 1)
        weights = ExpertIterationSFT().token_weights(batch)
        tokens = sum(len(r.completion.token_ids) for r in rows)
        assert len(batch) == size and int(batch.mask.sum()) == tokens
        # one weight for every token of the update, which sum to 1 up to float64 rounding
        torch.testing.assert_close(weights[batch.mask], torch.full((tokens,), 1 / tokens, dtype=weights.dtype))


def write(path, policy, solutions, tokenizer: str | None = None, drawn_by: str | None = None) -> str:
    found = Found(solutions, {tokenizer or tokenizer_sha256(policy.tokenizer)}, {drawn_by or policy.sha256}, None)
    write_solutions(path, found)
    return str(path)


def test_the_plan_is_as_long_as_its_epochs(tmp_path, policy):
    path = write(tmp_path / "s.jsonl", policy, [solution(i) for i in range(20)])
    data = SolutionData([path], None, epochs=3, solutions_per_update=8)
    assert data.updates == 3 * 3
    assert len(data.train_dataloader()) == 9
    data.check(policy)


def test_solutions_of_another_policy_are_told(tmp_path, policy, capsys):
    for drawn_by, told in ((policy.sha256, False), ("another", True)):
        SolutionData([write(tmp_path / "s.jsonl", policy, [solution(0)], drawn_by=drawn_by)], None).check(policy)
        assert ("no solution was drawn from embedded:start itself" in capsys.readouterr().err) == told


def test_what_a_policy_cannot_learn_is_refused(tmp_path, policy):
    other = write(tmp_path / "other.jsonl", policy, [solution(0)], tokenizer="another")
    open_ended = write(tmp_path / "open.jsonl", policy, [solution(0, end=25)])
    long = write(tmp_path / "long.jsonl", policy, [solution(0, length=510)])
    for path, told in (
        (other, "another tokenizer"),
        (open_ended, "does not end with an end-of-sequence token"),
        (long, "exceed the context of 512"),
    ):
        with pytest.raises(UserError, match=told):
            SolutionData([path], None).check(policy)


def test_settings_that_cannot_be(tmp_path, policy):
    path = write(tmp_path / "s.jsonl", policy, [solution(0)])
    wrong = json.dumps({"record": "samples", "version": 1, "tokenizer_sha256": "t"}) + "\n"
    row = {"uid": "q", "sample": 0, "problem": "p", "gold": "1", "correct": 0, "stop_reason": "eos"}
    (tmp_path / "none.jsonl").write_text(wrong + json.dumps({**row, "token_ids": [1], "text": ""}) + "\n")
    for arguments, told in (
        ({"solutions": []}, "name at least one"),
        ({"solutions": [path], "epochs": 0}, "epochs"),
        ({"solutions": [path], "solutions_per_update": 0}, "solutions_per_update"),
        ({"solutions": [str(tmp_path / "none.jsonl")]}, "no sample of"),
        ({"solutions": [str(tmp_path / "absent.jsonl")]}, "absent.jsonl"),
    ):
        with pytest.raises(UserError, match=told):
            SolutionData(**{"validation": None, **arguments})
