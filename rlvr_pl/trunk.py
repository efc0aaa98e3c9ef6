"""The forward and backward of a policy's blocks with few passes over the activations, for FP32 training on CPUs.

On small policies a third of a gradient goes to elementwise work: RMSNorm, rotary embedding and gating, each as several
operations of autograd's. Here a block is two nodes with a backward of their own. The weights of norms and the order of
channels are folded into the matrices that follow, where autograd differentiates them at the cost of a few small
operations. What is left of RMSNorm is ``u = x / r``, ``r = hypot(|x|, sqrt(h eps))`` (times sqrt(h), folded too), with
``dx = (du - u <du, u>) / r``. Channels of q and k are interleaved, so that the rotary embedding is one complex product,
and its backward the product with the conjugate.

Same numbers as the transformers forward up to the rounding of FP32. Reverse mode, once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlvr_pl.adapters import is_adapted
from rlvr_pl.core.products import block_product, row_blocks, rows_product, sum_product
from rlvr_pl.policy import Policy
from rlvr_pl.sampling.fused import fusable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Attributes of modules that, when not empty, change what their forward computes.
_EXTRAS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "parametrizations",
    "gradient_checkpointing",
    "_compiled_call_impl",
)


def quick(policy: Policy) -> Policy:
    """A policy of the same weights with faster hidden states, or the policy itself where there are none."""
    return _QuickPolicy(**{f.name: getattr(policy, f.name) for f in fields(policy)}) if fits(policy.model) else policy


def fits(model: PreTrainedModel) -> bool:
    """Whether `hidden_states` computes this model: a Llama, Qwen2 or Qwen3 in FP32 on a CPU, nothing hung on its
    modules, no adapter, no activation checkpointing, no compilation, no
    autocast."""
    return (
        fusable(model)
        and not any(is_adapted(module) for module in model.modules())
        and model.config.hidden_act == "silu"
        and all(p.dtype == torch.float32 and p.device.type == "cpu" for p in model.parameters())
        and not any(getattr(module, extra, None) for module in model.modules() for extra in _EXTRAS)
        and not torch.is_autocast_enabled("cpu")
    )


@dataclass(eq=False)
class _QuickPolicy(Policy):
    """Backward can run once, in reverse mode."""

    def hidden_states(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return hidden_states(self.model, input_ids)


@dataclass(frozen=True)
class _Shape:
    """Rows and width of the padded batch, key-value heads, query heads of each, channels of a head, scale of scores."""

    rows: int
    width: int
    kv: int
    groups: int
    dim: int
    scaling: float

    @property
    def turned(self) -> int:
        """Heads of q and k, which are rotated; those of v follow."""
        return self.kv * (self.groups + 1)


def hidden_states(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """[n, s, h] states before the head, for right-padded rows of ids [n, s]; those of padding are meaningless."""
    body: Any = model.model
    attention = body.layers[0].self_attn
    dim = attention.head_dim
    kv = attention.k_proj.out_features // dim
    groups = attention.q_proj.out_features // dim // kv
    shape = _Shape(ids.shape[0], ids.shape[1], kv, groups, dim, attention.scaling)
    x = body.embed_tokens(ids).flatten(0, 1)
    root = math.sqrt(x.shape[1])
    floor = x.new_tensor(root * math.sqrt(model.config.rms_norm_eps))
    head_floor = x.new_tensor(math.sqrt(dim * model.config.rms_norm_eps))
    rope = _rope(body, shape, x)
    for block in body.layers:
        qkv, bias, turned = _query_key_value(block.self_attn, block.input_layernorm.weight * root, shape)
        out = block.self_attn.o_proj
        x = _Attention.apply(x, qkv, bias, turned, out.weight, out.bias, rope, shape, floor, head_floor)
        gate, up, down = block.mlp.gate_proj, block.mlp.up_proj, block.mlp.down_proj
        gate_up = torch.cat([gate.weight, up.weight]) * (block.post_attention_layernorm.weight * root)
        bias = None if gate.bias is None else torch.cat([gate.bias, up.bias])
        x = _GatedMLP.apply(x, gate_up, bias, down.weight, down.bias, floor)
    return (_Unit.apply(x, floor) * (body.norm.weight * root)).view(*ids.shape, -1)


def _query_key_value(attention: Any, norm: Tensor, shape: _Shape) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """One matrix [heads dim, h] for q, k and v, `norm` folded in; its bias; the factors [turned, dim] of q and k."""
    pairs = torch.arange(shape.dim, device=norm.device).view(2, -1).T.reshape(-1)  # channel i beside i + dim/2

    def heads(kind: str) -> Tensor | None:
        q, k, v = (getattr(getattr(attention, f"{name}_proj"), kind) for name in "qkv")
        if q is None:
            return None
        q, k, v = (x.view(-1, shape.dim, *x.shape[1:]) for x in (q, k, v))
        return torch.cat([q[:, pairs], k[:, pairs], v]).flatten(0, 1)

    matrix = heads("weight")
    assert matrix is not None
    turned = None
    if hasattr(attention, "q_norm"):
        q, k = (x.weight[pairs] * math.sqrt(shape.dim) for x in (attention.q_norm, attention.k_norm))
        turned = torch.stack([q] * (shape.kv * shape.groups) + [k] * shape.kv)
    return matrix * norm, heads("bias"), turned


def _rope(body: Any, shape: _Shape, like: Tensor) -> Tensor:
    """[n s, 1, dim/2] of cos + i sin, from the model's own rotary module."""
    positions = torch.arange(shape.width, device=like.device)[None]
    cos, sin = (x[0, :, : shape.dim // 2] for x in body.rotary_emb(like, positions))
    return torch.complex(cos, sin).repeat(shape.rows, 1)[:, None]


def _unit(x: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
    size = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(floor)
    return x / size, size


def _unit_backward_(grad: Tensor, unit: Tensor, size: Tensor) -> Tensor:
    """Turns the gradient of `unit` into that of x, in place."""
    along = torch.linalg.vecdot(grad, unit)[..., None]
    return grad.addcmul_(unit, along, value=-1).div_(size)


def _biased(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y.add_(bias)


def _bias_grad(grad: Tensor, bias: Tensor | None) -> Tensor | None:
    return None if bias is None else grad.sum(0)


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, floor: Tensor) -> Tensor:  # type: ignore[override]
        unit, size = _unit(x, floor)
        ctx.save_for_backward(unit, size)
        return unit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _unit_backward_(grad.clone(), *ctx.saved_tensors), None


class _Attention(torch.autograd.Function):
    """x [n s, h] plus causal self-attention of its normed self."""

    @staticmethod
    def forward(ctx, x, qkv, qkv_bias, turned, out, out_bias, rope, shape, floor, head_floor):  # type: ignore[override]
        unit, size = _unit(x, floor)
        heads = _biased(rows_product(unit, qkv.T), qkv_bias).view(len(x), -1, shape.dim)
        head_units = head_sizes = None
        if turned is None:
            rotated = heads[:, : shape.turned].contiguous()
        else:
            head_units, head_sizes = _unit(heads[:, : shape.turned], head_floor)
            rotated = head_units * turned
        _pairs(rotated).mul_(rope)
        parts = rotated[:, : -shape.kv], rotated[:, -shape.kv :], heads[:, shape.turned :]
        with torch.enable_grad():  # torch's own attention knows its backward
            q, k, v = (x.view(shape.rows, shape.width, -1, shape.dim).transpose(1, 2) for x in parts)
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=shape.scaling, enable_gqa=True)
        flat = mixed.detach().transpose(1, 2).reshape(len(x), -1)
        ctx.shape, ctx.attention = shape, (q, k, v, mixed)
        ctx.save_for_backward(unit, size, head_units, head_sizes, flat, qkv, qkv_bias, turned, out, out_bias, rope)
        return _biased(rows_product(flat, out.T).add_(x), out_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[override]
        unit, size, head_units, head_sizes, flat, qkv, qkv_bias, turned, out, out_bias, rope = ctx.saved_tensors
        shape, (q, k, v, mixed) = ctx.shape, ctx.attention
        del ctx.attention
        grad_mixed = rows_product(grad, out).view(shape.rows, shape.width, -1, shape.dim).transpose(1, 2)
        heads = grad.new_empty(len(unit), shape.turned + shape.kv, shape.dim)
        places = heads.view(shape.rows, shape.width, -1, shape.dim).transpose(1, 2)
        places = places.split([shape.turned - shape.kv, shape.kv, shape.kv], 1)
        for place, part in zip(places, torch.autograd.grad(mixed, [q, k, v], grad_mixed)):
            place.copy_(part)
        rotated = heads[:, : shape.turned]
        _pairs(heads)[:, : shape.turned].mul_(rope.conj())
        grad_turned = None
        if turned is not None:
            grad_turned = (rotated * head_units).sum(0)
            _unit_backward_(rotated.mul_(turned), head_units, head_sizes)
        flat_heads = heads.view(len(unit), -1)
        grad_x = _unit_backward_(rows_product(flat_heads, qkv), unit, size).add_(grad)
        own = (
            grad_x,
            sum_product(flat_heads, unit),
            _bias_grad(flat_heads, qkv_bias),
            grad_turned,
            sum_product(grad, flat),
        )
        return *own, _bias_grad(grad, out_bias), None, None, None, None


class _GatedMLP(torch.autograd.Function):
    """x [n s, h] plus ``down(silu(gate) up)`` of its normed self, in blocks of rows that stay in the caches.

    What is kept for the backward is the product of gate and up; silu and what it gates are cheap there.
    """

    @staticmethod
    def forward(ctx, x, gate_up, gate_up_bias, down, down_bias, floor):  # type: ignore[override]
        y, kept = torch.empty_like(x), []
        for rows in row_blocks(len(x), x, gate_up, down):
            unit, size = _unit(x[rows], floor)
            inner = _biased(block_product(unit, gate_up.T, rows), gate_up_bias)
            gate, up = inner.chunk(2, 1)
            torch.add(block_product(F.silu(gate).mul_(up), down.T, rows), x[rows], out=y[rows])
            kept += unit, size, inner
        ctx.save_for_backward(gate_up, gate_up_bias, down, down_bias, *kept)
        return _biased(y, down_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[override]
        gate_up, gate_up_bias, down, down_bias, *kept = ctx.saved_tensors
        grad_x = torch.empty_like(grad)
        grad_gate_up, grad_down = torch.zeros_like(gate_up), torch.zeros_like(down)
        grad_bias = None if gate_up_bias is None else torch.zeros_like(gate_up_bias)
        blocks = row_blocks(len(grad), grad, gate_up, down)
        for rows, unit, size, inner in zip(blocks, kept[::3], kept[1::3], kept[2::3]):
            (gate, up), above = inner.chunk(2, 1), grad[rows]
            open_ = F.silu(gate)
            grad_down += block_product(above.T, open_ * up, rows)
            grad_gated = block_product(above, down, rows)
            grad_inner = torch.empty_like(inner)
            grad_gate, grad_up = grad_inner.chunk(2, 1)
            torch.mul(grad_gated, open_, out=grad_up)
            torch.ops.aten.silu_backward.grad_input(grad_gated.mul_(up), gate, grad_input=grad_gate)
            grad_gate_up += block_product(grad_inner.T, unit, rows)
            if grad_bias is not None:
                grad_bias += grad_inner.sum(0)
            torch.add(_unit_backward_(block_product(grad_inner, gate_up, rows), unit, size), above, out=grad_x[rows])
        return grad_x, grad_gate_up, grad_bias, grad_down, _bias_grad(grad, down_bias), None


def _pairs(heads: Tensor) -> Tensor:
    """[n, heads, dim/2] complex view of [n, heads, dim]."""
    return torch.view_as_complex(heads.unflatten(-1, (-1, 2)))
