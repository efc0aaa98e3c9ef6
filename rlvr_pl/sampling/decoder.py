"""Next-token logits of a batch of growing sequences: a fused decode loop, and the transformers forward for the rest.

Both kinds of decoder have `start` (one prefill a distinct prompt, copied to the rows that continue it), `step` (one
token a row) and `move` (drop rows). Sequences end at the same column: prompts are padded on the left, and the padding
is masked.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tokens of one prefill call: bounds its activations, not what it computes.
_PREFILL_TOKENS = 8192
_FUSED_CLASSES = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_FIXED_ROPE = {"default", "linear", "llama3", "yarn"}


def build_decoder(model: PreTrainedModel, dtype: torch.dtype) -> Decoder:
    """The fused decoder where the model is of a family it knows, otherwise the transformers forward."""
    return FusedDecoder(model, dtype) if fusable(model) else ForwardDecoder(model)


class Decoder(ABC):
    """A batch of sequences and the logits of their next tokens.

    Logits are [n, V] FP32 on the model's device, multiplied by `scale` (an inverse temperature); the caller may
    overwrite them, and the next call does.
    """

    @abstractmethod
    def load(self) -> None:
        """Take over the model's current weights."""

    @abstractmethod
    def start(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], room: int, scale: float) -> Tensor:
        """Begin a batch: row i continues ``prompts[rows[i]]`` by at most `room` tokens. Returns its first logits."""

    @abstractmethod
    def step(self, tokens: Tensor, scale: float) -> Tensor:
        """Append one token [n] to each row and return the next logits."""

    @abstractmethod
    def move(self, sources: Tensor, targets: Tensor, count: int) -> None:
        """Put rows `sources` in the places `targets` and keep the first `count` rows."""

    @abstractmethod
    def finish(self) -> None:
        """Release the batch."""


def fusable(model: PreTrainedModel) -> bool:
    """Whether `FusedDecoder` computes exactly this model: a known class, plain layers, full attention, fixed rope."""
    if type(model).__name__ not in _FUSED_CLASSES or not type(model).__module__.startswith("transformers."):
        return False
    body: Any = model.model
    linears = [m for layer in body.layers for name, m in layer.named_modules() if name.endswith("_proj")]
    return (
        all(type(m) is nn.Linear for m in (*linears, model.lm_head))
        and type(body.embed_tokens) is nn.Embedding
        and getattr(body.rotary_emb, "rope_type", "default") in _FIXED_ROPE
        and 2 * len(body.rotary_emb.inv_freq) == body.layers[0].self_attn.head_dim
        and not any(getattr(layer.self_attn, "sliding_window", None) for layer in body.layers)
    )


