"""Token log-probs, entropies and divergences from hidden states and the vocabulary head, never holding all the logits.

With logits ``z = hidden @ head.T / temperature`` and ``p = softmax(z)``, everything here follows from three facts:

    log p_t = z_t - logsumexp(z)                d log p_t / dz = onehot_t - p
    H = -sum p log p                            dH / dz = -p (log p + H)
    KL(a || b) = sum p_a (log p_a - log p_b)

so that sums over the vocabulary can be kept online, block by block (running maximum, rescaled sums), as in
FlashAttention (arXiv 2205.14135) and Cut Cross-Entropy (arXiv 2411.09009). The logits are those that the head itself
would give in its own dtype (a BF16 head rounds them to BF16, as the supplied recipe does); everything after them is
FP32, or FP64 when the inputs are FP64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlvr_pl.core.products import product, quick

# Elements of one tile of logits on a CPU: 2 MiB of FP32, about an L2 cache, for the passes over it.
_CPU_TILE = 2**19
# Elements of a tile elsewhere, and of the row block that `linear_loss` keeps between its sweeps over the vocabulary:
# 64 MiB of FP32. (On a CPU a block twice as large takes a sixth of the time off, one half as large adds a seventh.)
_LARGE = 2**24
# Where oneDNN makes the products, rows are filled up to multiples of this: on a CPU every new shape costs kernels of
# its own, in time and in megabytes that are not given back.
_ROW_STEP = 64
# Vocabularies from which FP32 products go to oneDNN: below, row blocks are long, and of many lengths. A sweep's tiles
# are lower than `linear_loss`'s row blocks.
_QUICK, _QUICK_SWEEP = 4096, 512
# FP32 and FP64 logits are kept in bits, not nats, wherever only their exponentials and sums are wanted: torch's exp2 on
# a CPU takes a quarter of its exp's time.
_BIT = math.log2(math.e)


def token_logprobs_reference(hidden: Tensor, head: Tensor, targets: Tensor, *, temperature: float = 1.0) -> Tensor:
    """`chunked_logprobs` written plainly: all the logits at once, every autograd transform works on it.

    Args:
        hidden: [..., h]. head: [V, h]. targets: [...] int64. temperature: above 0.

    Returns:
        [...] log-probs of the targets.
    """
    logits = _widen(hidden @ head.T) / temperature
    return torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]


def chunked_logprobs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    vocab_chunk: int = 8192,
    with_entropy: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probs of the target tokens, in blocks of the vocabulary; no more than rows x `vocab_chunk` logits ever exist.

    Differentiable in `hidden` and `head`, in reverse mode once (the logits are computed again) and in forward mode
    (`torch.func.jvp`).

    Args:
        hidden: [..., h] last hidden states, before the head.
        head: [V, h] weight of the head.
        targets: [...] int64 token ids.
        temperature: above 0; divides the logits.
        vocab_chunk: columns of the largest block of logits.
        with_entropy: also return the entropies of the whole distributions, differentiable as well.

    Returns:
        [...] log-probs in nats, or log-probs and [...] entropies; FP32, FP64 for FP64 inputs.

    Example:
        >>> import torch
        >>> equal = chunked_logprobs(torch.zeros(1, 3), torch.ones(4, 3), torch.tensor([2]))  # log 1/4
        >>> round(float(equal), 4)
        -1.3863
    """
    _check(hidden, head, targets, temperature, vocab_chunk)
    logprobs, entropy, _ = _TokenLogprobs.apply(
        hidden.reshape(-1, hidden.shape[-1]), head, targets.reshape(-1), 1.0 / temperature, vocab_chunk, with_entropy
    )
    logprobs = logprobs.view(targets.shape)
    return (logprobs, entropy.view(targets.shape)) if with_entropy else logprobs


