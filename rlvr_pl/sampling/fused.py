"""A decode loop of few, large operations for the Llama, Qwen2 and Qwen3 families.

On small models the time goes to the number of operations, not to arithmetic. So: q, k and v are one product, gate and
up another. In FP32 the weights of the norms are folded into these products, and what is left of RMSNorm is
``x / hypot(|x|, sqrt(h eps))`` (times sqrt(h), folded too). Channels of q and k are interleaved, so that the rotary
embedding is one complex product. Every activation has a standing buffer with its views made beforehand. Keys are
cached transposed.

Products with weights run in the decoder's dtype; activations and, on a CPU, the cache are FP32.
"""

from __future__ import annotations

import copy
import functools
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from rlvr_pl.adapters import base, is_adapted, is_replaced, plain
from rlvr_pl.allocator import LARGE
from rlvr_pl.core.products import packable, packed, packed_product, product, quick
from rlvr_pl.sampling.decoder import Decoder, Sequences, left_padded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tokens of one prefill call: bounds its activations, not what it computes.
_PREFILL_TOKENS = 8192
# Attention over fewer columns than a vector register holds is slower than over this many with a mask.
_LEAST_WINDOW = 16
# Rows of a product by oneDNN (BF16 on a CPU, and large FP32 heads) are filled up to a multiple of this.
_ROW_STEP = 16
# Columns of one block of a large FP32 head.
_HEAD_BLOCK = 8192
# Steps of a batch that repay packing the weights for it, which takes as long as 3 to 7 steps gain.
_PACKED_STEPS = 16
# Bytes of a packed block of a large head: more than the allocator keeps for itself when they are freed.
_PACKED_BYTES = LARGE * 3 // 2
_CLASSES = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_FIXED_ROPE = {"default", "linear", "llama3", "yarn"}


