"""Statistics of the rollouts of one update or of a window of updates, from a handful of facts about each rollout.

An update is first reduced to a `tally`: plain sums, so that a window is the sum of its updates' tallies and not a mean
of their ratios. `figures` turns tallies into the shares, means and ratios of the paper's section 4.3 and Table 4. The
same functions serve a running job and the records of a finished one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

EPS = 1e-4  # of the plain advantage: (r - mean) / (std + 1e-4), std with n - 1, as supplied

Figure = float | None


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    """What the statistics need to know of one rollout.

    Attributes:
        group: number of its group within the update.
        reward: NaN if it could not be scored.
        correct: whether its answer was graded correct.
        length: completion tokens, EOS included.
        truncated: whether it hit the cap.
        rollout_class: "eos", "truncated", "loop" or "soup".
        detector: which detector called it a loop or soup.
        m_plus, m_minus: sums of the positive and of the negative token weights' magnitudes that the objective gave
            it; None where the weights are not known.
    """

    group: int
    reward: float
    correct: bool
    length: int
    truncated: bool
    rollout_class: str
    detector: str | None = None
    m_plus: float | None = None
    m_minus: float | None = None


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the optimizer did in one update: gradient norm before clipping (0: no gradient), whether it was clipped,
    share of the weights that changed."""

    grad_norm: float
    clipped: bool
    changed_share: float


def plain_advantages(facts: Sequence[RolloutFacts]) -> list[float]:
    """The supplied advantage of each rollout, whatever the objective's own: 0 in uniform groups and without a score."""
    groups: dict[int, list[int]] = {}
    for i, fact in enumerate(facts):
        if math.isfinite(fact.reward):
            groups.setdefault(fact.group, []).append(i)
    advantages = [0.0] * len(facts)
    for rows in groups.values():
        rewards = [facts[i].reward for i in rows]
        if min(rewards) == max(rewards):
            continue
        mean = math.fsum(rewards) / len(rewards)
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in rewards) / (len(rewards) - 1))
        for i, reward in zip(rows, rewards):
            advantages[i] = (reward - mean) / (std + EPS)
    return advantages


def tally(facts: Sequence[RolloutFacts]) -> dict[str, float]:
    """The sums of one update. Sums of tallies are tallies."""
    sums: dict[str, float] = dict.fromkeys(_SUMS, 0.0)

    def add(name: str, value: float = 1.0) -> None:
        sums[name] += value

    advantages = plain_advantages(facts)
    mixed = {fact.group for fact, a in zip(facts, advantages) if a}
    add("groups", len({fact.group for fact in facts}))
    add("mixed_groups", len(mixed))
    for fact, advantage in zip(facts, advantages):
        add("rollouts")
        add("tokens", fact.length)
        add(fact.rollout_class)
        add("cut", fact.truncated)
        add("correct", fact.correct)
        if math.isfinite(fact.reward):
            add("scored")
            add("reward", fact.reward)
        if fact.detector == "surprise":
            add("soup_by_surprise")
        kinds = ["correct" if fact.correct else "wrong"] + ["truncated"] * fact.truncated
        for kind in kinds:
            for scope in ("all", "mixed") if fact.group in mixed else ("all",):
                add(f"{scope}_{kind}")
                add(f"{scope}_{kind}_tokens", fact.length)
        sign = "minus" if advantage < 0 else "plus"
        mass = abs(advantage) * fact.length
        add(f"plain_{sign}", mass)
        if sign == "minus" and fact.truncated:
            add("plain_minus_cut", mass)
        if fact.m_plus is None or fact.m_minus is None:
            add("unweighted")
            add(f"sequence_{sign}", abs(advantage))
            continue
        add("own_plus", fact.m_plus)
        add("own_minus", fact.m_minus)
        if fact.truncated:
            add("own_minus_cut", fact.m_minus)
        if fact.m_plus or fact.m_minus:
            add(f"sequence_{sign}", abs(advantage))
    return sums