def linear_loss(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    weights: Tensor,
    *,
    temperature: float = 1.0,
    vocab_chunk: int = 4096,
    row_chunk: int | None = None,
    with_logprobs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """``-sum(weights * log_probs)`` with the gradients of `hidden` and `head` computed in the forward pass.

    The gradient of the loss in the log-probs is known beforehand (``-weights``), so one block of logits serves
    log-prob and gradient: three matrix products in all where recomputation takes four. Tokens of weight zero cost
    nothing. The gradient of the head is summed in FP32 (FP64 for FP64 inputs) over all rows and only then cast.

    Args:
        hidden: [..., h]. head: [V, h]. targets: [...] int64.
        weights: [...] signed token weights; no gradient flows into them.
        temperature: above 0; divides the logits.
        vocab_chunk: columns of one block of logits.
        row_chunk: rows whose exponentials over the whole vocabulary are held at a time; by default as many as fit into
            64 MiB (one at least).
        with_logprobs: also return the log-probs [...], detached; those of weight-zero tokens are NaN.

    Returns:
        The scalar loss, or the loss and the log-probs. Backward can run once.
    """
    _check(hidden, head, targets, temperature, vocab_chunk)
    if weights.shape != targets.shape:
        raise ValueError(f"weights {tuple(weights.shape)} and targets {tuple(targets.shape)} differ in shape")
    loss, logprobs = _LinearLoss.apply(
        hidden.reshape(-1, hidden.shape[-1]),
        head,
        targets.reshape(-1),
        weights.detach().reshape(-1),
        1.0 / temperature,
        vocab_chunk,
        row_chunk or _row_chunk(head, vocab_chunk),
        torch.is_grad_enabled(),
    )
    return (loss, logprobs.view(targets.shape)) if with_logprobs else loss


@torch.no_grad()
def entropy_and_kl(
    hidden_a: Tensor,
    head_a: Tensor,
    hidden_b: Tensor,
    head_b: Tensor,
    targets: Tensor,
    vocab_chunk: int = 8192,
) -> tuple[Tensor, Tensor, Tensor]:
    """Next-token entropy of b, KL(a || b) and NLL of the targets under b, per token, at temperature 1, in FP32.

    One sweep over blocks of the vocabulary. BF16 inputs are widened before the product, so that the figures are those
    of the weights and not of the rounding of logits; sums over the vocabulary are combined in FP64.

    Args:
        hidden_a, hidden_b: [..., h_a] and [..., h_b] hidden states of the same tokens under the two policies.
        head_a, head_b: [V, h_a] and [V, h_b].
        targets: [...] int64.

    Returns:
        entropy, kl, nll: [...] each, in nats.
    """
    _check(hidden_a, head_a, targets, 1.0, vocab_chunk)
    _check(hidden_b, head_b, targets, 1.0, vocab_chunk)
    if head_a.shape[0] != head_b.shape[0]:
        raise ValueError(f"vocabularies differ: {head_a.shape[0]} and {head_b.shape[0]}")
    flat_a, flat_b = (_widen(x.reshape(-1, x.shape[-1])) * _BIT for x in (hidden_a, hidden_b))
    flat_targets, count = targets.reshape(-1), targets.numel()
    onednn = _sweeps_quickly(len(head_a), flat_a, flat_b)
    if onednn:
        flat_a, flat_b, flat_targets = (_fill(x) for x in (flat_a, flat_b, flat_targets))
    a, b = (_Online(x, torch.float64, _BIT) for x in (flat_a, flat_b))
    gap = torch.zeros_like(a.total)  # running sum of exp(z_a - max_a) (z_a - z_b)
    some_a, some_b = head_a, head_b
    for columns, rows in _tiles(head_a, len(flat_targets), vocab_chunk):
        if rows.start == 0:  # columns are widened once for all rows
            some_a, some_b = (_widen(h[columns]) for h in (head_a, head_b))
        z_a, z_b = (_logits(x[rows], h, 1.0, onednn) for x, h in ((flat_a, some_a), (flat_b, some_b)))
        apart = z_a - z_b
        shrink, exp_a = a.add(rows, z_a)
        gap[rows] = gap[rows] * shrink + apart.mul_(exp_a).sum(1)
        b.add(rows, z_b, moment=True, targets=flat_targets, first=columns.start)
    kl = gap / a.total / _BIT - a.logsumexp() + b.logsumexp()
    nll = b.logsumexp() - b.at_target()
    found = (b.entropy(), kl, nll)
    return tuple(x[:count].to(flat_b.dtype).view(targets.shape) for x in found)  # type: ignore[return-value]


class _Online:
    """Running sums over the vocabulary for each row: maximum, sum of exponentials, first moment, target logit.

    `unit` is what the logits that it is given are of one nat: 1, or `_BIT` for logits in bits. What it returns is nats.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype, unit: float = 1.0) -> None:
        rows = len(like)
        self.unit = unit
        self.max = like.new_full((rows,), -torch.inf, dtype=dtype)
        self.total = like.new_zeros(rows, dtype=dtype)  # sum exp(z - max)
        self.moment = like.new_zeros(rows, dtype=dtype)  # sum exp(z - max) (z - max)
        self.target = like.new_zeros(rows, dtype=dtype)

    def add(
        self, rows: slice, z: Tensor, *, moment: bool = False, targets: Tensor | None = None, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Take in a tile of logits [r, c] whose first column is token `first`. The tile is overwritten.

        Returns what the sums so far were multiplied with [r], and exp(z - new maximum) [r, c].
        """
        if targets is not None:
            self.target[rows] = _pick(z, targets[rows] - first, self.target[rows])
        old = self.max[rows]
        new = torch.maximum(old, z.amax(1))
        shrink = _exp(old - new, self.unit)
        shifted = z.sub_(new[:, None].to(z.dtype))
        exp = _exp(shifted, self.unit, None if moment else shifted)
        if moment:
            # the old terms move by (old - new); before the first tile there are none, and -inf * 0 would be NaN
            moved = self.moment[rows] + torch.where(old == -torch.inf, 0, old - new) * self.total[rows]
            self.moment[rows] = moved * shrink + shifted.mul_(exp).sum(1)
        self.total[rows] = self.total[rows] * shrink + exp.sum(1)
        self.max[rows] = new
        return shrink, exp

    def logsumexp(self) -> Tensor:
        return self.max / self.unit + self.total.log()

    def entropy(self) -> Tensor:
        return self.total.log() - self.moment / self.total / self.unit

    def at_target(self) -> Tensor:
        return self.target / self.unit


class _Sweep:
    """The logits of rows [R, h] under a head [V, h], tile by tile: those of FP32 and FP64 inputs in bits.

    Attributes:
        onednn: whether the products are oneDNN's; then `hidden` and `targets` are filled up with rows of zeros.
        unit: what the logits are of one nat.
    """

    def __init__(self, hidden: Tensor, head: Tensor, targets: Tensor, scale: float) -> None:
        self.onednn = _sweeps_quickly(len(head), hidden, head)
        self.targets = _fill(targets) if self.onednn else targets
        hidden = _fill(hidden) if self.onednn else hidden
        self.unit = _unit(hidden)
        self.hidden = hidden if self.unit == 1 else hidden * (scale * self.unit)
        self._head, self._scale = head, scale if self.unit == 1 else 1.0

    def logits(self, columns: slice, rows: slice) -> Tensor:
        """A fresh tensor [r, c]."""
        return _logits(self.hidden[rows], self._head[columns], self._scale, self.onednn)


class _TokenLogprobs(torch.autograd.Function):
    """rows [R, h], head [V, h] -> log-probs [R], entropies [R] (zeros unless asked for), logsumexp [R]."""

    @staticmethod
    def forward(hidden, head, targets, scale, vocab_chunk, with_entropy):  # type: ignore[override]
        sweep = _Sweep(hidden, head, targets, scale)
        sums = _Online(sweep.hidden, _wide_dtype(hidden), sweep.unit)
        for columns, rows in _tiles(head, len(sweep.hidden), vocab_chunk):
            z = sweep.logits(columns, rows)
            sums.add(rows, z, moment=with_entropy, targets=sweep.targets, first=columns.start)
        lse = sums.logsumexp()
        entropy = sums.entropy() if with_entropy else torch.zeros_like(lse)
        logprobs = sums.at_target() - lse
        return tuple(x[: len(hidden)] for x in (logprobs, entropy, lse))

    @staticmethod
    def setup_context(ctx, inputs, output):
        hidden, head, targets, ctx.scale, ctx.vocab_chunk, ctx.with_entropy = inputs
        _, entropy, lse = output
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(hidden, head, targets, entropy, lse)
        ctx.save_for_forward(hidden, head, targets, entropy, lse)
        ctx.set_materialize_grads(False)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy, _):  # type: ignore[override]
        hidden, head, targets, entropy, lse = ctx.saved_tensors
        grad_entropy = grad_entropy if ctx.with_entropy else None
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 6
        wide = _wide_dtype(hidden)
        grad_logprobs = torch.zeros_like(lse) if grad_logprobs is None else grad_logprobs
        sweep = _Sweep(hidden, head, targets, ctx.scale)
        if sweep.onednn:
            hidden, grad_logprobs, entropy, lse = (_fill(x) for x in (hidden, grad_logprobs, entropy, lse))
            grad_entropy = None if grad_entropy is None else _fill(grad_entropy)
        grad_hidden = torch.zeros_like(hidden, dtype=wide) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head, dtype=wide) if ctx.needs_input_grad[1] else None
        for columns, rows in _tiles(head, len(hidden), ctx.vocab_chunk):
            logp = sweep.logits(columns, rows).sub_(lse[rows, None] * sweep.unit)
            dz = -grad_logprobs[rows, None]
            if grad_entropy is not None:
                dz = dz - grad_entropy[rows, None] * (logp / sweep.unit + entropy[rows, None])
            p = _exp(logp, sweep.unit, logp)
            dz = p.mul_(dz) if grad_entropy is None else dz.mul_(p)
            _add_at(dz, sweep.targets[rows] - columns.start, grad_logprobs[rows])
            dz = dz.mul_(ctx.scale).to(hidden.dtype)
            if grad_hidden is not None:
                _add_product(grad_hidden[rows], dz, head[columns], sweep.onednn)
            if grad_head is not None:
                _add_product(grad_head[columns], dz.T, hidden[rows], sweep.onednn)
        grad_hidden = None if grad_hidden is None else grad_hidden[: len(ctx.saved_tensors[0])]
        grads = [None if g is None else g.to(x.dtype) for g, x in ((grad_hidden, hidden), (grad_head, head))]
        return *grads, None, None, None, None

    @staticmethod
    def jvp(ctx, hidden_dot, head_dot, *_):  # type: ignore[override]
        # d log p_t = dz_t - sum p dz ;  dH = -sum p (log p + H) dz
        hidden, head, targets, entropy, lse = ctx.saved_tensors
        at_target, mean, slope = (torch.zeros_like(lse) for _ in range(3))
        for columns, rows in _tiles(head, len(hidden), ctx.vocab_chunk):
            logp = _logits(hidden[rows], head[columns], ctx.scale) - lse[rows, None]
            dz = torch.zeros_like(logp)
            if hidden_dot is not None:
                dz = dz + _logits(hidden_dot[rows], head[columns], ctx.scale)
            if head_dot is not None:
                dz = dz + _logits(hidden[rows], head_dot[columns], ctx.scale)
            weighted = logp.exp() * dz
            mean[rows] += weighted.sum(1)
            at_target[rows] = _pick(dz, targets[rows] - columns.start, at_target[rows])
            if ctx.with_entropy:
                slope[rows] -= (weighted * (logp + entropy[rows, None])).sum(1)
        return at_target - mean, slope, None