@dataclass(slots=True)
class _Layer:
    """Weights of one block, transposed for ``x @ w``; norms are None where they are folded into what follows."""

    input_norm: Tensor | None
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norm: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class FusedDecoder(Decoder):
    """Llama, Qwen2 and Qwen3 with few, large operations a layer.

    q, k and v are one product, gate and up another. In FP32 the weights of the norms are folded into these products.
    Channels of q and k are interleaved, so that the rotary embedding is one complex product. The norm of x is
    ``x / hypot(|x|, sqrt(h eps))`` up to the factor sqrt(h), which is folded too. Products with weights run in `dtype`;
    activations and, on a CPU, the cache are FP32. Keys are cached transposed.

    Weights that need neither cast nor fusion are those of the model itself, not copies.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self._model: Any = model
        self._dtype = dtype
        self._device = model.device
        self._folds = dtype == torch.float32
        attention = self._model.model.layers[0].self_attn
        self._dim: int = attention.head_dim
        self._kv: int = attention.k_proj.out_features // self._dim
        self._groups: int = attention.q_proj.out_features // self._dim // self._kv
        self._scaling: float = attention.scaling
        self._width: int = model.config.hidden_size
        self._eps: float = model.config.rms_norm_eps
        self._act = self._model.model.layers[0].mlp.act_fn
        self._has_head_norm = hasattr(attention, "q_norm")
        self._hidden_floor = torch.tensor(math.sqrt(self._width * self._eps), device=self._device)
        self._head_floor = torch.tensor(math.sqrt(self._dim * self._eps), device=self._device)
        self._cache_dtype = torch.float32 if self._device.type == "cpu" else dtype
        self._layers: list[_Layer] = []
        self._rope = torch.empty(0, 1, self._dim // 2, dtype=torch.complex64)
        self._no_bias = torch.zeros(1, 1, 1, device=self._device, dtype=self._cache_dtype)
        self.load()

    @torch.no_grad()
    def load(self) -> None:
        body = self._model.model
        old = self._layers or [None] * len(body.layers)
        self._layers = [self._fuse(block, layer) for block, layer in zip(body.layers, old)]
        self._embedding: Tensor = body.embed_tokens.weight.detach()
        self._norm = body.norm.weight.detach().float() * math.sqrt(self._width)
        self._head = self._model.lm_head.weight.detach().to(self._dtype).T

    def _fuse(self, block: Any, old: _Layer | None) -> _Layer:
        attention, mlp = block.self_attn, block.mlp
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        pairs = torch.arange(self._dim, device=self._device).view(2, -1).T.reshape(-1)  # channel i beside i + dim/2

        def interleave(x: Tensor) -> Tensor:
            return x.unflatten(0, (-1, self._dim))[:, pairs].flatten(0, 1)

        def cat(parts: Sequence[Tensor | None], norm: Tensor | None, old: Tensor | None) -> Tensor | None:
            if parts[0] is None:
                return None
            fused = torch.cat([x for x in parts if x is not None])
            fused = fused.float() * norm if norm is not None else fused
            return fused.to(self._dtype) if old is None else old.copy_(fused)

        def split(norm: nn.Module) -> tuple[Tensor | None, Tensor | None]:
            """The norm's weight as (applied by itself, folded)."""
            weight = norm.weight.float() * math.sqrt(self._width)
            return (None, weight) if self._folds else (weight, None)

        input_norm, qkv_fold = split(block.input_layernorm)
        mlp_norm, mlp_fold = split(block.post_attention_layernorm)
        head_norm = None
        if self._has_head_norm:
            norms = (attention.q_norm.weight,) * (self._kv * self._groups) + (attention.k_norm.weight,) * self._kv
            head_norm = torch.stack(norms).float()[:, pairs] * math.sqrt(self._dim)
        qkv = cat([interleave(q.weight), interleave(k.weight), v.weight], qkv_fold, old and old.qkv.T)
        biased = q.bias is not None
        qkv_bias = cat([interleave(q.bias), interleave(k.bias), v.bias] if biased else [None], None, None)
        gate_up = cat([mlp.gate_proj.weight, mlp.up_proj.weight], mlp_fold, old and old.gate_up.T)
        assert qkv is not None and gate_up is not None
        return _Layer(
            input_norm=input_norm,
            qkv=qkv.T,
            qkv_bias=qkv_bias,
            head_norm=head_norm,
            out=attention.o_proj.weight.to(self._dtype).T,
            out_bias=None if attention.o_proj.bias is None else attention.o_proj.bias.to(self._dtype),
            mlp_norm=mlp_norm,
            gate_up=gate_up.T,
            gate_up_bias=cat([mlp.gate_proj.bias, mlp.up_proj.bias], None, None),
            down=mlp.down_proj.weight.to(self._dtype).T,
            down_bias=None if mlp.down_proj.bias is None else mlp.down_proj.bias.to(self._dtype),
        )

    def start(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], room: int, scale: float) -> Tensor:
        n, width = len(rows), max(map(len, prompts))
        shape = (len(self._layers), n, self._kv)
        kind = {"dtype": self._cache_dtype, "device": self._device}
        self._keys = torch.empty(*shape, self._dim, width + room, **kind)
        self._values = torch.empty(*shape, width + room, self._dim, **kind)
        self._used, self._count = width, n
        self._extend_rope(width + room)
        pad = torch.tensor([width - len(p) for p in prompts], device=self._device)
        index = torch.tensor(rows, device=self._device)
        self._pad = pad[index]
        self._bias = None
        if bool(pad.any()):
            masked = torch.arange(width + room, device=self._device) < self._pad[:, None]
            self._bias = torch.zeros(n, 1, 1, width + room, **kind).masked_fill_(masked[:, None, None], -torch.inf)
            self._bias = self._bias.expand(-1, self._kv, -1, -1).flatten(0, 1)
        last = torch.cat([self._prefill(prompts, first, index) for first in self._prefill_chunks(len(prompts), width)])
        self._logits = torch.empty(n, self._head.shape[1], dtype=self._dtype, device=self._device)
        torch.index_select(self._project(last, scale), 0, index, out=self._logits)
        return self._logits.float()

    @staticmethod
    def _prefill_chunks(prompts: int, width: int) -> list[slice]:
        height = max(1, _PREFILL_TOKENS // width)
        return [slice(i, min(i + height, prompts)) for i in range(0, prompts, height)]

    def _prefill(self, prompts: Sequence[Sequence[int]], chunk: slice, index: Tensor) -> Tensor:
        """Last hidden states [u, h] of the prompts in `chunk`; their keys and values go to the rows that continue them."""
        some, width = prompts[chunk], self._used
        lengths = torch.tensor([len(p) for p in some], device=self._device)
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in some], device=self._device)
        columns = torch.arange(width, device=self._device)
        pad = width - lengths
        mask = None
        if bool(pad.any()):
            real = columns >= pad[:, None]
            causal = columns <= columns[:, None]
            mask = (real[:, None, :] & causal | torch.eye(width, dtype=torch.bool, device=self._device))[:, None]
        positions = (columns - pad[:, None]).clamp_(min=0).flatten()
        rope = self._rope[positions]
        here = ((index >= chunk.start) & (index < chunk.stop)).nonzero()[:, 0]
        source = index[here] - chunk.start
        x = self._embedding[ids.flatten()].float()
        for number, layer in enumerate(self._layers):
            heads = self._heads(layer, x, rope).unflatten(0, ids.shape).transpose(1, 2)
            q, k, v = heads.split([self._kv * self._groups, self._kv, self._kv], 1)
            self._keys[number, here, :, :, :width] = k.transpose(2, 3)[source].to(self._cache_dtype)
            self._values[number, here, :, :width] = v[source].to(self._cache_dtype)
            mixed = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=self._scaling, enable_gqa=True
            )
            x = self._add(x, mixed.transpose(1, 2).reshape(len(x), -1), layer.out, layer.out_bias)
            x = self._mlp(layer, x)
        return x.view(*ids.shape, -1)[:, -1]

    def step(self, tokens: Tensor, scale: float) -> Tensor:
        n, at = self._count, self._used
        x = self._embedding.index_select(0, tokens).float()
        rope = self._rope[at] if self._bias is None else self._rope[at - self._pad]
        end = self._used = at + 1
        bias, beta = (self._no_bias, 0) if self._bias is None else (self._bias[: n * self._kv, :, :end], 1)
        queries = self._kv * self._groups
        for layer, keys, values in zip(self._layers, self._keys, self._values):
            heads = self._heads(layer, x, rope)
            keys[:n, :, :, at] = heads[:, queries : queries + self._kv]
            values[:n, :, at] = heads[:, queries + self._kv :]
            q = heads[:, :queries].reshape(n * self._kv, self._groups, self._dim).to(self._cache_dtype)
            k, v = keys[:n].flatten(0, 1)[:, :, :end], values[:n].flatten(0, 1)[:, :end]
            scores = torch.baddbmm(bias, q, k, beta=beta, alpha=self._scaling)
            mixed = torch.bmm(scores.softmax(-1), v).view(n, -1)
            x = self._add(x, mixed, layer.out, layer.out_bias)
            x = self._mlp(layer, x)
        return self._project(x, scale, out=self._logits[:n]).float()

    def move(self, sources: Tensor, targets: Tensor, count: int) -> None:
        end = self._used
        if len(sources):
            self._keys[:, targets, :, :, :end] = self._keys[:, sources, :, :, :end]
            self._values[:, targets, :, :end] = self._values[:, sources, :, :end]
            self._pad[targets] = self._pad[sources]
            if self._bias is not None:
                bias = self._bias.unflatten(0, (-1, self._kv))
                bias[targets] = bias[sources]
        self._pad = self._pad[:count]
        self._count = count

    def finish(self) -> None:
        del self._keys, self._values, self._logits

    def _heads(self, layer: _Layer, x: Tensor, rope: Tensor) -> Tensor:
        """Queries, keys and values [m, heads + 2 kv heads, dim], normed and rotated, FP32."""
        heads = self._linear(self._unit(x, layer.input_norm), layer.qkv, layer.qkv_bias).float()
        heads = heads.view(len(x), -1, self._dim)
        turned = heads[:, : -self._kv]
        if layer.head_norm is not None:
            size = torch.linalg.vector_norm(turned, dim=-1, keepdim=True)
            turned.div_(size.hypot_(self._head_floor)).mul_(layer.head_norm)
        torch.view_as_complex(turned.unflatten(-1, (-1, 2))).mul_(rope)
        return heads

    def _mlp(self, layer: _Layer, x: Tensor) -> Tensor:
        gate, up = self._linear(self._unit(x, layer.mlp_norm), layer.gate_up, layer.gate_up_bias).chunk(2, -1)
        return self._add(x, self._act(gate).mul_(up), layer.down, layer.down_bias)

    def _unit(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """RMSNorm, up to the factors that are folded into the next product."""
        unit = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self._hidden_floor)
        return unit if norm is None else unit.mul_(norm)

    def _project(self, x: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
        return torch.mm(self._unit(x, self._norm).mul_(scale).to(self._dtype), self._head, out=out)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = x.to(self._dtype)
        return torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)

    def _add(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x + y @ weight (+ bias), overwriting x where that is one product."""
        if bias is None and self._dtype == x.dtype:
            return x.addmm_(y, weight)
        return x.add_(self._linear(y, weight, bias))

    def _extend_rope(self, length: int) -> None:
        """Table [length, 1, dim/2] of cos + i sin, from the model's own rotary module."""
        if len(self._rope) < length:
            like = torch.empty(0, dtype=torch.float32, device=self._device)
            cos, sin = self._model.model.rotary_emb(like, torch.arange(length, device=self._device)[None])
            half = self._dim // 2
            self._rope = torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())[:, None]


