"""The built-in sampler: batched decoding in torch, exact top-p, draws that do not depend on the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from rlvr_pl.adapters import computing, is_adapted
from rlvr_pl.errors import UserError
from rlvr_pl.sampling import nucleus
from rlvr_pl.sampling.base import (
    Decoding,
    NonFiniteLogits,
    Sampler,
    SampleRequest,
    caps_of,
    check_decoding,
    uniforms,
)
from rlvr_pl.sampling.decoder import Decoder, ForwardDecoder
from rlvr_pl.sampling.fused import FusedDecoder, fusable
from rlvr_pl.types import Completion, StopReason

if TYPE_CHECKING:
    from rlvr_pl.policy import Policy


class TorchSampler(Sampler):
    """Samples on the policy's own device, with no engine beside it.

    Requests are sorted by prompt length and cut into batches; each distinct prompt of a batch is prefilled once, and a
    row leaves the batch as soon as it is finished. Every row has its own uniforms, so it gets the same tokens in
    whatever batch it is sampled (up to the rounding of matrix products).

    Args:
        dtype: of the products with weights; "auto" is FP32 on a CPU for models under `SMALL` parameters (whose BF16
            products are slower), FP32 for a model with an adapter (merged into BF16 weights it would mostly round
            away), and the policy's own dtype otherwise. Models outside the Llama, Qwen2 and Qwen3
            families run in their own dtype.
        max_batch_tokens: rows x (prompt + cap) of one batch; bounds the key-value cache.

    Example:
        >>> from rlvr_pl import Decoding, SampleRequest, load_policy, load_questions
        >>> policy, sampler = load_policy("embedded:start"), TorchSampler()
        >>> sampler.sync(policy)
        >>> prompt = policy.prompt_ids(load_questions("embedded:val350")[0])
        >>> (completion,) = sampler.generate([SampleRequest(prompt)], Decoding(0.0, 1.0, max_new_tokens=5))
        >>> len(completion.token_ids), completion.stop_reason.value
        (5, 'length')
    """

    # speed of BF16 over FP32 decoding on a CPU with AMX: 0.5-0.7 at 0.27M parameters, 0.8-1.1 at 0.8M, 1.4 at 7M, 2-3
    # at 135M
    SMALL: ClassVar[int] = 2_000_000

    engine = "torch"
    deterministic = True

    def __init__(self, dtype: Literal["auto", "float32", "bfloat16"] = "auto", max_batch_tokens: int = 16_384) -> None:
        if dtype not in ("auto", "float32", "bfloat16"):
            raise UserError(f"sampler.dtype is {dtype!r}: choose auto, float32 or bfloat16")
        if max_batch_tokens < 1:
            raise UserError(f"sampler.max_batch_tokens is {max_batch_tokens}: it must be at least 1")
        self.dtype = dtype
        self.max_batch_tokens = max_batch_tokens
        self._decoder: Decoder | None = None

    def sync(self, policy: Policy) -> None:
        model = policy.model
        built_for = (model, model.device, self._compute_dtype(model))
        if self._decoder is None or self._built_for != built_for:
            with computing(policy):
                self._decoder = FusedDecoder(model, built_for[2]) if fusable(model) else ForwardDecoder(model)
            self._built_for = built_for
        else:
            with computing(policy):
                self._decoder.load()
        self._policy = policy
        self._eos = torch.tensor(policy.eos_ids, dtype=torch.long, device=model.device)

    def generate(
        self,
        requests: Sequence[SampleRequest],
        decoding: Decoding,
        progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Completions in the order of `requests`; `progress` is told how many are finished so far.

        Raises:
            UserError: a prompt and its cap do not fit into the model's context, or the decoding makes no sense.
            NonFiniteLogits: the policy gives NaN or infinite logits.
        """
        if self._decoder is None:
            raise RuntimeError("sync(policy) comes before generate")
        check_decoding(decoding)
        caps = caps_of(requests, decoding, self._policy.max_context)
        done: dict[int, Completion] = {}
        model = self._policy.model
        training = model.training
        model.eval()
        try:
            with torch.inference_mode(), computing(self._policy):
                for batch in self._batches(requests, caps):
                    for number, completion in _Batch(self._decoder, self._eos, requests, caps, decoding).run(batch):
                        done[number] = completion
                        if progress is not None:
                            progress(len(done))
        finally:
            model.train(training)
        return [done[i] for i in range(len(requests))]

    def _compute_dtype(self, model: torch.nn.Module) -> torch.dtype:
        if self.dtype != "auto":
            return getattr(torch, self.dtype)
        weight = next(model.parameters())
        small = weight.device.type == "cpu" and sum(p.numel() for p in model.parameters()) < self.SMALL
        exact = weight.dtype == torch.float64 or any(is_adapted(m) for m in model.modules())
        return torch.float32 if small or exact else weight.dtype

    def _batches(self, requests: Sequence[SampleRequest], caps: Sequence[int]) -> Iterator[list[int]]:
        """Request numbers, equal prompts beside each other and similar lengths together, cut by the token budget."""
        order = sorted(
            range(len(requests)), key=lambda i: (len(requests[i].prompt_ids), requests[i].prompt_ids, caps[i])
        )
        batch: list[int] = []
        longest = room = 0
        for number in order:
            longest = max(longest, len(requests[number].prompt_ids))  # ascending, so it is this prompt's
            room = max(room, caps[number])
            if batch and (len(batch) + 1) * (longest + room) > self.max_batch_tokens:
                yield batch
                batch, room = [], caps[number]
            batch.append(number)
        if batch:
            yield batch


