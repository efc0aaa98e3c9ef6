"""Credit for the decisions at which rollouts part, in place of one advantage for a whole rollout."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rlvr_pl.core.advantage import leave_one_out
from rlvr_pl.core.choices import check_choice
from rlvr_pl.core.credit import (
    Credit,
    entropy_forks,
    permutation,
    segment_credit,
    suffix_credit,
    transform_credit,
    tree_credit,
)
from rlvr_pl.core.histogram import Histogram
from rlvr_pl.core.keyed import generator, key_digest
from rlvr_pl.core.weights import unmasked_tokens
from rlvr_pl.objectives.base import Objective
from rlvr_pl.objectives.terms import required
from rlvr_pl.types import Branch, BranchRequest

if TYPE_CHECKING:
    from torch import Tensor

    from rlvr_pl.types import RolloutBatch

Source = Literal["tree", "branch"]
Combine = Literal["replace", "hybrid", "add"]
Spread = Literal["fork", "suffix", "segment"]
Norm = Literal["rollouts", "tokens", "forks"]
Truncated = Literal["mask", "zero"]
Scope = Literal["batch", "group"]
Cut = Literal["zero", "drop"]


@dataclass(frozen=True, slots=True)
class Fork:
    """One rollout (`row` of the batch) at one fork: V before it, its credit, and the `n` outcomes that V averages."""

    row: int
    position: int
    n: int
    value: float
    credit: float


class ForkCredit(Objective):
    """``-1/Z sum_it m_i w_it log p_it``, where w is the credit C of the token at a fork and 0 elsewhere.

    C = Q - V: the mean outcome after the token minus the mean outcome before it. Source "tree" (no cost) reads both
    off the group's own rollouts, with the factor n/(n-1) (see `rlvr_pl.core.credit`); source "branch" samples
    `continuations` fresh ones from before and from after the token and charges them to the run.

    This is a definition of this package: a hypothesis to test, not a promised gain. In tabular simulations no arm of
    it beat outcome-only GRPO for the tokens sampled (area under the learning curve .949 for GRPO; tree credit .832
    raw, .794 rankc, .208 shuffled; 20 seeds). Tree credit touches only the tokens that a group still shares, about
    the first ln(group_size)/entropy of them, and weighs deep forks down: the expectation at a node is the true term
    times 1 - (1 - d)^(group_size - 1), d the chance of reaching it.

    A truncated rollout, and a truncated continuation, has reward 0. A NaN reward takes no part and has weight 0.
    A uniform group: credit 0. A group of one: ValueError. No forks, or an all-truncated batch under
    ``truncated="mask"``: loss exactly 0. An empty completion meets no fork. Departs from supplied: weights differ
    within a rollout, and most are 0.

    Args:
        source: "tree" or "branch".
        credit: transform of the credits of the active instances: see `transform_credit`. "shuffled" is the negative
            control; its matched real arm is "raw" with ``center=True``.
        combine: at tokens that are not forks "replace" gives 0, "hybrid" r - leave-one-out mean; "add" gives that
            everywhere, plus C at forks.
        spread: "fork": C at the fork's token alone. "suffix" (tree): every token gets r minus the leave-one-out mean
            at the deepest prefix it shares, exactly unbiased. "segment" (branch): the change of V between forks,
            telescoping to r - leave-one-out mean.
        norm: Z: "rollouts" of the update, its unmasked "tokens", or max(1, active "forks").
        truncated: "mask" gives truncated rollouts weight 0 (their outcome 0 stays in V); "zero" learns from them.
        scope: instances that a transform ranks, shuffles or centres together: of the "batch" or of each "group".
        center: subtract the mean credit of the active instances first.
        rollouts_per_group: R, rollouts drawn from each group to branch from (branch).
        forks_per_rollout: F, at most so many forks each (branch).
        continuations: K, from before and again from after each fork (branch).
        entropy_quantile: forks lie where the entropy reaches this quantile over the earlier updates (branch; the first
            update uses its own).
        min_gap: least number of tokens between two forks (branch).
        cut: a truncated continuation has outcome "zero", or is dropped, which conditions on termination (branch).
    """

    equation = "-1/Z sum_it C_it log p_it,  C = Q - V at forks (tree or branch), 0 elsewhere"
    shift_invariant = False  # a truncated rollout's reward is 0 whatever the others get

    def __init__(
        self,
        *,
        source: Source = "tree",
        credit: Credit = "raw",
        combine: Combine = "replace",
        spread: Spread = "fork",
        norm: Norm = "rollouts",
        truncated: Truncated = "mask",
        scope: Scope = "batch",
        center: bool = False,
        rollouts_per_group: int = 2,
        forks_per_rollout: int = 1,
        continuations: int = 4,
        entropy_quantile: float = 0.8,
        min_gap: int = 16,
        cut: Cut = "zero",
    ) -> None:
        for name, value, literal in (
            ("source", source, Source),
            ("credit", credit, Credit),
            ("combine", combine, Combine),
            ("spread", spread, Spread),
            ("norm", norm, Norm),
            ("truncated", truncated, Truncated),
            ("scope", scope, Scope),
            ("cut", cut, Cut),
        ):
            check_choice(name, value, literal)
        if (spread, source) in (("suffix", "branch"), ("segment", "tree")):
            raise ValueError(
                f"spread={spread!r} is not defined for source={source!r}: suffix needs tree, segment branch"
            )
        if spread != "fork" and (credit != "raw" or center or combine == "add"):
            raise ValueError(f"spread={spread!r} takes credit='raw', center=False and combine='replace' or 'hybrid'")
        if min(rollouts_per_group, forks_per_rollout, continuations) < 1 or min_gap < 2:
            raise ValueError("rollouts_per_group, forks_per_rollout and continuations must be at least 1, min_gap 2")
        if not 0 <= entropy_quantile <= 1:
            raise ValueError(f"entropy_quantile={entropy_quantile} must lie between 0 and 1")
        self.source = source
        self.credit: Credit = credit
        self.combine = combine
        self.spread = spread
        self.norm = norm
        self.truncated = truncated
        self.scope = scope
        self.center = center
        self.rollouts_per_group = rollouts_per_group
        self.forks_per_rollout = forks_per_rollout
        self.continuations = continuations
        self.entropy_quantile = entropy_quantile
        self.min_gap = min_gap
        self.cut = cut
        self._entropies = Histogram()
        if source == "branch":
            self.needs = frozenset({"sampling_entropy"})

    def requests(self, batch: RolloutBatch) -> Sequence[BranchRequest]:
        """Continuations from before and from after each fork of the drawn rollouts. Only this method advances the
        state: the entropies of this update join the record against which the next one's are compared."""
        if self.source == "tree":
            return ()
        entropy = required(batch, "sampling_entropy", self)
        values = entropy[batch.mask].double().cpu().numpy()
        earlier = self._entropies
        threshold = (
            earlier.quantile(self.entropy_quantile) if earlier.total else _quantile(values, self.entropy_quantile)
        )
        earlier.add(values)
        active = self._active_rows(batch)
        return [
            request
            for row in self._drawn(batch)
            if active[row]
            for request in self._row_requests(row, entropy[row][batch.mask[row]].tolist(), threshold)
        ]

    def token_weights(self, batch: RolloutBatch) -> Tensor:
        rewards = self._rewards(batch)
        baseline = leave_one_out(rewards, batch.group_size)
        forks = self.forks(batch)
        credit = batch.mask.double() * (0 if self.combine == "replace" else baseline[:, None])
        if self.spread == "fork":
            at = ([f.row for f in forks], [f.position for f in forks])
            values = credit.new_tensor(self.transformed(batch, forks))
            credit[at] = credit[at] + values if self.combine == "add" else values
        else:
            for row, values in self._spread(batch, rewards, baseline, forks):
                credit[row, : len(values)] = credit.new_tensor(values)
        kept = rewards.new_tensor(self._active_rows(batch))[:, None]
        return credit * kept / self._z(batch, forks)

    def forks(self, batch: RolloutBatch) -> list[Fork]:
        """The active (unmasked) instances with their raw credits, zeros included, in (uid, sample, position) order.

        Empty where the answers to `requests` are not in the batch yet."""
        found = self._tree_forks(batch) if self.source == "tree" else self._branch_forks(batch)
        active = self._active_rows(batch)
        kept = [fork for fork in found if active[fork.row] and not math.isnan(fork.credit)]
        return sorted(kept, key=lambda f: (batch.uids[f.row], batch.samples[f.row], f.position))

    def transformed(self, batch: RolloutBatch, forks: Sequence[Fork]) -> list[float]:
        """The credits of `forks` after centring and transform, within each group where ``scope="group"``."""
        result = [0.0] * len(forks)
        for group, members in self._scopes(batch, forks).items():
            raw = np.array([forks[i].credit for i in members])
            raw = raw - raw.mean() if self.center else raw
            values = transform_credit(raw.tolist(), self.credit, seed=batch.seed, update=batch.update, group=group)
            for i, value in zip(members, values):
                result[i] = value
        return result

    def metrics(self, batch: RolloutBatch, weights: Tensor) -> dict[str, float]:
        """Where the forks lie and what they say; for shuffled credits also what the permutation was and did."""
        forks = self.forks(batch)
        raw = np.array([f.credit for f in forks])
        tokens = max(1, unmasked_tokens(batch.totals, self.truncated == "mask"))
        result = {
            "fork/active": float(len(forks)),
            "fork/token_frac": len(forks) / tokens,
            "fork/depth": float(np.mean([f.position for f in forks])) if forks else 0.0,
            "fork/n": float(np.mean([f.n for f in forks])) if forks else 0.0,
            "fork/credit_mean": float(raw.mean()) if forks else 0.0,
        }
        if self.credit.startswith("shuffled"):
            result["fork/shuffle_corr"] = _correlation(raw, np.array(self.transformed(batch, forks)))
            orders = [
                permutation(len(members), batch.seed, batch.update, group).tolist()
                for group, members in self._scopes(batch, forks).items()
            ]
            # 48 bits, so that a float holds the hash exactly.
            result["fork/permutation_hash"] = float(int.from_bytes(key_digest(repr(orders))[:6], "big"))
        return result

    def state_dict(self) -> dict[str, Any]:
        return {"entropies": self._entropies.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._entropies.load_state_dict(state["entropies"])

    def _rewards(self, batch: RolloutBatch) -> Tensor:
        return batch.rewards.where(~batch.truncated, 0)

    def _active_rows(self, batch: RolloutBatch) -> list[bool]:
        active = ~self._rewards(batch).isnan()
        return (active & ~batch.truncated if self.truncated == "mask" else active).tolist()

    def _scopes(self, batch: RolloutBatch, forks: Sequence[Fork]) -> dict[str | None, list[int]]:
        """Indices of the forks that are transformed together."""
        if self.scope == "batch":
            return {None: list(range(len(forks)))} if forks else {}
        names = _group_names(batch)
        scopes: dict[str | None, list[int]] = defaultdict(list)
        for i, fork in enumerate(forks):
            scopes[names[fork.row // batch.group_size]].append(i)
        return scopes

    def _z(self, batch: RolloutBatch, forks: Sequence[Fork]) -> int:
        if self.norm == "tokens":
            return max(1, unmasked_tokens(batch.totals, self.truncated == "mask"))
        return max(1, len(forks) if self.norm == "forks" else batch.totals.rollouts)

    def _groups(self, batch: RolloutBatch) -> Iterator[range]:
        for start in range(0, len(batch), batch.group_size):
            yield range(start, start + batch.group_size)

    def _tree_forks(self, batch: RolloutBatch) -> Iterator[Fork]:
        rewards, ids = self._rewards(batch).tolist(), _completions(batch)
        for rows in self._groups(batch):
            for f in tree_credit([ids[i] for i in rows], [rewards[i] for i in rows]):
                yield Fork(rows[f.rollout], f.position, f.n, f.value, f.credit)

    def _branch_forks(self, batch: RolloutBatch) -> Iterator[Fork]:
        rewards = self._rewards(batch).tolist()
        answers = {(b.request.row, b.request.position): b for b in batch.branches}
        forks = set()
        for (row, position), before in sorted(answers.items(), key=lambda item: item[0]):
            if (row, position - 1) in forks:
                continue  # the answer from after that fork: two forks are never neighbours
            forks.add((row, position))
            after = answers.get((row, position + 1))
            value = self._outcome(before)
            # The last token of a rollout leaves nothing to continue: its outcome is the rollout's own.
            q = rewards[row] if after is None else self._outcome(after)
            yield Fork(row, position, len(before.rewards), value, q - value)

    def _outcome(self, branch: Branch) -> float:
        """Mean reward of the continuations; NaN where none could be scored."""
        rewards = [
            0.0 if cut else r for r, cut in zip(branch.rewards, branch.truncated) if self.cut == "zero" or not cut
        ]
        scored = [r for r in rewards if not math.isnan(r)]
        return sum(scored) / len(scored) if scored else math.nan

    def _spread(
        self, batch: RolloutBatch, rewards: Tensor, baseline: Tensor, forks: Sequence[Fork]
    ) -> Iterator[tuple[int, np.ndarray]]:
        if self.spread == "suffix":
            ids = _completions(batch)
            for rows in self._groups(batch):
                yield from zip(rows, suffix_credit([ids[i] for i in rows], rewards[list(rows)].tolist()))
            return
        lengths = batch.lengths.tolist()
        of_row: dict[int, list[Fork]] = defaultdict(list)
        for fork in forks:
            of_row[fork.row].append(fork)
        for row, own in of_row.items():
            reward = float(rewards[row])
            loo = reward - float(baseline[row])
            yield row, segment_credit(lengths[row], [f.position for f in own], [f.value for f in own], loo, reward)

    def _drawn(self, batch: RolloutBatch) -> Iterator[int]:
        """The rows to branch from: a uniform draw from each group, whatever the order of its rows."""
        for name, rows in zip(_group_names(batch), self._groups(batch)):
            by_sample = sorted(rows, key=lambda i: batch.samples[i])
            order = generator("fork-branch", batch.seed, batch.update, name).permutation(len(by_sample))
            yield from (by_sample[i] for i in order[: self.rollouts_per_group].tolist())

    def _row_requests(self, row: int, entropy: list[float], threshold: float) -> Iterator[BranchRequest]:
        for t in entropy_forks(entropy, threshold, gap=self.min_gap, limit=self.forks_per_rollout):
            yield BranchRequest(row, t, self.continuations)
            if self.spread == "fork" and t + 1 < len(entropy):
                yield BranchRequest(row, t + 1, self.continuations)


def _completions(batch: RolloutBatch) -> list[list[int]]:
    return [ids[:n] for ids, n in zip(batch.token_ids.tolist(), batch.lengths.tolist())]


def _group_names(batch: RolloutBatch) -> list[str]:
    """A name for each group: its question's uid, numbered where a question has several groups in the update."""
    seen: Counter[str] = Counter()
    names = []
    for uid in batch.uids[:: batch.group_size]:
        names.append(f"{uid}/{seen[uid]}")
        seen[uid] += 1
    return names


def _quantile(values: np.ndarray, q: float) -> float:
    return float(np.quantile(values, q)) if len(values) else math.inf


def _correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Pearson's, 0 where one side does not vary."""
    if len(x) < 2 or x.std() == 0 or y.std() == 0:
        return 0.0
    return float(np.corrcoef(x, y)[0, 1])