class ForwardDecoder(Decoder):
    """Any causal language model, by its transformers forward and cache."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._with_positions = "position_ids" in parameters

    def load(self) -> None:
        """Nothing to do: the model itself is called."""

    def start(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], room: int, scale: float) -> Tensor:
        from transformers import DynamicCache

        device, width = self._model.device, max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        mask = (torch.arange(width, device=device) >= width - lengths[:, None]).long()
        self._cache = DynamicCache(config=self._model.config)
        self._mask, self._lengths = mask, lengths
        logits = self._forward(ids, (mask.cumsum(1) - 1).clamp_(min=0), scale)
        index = torch.tensor(rows, device=device)
        self._select(index)
        return logits[index]

    def step(self, tokens: Tensor, scale: float) -> Tensor:
        self._mask = F.pad(self._mask, (0, 1), value=1)
        logits = self._forward(tokens[:, None], self._lengths[:, None], scale)
        self._lengths = self._lengths + 1
        return logits

    def move(self, sources: Tensor, targets: Tensor, count: int) -> None:
        index = torch.arange(count, device=self._mask.device)
        index[targets] = sources
        self._select(index)

    def finish(self) -> None:
        del self._cache

    def _select(self, index: Tensor) -> None:
        self._cache.reorder_cache(index)
        self._mask, self._lengths = self._mask[index], self._lengths[index]

    def _forward(self, ids: Tensor, positions: Tensor, scale: float) -> Tensor:
        """Scaled logits [n, V] of the last column."""
        extra = {"position_ids": positions} if self._with_positions else {}
        cache = {self._cache_name: self._cache}
        output = self._model(
            input_ids=ids, attention_mask=self._mask, use_cache=True, **cache, **extra, **self._last_only
        )
        return output.logits[:, -1].float() * scale
