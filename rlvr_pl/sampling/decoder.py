"""Next-token logits of a batch of growing sequences: a fused decode loop, and the transformers forward for the rest.

Both kinds of decoder have `start` (one prefill a distinct prompt, copied to the rows that continue it), `step` (one
token a row) and `move` (drop rows). Sequences end at the same column: prompts are padded on the left, and the padding
is masked.
"""

from __future__ import annotations

import functools
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tokens of one prefill call: bounds its activations, not what it computes.
_PREFILL_TOKENS = 8192
# Attention over fewer columns than a vector register holds is slower than over this many with a mask.
_LEAST_WINDOW = 16
_FUSED_CLASSES = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_FIXED_ROPE = {"default", "linear", "llama3", "yarn"}


def build_decoder(model: PreTrainedModel, dtype: torch.dtype) -> Decoder:
    """The fused decoder where the model is of a family it knows, otherwise the transformers forward."""
    return FusedDecoder(model, dtype) if fusable(model) else ForwardDecoder(model)


class Decoder(ABC):
    """A batch of sequences and the logits of their next tokens.

    Logits are [n, V] FP32 on the model's device, multiplied by the `scale` of `start` (an inverse temperature); the
    caller may overwrite them, and the next call does.
    """

    @abstractmethod
    def load(self) -> None:
        """Take over the model's current weights."""

    @abstractmethod
    def start(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], room: int, scale: float) -> Tensor:
        """Begin a batch: row i continues ``prompts[rows[i]]`` by at most `room` tokens. Returns its first logits."""

    @abstractmethod
    def step(self, tokens: Tensor) -> Tensor:
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
    """Weights of one block, transposed for ``x @ w``; norms are None where they are folded into the next product."""

    input_norm: Tensor | None
    qkv: Tensor  # columns: for each key-value head its query heads, its key, its value
    qkv_bias: Tensor | None
    head_norm: Tensor | None  # [queries of a key-value head + 1, dim], the softmax scaling included in the queries'
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class _Scratch:
    """Activations of `rows` tokens, and the views of them that the loop needs: made once, not in every layer."""

    def __init__(self, rows: int, width: int, kv: int, groups: int, dim: int, inner: int, device: torch.device) -> None:
        def empty(*shape: int) -> Tensor:
            return torch.empty(*shape, device=device)

        self.x, self.unit, self.size = empty(rows, width), empty(rows, width), empty(rows, 1)
        self.heads = empty(rows, kv * (groups + 2) * dim)
        by_kv = self.heads.view(rows * kv, groups + 2, dim)
        self.query, self.key, self.value = by_kv[:, :groups], by_kv[:, groups], by_kv[:, groups + 1]
        self.turned = by_kv[:, : groups + 1]
        self.turned_size = empty(rows * kv, groups + 1, 1)
        pairs = self.heads.view(rows, kv, groups + 2, dim // 2, 2)
        self.turned_pairs = torch.view_as_complex(pairs)[:, :, : groups + 1]
        self.mixed = empty(rows, kv * groups * dim)
        self.mixed_heads = self.mixed.view(rows * kv, groups, dim)
        self.gate_up = empty(rows, 2 * inner)
        self.gate, self.up = self.gate_up.chunk(2, -1)


class FusedDecoder(Decoder):
    """Llama, Qwen2 and Qwen3 with few, large operations a layer, on buffers that stay.

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
        self._wide = dtype == torch.float32
        attention, mlp = self._model.model.layers[0].self_attn, self._model.model.layers[0].mlp
        self._dim: int = attention.head_dim
        self._kv: int = attention.k_proj.out_features // self._dim
        self._groups: int = attention.q_proj.out_features // self._dim // self._kv
        self._scaling: float = attention.scaling
        self._width: int = model.config.hidden_size
        self._inner: int = mlp.gate_proj.out_features
        silu_ = functools.partial(F.silu, inplace=True)
        self._act_ = silu_ if model.config.hidden_act == "silu" else lambda x: x.copy_(mlp.act_fn(x))
        eps: float = model.config.rms_norm_eps
        self._floor = torch.tensor(math.sqrt(self._width * eps), device=self._device)
        self._head_floor = torch.tensor(math.sqrt(self._dim * eps), device=self._device)
        self._cache_dtype = torch.float32 if self._device.type == "cpu" else dtype
        self._has_head_norm = hasattr(attention, "q_norm")
        self._layers: list[_Layer] = []
        self._rope = torch.empty(0, 1, 1, self._dim // 2, dtype=torch.complex64, device=self._device)
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
        has_norm = hasattr(attention, "q_norm")
        pairs = torch.arange(self._dim, device=self._device).view(2, -1).T.reshape(-1)  # channel i beside i + dim/2
        scaling = torch.ones(self._groups + 2, 1, 1, device=self._device)
        scaling[: self._groups] = self._scaling

        def qkv(kind: str, norm: Tensor | None = None) -> Tensor | None:
            """Weights or biases of the three, [kv (groups + 2) dim, ...], in the order of `_Layer.qkv`."""
            q, k, v = (getattr(getattr(attention, f"{name}_proj"), kind) for name in "qkv")
            if q is None:
                return None
            q, k, v = (x.reshape(self._kv, -1, self._dim, *x.shape[1:]) for x in (q, k, v))
            heads = torch.cat([q[:, :, pairs], k[:, :, pairs], v], 1)
            if norm is not None:
                heads = heads.float() * norm
            if self._wide and not has_norm:
                heads = heads.float() * (scaling if kind == "weight" else scaling[..., 0])
            return heads.flatten(0, 2)

        def gate_up(kind: str, norm: Tensor | None = None) -> Tensor | None:
            gate, up = getattr(mlp.gate_proj, kind), getattr(mlp.up_proj, kind)
            fused = None if gate is None else torch.cat([gate, up])
            return fused if fused is None or norm is None else fused.float() * norm

        def norm(module: Any) -> tuple[Tensor | None, Tensor | None]:
            """Its weight as (applied by itself, folded into the next product)."""
            weight = module.weight.float() * math.sqrt(self._width)
            return (None, weight) if self._wide else (weight, None)

        def take(x: Tensor | None, old: Tensor | None = None) -> Tensor | None:
            """x in the dtype of the products, in the memory of `old` if there is any."""
            return None if x is None else x.to(self._dtype) if old is None else old.copy_(x)

        def product(x: Tensor | None, old: Tensor | None = None) -> Tensor:
            weight = take(x, None if old is None else old.T)
            assert weight is not None
            return weight.T

        head_norm = None
        if has_norm:
            q_norm, k_norm = (
                x.weight.float()[pairs] * math.sqrt(self._dim) for x in (attention.q_norm, attention.k_norm)
            )
            head_norm = torch.stack([q_norm * self._scaling] * self._groups + [k_norm])
        elif not self._wide:
            head_norm = scaling[:-1, 0].expand(-1, self._dim)
        input_norm, qkv_fold = norm(block.input_layernorm)
        mlp_norm, mlp_fold = norm(block.post_attention_layernorm)
        return _Layer(
            input_norm=input_norm,
            qkv=product(qkv("weight", qkv_fold), None if old is None else old.qkv),
            qkv_bias=take(qkv("bias")),
            head_norm=head_norm,
            out=product(attention.o_proj.weight.detach()),
            out_bias=take(attention.o_proj.bias),
            mlp_norm=mlp_norm,
            gate_up=product(gate_up("weight", mlp_fold), None if old is None else old.gate_up),
            gate_up_bias=take(gate_up("bias")),
            down=product(mlp.down_proj.weight.detach()),
            down_bias=take(mlp.down_proj.bias),
        )

    def start(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], room: int, scale: float) -> Tensor:
        n, width = len(rows), max(map(len, prompts))
        length = max(width + room, _LEAST_WINDOW)
        shape, device = (len(self._layers), n * self._kv), self._device
        self._keys = torch.empty(*shape, self._dim, length, dtype=self._cache_dtype, device=device)
        self._values = torch.empty(*shape, length, self._dim, dtype=self._cache_dtype, device=device)
        self._keys[..., :_LEAST_WINDOW] = 0  # attended to, under the mask, before they are written
        self._values[:, :, :_LEAST_WINDOW] = 0
        self._used, self._scale = width, self._norm * scale
        self._extend_rope(length)
        index = torch.tensor(rows, device=device)
        pad = torch.tensor([width - len(p) for p in prompts], device=device)
        self._padded = bool(pad.any())
        self._pad = pad[index]
        self._bias = None
        if self._padded or width < _LEAST_WINDOW:
            columns = torch.arange(length, device=device)
            hidden = (columns < self._pad[:, None]) | (columns >= width)
            bias = torch.zeros(n, 1, length, dtype=self._cache_dtype, device=device)
            self._bias = bias.masked_fill_(hidden[:, None], -torch.inf).repeat_interleave(self._kv, 0)
        height = max(1, _PREFILL_TOKENS // width)
        logits = [self._prefill(prompts[i : i + height], index - i) for i in range(0, len(prompts), height)]
        self._logits = torch.empty(n, self._head.shape[1], dtype=self._dtype, device=device)
        torch.index_select(torch.cat(logits), 0, index, out=self._logits)
        self._use(n)
        return self._logits.float()

    def _prefill(self, prompts: Sequence[Sequence[int]], index: Tensor) -> Tensor:
        """Logits [u, V] after each prompt; its keys and values go to every row whose `index` [n] names it."""
        u, width = len(prompts), self._used
        ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=self._device)
        columns = torch.arange(width, device=self._device)
        pad = width - torch.tensor([len(p) for p in prompts], device=self._device)
        mask = None
        if self._padded:
            real = columns >= pad[:, None]
            mask = real[:, None, :] & (columns <= columns[:, None]) | torch.eye(
                width, dtype=torch.bool, device=pad.device
            )
            mask = mask[:, None]
        rope = self._rope[(columns - pad[:, None]).clamp_(min=0).flatten()]
        scratch = self._scratch_of(u * width)
        here = ((index >= 0) & (index < u)).nonzero()[:, 0]
        keys, values = (x.unflatten(1, (-1, self._kv)) for x in (self._keys, self._values))

        def attend(number: int) -> None:
            heads = scratch.heads.view(u, width, self._kv, self._groups + 2, self._dim)
            q = heads[:, :, :, :-2].flatten(2, 3).transpose(1, 2)
            k, v = heads[:, :, :, -2].transpose(1, 2), heads[:, :, :, -1].transpose(1, 2)
            keys[number, here, :, :, :width] = k.transpose(2, 3)[index[here]].to(keys.dtype)
            values[number, here, :, :width] = v[index[here]].to(values.dtype)
            mixed = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=1.0, enable_gqa=True
            )
            scratch.mixed.view(u, width, -1).copy_(mixed.transpose(1, 2).flatten(2))

        self._run(scratch, ids.flatten(), rope, attend)
        last = scratch.x.view(u, width, -1)[:, -1].contiguous()
        return torch.mm(self._normed(last).to(self._dtype), self._head)

    def step(self, tokens: Tensor) -> Tensor:
        at, scratch = self._used, self._scratch
        end = self._used = at + 1
        window = max(end, _LEAST_WINDOW)
        rope = self._rope[at - self._pad] if self._padded else self._rope[at]
        bias = self._bias
        if bias is not None:
            bias[:, :, at] = 0
            bias = self._bias = bias if self._padded or end < _LEAST_WINDOW else None
        bias = None if bias is None else bias[:, :, :window]

        def attend(number: int) -> None:
            keys, values = self._rows[number]
            keys[:, :, at] = scratch.key
            values[:, at] = scratch.value
            query = scratch.query if self._cache_dtype == torch.float32 else scratch.query.to(self._cache_dtype)
            keys, values = keys[:, :, :window], values[:, :window]
            scores = torch.bmm(query, keys) if bias is None else torch.baddbmm(bias, query, keys)
            if self._cache_dtype == torch.float32:
                torch.bmm(scores.softmax(-1), values, out=scratch.mixed_heads)
            else:
                scratch.mixed_heads.copy_(torch.bmm(scores.softmax(-1), values))

        self._run(scratch, tokens, rope, attend)
        unit = self._normed(scratch.x)
        return torch.mm(unit.to(self._dtype), self._head, out=self._logits[: len(tokens)]).float()

    def move(self, sources: Tensor, targets: Tensor, count: int) -> None:
        if len(sources):
            end = self._used
            keys, values = (x.unflatten(1, (-1, self._kv)) for x in (self._keys, self._values))
            keys[:, targets, :, :, :end] = keys[:, sources, :, :, :end]
            values[:, targets, :, :end] = values[:, sources, :, :end]
            self._pad[targets] = self._pad[sources]
            if self._bias is not None:
                bias = self._bias.unflatten(0, (-1, self._kv))
                bias[targets] = bias[sources]
        self._pad = self._pad[:count]
        self._bias = None if self._bias is None else self._bias[: count * self._kv]
        self._use(count)

    def finish(self) -> None:
        del self._keys, self._values, self._rows, self._logits, self._scratch

    def _use(self, count: int) -> None:
        """Decode the first `count` rows from now on."""
        self._scratch = self._scratch_of(count)
        used = count * self._kv
        self._rows = [(keys[:used], values[:used]) for keys, values in zip(self._keys, self._values)]

    def _scratch_of(self, rows: int) -> _Scratch:
        return _Scratch(rows, self._width, self._kv, self._groups, self._dim, self._inner, self._device)

    def _run(self, s: _Scratch, tokens: Tensor, rope: Tensor, attend: Callable[[int], None]) -> None:
        """Take the tokens through all blocks, leaving the residual stream in ``s.x``.

        `attend` turns the heads of a block into ``s.mixed``.
        """
        s.x.copy_(self._embedding[tokens])
        for number, layer in enumerate(self._layers):
            self._unit(s, layer.input_norm)
            self._product(s.unit, layer.qkv, layer.qkv_bias, s.heads)
            if layer.head_norm is not None:
                if self._has_head_norm:
                    torch.linalg.vector_norm(s.turned, dim=-1, keepdim=True, out=s.turned_size)
                    s.turned.div_(s.turned_size.hypot_(self._head_floor))
                s.turned.mul_(layer.head_norm)
            s.turned_pairs.mul_(rope)
            attend(number)
            self._add_product(s.x, s.mixed, layer.out, layer.out_bias)
            self._unit(s, layer.mlp_norm)
            self._product(s.unit, layer.gate_up, layer.gate_up_bias, s.gate_up)
            self._act_(s.gate)
            s.gate.mul_(s.up)
            self._add_product(s.x, s.gate, layer.down, layer.down_bias)

    def _unit(self, s: _Scratch, norm: Tensor | None) -> None:
        """RMSNorm of ``s.x`` into ``s.unit``, up to the factors that are folded into the next product."""
        torch.linalg.vector_norm(s.x, dim=-1, keepdim=True, out=s.size)
        torch.div(s.x, s.size.hypot_(self._floor), out=s.unit)
        if norm is not None:
            s.unit.mul_(norm)

    def _normed(self, x: Tensor) -> Tensor:
        """The final norm, times the scale of the logits."""
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x / size.hypot_(self._floor)).mul_(self._scale)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """out = x @ weight (+ bias)"""
        if not self._wide:
            x = x.to(self._dtype)
            out.copy_(x @ weight if bias is None else torch.addmm(bias, x, weight))
        elif bias is None:
            torch.mm(x, weight, out=out)
        else:
            torch.addmm(bias, x, weight, out=out)

    def _add_product(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """x += y @ weight (+ bias)"""
        if self._wide:
            x.addmm_(y, weight)
        else:
            x += y.to(self._dtype) @ weight
        if bias is not None:
            x += bias

    def _extend_rope(self, length: int) -> None:
        """Table [length, 1, 1, dim/2] of cos + i sin, from the model's own rotary module."""
        if len(self._rope) < length:
            like = torch.empty(0, dtype=torch.float32, device=self._device)
            cos, sin = self._model.model.rotary_emb(like, torch.arange(length, device=self._device)[None])
            half = self._dim // 2
            self._rope = torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())[:, None, None]


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
        self._scale = scale
        logits = self._forward(ids, (mask.cumsum(1) - 1).clamp_(min=0))
        index = torch.tensor(rows, device=device)
        self._select(index)
        return logits[index]

    def step(self, tokens: Tensor) -> Tensor:
        self._mask = F.pad(self._mask, (0, 1), value=1)
        logits = self._forward(tokens[:, None], self._lengths[:, None])
        self._lengths = self._lengths + 1
        return logits

    def move(self, sources: Tensor, targets: Tensor, count: int) -> None:
        index = torch.arange(count, device=self._mask.device)
        index[targets] = sources
        self._select(index)

    def finish(self) -> None:
        del self._cache

    def _select(self, index: Tensor) -> None:
        self._cache.reorder_cache(cast("torch.LongTensor", index))
        self._mask, self._lengths = self._mask[index], self._lengths[index]

    def _forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Scaled logits [n, V] of the last column."""
        extra = {"position_ids": positions} if self._with_positions else {}
        cache = {self._cache_name: self._cache}
        output = self._model(
            input_ids=ids, attention_mask=self._mask, use_cache=True, **cache, **extra, **self._last_only
        )
        return output.logits[:, -1].float() * self._scale
