"""Rationalization with prefix bridging: turn questions that the policy never solves into solutions without a hint.

STaR (arXiv:2203.14465) with the paper's bridge (section 3): rationales are sampled from a prompt that states the
answer; of each good one the first half becomes a prefix under the ordinary prompt, if it does not hold the answer; the
policy continues it without the hint, and what verifies is kept. So every target could have been sampled from the prompt
under which it is learned.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr_pl.cost import CostLedger
from rlvr_pl.errors import UserError
from rlvr_pl.expert_iteration.explorer import Attempt, Explorer, Wish
from rlvr_pl.expert_iteration.filter import Distinct
from rlvr_pl.expert_iteration.hidden import holds_answer, leak
from rlvr_pl.expert_iteration.records import RATIONALES, Filled, QuestionFile, Row, fill
from rlvr_pl.types import Question

RATIONALE_FATES = ("wrong", "truncated", "leak", "answer_in_prefix", "bridged")
"""What becomes of a rationale: not verified; verified but cut off at the cap; gives the hint away by a phrase; its
prefix holds the answer; its prefix was continued."""
CONTINUATION_FATES = ("wrong", "truncated", "duplicate", "solution")
"""What becomes of a continuation: not verified; cut off; the same as an earlier one of its question; kept."""


@dataclass(frozen=True)
class Bridge:
    """Settings of rationalization.

    Attributes:
        rationales: hinted samples of each question (the paper's 4).
        continuations: unhinted continuations of each prefix (the paper's 4).
        fraction: share of a rationale's tokens that become its prefix (the paper's half), rounded down.
        phrases: leak phrases, normalised.
    """

    rationales: int = 4
    continuations: int = 4
    fraction: float = 0.5
    phrases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rationales < 1 or self.continuations < 1 or not 0 < self.fraction < 1:
            raise UserError(
                f"--rationales {self.rationales} and --continuations {self.continuations} must be at least 1, and "
                f"--fraction {self.fraction} between 0 and 1"
            )

    def settings(self) -> dict[str, Any]:
        """The settings as a header holds them."""
        return {
            "rationales": self.rationales,
            "continuations": self.continuations,
            "fraction": self.fraction,
            "leak_sha256": hashlib.sha256("\n".join(self.phrases).encode()).hexdigest(),
        }

    def rows(self, rows: Sequence[Row]) -> int:
        """How many records a question has: its rationales, and the continuations of those that were bridged."""
        first = rows[: self.rationales]
        return self.rationales + self.continuations * sum(row["fate"] == "bridged" for row in first)


def unsolved(samples: Sequence[Mapping[str, Any]]) -> list[Question]:
    """The questions of sample records that no sample solved, in the order of their first sample."""
    right: Counter[str] = Counter()
    first: dict[str, Mapping[str, Any]] = {}
    for row in samples:
        right[row["uid"]] += row["correct"]
        first.setdefault(row["uid"], row)
    return [
        Question(uid, row["problem"], row["gold"], row.get("subject"), row.get("level"))
        for uid, row in first.items()
        if not right[uid]
    ]


def rationalize(
    explorer: Explorer,
    questions: Sequence[Question],
    bridge: Bridge,
    out: Path,
    progress: Callable[[int], None] | None = None,
) -> Filled:
    """Rationalize every question into `out`, or go on where an earlier call stopped.

    `progress` is told how many questions are done. Raises UserError when `out` is something else, a prompt is too long,
    or the tokenizer has no words for the hint.
    """
    plain = {q.uid: q for q in questions}
    place = {uid: i for i, uid in enumerate(plain, 1)}
    hinted = [explorer.policy.template.hinted(q) for q in questions]
    for told, question in zip(hinted, questions):
        _check_words(explorer, told, question)
    parts = list(explorer.parts(hinted, max(bridge.rationales, bridge.continuations)))
    header = explorer.header(RATIONALES, questions, hint=explorer.policy.template.hint, **bridge.settings())

    def make(part: Sequence[Question]) -> dict[str, list[Row]]:
        rows = bridge_part(explorer, part, [plain[q.uid] for q in part], bridge)
        if progress is not None:
            progress(place[part[-1].uid])
        return rows

    with QuestionFile(out, header, list(plain), bridge.rows) as file:
        return fill(file, parts, make, cost)


def bridge_part(
    explorer: Explorer, hinted: Sequence[Question], questions: Sequence[Question], bridge: Bridge
) -> dict[str, list[Row]]:
    """The records of questions that are sampled together, by uid; `hinted` are the same ones with their answer told."""
    wishes = [
        Wish(q, explorer.prompt_ids(told), ("rationale", explorer.seed, q.uid, i))
        for told, q in zip(hinted, questions)
        for i in range(bridge.rationales)
    ]
    attempts = explorer.attempt(wishes)
    cuts = [a.token_ids[: int(len(a.token_ids) * bridge.fraction)] for a in attempts]
    fates = _fates_of_rationales(explorer, attempts, cuts, bridge.phrases)
    rows: dict[str, list[Row]] = defaultdict(list)
    for n, (a, cut, fate) in enumerate(zip(attempts, cuts, fates)):
        names = {"uid": a.question.uid, "stage": "rationale", "sample": n % bridge.rationales, "fate": fate}
        rows[a.question.uid].append({**names, "prefix_length": len(cut), **a.record()})
    prefixes = [
        (a.question, n % bridge.rationales, cut)
        for n, (a, cut, fate) in enumerate(zip(attempts, cuts, fates))
        if fate == "bridged"
    ]
    for uid, row in _continue(explorer, prefixes, bridge.continuations):
        rows[uid].append(row)
    return rows


def _fates_of_rationales(
    explorer: Explorer, attempts: Sequence[Attempt], cuts: Sequence[tuple[int, ...]], phrases: Sequence[str]
) -> list[str]:
    fates = [_fate(attempt, phrases) for attempt in attempts]
    good = [i for i, fate in enumerate(fates) if fate == "bridged"]
    texts = [explorer.policy.decode(cuts[i]) for i in good]
    for i, held in zip(good, holds_answer(texts, [attempts[i].question for i in good], explorer.grader)):
        if held:
            fates[i] = "answer_in_prefix"
    return fates


def _fate(attempt: Attempt, phrases: Sequence[str]) -> str:
    """The fate of a rationale as far as its prefix has no say."""
    if not attempt.verified:
        return "wrong"
    if not attempt.ended:
        return "truncated"
    return "bridged" if leak(attempt.text, phrases) is None else "leak"


def _continue(
    explorer: Explorer, prefixes: Sequence[tuple[Question, int, tuple[int, ...]]], count: int
) -> list[tuple[str, Row]]:
    """Continue every prefix `count` times under the ordinary prompt; (uid, record) of each continuation."""
    wishes = [
        Wish(q, explorer.prompt_ids(q), ("bridge", explorer.seed, q.uid, rationale, i), prefix)
        for q, rationale, prefix in prefixes
        for i in range(count)
    ]
    seen: dict[str, Distinct] = defaultdict(Distinct)
    rows = []
    for n, attempt in enumerate(explorer.attempt(wishes)):
        question, rationale, prefix = prefixes[n // count]
        if not attempt.verified:
            fate = "wrong"
        elif not attempt.ended:
            fate = "truncated"
        else:
            fate = "solution" if seen[question.uid].add(attempt.token_ids, attempt.text) else "duplicate"
        names = {"uid": question.uid, "stage": "continuation", "rationale": rationale, "sample": n % count}
        rows.append((question.uid, {**names, "fate": fate, "prefix_length": len(prefix), **attempt.record()}))
    return rows


def cost(rows: Sequence[Row]) -> CostLedger:
    """What records of rationalization cost: completions of one prompt, or of one prefix, share its reading."""
    sampled = prefill = 0
    for row in rows:
        given = row["prefix_length"] if row["stage"] == "continuation" else 0
        sampled += row["length"] - given
        prefill += row["prompt_length"] + given if row["sample"] == 0 else 0
    return CostLedger(sampled_tokens=sampled, prefill_tokens=prefill, graded=len(rows))


def funnel(rows: Sequence[Row]) -> dict[str, Any]:
    """How many questions, rationales and continuations are left at each step; every count is the sum of those that its
    members went to.

    ``questions`` (none ever solved) -> ``with_rationale`` (a verified rationale that ended and leaks no hint) ->
    ``with_prefix`` (of these, one whose prefix hides the answer) -> ``with_solution`` (survived the hint's removal).
    """
    stages = (("rationale", RATIONALE_FATES), ("continuation", CONTINUATION_FATES))
    by_stage = {stage: dict.fromkeys(fates, 0) for stage, fates in stages}
    reached: dict[str, set[str]] = defaultdict(set)
    for row in rows:
        by_stage[row["stage"]][row["fate"]] += 1
        reached[row["fate"]].add(row["uid"])
    return {
        "questions": len({row["uid"] for row in rows}),
        "with_rationale": len(reached["answer_in_prefix"] | reached["bridged"]),
        "with_prefix": len(reached["bridged"]),
        "with_solution": len(reached["solution"]),
        "solutions": by_stage["continuation"]["solution"],
        "rationales": by_stage["rationale"],
        "continuations": by_stage["continuation"],
    }


def _check_words(explorer: Explorer, hinted: Question, question: Question) -> None:
    unknown = explorer.policy.tokenizer.unk_token_id
    if unknown is None or unknown not in explorer.prompt_ids(hinted) or unknown in explorer.prompt_ids(question):
        return
    hint = explorer.policy.template.hint
    raise UserError(f"--hint {hint[:80]!r}: holds words that the policy's tokenizer does not know; choose others")