class _LinearLoss(torch.autograd.Function):
    """-sum(weights * log-probs) of rows [R, h]; forward leaves the gradients behind for backward to hand out."""

    @staticmethod
    def forward(ctx, hidden, head, targets, weights, scale, vocab_chunk, row_chunk, with_grad):  # type: ignore[override]
        wide = _wide_dtype(hidden)
        active = weights.nonzero()[:, 0]
        logprobs = torch.full_like(weights, torch.nan, dtype=wide)
        grad_hidden = torch.zeros_like(hidden) if with_grad and ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head, dtype=wide) if with_grad and ctx.needs_input_grad[1] else None
        onednn = len(head) >= _QUICK and quick(hidden, head)
        filled = onednn or hidden.dtype in (torch.bfloat16, torch.float16)
        if onednn:
            row_chunk += -row_chunk % _ROW_STEP
        kept = hidden.new_empty((min(row_chunk, len(active)) + _ROW_STEP) * len(head))
        for index in active.split(row_chunk) if len(active) else ():
            count = len(index)
            if filled:
                index = torch.cat([index, index[-1:].expand(-count % _ROW_STEP)])
            rows, at, weight = hidden[index], targets[index], weights[index].to(wide)
            weight[count:] = 0
            tiles, logprobs[index] = _exp_tiles(rows, head, at, scale, vocab_chunk, kept, onednn)
            # dL/dz = weight (p - onehot) scale, and p = exp(z - max) * share, so one factor a row and tile carries both
            pull = (weight * scale)[:, None]
            if grad_hidden is not None:
                grad_rows = -pull * head[at]
                for columns, exp, share in tiles:
                    mean = product(exp, head[columns]) if onednn else exp @ head[columns]
                    grad_rows.addcmul_(mean, share[:, None] * pull)
                grad_hidden[index[:count]] = grad_rows[:count].to(hidden.dtype)
            if grad_head is not None:
                for columns, exp, share in tiles:
                    scaled = (rows * (share[:, None] * pull)).to(rows.dtype)
                    _add_product(grad_head[columns], exp.T, scaled, onednn)
                grad_head.index_add_(0, at, -pull * rows)
        ctx.grads = grad_hidden, None if grad_head is None else grad_head.to(head.dtype)
        ctx.mark_non_differentiable(logprobs)
        return -(weights[active].to(wide) * logprobs[active]).sum(), logprobs

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, _):  # type: ignore[override]
        if ctx.grads is None:
            raise RuntimeError("the gradients of linear_loss were handed out already: backward runs once")
        grads, ctx.grads = ctx.grads, None
        if float(grad_loss) != 1:  # a pass over the whole head saved
            grads = (None if g is None else g.mul_(grad_loss) for g in grads)
        return *grads, *(None,) * 6


