"""The measurements behind `rlvr-pl entropy-grad`: grad H, slopes of tokens, directions of losses, realised steps.

H is the mean next-token entropy (nats, temperature 1) over the completion tokens of fixed contexts. Gradients are
dicts from parameter name to tensor; a tied weight is one parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from rlvr_pl.objectives import ORL
from rlvr_pl.policy import Policy
from rlvr_pl.types import RolloutBatch
from rlvr_pl.update import GradientSum, accumulate_gradient, plan_micro_batches, token_logprobs

Gradient = dict[str, Tensor]
Tick = Callable[[int], None]


def widened(policy: Policy) -> Policy:
    """A copy that computes in FP32 (FP64 for an FP64 policy) from the same weights, all of which ask for gradients."""
    model = deepcopy(policy.model).requires_grad_(True).eval()
    model.to(torch.promote_types(policy.head.dtype, torch.float32))  # type: ignore[arg-type]
    return replace(policy, model=model)


def parameters(policy: Policy) -> dict[str, nn.Parameter]:
    """The policy's parameters by name, each once."""
    return dict(policy.model.named_parameters())


def norm(gradient: Gradient) -> float:
    """Euclidean norm, summed in FP64."""
    return dot(gradient, gradient) ** 0.5


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """<a, b>, summed in FP64."""
    return sum(float((a[name].double() * b[name].double()).sum()) for name in a)


def entropy(policy: Policy, contexts: RolloutBatch, max_tokens: int) -> float:
    """H of the contexts' completion tokens."""
    with torch.no_grad():
        return sum(float(part.double().sum()) for part in _entropies(policy, contexts, max_tokens)) / _tokens(contexts)


def entropy_gradient(policy: Policy, contexts: RolloutBatch, max_tokens: int) -> tuple[float, Gradient]:
    """H and its gradient."""
    total = GradientSum([(p, p) for p in policy.model.parameters()])
    value = 0.0
    for part in _entropies(policy, contexts, max_tokens):
        mean = part.sum() / _tokens(contexts)
        mean.backward()
        total.join()
        value += float(mean.detach())
    return value, _named(policy, total)


def slopes_forward(
    policy: Policy, batch: RolloutBatch, gradient: Gradient, max_tokens: int, tick: Tick = lambda done: None
) -> Tensor:
    """[N, T] FP64 slopes ``<gradient, grad log p_it>`` of every completion token, 0 on padding.

    One forward-mode pass: the tangent of all log-probs along `gradient`, without a stored graph.
    """
    probe = _TokenLogprobs(policy)
    primals = {f"model.{name}": p.detach() for name, p in parameters(policy).items()}
    tangents = {f"model.{name}": gradient[name] for name in parameters(policy)}
    slopes = torch.zeros(batch.mask.shape, dtype=torch.float64)
    done = 0
    for rows in plan_micro_batches(batch, range(len(batch)), max_tokens):
        part = batch.select(rows)
        with sdpa_kernel(SDPBackend.MATH):  # the attention kernel that knows forward mode
            tangent = torch.func.jvp(
                lambda weights, part=part: torch.func.functional_call(probe, weights, (part,)), (primals,), (tangents,)
            )[1]
        slopes[rows, : tangent.shape[1]] = tangent.double().cpu()
        done += len(rows)
        tick(done)
    return slopes


def slopes_backward(
    policy: Policy,
    batch: RolloutBatch,
    gradient: Gradient,
    weightings: Sequence[Tensor],
    tick: Tick = lambda done: None,
) -> Tensor:
    """[W, N] FP64 slopes ``sum_t w_it <gradient, grad log p_it>`` of every rollout under each weighting [N, T].

    The reference of `slopes_forward`: one backward a rollout and weighting.
    """
    weights = list(parameters(policy).values())
    result = torch.zeros(len(weightings), len(batch), dtype=torch.float64)
    for i in range(len(batch)):
        logprobs, _ = token_logprobs(policy, batch.select([i]))
        for k, weighting in enumerate(weightings):
            pull = weighting[i : i + 1, : logprobs.shape[1]].to(logprobs)
            if pull.any():
                grads = torch.autograd.grad(logprobs, weights, pull, retain_graph=True)
                result[k, i] = dot(gradient, dict(zip(parameters(policy), grads)))
        tick(i + 1)
    return result


