"""The official greedy evaluator: the same code in `rlvr-pl evaluate` and in the validation inside `fit`.

Greedy outcomes depend on the generation batch (padding and reduction order flip near-ties: 8% of items in the paper,
section 4.2), so the batch size is fixed and travels in the header of every item file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr_pl.grading.base import Grader, GradeRequest, ask
from rlvr_pl.records import atomic_write_text
from rlvr_pl.sampling.base import Decoding, Sampler, SampleRequest
from rlvr_pl.types import GradeStatus, Question, StopReason

if TYPE_CHECKING:
    from rlvr_pl.policy import Policy

ITEMS_VERSION = 1


def evaluate_batch(
    policy: Policy, sampler: Sampler, grader: Grader, questions: Sequence[Question], decoding: Decoding
) -> list[dict[str, Any]]:
    """Answer one batch of questions greedily and grade it (last number, then full text, where there is no box).

    Returns item records: ``{uid, subject, level, correct, answer, length, stop_reason, boxed, status}``. The sampler
    must already hold the policy's weights.
    """
    prompts = [policy.prompt_ids(q) for q in questions]
    completions = sampler.generate([SampleRequest(p) for p in prompts], decoding.greedy())
    texts = [policy.decode(c.token_ids) for c in completions]
    requests = [
        GradeRequest(text, q, policy.template.render(q), c.token_ids, c.stop_reason is StopReason.LENGTH)
        for text, q, c in zip(texts, questions, completions)
    ]
    grades = ask(grader, requests, require_box=False)
    return [
        {
            "uid": q.uid,
            "subject": q.subject,
            "level": q.level,
            "correct": int(g.status is GradeStatus.CORRECT),
            "answer": g.answer,
            "length": len(c.token_ids),
            "stop_reason": c.stop_reason.value,
            "boxed": int(g.boxed),
            "status": g.status.value,
        }
        for q, c, g in zip(questions, completions, grades)
    ]


def evaluate_questions(
    policy: Policy,
    sampler: Sampler,
    grader: Grader,
    questions: Sequence[Question],
    decoding: Decoding,
    *,
    batch_size: int = 64,
    progress: Callable[[int], None] | None = None,
) -> list[dict[str, Any]]:
    """`evaluate_batch` over fixed-size batches in the order of `questions`; `progress` is told how many are done."""
    sampler.sync(policy)
    items: list[dict[str, Any]] = []
    for start in range(0, len(questions), batch_size):
        items += evaluate_batch(policy, sampler, grader, questions[start : start + batch_size], decoding)
        if progress is not None:
            progress(len(items))
    return items


def header(
    *, sampler: Sampler, grader: Grader, batch_size: int, decoding: Decoding, checkpoint: str, sha256: str
) -> dict[str, Any]:
    """The first line of an item file: everything that item outcomes depend on besides the questions."""
    return {
        "record": "items",
        "version": ITEMS_VERSION,
        "engine": sampler.engine,
        "grader": grader.described,
        "batch_size": batch_size,
        "max_new_tokens": decoding.max_new_tokens,
        "checkpoint": checkpoint,
        "checkpoint_sha256": sha256,
    }


def summarize(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """``n``, ``correct``, ``accuracy``, ``boxed``, ``truncated`` (shares of n) and ``mean_length`` (tokens)."""
    n = max(1, len(items))
    return {
        "n": len(items),
        "correct": sum(i["correct"] for i in items),
        "accuracy": sum(i["correct"] for i in items) / n,
        "boxed": sum(i["boxed"] for i in items) / n,
        "truncated": sum(i["stop_reason"] == StopReason.LENGTH.value for i in items) / n,
        "mean_length": sum(i["length"] for i in items) / n,
    }


def write_items(path: Path, head: dict[str, Any], items: Sequence[dict[str, Any]]) -> None:
    """Write header and items as JSON lines, atomically."""
    rows = [head, *items]
    atomic_write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
