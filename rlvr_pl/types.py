"""The records that flow through an update, frozen and without torch at import time.

A `Question` becomes a prompt; a sampler turns a prompt into a `Completion`; grading turns it into a `Rollout`; the
rollouts of one update form a `RolloutBatch` of padded tensors, which is all that objectives and callbacks see.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class StopReason(str, Enum):
    """Why the sampler stopped: an end-of-sequence id was drawn, or the length cap was reached.

    >>> StopReason("length") is StopReason.LENGTH
    True
    """

    EOS = "eos"
    LENGTH = "length"


class RolloutClass(str, Enum):
    """What a rollout looks like: `EOS` ended; at the cap, `TRUNCATED` in ordinary text, or `LOOP` or `SOUP`."""

    EOS = "eos"
    TRUNCATED = "truncated"
    LOOP = "loop"
    SOUP = "soup"


class GradeStatus(str, Enum):
    """Outcome of grading. `TIMEOUT` and `ERROR` earn no reward but are never silently called wrong.

    >>> [status.value for status in GradeStatus]
    ['correct', 'wrong', 'no_answer', 'timeout', 'error']
    """

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no_answer"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Question:
    """One verifiable question. `columns` keeps the other columns of its row, for user reward functions. `messages` is
    set when the data holds chat messages (``{"role", "content"}``); `problem` is then the last user message. `renamed`
    holds the fields of ours that had another name in the data, under that name; `place` is where the question was read
    ("file:line"), for messages.

    >>> Question("q1", "What is 1+1?", "2", level=1).answer
    '2'
    """

    uid: str
    problem: str
    answer: str
    subject: str | None = None
    level: int | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, str], ...] = ()
    renamed: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    place: str = field(default="", compare=False, repr=False)

    @property
    def called(self) -> str:
        """What messages call it: its uid, after the place where it was read."""
        return f"{self.place}: question {self.uid}" if self.place else f"question {self.uid}"


@dataclass(frozen=True, slots=True)
class Completion:
    """What a sampler returns: the sampled ids (the EOS id included), the stop reason, and log-probs under the
    distribution that was sampled from (after temperature and top-p), one per token, or None if the engine gave none.

    >>> Completion((5, 9, 1), StopReason.EOS).stop_reason.value
    'eos'
    """

    token_ids: tuple[int, ...]
    stop_reason: StopReason
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class Grade:
    """A verdict. `reward` is the number learned from (NaN: not scorable); `answer` the extracted answer; `boxed` says
    whether a boxed answer was found; `seconds` is the CPU time that grading took; `parts` are the weight and
    the reward of each grader, where `reward` is the weighted sum over several.

    >>> Grade(GradeStatus.CORRECT, 1.0, answer="2", boxed=True).reward
    1.0
    """

    status: GradeStatus
    reward: float
    answer: str | None = None
    boxed: bool = False
    seconds: float = 0.0
    parts: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Rollout:
    """One prompt, its completion and its grade. `sample` counts the rollouts of one question within an update.

    >>> grade = Grade(GradeStatus.WRONG, 0.0)
    >>> Rollout("q1", 0, (7, 8), Completion((5, 1), StopReason.EOS), "five", grade).grade.status.value
    'wrong'
    """

    uid: str
    sample: int
    prompt_ids: tuple[int, ...]
    completion: Completion
    text: str
    grade: Grade


@dataclass(frozen=True, slots=True)
class BranchRequest:
    """A wish of an objective: `count` fresh continuations of rollout `row` after its first `position` tokens."""

    row: int
    position: int
    count: int


@dataclass(frozen=True, slots=True)
class Branch:
    """The answer to a `BranchRequest`: reward and truncation of each continuation, and the tokens they cost."""

    request: BranchRequest
    rewards: tuple[float, ...]
    truncated: tuple[bool, ...]
    sampled_tokens: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the complete update (all ranks), kept by every micro-batch cut from it: the denominators of losses."""

    rollouts: int
    tokens: int
    truncated_tokens: int