class _Batch:
    """The decode loop over one batch. Slots 0..count-1 hold the unfinished rows; the last ones fill finished places."""

    def __init__(
        self, decoder: Decoder, eos: Tensor, requests: Sequence[SampleRequest], caps: Sequence[int], decoding: Decoding
    ) -> None:
        self._decoder = decoder
        self._eos = eos
        self._requests = requests
        self._caps = caps
        self._decoding = decoding
        self._greedy = decoding.temperature == 0
        self._scale = 1.0 if self._greedy else 1.0 / decoding.temperature

    def run(self, numbers: list[int]) -> Iterator[tuple[int, Completion]]:
        """Yields (request number, completion) as rows finish."""
        room = max(self._caps[i] for i in numbers)
        places: dict[tuple[int, ...], int] = {}
        rows = [places.setdefault(self._requests[i].prompt_ids, len(places)) for i in numbers]
        self._sequences = self._decoder.start(list(places), rows, room, self._scale)
        device = self._eos.device
        is_eos = torch.zeros(self._sequences.logits.shape[1], dtype=torch.bool, device=device)
        is_eos[self._eos[self._eos < len(is_eos)]] = True
        self._slots = np.array(numbers)
        self._ends = torch.tensor([self._caps[i] for i in numbers], device=device)
        self._uniform = self._draw_uniforms(numbers, room).to(device)
        self._ids = torch.empty(room, len(numbers), dtype=torch.long, device=device)
        self._logprobs = torch.empty(room, len(numbers), device=device)
        stops = {self._caps[i] for i in numbers}
        count = len(numbers)
        for at in range(room):
            ids, logprobs = self._draw(self._sequences.logits, at)
            self._ids[at, :count], self._logprobs[at, :count] = ids, logprobs
            if not math.isfinite(float(logprobs.sum())):
                self._fail(logprobs, at)
            finished = is_eos[ids]
            if at + 1 in stops:
                finished |= self._ends[:count] == at + 1
            if finished.any():
                yield from self._harvest(finished, is_eos, at)
                count -= self._drop(finished, at)
                if count == 0:
                    return
                ids = self._ids[at, :count]
            self._sequences.step(ids)

    def _draw_uniforms(self, numbers: list[int], room: int) -> Tensor:
        """[room, rows] FP64; row i of the batch has the column named by its request's key."""
        if self._greedy:
            return torch.empty(room, 0, dtype=torch.float64)
        return torch.from_numpy(np.stack([uniforms(self._requests[i].key, room) for i in numbers], axis=1))

    def _draw(self, logits: Tensor, at: int) -> tuple[Tensor, Tensor]:
        if self._greedy:
            top, ids = logits.max(-1)
            return ids, top - logits.logsumexp(-1)
        probs = torch.softmax(logits, -1, out=logits)
        return nucleus.sample(probs, self._uniform[at, : len(probs)], self._decoding.top_p)

    def _harvest(self, finished: Tensor, is_eos: Tensor, at: int) -> Iterator[tuple[int, Completion]]:
        index = finished.nonzero()[:, 0]
        ids = self._ids[: at + 1, index].T.tolist()
        logprobs = self._logprobs[: at + 1, index].T.tolist()
        ended = is_eos[self._ids[at, index]].tolist()
        for slot, tokens, values, eos in zip(index.tolist(), ids, logprobs, ended):
            reason = StopReason.EOS if eos else StopReason.LENGTH
            yield int(self._slots[slot]), Completion(tuple(tokens), reason, tuple(values))

    def _drop(self, finished: Tensor, at: int) -> int:
        """Fill the places of finished rows with the last unfinished ones; returns how many rows left."""
        left = int(finished.sum())
        count = len(finished) - left
        if count:
            targets = finished[:count].nonzero()[:, 0]
            sources = (~finished[count:]).nonzero()[:, 0] + count
            for table in (self._ids, self._logprobs, self._uniform):
                if table.shape[1]:
                    table[:, targets] = table[:, sources]
            self._ends[targets] = self._ends[sources]
            self._slots[targets.cpu()] = self._slots[sources.cpu()]
            self._sequences.move(sources, targets, count)
        return left

    def _fail(self, logprobs: Tensor, at: int) -> None:
        slot = int((~logprobs.isfinite()).nonzero()[0])
        raise NonFiniteLogits(int(self._slots[slot]), tuple(self._ids[:at, slot].tolist()))