def _exp_tiles(
    rows: Tensor, head: Tensor, targets: Tensor, scale: float, vocab_chunk: int, kept: Tensor, onednn: bool
) -> tuple[list[tuple[slice, Tensor, Tensor]], Tensor]:
    """Tiles (columns, exp(z - tile's maximum) [r, c], the factor [r] that makes them probabilities), and log-probs [r].

    The tiles lie in `kept` (at least r V elements), in the dtype of `rows`.
    """
    tiles, parts, at_target = [], [], rows.new_zeros(len(rows), dtype=_wide_dtype(rows))
    unit = _unit(rows)
    if unit != 1:
        rows, scale = rows * (scale * unit), 1.0
    for first in range(0, len(head), vocab_chunk):
        columns = slice(first, min(first + vocab_chunk, len(head)))
        tile = kept[first * len(rows) : columns.stop * len(rows)].view(len(rows), -1)
        across = head[columns].T
        z = product(rows, across) if onednn else _widen(torch.mm(rows, across, out=tile))
        if scale != 1:
            z.mul_(scale)
        at_target = _pick(z, targets - first, at_target)
        top = z.amax(1, keepdim=True)
        wide = z.dtype == tile.dtype
        exp = _exp(z.sub_(top), unit, tile if wide else z)
        top = top[:, 0] / unit
        parts.append(top + exp.sum(1).log())
        tiles.append((columns, exp if wide else tile.copy_(exp), top))
    lse = torch.logsumexp(torch.stack(parts), 0)
    return [(columns, exp, (top - lse).exp()) for columns, exp, top in tiles], at_target / unit - lse


