"""Fixed contexts and what a policy makes of them: entropy, KL to the start policy, NLL of the start policy's tokens.

The contexts are questions that nothing trains on, with the start policy's own greedy completions (paper, section 4.3).
Every policy reads the same tokens, so a change in these figures is a change of the policy and not of the questions.
They are measured on the start's histories, not on what the policy itself would write.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlvr_pl.core.logprobs import entropy_and_kl
from rlvr_pl.errors import UserError
from rlvr_pl.records import atomic_write_text
from rlvr_pl.sampling.base import SampleRequest
from rlvr_pl.text_file import read_json
from rlvr_pl.types import Completion, Grade, GradeStatus, Rollout, RolloutBatch, StopReason, build_batch
from rlvr_pl.update import completion_hidden, plan_micro_batches

if TYPE_CHECKING:
    from rlvr_pl.policy import Policy
    from rlvr_pl.sampling.base import Decoding, Sampler
    from rlvr_pl.types import Question

VERSION = 1


@dataclass(frozen=True)
class Contexts:
    """Token ids of prompts and greedy start completions; `start_sha256` names the weights that wrote them."""

    uids: tuple[str, ...]
    prompts: tuple[tuple[int, ...], ...]
    completions: tuple[tuple[int, ...], ...]
    start_sha256: str

    @property
    def tokens(self) -> int:
        """Completion tokens, over which every figure is a mean."""
        return sum(map(len, self.completions))

    def batch(self) -> RolloutBatch:
        """The contexts as rollouts without rewards."""
        grade = Grade(GradeStatus.NO_ANSWER, 0.0)
        rows = zip(self.uids, self.prompts, self.completions)
        return build_batch([Rollout(u, 0, p, Completion(c, StopReason.EOS), "", grade) for u, p, c in rows], 1)

    def save(self, path: Path) -> None:
        """Write a JSON file that `load` reads, atomically."""
        rows = [
            {"uid": u, "prompt_ids": p, "completion_ids": c}
            for u, p, c in zip(self.uids, self.prompts, self.completions)
        ]
        head = {"record": "drift-contexts", "version": VERSION, "start_sha256": self.start_sha256}
        atomic_write_text(path, json.dumps({**head, "contexts": rows}) + "\n")

    @classmethod
    def load(cls, path: Path, vocabulary: int) -> Contexts:
        """Read a file of `save`. Raises UserError when it is none, or holds ids the policy does not know."""
        data = read_json(path)
        try:
            rows = data["contexts"]
            found = cls(
                tuple(str(row["uid"]) for row in rows),
                tuple(tuple(map(int, row["prompt_ids"])) for row in rows),
                tuple(tuple(map(int, row["completion_ids"])) for row in rows),
                str(data["start_sha256"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: not a file of drift contexts ({type(error).__name__}: {error})") from None
        ids = [i for row in (*found.prompts, *found.completions) for i in row]
        if not found.tokens or not all(found.prompts):
            raise UserError(f"{path}: needs contexts with a prompt, and at least one completion token")
        if not 0 <= min(ids) <= max(ids) < vocabulary:
            raise UserError(f"{path}: token ids up to {max(ids)}, but the policy has {vocabulary}: another tokenizer?")
        return found


def is_context_file(name: str) -> bool:
    """Whether `name` is a file of `Contexts.save`, and not a question set."""
    path = Path(name)
    if path.suffix != ".json" or not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as f:
        return '"drift-contexts"' in f.read(200)


def make_contexts(start: Policy, sampler: Sampler, questions: Sequence[Question], decoding: Decoding) -> Contexts:
    """Let the start policy answer greedily. The sampler is left holding the start policy's weights."""
    sampler.sync(start)
    prompts = [start.prompt_ids(q) for q in questions]
    completions = sampler.generate([SampleRequest(p) for p in prompts], decoding.greedy())
    return Contexts(
        tuple(q.uid for q in questions),
        tuple(prompts),
        tuple(c.token_ids for c in completions),
        start.sha256,
    )


class StartStates:
    """The start policy's side, kept as its hidden states and head: tokens x h + V x h numbers, read once.

    Args:
        start: the start policy.
        parts: the contexts in micro-batches.
    """

    def __init__(self, start: Policy, parts: Sequence[RolloutBatch]) -> None:
        self.head = start.head.detach().clone()
        with torch.no_grad():
            self._states = [completion_hidden(start, part) for part in parts]

    def states(self, index: int) -> Tensor:
        """[m, h], the states that predict the completion tokens of micro-batch `index`, in row-major order."""
        return self._states[index]


class StartCopy:
    """The start policy's side, computed anew from a frozen copy: no memory beyond the copy, twice the passes."""

    def __init__(self, start: Policy, parts: Sequence[RolloutBatch]) -> None:
        self.head = start.head
        self._start, self._parts = start, parts

    @torch.no_grad()
    def states(self, index: int) -> Tensor:
        """[m, h] of micro-batch `index`."""
        return completion_hidden(self._start, self._parts[index])


class DriftMeter:
    """Measures policies against one start on fixed contexts.

    Every context goes through the same micro-batches for start and current policy, so that equal weights give a KL of
    exactly 0.

    Args:
        contexts: what every policy reads.
        start: the start policy.
        side: `StartStates` or `StartCopy`; the figures are the same.
        max_tokens: padded tokens of one forward pass; few, because contexts of like length then share a pass.
        vocab_chunk: columns of the head multiplied at once; with the tiles of `entropy_and_kl` it bounds the memory.
    """

    def __init__(
        self,
        contexts: Contexts,
        start: Policy,
        *,
        side: type[StartStates] | type[StartCopy] = StartStates,
        max_tokens: int = 2048,
        vocab_chunk: int = 8192,
    ) -> None:
        batch = contexts.batch()
        self._parts = [batch.select(rows) for rows in plan_micro_batches(batch, range(len(batch)), max_tokens)]
        self._start = side(start, self._parts)
        self._vocab_chunk = vocab_chunk
        self.tokens = contexts.tokens
        self.vocabulary = start.head.shape[0]

    @torch.no_grad()
    def measure(self, policy: Policy) -> dict[str, float]:
        """``entropy`` (next token, T=1), ``kl`` (start || policy) and ``nll`` (of the start's tokens), nats a token."""
        sums = torch.zeros(3, dtype=torch.float64)
        for index, part in enumerate(self._parts):
            hidden = completion_hidden(policy, part)
            targets = part.token_ids[part.mask].to(hidden.device)
            start = self._start.states(index).to(hidden.device)
            head = self._start.head.to(hidden.device)
            figures = entropy_and_kl(start, head, hidden, policy.head, targets, vocab_chunk=self._vocab_chunk)
            sums += torch.stack([f.double().sum() for f in figures]).cpu()
        entropy, kl, nll = (sums / self.tokens).tolist()
        return {"entropy": entropy, "kl": kl, "nll": nll}


def drift_row(meter: DriftMeter, policy: Policy, **key: Any) -> dict[str, Any]:
    """`key`, then the figures, then ``tokens``: one row of ``drift.csv`` or of ``rlvr-pl drift``."""
    return {**key, **meter.measure(policy), "tokens": meter.tokens}
