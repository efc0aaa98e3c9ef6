"""Search: k graded samples of each question, recorded question by question."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlvr_pl.cost import CostLedger
from rlvr_pl.expert_iteration.explorer import Explorer, Wish
from rlvr_pl.expert_iteration.records import SAMPLES, Filled, QuestionFile, Row, fill
from rlvr_pl.types import Question


def search(
    explorer: Explorer,
    questions: Sequence[Question],
    k: int,
    out: Path,
    progress: Callable[[int], None] | None = None,
) -> Filled:
    """Sample every question k times into `out`, or go on where an earlier call stopped.

    Sample i of a question is named by ("search", seed, uid, i): it is the same in every pool, order and shard.

    Args:
        progress: told how many samples there are so far, those of earlier calls included.

    Raises:
        UserError: `out` exists and is something else, or was made with other settings; a prompt that is too long.
    """
    parts = list(explorer.parts(questions, k))
    header = explorer.header(SAMPLES, questions, k=k)

    def make(part: Sequence[Question]) -> dict[str, list[Row]]:
        before = len(file.rows)

        def tell(done: int) -> None:
            if progress is not None:
                progress(before + done)

        return sample_part(explorer, part, k, tell)

    with QuestionFile(out, header, [q.uid for q in questions], lambda rows: k) as file:
        return fill(file, parts, make, cost)


def sample_part(
    explorer: Explorer, questions: Sequence[Question], k: int, progress: Callable[[int], None] | None = None
) -> dict[str, list[Row]]:
    """The sample records of questions that are sampled together, by uid."""
    wishes = [
        Wish(q, explorer.prompt_ids(q), ("search", explorer.seed, q.uid, sample))
        for q in questions
        for sample in range(k)
    ]
    attempts = explorer.attempt(wishes, progress)
    return {
        q.uid: [
            {"uid": q.uid, "sample": sample, **attempts[i * k + sample].record()}  # one dict a sample
            for sample in range(k)
        ]
        for i, q in enumerate(questions)
    }


def cost(rows: Sequence[Row]) -> CostLedger:
    """What sample records cost: the k samples of a question share one reading of its prompt."""
    return CostLedger(
        sampled_tokens=sum(row["length"] for row in rows),
        prefill_tokens=sum(row["prompt_length"] for row in rows if row["sample"] == 0),
        graded=len(rows),
    )


def yields(rows: Sequence[Mapping[str, Any]], column: str) -> list[tuple[Any, int, int, float]]:
    """(value, questions, solved ones, share of correct samples) for each value of `column`, in order."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row[column], []).append(row)
    return [
        (
            value,
            len({row["uid"] for row in groups[value]}),
            len(solved(groups[value])),
            sum(row["correct"] for row in groups[value]) / len(groups[value]),
        )
        for value in sorted(groups, key=lambda v: (v is None, v))
    ]


def solved(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """The uids with at least one correct sample."""
    return {row["uid"] for row in rows if row["correct"]}