def fusable(model: PreTrainedModel) -> bool:
    """Whether `FusedDecoder` computes exactly this model: a known class, plain layers, full attention, fixed rope.

    Adapters on the projections of blocks are merged as the weights are taken; others are not known here.
    """
    kind = type(model).__mro__[2] if isinstance(model, FSDPModule) else type(model)  # which is given a class of its own
    if kind.__name__ not in _CLASSES or not kind.__module__.startswith("transformers."):
        return False
    body: Any = model.model
    linears = [m for layer in body.layers for name, m in layer.named_modules() if name.endswith("_proj")]
    if any(is_replaced(m) or (is_adapted(m) and not name.endswith("_proj")) for name, m in model.named_modules()):
        return False
    return (
        all(type(base(m)) is nn.Linear for m in (*linears, model.lm_head))
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
    head_norm: Tensor | None  # [query heads of a key-value head + 1, dim], softmax scaling included in the queries'
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class FusedDecoder(Decoder):
    """The fused weights. Those that need neither cast nor fusion are the model's own, not copies.

    Args:
        model: one for which `fusable` holds.
        dtype: of the products with weights.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        self._model: Any = model
        self.dtype, self.device = dtype, model.device
        self.wide = dtype == torch.float32
        self.cache_dtype = torch.float32 if self.device.type == "cpu" else dtype
        attention, mlp = self._model.model.layers[0].self_attn, self._model.model.layers[0].mlp
        self.width: int = model.config.hidden_size
        self.dim: int = attention.head_dim
        self.kv: int = base(attention.k_proj).out_features // self.dim
        self.groups: int = base(attention.q_proj).out_features // self.dim // self.kv
        self.inner: int = base(mlp.gate_proj).out_features
        self._scaling: float = attention.scaling
        self._has_head_norm = hasattr(attention, "q_norm")
        silu_ = functools.partial(F.silu, inplace=True)
        self._act_ = silu_ if model.config.hidden_act == "silu" else lambda x: x.copy_(mlp.act_fn(x))
        eps: float = model.config.rms_norm_eps
        self._floor = torch.tensor(math.sqrt(self.width * eps), device=self.device)
        self._head_floor = torch.tensor(math.sqrt(self.dim * eps), device=self.device)
        self._frequencies: Tensor | None = None
        self.layers: list[_Layer] = []
        self.load()

    @torch.no_grad()
    def load(self) -> None:
        body = self._model.model
        old = self.layers or [None] * len(body.layers)
        self.layers = [self._fuse(block, layer) for block, layer in zip(body.layers, old)]
        self._embedding: Tensor = body.embed_tokens.weight.detach()
        self._norm = body.norm.weight.detach().float() * math.sqrt(self.width)
        frequencies = body.rotary_emb.inv_freq  # a cast of the model rounds them
        if self._frequencies is None or not torch.equal(frequencies, self._frequencies):
            self._frequencies = frequencies.clone()
            self._rope = torch.empty(0, 1, 1, self.dim // 2, dtype=torch.complex64, device=self.device)
        self.head = self._model.lm_head.weight.detach().to(self.dtype).T
        self.vocabulary: int = self.head.shape[1]
        self._head_blocks = self._blocks_of_head(_HEAD_BLOCK)

    def _blocks_of_head(self, width: int) -> list[tuple[slice, Tensor]]:
        """Columns of the head by `width`, and what is in them."""
        columns = [slice(first, first + width) for first in range(0, self.vocabulary, width)]
        return [(some, self.head[:, some]) for some in columns]

    def _fuse(self, block: Any, old: _Layer | None) -> _Layer:
        attention = block.self_attn
        q, k, v, out = (plain(getattr(attention, f"{name}_proj")) for name in "qkvo")
        gate, up, down = (plain(getattr(block.mlp, f"{name}_proj")) for name in ("gate", "up", "down"))
        input_norm, qkv_fold = self._norm_or_fold(block.input_layernorm)
        mlp_norm, mlp_fold = self._norm_or_fold(block.post_attention_layernorm)
        gate_up_bias = None if gate.bias is None else torch.cat([gate.bias, up.bias])
        return _Layer(
            input_norm=input_norm,
            qkv=self._fused(self._by_head(q.weight, k.weight, v.weight), qkv_fold, old and old.qkv),
            qkv_bias=None if q.bias is None else self._by_head(q.bias, k.bias, v.bias).to(self.dtype),
            head_norm=self._head_norm(attention),
            out=self._taken(out.weight).T,
            out_bias=self._taken(out.bias),
            mlp_norm=mlp_norm,
            gate_up=self._fused(torch.cat([gate.weight, up.weight]), mlp_fold, old and old.gate_up),
            gate_up_bias=self._taken(gate_up_bias),
            down=self._taken(down.weight).T,
            down_bias=self._taken(down.bias),
        )

    def _norm_or_fold(self, norm: Any) -> tuple[Tensor | None, Tensor | None]:
        """The norm's weight, times sqrt(h), as (applied by itself, folded into the next product)."""
        weight = norm.weight.float() * math.sqrt(self.width)
        return (None, weight) if self.wide else (weight, None)

    def _fused(self, weight: Tensor, fold: Tensor | None, old: Tensor | None) -> Tensor:
        """The transposed weight, `fold` multiplied into its inputs, in the memory of `old` if there is any."""
        weight = weight if fold is None else weight.float() * fold
        return weight.to(self.dtype).T if old is None else old.copy_(weight.T)

    def _taken(self, x: Any) -> Any:
        return None if x is None else x.detach().to(self.dtype)

    def _by_head(self, *parts: Tensor) -> Tensor:
        """Weights or biases of q, k and v as the rows of `_Layer.qkv`, channels of q and k interleaved."""
        q, k, v = (x.reshape(self.kv, -1, self.dim, *x.shape[1:]) for x in parts)
        if self.wide and not self._has_head_norm:
            q = q * self._scaling
        return torch.cat([q[:, :, self._pairs()], k[:, :, self._pairs()], v], 1).flatten(0, 2)

    def _head_norm(self, attention: Any) -> Tensor | None:
        if self._has_head_norm:
            pair = attention.q_norm, attention.k_norm
            q, k = (norm.weight.float()[self._pairs()] * math.sqrt(self.dim) for norm in pair)
        elif not self.wide:  # the scaling alone, which BF16 weights could not take exactly
            q = k = torch.ones(self.dim, device=self.device)
        else:
            return None
        return torch.stack([q * self._scaling] * self.groups + [k])

    def _pairs(self) -> Tensor:
        """The order that puts channel i beside channel i + dim/2, with which the rotary embedding mixes it."""
        return torch.arange(self.dim, device=self.device).view(2, -1).T.reshape(-1)

    def rope(self, length: int) -> Tensor:
        """Table [>= length, 1, 1, dim/2] of cos + i sin, from the model's own rotary module."""
        if len(self._rope) < length:
            like = torch.empty(0, dtype=torch.float32, device=self.device)
            cos, sin = self._model.model.rotary_emb(like, torch.arange(length, device=self.device)[None])
            half = self.dim // 2
            self._rope = torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())[:, None, None]
        return self._rope

    def start(self, prompts: Sequence[Sequence[int]], rows: Sequence[int], room: int, scale: float) -> Sequences:
        weights = self._packed() if room >= _PACKED_STEPS else self
        return _FusedSequences(weights, prompts, rows, room, scale)

    def _packed(self) -> FusedDecoder:
        """Itself, with what oneDNN multiplies packed for one batch: BF16 weights of blocks, and a large head."""
        if not packable(self.head) or (self.wide and self.vocabulary < _HEAD_BLOCK):
            return self
        other = copy.copy(self)
        if not self.wide:
            other.layers = [
                replace(x, qkv=packed(x.qkv), out=packed(x.out), gate_up=packed(x.gate_up), down=packed(x.down))
                for x in self.layers
            ]
            other.head = packed(self.head)
        else:
            width = max(_HEAD_BLOCK, _PACKED_BYTES // (self.width * 4))
            other._head_blocks = [(columns, packed(block)) for columns, block in self._blocks_of_head(width)]
        return other

    def run(self, s: _Scratch, tokens: Tensor, rope: Tensor, attend: Callable[[int], None]) -> None:
        """Take the tokens through all blocks, leaving the residual stream in ``s.x``.

        `attend` turns the heads of the block of that number into ``s.mixed``.
        """
        s.x.copy_(self._embedding.index_select(0, tokens))
        for number, layer in enumerate(self.layers):
            self._unit(s, layer.input_norm)
            self._product(s.unit, layer.qkv, layer.qkv_bias, s.heads)
            if self._has_head_norm:
                torch.linalg.vector_norm(s.turned, dim=-1, keepdim=True, out=s.turned_size)
                s.turned.div_(s.turned_size.hypot_(self._head_floor))
            if layer.head_norm is not None:
                s.turned.mul_(layer.head_norm)
            s.turned_pairs.mul_(rope)
            attend(number)
            self._add_product(s.x, s.mixed, layer.out, layer.out_bias)
            self._unit(s, layer.mlp_norm)
            self._product(s.unit, layer.gate_up, layer.gate_up_bias, s.gate_up)
            self._act_(s.gate)
            s.gate.mul_(s.up)
            self._add_product(s.x, s.gate, layer.down, layer.down_bias)

    def project(self, x: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
        """Logits of the residual stream x [m, h], times `scale`, FP32."""
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        unit = (x / size.hypot_(self._floor)).mul_(self._norm).mul_(scale)
        if self.wide:
            return self._wide_logits(unit, unit.new_empty(len(x), self.vocabulary) if out is None else out)
        logits = self._narrow_product(unit, self.head)
        return logits.float() if out is None else out.copy_(logits)

    def _wide_logits(self, unit: Tensor, out: Tensor) -> Tensor:
        """``unit @ head`` into `out`, whose memory is used again and again where products by oneDNN take new one."""
        if self.vocabulary < _HEAD_BLOCK or not quick(unit, self.head):
            return torch.mm(unit, self.head, out=out)
        rows = F.pad(unit, (0, 0, 0, -len(unit) % _ROW_STEP))
        for columns, block in self._head_blocks:
            part = packed_product(rows, block) if block.is_mkldnn else product(rows, block)
            out[:, columns] = part[: len(unit)]
        return out

    def _unit(self, s: _Scratch, norm: Tensor | None) -> None:
        """RMSNorm of ``s.x`` into ``s.unit``, up to the factors that are folded into the next product."""
        torch.linalg.vector_norm(s.x, dim=-1, keepdim=True, out=s.size)
        torch.div(s.x, s.size.hypot_(self._floor), out=s.unit)
        if norm is not None:
            s.unit.mul_(norm)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """out = x @ weight (+ bias)"""
        if not self.wide:
            out.copy_(self._narrow_product(x, weight))
        else:
            torch.mm(x, weight, out=out)
        if bias is not None:
            out += bias

    def _add_product(self, x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """x += y @ weight (+ bias)"""
        if self.wide:
            x.addmm_(y, weight)
        else:
            x += self._narrow_product(y, weight)
        if bias is not None:
            x += bias

    def _narrow_product(self, x: Tensor, weight: Tensor) -> Tensor:
        """x @ weight in the decoder's dtype. On a CPU every new number of rows costs a kernel of its own, in time and
        in memory that is not given back, so there are only multiples of `_ROW_STEP`."""
        missing = -len(x) % _ROW_STEP if self.device.type == "cpu" else 0
        rows = F.pad(x.to(self.dtype), (0, 0, 0, missing))
        return (packed_product(rows, weight) if weight.is_mkldnn else rows @ weight)[: len(x)]


class _Scratch:
    """Activations of `rows` tokens, and the views of them that the loop needs: made once, not in every layer."""

    def __init__(self, rows: int, w: FusedDecoder) -> None:
        def empty(*shape: int) -> Tensor:
            return torch.empty(*shape, device=w.device)

        self.x, self.unit, self.size = empty(rows, w.width), empty(rows, w.width), empty(rows, 1)
        self.heads = empty(rows, w.kv * (w.groups + 2) * w.dim)
        by_kv = self.heads.view(rows * w.kv, w.groups + 2, w.dim)
        self.query, self.key, self.value = by_kv[:, : w.groups], by_kv[:, w.groups], by_kv[:, w.groups + 1]
        self.turned = by_kv[:, : w.groups + 1]
        self.turned_size = empty(rows * w.kv, w.groups + 1, 1)
        pairs = self.heads.view(rows, w.kv, w.groups + 2, w.dim // 2, 2)
        self.turned_pairs = torch.view_as_complex(pairs)[:, :, : w.groups + 1]
        self.mixed = empty(rows, w.kv * w.groups * w.dim)
        self.mixed_heads = self.mixed.view(rows * w.kv, w.groups, w.dim)
        self.gate_up = empty(rows, 2 * w.inner)
        self.gate, self.up = self.gate_up.chunk(2, -1)


class _FusedSequences(Sequences):
    """Key-value cache, allocated once, and buffers of one batch.

    Keys are [layer, sequence x kv head, dim, column], values [layer, sequence x kv head, column, dim]. The bias
    [sequence x kv head, 1, column] hides padding, and columns still to come where the window is wider than the text.
    """

    def __init__(
        self, w: FusedDecoder, prompts: Sequence[Sequence[int]], rows: Sequence[int], room: int, scale: float
    ) -> None:
        self._w, self._scale = w, scale
        ids, pad = left_padded(prompts, w.device)
        n, width = len(rows), ids.shape[1]
        length = max(width + room, _LEAST_WINDOW)
        shape = (len(w.layers), n * w.kv)
        self._keys = torch.empty(*shape, w.dim, length, dtype=w.cache_dtype, device=w.device)
        self._values = torch.empty(*shape, length, w.dim, dtype=w.cache_dtype, device=w.device)
        self._keys[..., :_LEAST_WINDOW] = 0  # attended to, under the mask, before they are written
        self._values[:, :, :_LEAST_WINDOW] = 0
        self._used = width
        self._rope = w.rope(length)
        index = torch.tensor(rows, device=w.device)
        self._padded = bool(pad.any())
        self._pad = pad[index]
        self._bias = None
        if self._padded or width < _LEAST_WINDOW:
            columns = torch.arange(length, device=w.device)
            hidden = (columns < self._pad[:, None]) | (columns >= width)
            bias = torch.zeros(n, 1, length, dtype=w.cache_dtype, device=w.device)
            self._bias = bias.masked_fill_(hidden[:, None], -torch.inf).repeat_interleave(w.kv, 0)
        height = max(1, _PREFILL_TOKENS // width)
        parts = []
        for first in range(0, len(ids), height):
            some = slice(first, first + height)
            here = slice(bisect_left(rows, first), bisect_left(rows, first + height))
            parts.append(self._prefill(ids[some], pad[some], here, index[here] - first))
        self._buffer = torch.empty(n, w.vocabulary, device=w.device)
        self.logits = torch.index_select(torch.cat(parts), 0, index, out=self._buffer)
        self._use(n)

    def _use(self, count: int) -> None:
        """Work on the first `count` sequences from now on."""
        self._scratch = _Scratch(count, self._w)
        used = count * self._w.kv
        self._cache = [(keys[:used], values[:used]) for keys, values in zip(self._keys, self._values)]
        self._out = self._buffer[:count]

    def _prefill(self, ids: Tensor, pad: Tensor, here: slice, source: Tensor) -> Tensor:
        """Logits [u, V] after prompts [u, width]; keys and values of prompts `source` go to the sequences `here`."""
        w, (u, width) = self._w, ids.shape
        columns = torch.arange(width, device=w.device)
        mask = None
        if self._padded:
            real = columns >= pad[:, None]
            itself = torch.eye(width, dtype=torch.bool, device=w.device)  # so that padding has something to see
            mask = (real[:, None, :] & (columns <= columns[:, None]) | itself)[:, None]
        rope = self._rope[(columns - pad[:, None]).clamp_(min=0).flatten()]
        scratch = _Scratch(u * width, w)
        keys, values = (x.unflatten(1, (-1, w.kv)) for x in (self._keys, self._values))

        def attend(number: int) -> None:
            heads = scratch.heads.view(u, width, w.kv, w.groups + 2, w.dim)
            q = heads[:, :, :, :-2].flatten(2, 3).transpose(1, 2)
            k, v = heads[:, :, :, -2].transpose(1, 2), heads[:, :, :, -1].transpose(1, 2)
            keys[number, here, :, :, :width] = k.transpose(2, 3).index_select(0, source)
            values[number, here, :, :width] = v.index_select(0, source)
            mixed = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=1.0, enable_gqa=True
            )
            scratch.mixed.view(u, width, -1).copy_(mixed.transpose(1, 2).flatten(2))

        w.run(scratch, ids.flatten(), rope, attend)
        return w.project(scratch.x.view(u, width, -1)[:, -1], self._scale)

    def step(self, tokens: Tensor) -> None:
        w, s, at = self._w, self._scratch, self._used
        end = self._used = at + 1
        window = max(end, _LEAST_WINDOW)
        rope = self._rope[at - self._pad] if self._padded else self._rope[at]
        bias = None
        if self._bias is not None:
            self._bias[:, :, at] = 0
            if not self._padded and end >= _LEAST_WINDOW:
                self._bias = None
            else:
                bias = self._bias[:, :, :window]

        def attend(number: int) -> None:
            keys, values = self._cache[number]
            keys[:, :, at] = s.key
            values[:, at] = s.value
            keys, values = keys[:, :, :window], values[:, :window]
            query = s.query if keys.dtype == torch.float32 else s.query.to(keys.dtype)
            scores = torch.bmm(query, keys) if bias is None else torch.baddbmm(bias, query, keys)
            if keys.dtype == torch.float32:
                torch.bmm(scores.softmax(-1), values, out=s.mixed_heads)
            else:
                s.mixed_heads.copy_(torch.bmm(scores.softmax(-1), values))

        w.run(s, tokens, rope, attend)
        self.logits = w.project(s.x, self._scale, out=self._out)

    def move(self, sources: Tensor, targets: Tensor, count: int) -> None:
        if len(sources):
            end, kv = self._used, self._w.kv
            keys, values = (x.unflatten(1, (-1, kv)) for x in (self._keys, self._values))
            keys[:, targets, :, :, :end] = keys[:, sources, :, :, :end]
            values[:, targets, :, :end] = values[:, sources, :, :end]
            self._pad[targets] = self._pad[sources]
            if self._bias is not None:
                bias = self._bias.unflatten(0, (-1, kv))
                bias[targets] = bias[sources]
        self._pad = self._pad[:count]
        self._bias = None if self._bias is None else self._bias[: count * self._w.kv]
        self._use(count)
