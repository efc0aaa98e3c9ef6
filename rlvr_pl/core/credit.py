"""Credit for single decisions: forks in a group's tree of completions, and transforms of their credits.

A node u is a completion prefix; N(u) are the group's rollouts that have the prefix u and act there, n = |N(u)|. A fork
is a node with n >= 2 and at least two distinct next tokens. V(u) is the mean reward over N(u), Q(u, c) over those that
take c, and the credit of taking c is ``n/(n-1) (Q - V)``: the mean, over the rollouts that take c, of their own reward
minus the leave-one-out mean at u. Credits of one fork sum to zero over its rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlvr_pl.core.choices import check_choice
from rlvr_pl.core.keyed import generator

Credit = Literal["raw", "rankc", "srank", "sign", "uniform", "shuffled", "shuffled_rankc"]

_ENDED = -1  # stands where a shorter rollout has no token


@dataclass(frozen=True, slots=True)
class ForkInstance:
    """One rollout at one fork: it acts at 0-based `position`; n, V, Q and the credit as in the module's text."""

    rollout: int
    position: int
    n: int
    n_child: int
    value: float
    q: float
    credit: float


def tree_credit(token_ids: Sequence[Sequence[int]], rewards: Sequence[float]) -> list[ForkInstance]:
    """The fork instances of one group, by rollout, then position.

    Args:
        token_ids: G sampled completions (EOS included), never re-encoded text.
        rewards: [G]; a rollout with a NaN reward takes no part.

    Raises ValueError for fewer than two rollouts. The work is proportional to the forks, not to the tokens.

    Example:
        >>> [(f.rollout, f.position, f.credit) for f in tree_credit([[5, 7, 1], [5, 8, 1]], [1.0, 0.0])]
        [(0, 1, 1.0), (1, 1, -1.0)]
    """
    if len(token_ids) < 2:
        raise ValueError(f"a tree of {len(token_ids)} rollout has no forks: group_size must be at least 2")
    if len(token_ids) != len(rewards):
        raise ValueError(f"{len(token_ids)} completions but {len(rewards)} rewards")
    found = []
    for depth, rows, children in _forks(token_ids, [i for i, r in enumerate(rewards) if not math.isnan(r)]):
        n, value = len(rows), sum(rewards[i] for i in rows) / len(rows)
        for child in children:
            q = sum(rewards[i] for i in child) / len(child)
            credit = n / (n - 1) * (q - value)
            found += [ForkInstance(i, depth, n, len(child), value, q, credit) for i in child]
    return sorted(found, key=lambda f: (f.rollout, f.position))


def suffix_credit(token_ids: Sequence[Sequence[int]], rewards: Sequence[float]) -> list[np.ndarray]:
    """For each rollout its tokens' ``r_i - b_t``: b_t is the leave-one-out mean at the deepest prefix of the tokens
    before t that another rollout shares. Exactly unbiased. Rollouts with a NaN reward get zeros.

    Arguments and errors as for `tree_credit`; a rollout whose group has no other scorable one gets zeros.
    """
    if len(token_ids) < 2:
        raise ValueError(f"a tree of {len(token_ids)} rollout has no baseline: group_size must be at least 2")
    scored = [i for i, r in enumerate(rewards) if not math.isnan(r)]
    credit = [np.zeros(len(ids)) for ids in token_ids]
    for depth, rows in _shared_nodes(token_ids, scored):
        total = sum(rewards[i] for i in rows)
        for i in rows:
            credit[i][depth:] = rewards[i] - (total - rewards[i]) / (len(rows) - 1)
    return credit


def segment_credit(
    length: int, positions: Sequence[int], values: Sequence[float], baseline: float, reward: float
) -> np.ndarray:
    """[length] credit that telescopes over the segments between forks: ``V(t1) - baseline`` before the first fork,
    ``V(t2) - V(t1)`` from it on, ..., ``reward - V(tF)`` from the last on. Over segments it sums to reward - baseline.

    `positions` rise; `values` are V at the prefixes before them.
    """
    steps = np.diff([baseline, *values, reward])
    return np.repeat(steps, np.diff([0, *positions, length]))


def entropy_forks(entropy: Sequence[float], threshold: float, *, gap: int = 16, limit: int = 1) -> list[int]:
    """Positions at which to branch, scanning left to right: entropy at least `threshold`, at least `gap` after the
    last accepted one, at most `limit`. Each choice depends on the tokens before it alone, which keeps credit unbiased.
    """
    chosen: list[int] = []
    for t in np.flatnonzero(np.asarray(entropy) >= threshold).tolist():
        if len(chosen) == limit:
            break
        if not chosen or t - chosen[-1] >= gap:
            chosen.append(t)
    return chosen


