"""Cutting a pool into validation, training order, panels and fixed contexts (paper section 3), from one seed.

What is drawn depends on the questions and the seed, not on the order of the pool's rows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from rlvr_pl.data.pools import listed
from rlvr_pl.errors import UserError
from rlvr_pl.sampling.base import uniforms
from rlvr_pl.types import Question

# Places in the training order, end excluded, that the paper gives to each use.
SLICES = {
    "trained320": (0, 320),  # every continuation method trained on these
    "drift64": (1000, 1064),  # contexts of the drift monitor, never trained on
    "entropy_grad_1": (7464, 7528),  # fresh questions of the entropy-gradient measurement
    "entropy_grad_2": (7528, 7592),
}


@dataclass(frozen=True)
class Splits:
    """The parts of a pool.

    Attributes:
        validation: held-out questions, in pool order.
        order: training questions in their fixed order.
        slices: the parts of `order` named by `SLICES`, those that the order is long enough for.
        panel: the coverage panel, a part of the validation questions.
        excluded: uids left out of both because another run has used them.
        twins: uids left out of the order because a validation question has the same text.
    """

    validation: tuple[Question, ...]
    order: tuple[Question, ...]
    slices: Mapping[str, tuple[Question, ...]]
    panel: tuple[Question, ...]
    excluded: tuple[str, ...]
    twins: tuple[str, ...]


def make_splits(
    pool: Sequence[Question],
    *,
    seed: int = 11,
    per_subject: int = 50,
    panel_per_subject: int = 10,
    exclude: Collection[str] = (),
    validation: Collection[str] | None = None,
) -> Splits:
    """Cut `pool`.

    Args:
        pool: questions with distinct uids.
        seed: names every draw.
        per_subject: validation questions of each subject, spread over its levels in proportion.
        panel_per_subject: validation questions of each subject that form the coverage panel.
        exclude: uids to leave out of validation and training order, such as those of the run that made the start.
        validation: uids of a validation split to keep, instead of drawing one.

    Raises:
        UserError: unknown uids, overlapping parts, or a subject with too few questions.
    """
    by_uid = {q.uid: q for q in pool}
    _refuse_unknown("--exclude", exclude, by_uid)
    excluded = set(exclude)
    free = [q for q in pool if q.uid not in excluded]
    if validation is None:
        held_out = _per_subject(free, per_subject, (seed, "validation"))
    else:
        _refuse_unknown("--validation", validation, by_uid)
        held_out = set(validation)
    chosen = [q for q in pool if q.uid in held_out]
    texts = {_plain(q.problem) for q in chosen}
    others = [q for q in free if q.uid not in held_out]
    twins = [q.uid for q in others if _plain(q.problem) in texts]
    order = _shuffled([q for q in others if q.uid not in set(twins)], (seed, "order"))
    slices = {name: tuple(order[a:b]) for name, (a, b) in SLICES.items() if b <= len(order)}
    panel = _per_subject(chosen, panel_per_subject, (seed, "panel"))
    require_disjoint({"validation": held_out, "--exclude": excluded, "training order": [q.uid for q in order]})
    require_disjoint({name: [q.uid for q in part] for name, part in slices.items()})
    return Splits(
        validation=tuple(chosen),
        order=tuple(order),
        slices=slices,
        panel=tuple(q for q in chosen if q.uid in panel),
        excluded=tuple(q.uid for q in pool if q.uid in excluded),
        twins=tuple(twins),
    )


def require_disjoint(parts: Mapping[str, Iterable[str]]) -> None:
    """UserError, naming both parts and the uids, when two of them share a uid."""
    owner: dict[str, str] = {}
    shared: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, uids in parts.items():
        for uid in uids:
            if owner.setdefault(uid, name) != name:
                shared[owner[uid], name].append(uid)
    for (first, second), uids in shared.items():
        raise UserError(f"{first} and {second} overlap in {len(uids)} questions: {listed(sorted(uids))}")


def stratified(questions: Sequence[Question], count: int, key: tuple[int | str, ...]) -> list[Question]:
    """`count` of `questions`, spread over levels in proportion to their sizes (largest remainders), drawn by `key`."""
    sizes = Counter(q.level for q in questions)
    levels = sorted(sizes, key=lambda level: (level is None, level or 0))
    shares = {level: Fraction(sizes[level] * count, len(questions)) for level in levels}
    quota = {level: int(share) for level, share in shares.items()}
    by_remainder = sorted(levels, key=lambda level: quota[level] - shares[level])
    for level in by_remainder[: count - sum(quota.values())]:
        quota[level] += 1
    return [
        q
        for level in levels
        for q in _shuffled([q for q in questions if q.level == level], (*key, str(level)))[: quota[level]]
    ]


def _per_subject(questions: Sequence[Question], count: int, key: tuple[int | str, ...]) -> set[str]:
    subjects: dict[str | None, list[Question]] = defaultdict(list)
    for q in questions:
        subjects[q.subject].append(q)
    chosen: set[str] = set()
    for subject, mine in subjects.items():
        if len(mine) < count:
            raise UserError(f"subject {subject}: {len(mine)} questions, but {count} were asked for; ask for fewer")
        chosen.update(q.uid for q in stratified(mine, count, (*key, str(subject))))
    return chosen


def _shuffled(questions: Sequence[Question], key: tuple[int | str, ...]) -> list[Question]:
    by_name = sorted(questions, key=lambda q: q.uid)
    return [by_name[i] for i in np.argsort(uniforms(("splits", *key), len(by_name)), kind="stable")]


def _plain(problem: str) -> str:
    """The text without spaces and case: the MATH pool holds pairs that differ in nothing else."""
    return "".join(problem.split()).casefold()


def _refuse_unknown(option: str, uids: Iterable[str], by_uid: Mapping[str, Question]) -> None:
    if absent := [uid for uid in uids if uid not in by_uid]:
        raise UserError(f"{option}: {len(absent)} uids are not in the pool: {listed(absent)}")