def _unit(x: Tensor) -> float:
    """What logits of this dtype are of one nat: half precision stays in nats, whose roundings are to be kept."""
    return 1.0 if x.dtype in (torch.bfloat16, torch.float16) else _BIT


def _exp(z: Tensor, unit: float, out: Tensor | None = None) -> Tensor:
    """exp of logits in nats (`unit` 1) or bits (`_BIT`)."""
    return torch.exp(z, out=out) if unit == 1 else torch.exp2(z, out=out)


def _sweeps_quickly(vocabulary: int, *factors: Tensor) -> bool:
    """Whether oneDNN makes the products of a sweep over the vocabulary."""
    return vocabulary >= _QUICK_SWEEP and quick(*factors)


def _fill(x: Tensor) -> Tensor:
    """x [R, ...] with zeros up to a multiple of `_ROW_STEP` rows."""
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, -len(x) % _ROW_STEP))


def _logits(rows: Tensor, head: Tensor, scale: float, onednn: bool = False) -> Tensor:
    """rows @ head.T * scale in FP32 (FP64), a fresh tensor."""
    z = _widen(product(rows, head.T) if onednn else rows @ head.T)
    return z if scale == 1 else z.mul_(scale)


def _pick(z: Tensor, column: Tensor, otherwise: Tensor) -> Tensor:
    """z[i, column[i]] where the column lies in the tile, else `otherwise`."""
    inside = (column >= 0) & (column < z.shape[1])
    picked = z.gather(1, column.clamp(0, z.shape[1] - 1)[:, None])[:, 0]
    return torch.where(inside, picked.to(otherwise.dtype), otherwise)