def transform_credit(
    credit: Sequence[float], kind: Credit, *, seed: int = 0, update: int = 0, group: str | None = None
) -> list[float]:
    """Transform the credits of the active instances, given in (uid, sample, position) order, zeros included.

    Args:
        kind: "raw" as given; "rankc" centred mid-ranks ``(rank - 1)/(n - 1) - 1/2`` in [-1/2, 1/2], zero-sum (neither
            sign-preserving nor unbiased); "srank" ``sgn(C) midrank(|C|)/m`` over the m nonzero ones; "sign"
            ``sgn(C) mean|C|``; "uniform" the mean everywhere; "shuffled" the centred credits in one uniform
            permutation; "shuffled_rankc" the centred ranks in that permutation. Ranks are of credits rounded to 12
            decimals, so that rounding noise makes no order.
        seed, update: name the permutation, with `group` where each group is shuffled by itself.

    Example:
        >>> transform_credit([0.2, -3.0, 0.7], "rankc")
        [0.0, -0.5, 0.5]
    """
    check_choice("credit", kind, Credit)
    values = np.asarray(credit, dtype=np.float64)
    if len(values) == 0:
        return []
    if kind == "rankc":
        values = _centred_ranks(values)
    elif kind == "srank":
        values = _signed_ranks(values)
    elif kind == "sign":
        values = np.sign(values.round(12)) * np.abs(values).mean()
    elif kind == "uniform":
        values = np.full_like(values, values.mean())
    elif kind == "shuffled":
        values = (values - values.mean())[permutation(len(values), seed, update, group)]
    elif kind == "shuffled_rankc":
        values = _centred_ranks(values)[permutation(len(values), seed, update, group)]
    return values.tolist()


def permutation(n: int, seed: int, update: int, group: str | None = None) -> np.ndarray:
    """The uniform permutation of n instances that `transform_credit` uses: a pure function of its arguments."""
    key = ("fork-credit", seed, update) if group is None else ("fork-credit", seed, update, group)
    return generator(*key).permutation(n)


def mid_ranks(values: np.ndarray) -> np.ndarray:
    """1-based ranks, ties sharing their mean rank, of values rounded to 12 decimals."""
    _, inverse, count = np.unique(values.round(12) + 0.0, return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count - 1) / 2)[inverse]


def _centred_ranks(values: np.ndarray) -> np.ndarray:
    if len(values) < 2:
        return np.zeros_like(values)
    return (mid_ranks(values) - 1) / (len(values) - 1) - 0.5


def _signed_ranks(values: np.ndarray) -> np.ndarray:
    sign = np.sign(values.round(12))
    nonzero = sign != 0
    ranks = np.zeros_like(values)
    if nonzero.any():
        ranks[nonzero] = mid_ranks(np.abs(values[nonzero])) / nonzero.sum()
    return sign * ranks


def _padded(token_ids: Sequence[Sequence[int]]) -> np.ndarray:
    """[G, longest + 1] ids, `_ENDED` after the last of each."""
    table = np.full((len(token_ids), max(map(len, token_ids)) + 1), _ENDED, dtype=np.int64)
    for row, ids in zip(table, token_ids):
        row[: len(ids)] = ids
    return table


def _branchings(token_ids: Sequence[Sequence[int]], rows: list[int]) -> Iterator[tuple[int, int, dict[int, list[int]]]]:
    """Nodes where two or more rows part, some of which may end: (depth of the first node that this very set shares,
    depth where they part, rows by next token). Jumps over the stretch on which all agree."""
    table = _padded(token_ids)
    open_nodes = [(0, rows)]
    while open_nodes:
        start, members = open_nodes.pop()
        if len(members) < 2:
            continue
        block = table[members, start:]
        parted = (block != block[0]).any(0)
        # Without a difference all of them end together, one past their last token.
        depth = start + int(parted.argmax() if parted.any() else (block[0] == _ENDED).argmax())
        children: dict[int, list[int]] = {}
        for i, token in zip(members, table[members, depth].tolist()):
            children.setdefault(token, []).append(i)
        yield start, depth, children
        open_nodes += [(depth + 1, child) for token, child in children.items() if token != _ENDED]


def _forks(token_ids: Sequence[Sequence[int]], rows: list[int]) -> Iterator[tuple[int, list[int], list[list[int]]]]:
    for _, depth, children in _branchings(token_ids, rows):
        acting = [child for token, child in children.items() if token != _ENDED]
        if len(acting) >= 2:
            yield depth, [i for child in acting for i in child], acting


def _shared_nodes(token_ids: Sequence[Sequence[int]], rows: list[int]) -> Iterator[tuple[int, list[int]]]:
    """Nodes at which at least two rows act, shallow before deep on each path; one per stretch with the same rows."""
    for start, depth, children in _branchings(token_ids, rows):
        members = [i for child in children.values() for i in child]
        if start < depth:
            yield start, members
        acting = [i for token, child in children.items() if token != _ENDED for i in child]
        if len(acting) >= 2:
            yield depth, acting