def direction(policy: Policy, batch: RolloutBatch, weights: Tensor, max_tokens: int) -> Gradient:
    """``d = sum_it w_it grad log p_it``, the direction along which the loss of these token weights [N, T] descends."""
    total = GradientSum([(p, p) for p in policy.model.parameters()])
    accumulate_gradient(policy, ORL(), batch, weights, total, max_tokens=max_tokens)
    return {name: g.neg_() for name, g in _named(policy, total).items()}


class RealisedSteps:
    """Takes a step on copies of the policy's weights, in their own dtype, and measures H there.

    The policy itself is never written to. H is computed by the wide copy, which holds its own weights again afterwards.

    Args:
        policy: the policy whose weights are stepped.
        wide: `widened(policy)`.
        contexts: the fixed contexts.
        max_tokens: padded tokens in a micro-batch.
    """

    def __init__(self, policy: Policy, wide: Policy, contexts: RolloutBatch, max_tokens: int) -> None:
        self.policy = policy
        self.wide = wide
        self.contexts = contexts
        self.max_tokens = max_tokens
        self.start = entropy(wide, contexts, max_tokens)

    def sign(self, gradient: Gradient, eta: float) -> float:
        """Change of H after ``w + eta sign(d)``: AdamW's first step from a fresh state, without epsilon and decay."""
        with self._stepped() as weights:
            for name, weight in weights.items():
                weight.data.add_(gradient[name].sign().to(weight.dtype), alpha=eta)
        return self._change()

    def random_sign(self, eta: float, seed: int) -> float:
        """Change of H after the same step along a random sign vector."""
        generator = torch.Generator().manual_seed(seed)
        signs = {
            name: torch.randint(0, 2, p.shape, generator=generator).mul_(2).sub_(1).to(p.device)
            for name, p in parameters(self.policy).items()
        }
        return self.sign(signs, eta)

    def adamw(self, gradient: Gradient, lr: float, max_norm: float | None) -> float:
        """Change of H after the first step of torch's AdamW (weight decay .01) along `gradient`, with or without
        clipping its norm to `max_norm`; gradients and state in the dtype of the weights, as the supplied recipe."""
        with self._stepped() as weights:
            for name, weight in weights.items():
                weight.grad = gradient[name].neg().to(weight.dtype)
            if max_norm is not None:
                nn.utils.clip_grad_norm_(weights.values(), max_norm)
            torch.optim.AdamW(weights.values(), lr=lr, weight_decay=0.01).step()
        return self._change()

    @contextmanager
    def _stepped(self) -> Iterator[dict[str, nn.Parameter]]:
        """Copies of the weights to step; on leaving, the wide copy takes them over."""
        weights = {name: nn.Parameter(p.detach().clone()) for name, p in parameters(self.policy).items()}
        yield weights
        self._load(weights)

    def _change(self) -> float:
        try:
            return entropy(self.wide, self.contexts, self.max_tokens) - self.start
        finally:
            self._load(parameters(self.policy))

    @torch.no_grad()
    def _load(self, weights: Mapping[str, Tensor]) -> None:
        for name, p in parameters(self.wide).items():
            p.copy_(weights[name])


class _TokenLogprobs(nn.Module):
    """`token_logprobs` as a module, so that its weights can be replaced for one call."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model = policy.model
        self.policy = policy

    def forward(self, batch: RolloutBatch) -> Tensor:
        return token_logprobs(self.policy, batch)[0]


def _entropies(policy: Policy, contexts: RolloutBatch, max_tokens: int) -> Iterator[Tensor]:
    for rows in plan_micro_batches(contexts, range(len(contexts)), max_tokens):
        part = contexts.select(rows)
        _, spread = token_logprobs(policy, part, with_entropy=True)
        assert spread is not None
        yield spread[part.mask.to(spread.device)]


def _tokens(contexts: RolloutBatch) -> int:
    return int(contexts.mask.sum())


def _named(policy: Policy, total: GradientSum) -> Gradient:
    """The sums by parameter name; zeros where no gradient came."""
    return {
        name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(parameters(policy).items(), total.sums)
    }