@dataclass(frozen=True)
class RolloutBatch:
    """The rollouts of one update as padded tensors; rows are grouped by question (`group_size` consecutive rows each).

    N rollouts, T completion positions (the longest completion). Position t of a row is completion token t, prompts are
    kept apart. Positions with `mask` False are padding and may hold anything, NaN included.

    >>> grade = Grade(GradeStatus.CORRECT, 1.0)
    >>> rollout = Rollout("q", 0, (7,), Completion((5, 1), StopReason.EOS), "", grade)
    >>> build_batch([rollout], group_size=1).mask.tolist()
    [[True, True]]
    """

    uids: tuple[str, ...]
    samples: tuple[int, ...]
    group_size: int
    prompt_ids: tuple[tuple[int, ...], ...]
    token_ids: Tensor  # [N, T] int64
    mask: Tensor  # [N, T] bool, True on completion tokens (EOS included)
    rewards: Tensor  # [N] float64; NaN where the answer is not scorable
    truncated: Tensor  # [N] bool, hit the length cap
    totals: Totals
    update: int = 0
    seed: int = 0
    cap: int = 0  # tokens that a completion could have had
    old_logprobs: Tensor | None = None  # [N, T] of the weights that sampled, at the training temperature
    start_logprobs: Tensor | None = None  # [N, T] of the start policy
    parts: Tensor | None = None  # [N, K, 2] float64, weight and reward of each of K graders; None where there is one
    sampling_logprobs: Tensor | None = None  # [N, T] reported by the sampler (after temperature and top-p)
    entropy: Tensor | None = None  # [N, T] next-token entropy, nats; in `Objective.loss` the differentiable one
    sampling_entropy: Tensor | None = None  # [N, T] entropy of the full softmax at the sampling temperature
    branches: tuple[Branch, ...] = ()
    extras: Mapping[str, Tensor] = field(default_factory=dict)  # [N, T] each, from `Objective.prepare`

    @property
    def lengths(self) -> Tensor:
        """[N] int64, completion tokens of each rollout."""
        return self.mask.sum(1)

    def __len__(self) -> int:
        return len(self.uids)

    def replace(self, **changes: Any) -> RolloutBatch:
        """A copy with some fields replaced."""
        return dataclasses.replace(self, **changes)

    def select(self, rows: Sequence[int] | Tensor) -> RolloutBatch:
        """The given rows as a micro-batch, trimmed to its own longest completion; `totals` stay those of the update.

        Group statistics are no longer defined on the result (`group_size` is kept for reference only).
        """
        index = [int(i) for i in rows]
        width = int(self.lengths[index].max()) if index else 0

        def pick(x: Tensor | None) -> Tensor | None:
            return None if x is None else (x[index][:, :width] if x.dim() == 2 else x[index])

        tensors = {f.name: pick(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name in _TENSOR_FIELDS}
        return self.replace(
            uids=tuple(self.uids[i] for i in index),
            samples=tuple(self.samples[i] for i in index),
            prompt_ids=tuple(self.prompt_ids[i] for i in index),
            branches=(),
            extras={name: x[index][:, :width] for name, x in self.extras.items()},
            **tensors,
        )

    def to(self, device: torch.device | str) -> RolloutBatch:
        """The batch with every tensor on `device`."""
        tensors = {name: getattr(self, name) for name in _TENSOR_FIELDS}
        moved = {name: None if x is None else x.to(device) for name, x in tensors.items()}
        return self.replace(extras={name: x.to(device) for name, x in self.extras.items()}, **moved)


_TENSOR_FIELDS = (
    "token_ids",
    "mask",
    "rewards",
    "parts",
    "truncated",
    "old_logprobs",
    "start_logprobs",
    "sampling_logprobs",
    "entropy",
    "sampling_entropy",
)


def build_batch(rollouts: Sequence[Rollout], group_size: int, **fields: Any) -> RolloutBatch:
    """Pad rollouts (grouped: `group_size` consecutive ones share a question) into a `RolloutBatch`.

    Sampling log-probs are carried when every rollout has them. Raises ValueError when the groups are ragged or mixed.

    >>> done = Completion((5, 9, 1), StopReason.EOS), Completion((5, 1), StopReason.EOS)
    >>> grade = Grade(GradeStatus.CORRECT, 1.0)
    >>> batch = build_batch([Rollout("q", i, (7,), c, "", grade) for i, c in enumerate(done)], group_size=2)
    >>> batch.lengths.tolist(), batch.totals.tokens
    ([3, 2], 5)
    """
    import torch

    n = len(rollouts)
    if group_size < 1 or n % group_size:
        raise ValueError(f"{n} rollouts do not form groups of {group_size}")
    for start in range(0, n, group_size):
        if len({r.uid for r in rollouts[start : start + group_size]}) != 1:
            raise ValueError(f"rollouts {start}..{start + group_size - 1} do not share one question")
    lengths = [len(r.completion.token_ids) for r in rollouts]
    width = max(lengths, default=0)
    token_ids = torch.zeros(n, width, dtype=torch.long)
    mask = torch.zeros(n, width, dtype=torch.bool)
    logprobs = torch.zeros(n, width) if all(r.completion.logprobs is not None for r in rollouts) else None
    for i, r in enumerate(rollouts):
        token_ids[i, : lengths[i]] = torch.tensor(r.completion.token_ids, dtype=torch.long)
        mask[i, : lengths[i]] = True
        if logprobs is not None:
            logprobs[i, : lengths[i]] = torch.tensor(r.completion.logprobs)
    truncated = torch.tensor([r.completion.stop_reason is StopReason.LENGTH for r in rollouts], dtype=torch.bool)
    parts = [r.grade.parts for r in rollouts]
    graders = len(parts[0]) if parts else 0
    summed = graders > 0 and all(len(p) == graders for p in parts)
    cut_tokens = sum(length for length, cut in zip(lengths, truncated.tolist()) if cut)
    return RolloutBatch(
        uids=tuple(r.uid for r in rollouts),
        samples=tuple(r.sample for r in rollouts),
        group_size=group_size,
        prompt_ids=tuple(r.prompt_ids for r in rollouts),
        token_ids=token_ids,
        mask=mask,
        rewards=torch.tensor([r.grade.reward for r in rollouts], dtype=torch.float64),
        truncated=truncated,
        totals=Totals(rollouts=n, tokens=sum(lengths), truncated_tokens=cut_tokens),
        parts=torch.tensor(parts, dtype=torch.float64) if summed else None,
        sampling_logprobs=logprobs,
        **fields,
    )