def figures(tallies: Sequence[Mapping[str, float]], steps: Sequence[StepFacts] = ()) -> dict[str, Figure]:
    """What a person reads of some updates together; None where a figure is not defined (no such rollout, no gradient).

    Shares are of all rollouts unless the name says otherwise:

    ``reward`` (mean over scored rollouts), ``accuracy``, ``eos``, ``truncation`` (all that hit the cap), ``loop``,
    ``soup``, ``soup_of_truncated``, ``soup_by_surprise`` (soup that only the surprise detector saw);
    ``length`` and ``length_correct``, ``length_wrong`` (truncated ones included), ``length_truncated`` in tokens, and
    the same as ``mixed_length_*`` over groups whose rewards differ;
    ``m_plus``, ``m_minus``, ``m_ratio`` (M-/M+) of the objective's own token weights, ``m_truncated`` (truncated
    rollouts' share of M-); ``plain_*`` the same of the plain advantages, M = sum |A| |o|;
    ``sequence_ratio`` (sum |A| over negative rollouts over that over positive ones, of those that carry any weight);
    ``uniform_groups`` (share of groups whose rewards are all equal);
    ``grad_norm_median``, ``grad_norm_p5``, ``grad_norm_p95`` before clipping, over the ``nonzero`` updates with a
    gradient, of which ``clipped`` were clipped; ``changed_share`` (mean share of weights that an update changed).
    """
    s = {name: math.fsum(t[name] for t in tallies) for name in _SUMS}
    own = s["unweighted"] == 0
    lengths = {
        f"{prefix}length_{kind}": _ratio(s[f"{scope}_{kind}_tokens"], s[f"{scope}_{kind}"])
        for scope, prefix in (("all", ""), ("mixed", "mixed_"))
        for kind in ("correct", "wrong", "truncated")
    }
    norms = sorted(step.grad_norm for step in steps if step.grad_norm > 0)
    low, median, high = (_percentile(norms, q) if norms else None for q in (5, 50, 95))
    return {
        "rollouts": s["rollouts"],
        "reward": _ratio(s["reward"], s["scored"]),
        "accuracy": _ratio(s["correct"], s["rollouts"]),
        "eos": _ratio(s["eos"], s["rollouts"]),
        "truncation": _ratio(s["cut"], s["rollouts"]),
        "loop": _ratio(s["loop"], s["rollouts"]),
        "soup": _ratio(s["soup"], s["rollouts"]),
        "soup_of_truncated": _ratio(s["soup"], s["cut"]),
        "soup_by_surprise": _ratio(s["soup_by_surprise"], s["rollouts"]),
        "length": _ratio(s["tokens"], s["rollouts"]),
        **lengths,
        "m_plus": s["own_plus"] if own else None,
        "m_minus": s["own_minus"] if own else None,
        "m_ratio": _ratio(s["own_minus"], s["own_plus"]) if own else None,
        "m_truncated": _ratio(s["own_minus_cut"], s["own_minus"]) if own else None,
        "plain_m_plus": s["plain_plus"],
        "plain_m_minus": s["plain_minus"],
        "plain_m_ratio": _ratio(s["plain_minus"], s["plain_plus"]),
        "plain_m_truncated": _ratio(s["plain_minus_cut"], s["plain_minus"]),
        "sequence_ratio": _ratio(s["sequence_minus"], s["sequence_plus"]),
        "uniform_groups": _ratio(s["groups"] - s["mixed_groups"], s["groups"]),
        "grad_norm_median": median,
        "grad_norm_p5": low,
        "grad_norm_p95": high,
        "nonzero": len(norms) if steps else None,
        "clipped": sum(step.clipped for step in steps) if steps else None,
        "changed_share": _ratio(math.fsum(step.changed_share for step in steps), len(steps)),
    }


def _percentile(ordered: Sequence[float], q: float) -> float:
    """The q-th percentile, linear between neighbours. (NumPy's costs more than all the other figures of an update.)"""
    below, between = divmod((len(ordered) - 1) * q, 100)
    low, high = ordered[int(below)], ordered[min(int(below) + 1, len(ordered) - 1)]
    return low + (high - low) * between / 100


def _ratio(part: float, whole: float) -> Figure:
    return part / whole if whole else None


_SUMS = (
    *("groups", "mixed_groups", "rollouts", "tokens", "cut", "correct", "scored", "reward"),
    *("eos", "truncated", "loop", "soup", "soup_by_surprise"),
    *(
        f"{scope}_{kind}{unit}"
        for scope in ("all", "mixed")
        for kind in ("correct", "wrong", "truncated")
        for unit in ("", "_tokens")
    ),
    *("plain_plus", "plain_minus", "plain_minus_cut", "sequence_plus", "sequence_minus"),
    *("own_plus", "own_minus", "own_minus_cut", "unweighted"),
)