def _add_at(z: Tensor, column: Tensor, value: Tensor) -> None:
    """z[i, column[i]] += value[i] where the column lies in the tile."""
    inside = (column >= 0) & (column < z.shape[1])
    z.scatter_add_(1, column.clamp(0, z.shape[1] - 1)[:, None], torch.where(inside, value, 0)[:, None])


def _add_product(out: Tensor, a: Tensor, b: Tensor, onednn: bool = False) -> None:
    """out += a @ b, with `out` at least as wide as the factors."""
    if onednn:
        out += product(a, b)
    elif out.dtype == a.dtype:
        out.addmm_(a, b)
    else:
        out += a @ b


def _row_chunk(head: Tensor, vocab_chunk: int) -> int:
    """Rows that `linear_loss` takes at a time: tiles stay small on a CPU, and the kept row block is bounded."""
    tile = _CPU_TILE if head.device.type == "cpu" else _LARGE
    return max(1, min(_LARGE // len(head), max(64, tile // min(vocab_chunk, len(head)))))


def _tiles(head: Tensor, rows: int, vocab_chunk: int) -> Iterator[tuple[slice, slice]]:
    """Slices (columns, rows) that cover the logits in tiles; all rows of some columns come before other columns."""
    width = min(vocab_chunk, len(head))
    if head.device.type == "cpu":
        width = min(width, 2048)
        height = max(64, _CPU_TILE // width // _ROW_STEP * _ROW_STEP)
    else:
        height = max(64, _LARGE // width)
    for first in range(0, len(head), width):
        for top in range(0, rows, height):
            yield slice(first, min(first + width, len(head))), slice(top, min(top + height, rows))


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _widen(x: Tensor) -> Tensor:
    return x.to(_wide_dtype(x))


def _check(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, vocab_chunk: int) -> None:
    if hidden.shape[:-1] != targets.shape or hidden.shape[-1] != head.shape[-1]:
        raise ValueError(
            f"shapes do not fit: hidden {tuple(hidden.shape)}, head {tuple(head.shape)}, targets {tuple(targets.shape)}"
        )
    if not temperature > 0 or vocab_chunk < 1:
        raise ValueError(f"temperature {temperature} and vocab_chunk {vocab_chunk} must be above 0")
