"""What an update asks of a sampler and a grader, and what their answers are: groups of rollouts, and continuations."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlvr_pl.grading.base import Grader, GradeRequest, ask
from rlvr_pl.records import atomic_write_text
from rlvr_pl.sampling.base import SampleRequest
from rlvr_pl.types import Branch, BranchRequest, Completion, Grade, Question, Rollout, RolloutBatch, StopReason

if TYPE_CHECKING:
    from rlvr_pl.policy import Policy


def group_requests(
    policy: Policy, questions: Sequence[Question], group_size: int, *, seed: int, update: int, attempt: int = 0
) -> list[SampleRequest]:
    """`group_size` requests for every question, group after group. Their keys name the rollout and nothing else, so
    that it depends on no other; the same question twice in one update is two occurrences."""
    requests: list[SampleRequest] = []
    seen: Counter[str] = Counter()
    for question in questions:
        prompt = policy.prompt_ids(question)
        occurrence = seen[question.uid]
        seen[question.uid] += 1
        for sample in range(group_size):
            key = ("rollout", seed, update, attempt, question.uid, occurrence, sample)
            requests.append(SampleRequest(prompt, key))
    return requests


def branch_requests(
    batch: RolloutBatch, wishes: Sequence[BranchRequest], *, seed: int, cap: int
) -> list[SampleRequest]:
    """The requests of every wish, one after another: the prompt is that of the rollout and its first tokens, the cap
    what they leave of `cap`."""
    requests: list[SampleRequest] = []
    for wish in wishes:
        head = tuple(batch.token_ids[wish.row, : wish.position].tolist())
        group = wish.row // batch.group_size
        earlier = batch.uids[: group * batch.group_size : batch.group_size].count(batch.uids[wish.row])
        rollout = (batch.uids[wish.row], earlier, batch.samples[wish.row])
        for k in range(wish.count):
            key = ("branch", seed, batch.update, *rollout, wish.position, k)
            requests.append(SampleRequest(batch.prompt_ids[wish.row] + head, key, cap - wish.position))
    return requests


def graded(
    policy: Policy,
    grader: Grader,
    questions: Sequence[Question],
    completions: Sequence[Completion],
    *,
    require_box: bool,
    heads: Sequence[tuple[int, ...]] | None = None,
) -> list[tuple[str, Grade]]:
    """Text and grade of every completion. `heads` are tokens that came before it and belong to the answer."""
    render = policy.template.render
    requests = []
    for i, (question, completion) in enumerate(zip(questions, completions, strict=True)):
        ids = heads[i] + completion.token_ids if heads is not None else completion.token_ids
        cut = completion.stop_reason is StopReason.LENGTH
        requests.append(GradeRequest(policy.decode(ids), question, render(question), ids, cut))
    grades = ask(grader, requests, require_box=require_box)
    return [(request.response, grade) for request, grade in zip(requests, grades)]


def branches(wishes: Sequence[BranchRequest], found: Sequence[tuple[Completion, Grade]]) -> tuple[Branch, ...]:
    """The answer to every wish, from the continuations of all in order."""
    answers: list[Branch] = []
    done = 0
    for wish in wishes:
        part = found[done : done + wish.count]
        done += wish.count
        rewards = tuple(grade.reward for _, grade in part)
        truncated = tuple(completion.stop_reason is StopReason.LENGTH for completion, _ in part)
        answers.append(Branch(wish, rewards, truncated, sum(len(c.token_ids) for c, _ in part)))
    return tuple(answers)


def is_uniform(group: Sequence[Rollout]) -> bool:
    """Whether no two scorable rewards of the group differ."""
    return len({r.grade.reward for r in group if not math.isnan(r.grade.reward)}) <= 1


def save_evidence(path: Path, rollouts: Sequence[Rollout]) -> None:
    """Write rollouts with their token ids, one JSON line each, so that what happened can be computed again."""
    rows = [
        {
            "uid": r.uid,
            "sample": r.sample,
            "reward": r.grade.reward if math.isfinite(r.grade.reward) else None,
            "stop_reason": r.completion.stop_reason.value,
            "prompt_ids": r.prompt_ids,
            "token_ids": r.completion.token_ids,
            "text": r.text,
        }
        for r in rollouts
    ]
    atomic_write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
