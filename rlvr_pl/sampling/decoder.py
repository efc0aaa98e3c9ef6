"""What a decoder is (next-token logits of a batch of growing sequences), and the one that serves every model.

A decoder holds the weights; `start` gives the sequences of one batch, with their key-value cache. Sequences end at the
same column: prompts are padded on the left, and the padding is masked.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Sequences(ABC):
    """The sequences of one batch.

    Attributes:
        logits: [n, V] FP32 of the next tokens, multiplied by the `scale` of `Decoder.start`. The caller may overwrite
            them; `step` does.
    """

    logits: Tensor

    @abstractmethod
    def step(self, tokens: Tensor) -> None:
        """Append one token [n] to each sequence and renew `logits`."""

    @abstractmethod
    def move(self, sources: Tensor, targets: Tensor, count: int) -> None:
        """Put sequences `sources` in the places `targets`, keep the first `count`; `logits` are void until `step`."""


class Decoder(ABC):
    """The weights of a policy, ready to decode."""

    @abstractmethod
    def load(self) -> None:
        """Take over the model's current weights."""

    @abstractmethod
    def start(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], room: int, scale: float) -> Sequences:
        """Begin a batch: sequence i continues ``prompts[rows[i]]``, of which each is prefilled once.

        Args:
            prompts: token ids, at least one each.
            rows: ascending.
            room: tokens by which a sequence may grow.
            scale: factor of the logits, an inverse temperature.
        """


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids [u, longest] with zeros before the shorter prompts, and the number of those zeros [u]."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
    return ids, torch.tensor([width - len(p) for p in prompts], device=device)


class ForwardDecoder(Decoder):
    """Any causal language model, by its transformers forward and cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model
        parameters = inspect.signature(model.forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self.with_positions = "position_ids" in parameters

    def load(self) -> None:
        """Nothing to do: the model itself is called."""

    def start(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], room: int, scale: float) -> Sequences:
        return _ForwardSequences(self, prompts, rows, scale)


class _ForwardSequences(Sequences):
    def __init__(
        self, decoder: ForwardDecoder, prompts: Sequence[Sequence[int]], rows: Sequence[int], scale: float
    ) -> None:
        from transformers import DynamicCache

        self._decoder, self._scale = decoder, scale
        ids, pad = left_padded(prompts, decoder.model.device)
        self._mask = (torch.arange(ids.shape[1], device=pad.device) >= pad[:, None]).long()
        self._lengths = ids.shape[1] - pad
        self._cache = DynamicCache(config=decoder.model.config)
        logits = self._forward(ids, (self._mask.cumsum(1) - 1).clamp_(min=0))
        index = torch.tensor(rows, device=pad.device)
        self._select(index)
        self.logits = logits[index]

    def step(self, tokens: Tensor) -> None:
        self._mask = F.pad(self._mask, (0, 1), value=1)
        self.logits = self._forward(tokens[:, None], self._lengths[:, None])
        self._lengths = self._lengths + 1

    def move(self, sources: Tensor, targets: Tensor, count: int) -> None:
        index = torch.arange(count, device=self._mask.device)
        index[targets] = sources
        self._select(index)

    def _select(self, index: Tensor) -> None:
        self._cache.reorder_cache(cast("torch.LongTensor", index))
        self._mask, self._lengths = self._mask[index], self._lengths[index]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Scaled logits [n, V] of the last column."""
        how = self._decoder
        extra = {how.cache_name: self._cache, **how.last_only}
        if how.with_positions:
            extra["position_ids"] = positions
        output = how.model(input_ids=ids, attention_mask=self._mask, use_cache=True, **extra)
        return output.logits[:, -1].float() * self._scale
