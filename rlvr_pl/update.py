"""One update without Lightning: log-probs, micro-batches, gradient accumulation, clip, step.

Everything here is callable with a plain `torch.optim.Optimizer` and testable alone; `rlvr_pl.module` is the glue.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlvr_pl import trunk
from rlvr_pl.core.logprobs import chunked_logprobs, linear_loss
from rlvr_pl.core.row_gradients import RowGradients
from rlvr_pl.errors import RunFailure
from rlvr_pl.objectives.base import Objective
from rlvr_pl.ranks import ALONE, Ranks
from rlvr_pl.shards import Shards, here, shard_of_sum
from rlvr_pl.types import RolloutBatch

if TYPE_CHECKING:
    from rlvr_pl.core.rollout_class import Diagnosis
    from rlvr_pl.core.windows import RolloutFacts
    from rlvr_pl.policy import Policy
    from rlvr_pl.types import Question, Rollout

Pairs = Sequence[tuple[torch.nn.Parameter, torch.nn.Parameter]]
UniformUpdate = Literal["skip", "step"]
# Rows of half precision are padded to multiples of this: on a CPU every new shape of a BF16 product costs kernels of
# its own, in time and in megabytes that are not given back.
WIDTH_STEP = 16
# Weights of one tensor that are compared around a step: a share of a million has a standard error below 0.0005.
WATCHED = 2**20


class NonFiniteError(RunFailure, ArithmeticError):
    """NaN or Inf in log-probs, a loss, a gradient, or the weights that a step gave.

    Raised before the step is applied, or, for weights, before anything of the update is recorded: the last checkpoint
    is good. `rows` are the rows of the batch that went into it; empty means any of them.
    """

    def __init__(self, message: str, rows: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(rows)


def plan_micro_batches(
    batch: RolloutBatch, rows: Sequence[int], max_tokens: int, ranks: Ranks = ALONE
) -> list[list[int]]:
    """Cut rows into micro-batches of at most `max_tokens` padded tokens (one row may exceed it alone), longest first,
    so that rows of similar length share a micro-batch and padding stays small.

    With several ranks the rows are dealt like cards, longest first, and the plan is that of this rank. All ranks have
    the same number of micro-batches, so some may end with empty ones: a sharded model works only in step.
    """
    lengths = batch.lengths.tolist()
    total = {i: len(batch.prompt_ids[i]) + lengths[i] for i in rows}
    ordered = sorted(rows, key=lambda i: (-total[i], i))
    plans = [_cut(ordered[rank :: ranks.size], total, max_tokens) for rank in range(ranks.size)]
    mine = plans[ranks.rank]
    return mine + [[] for _ in range(max(map(len, plans)) - len(mine))]


def _cut(ordered: Sequence[int], total: dict[int, int], max_tokens: int) -> list[list[int]]:
    plan: list[list[int]] = []
    current: list[int] = []
    for i in ordered:
        if current and (len(current) + 1) * total[current[0]] > max_tokens:
            plan.append(current)
            current = []
        current.append(i)
    return [*plan, current] if current else plan


def completion_hidden(policy: Policy, batch: RolloutBatch) -> Tensor:
    """Hidden states [M, h] that predict the M completion tokens of the batch, in row-major order of `batch.mask`."""
    device = policy.head.device
    prompts, lengths = torch.tensor([len(p) for p in batch.prompt_ids], dtype=torch.long), batch.lengths
    width = int((prompts + lengths).max()) if len(batch) else 0
    if policy.head.dtype in (torch.bfloat16, torch.float16):
        width = min(-(-width // WIDTH_STEP) * WIDTH_STEP, policy.max_context)
    place = torch.arange(width)
    ends = prompts + lengths
    in_prompt, attended = (place < end[:, None] for end in (prompts, ends))
    ids = torch.full((len(batch), width), policy.pad_id, dtype=torch.long)
    ids[in_prompt] = torch.tensor([i for prompt in batch.prompt_ids for i in prompt], dtype=torch.long)
    in_completion = torch.arange(batch.token_ids.shape[1]) < lengths[:, None]
    ids[attended & ~in_prompt] = batch.token_ids[in_completion]
    predicts = (place >= prompts[:, None] - 1) & (place < ends[:, None] - 1)
    hidden = policy.hidden_states(ids.to(device), attended.to(device))
    return hidden[predicts.to(device)]


def token_logprobs(
    policy: Policy, batch: RolloutBatch, *, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs [N, T] of the sampled tokens under the policy's full softmax at `temperature` (0 on padding), and on
    request the next-token entropies [N, T] in nats. Differentiable."""
    hidden = completion_hidden(policy, batch)
    mask = batch.mask.to(hidden.device)
    targets = batch.token_ids.to(hidden.device)[mask]
    out = chunked_logprobs(hidden, policy.head, targets, temperature=temperature, with_entropy=with_entropy)
    logprobs, entropy = out if isinstance(out, tuple) else (out, None)

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(mask.shape).masked_scatter(mask, values)

    return spread(logprobs), None if entropy is None else spread(entropy)


@torch.no_grad()
def measured(
    policy: Policy,
    batch: RolloutBatch,
    *,
    max_tokens: int,
    temperature: float,
    with_entropy: bool = False,
    ranks: Ranks = ALONE,
) -> tuple[Tensor, Tensor | None]:
    """`token_logprobs` of a whole update without gradients, micro-batch by micro-batch, on the CPU. Ranks share the
    work, and each gets the whole.

    Raises `NonFiniteError` for log-probs that are not finite.
    """
    logprobs = torch.zeros(batch.mask.shape, dtype=torch.float32)
    entropy = torch.zeros_like(logprobs) if with_entropy else None
    if ranks.size == 1:
        policy = trunk.quick(policy)
    for rows in plan_micro_batches(batch, range(len(batch)), max_tokens, ranks):
        if not rows:
            keep_step(policy)
            continue
        part = batch.select(rows)
        values, spread = token_logprobs(policy, part, temperature=temperature, with_entropy=with_entropy)
        if not bool(values.isfinite().all()) and ranks.size == 1:
            raise NonFiniteError(f"the log-probs of rollouts {_names(batch, rows)} are not finite", rows)
        logprobs[rows, : values.shape[1]] = values.float().cpu()
        if entropy is not None and spread is not None:
            entropy[rows, : spread.shape[1]] = spread.float().cpu()
    for table in (logprobs, entropy):
        if table is not None and ranks.size > 1:
            table.copy_(ranks.add(table.to(policy.head.device)))  # zero where another rank measured
    if not bool(logprobs.isfinite().all()):  # together, so that no rank waits for one that has stopped
        rows = (~logprobs.isfinite()).any(1).nonzero()[:, 0].tolist()
        raise NonFiniteError(f"the log-probs of rollouts {_names(batch, rows)} are not finite", rows)
    return logprobs, entropy


def keep_step(policy: Policy) -> Tensor:
    """0, by way of a forward of one token: what a rank does in an empty micro-batch."""
    one = torch.full((1, 1), policy.pad_id, dtype=torch.long, device=policy.head.device)
    return policy.hidden_states(one, torch.ones_like(one)).sum() * 0


class GradientSum:
    """Sums micro-batch gradients into the optimizer's parameters, in each one's own precision.

    A micro-batch's gradient joins the sum only once its backward is whole, so a retry cannot count it twice. Of sharded
    weights the sum is whole until it is reduced.
    """

    def __init__(self, pairs: Pairs, shards: Shards | None = None) -> None:
        self.pairs = [(weight, stepped) for weight, stepped in pairs if weight.requires_grad]
        self.in_step = shards is not None  # whether ranks must do the same forwards
        self.weights = [weight if shards is None else shards.whole(weight) for weight, _ in self.pairs]
        self.sums: list[Tensor | None] = [None] * len(self.pairs)
        self.discard()

    def discard(self) -> None:
        """Forget the gradients of an unfinished backward."""
        for weight in self.weights:
            weight.grad = None

    @torch.no_grad()
    def join(self) -> None:
        """Add the gradients of a finished backward."""
        for k, (weight, (_, stepped)) in enumerate(zip(self.weights, self.pairs)):
            if weight.grad is None:
                continue
            total = self.sums[k]
            if total is None:
                self.sums[k] = weight.grad.to(stepped.dtype)
            else:
                total.add_(weight.grad)
            weight.grad = None

    @torch.no_grad()
    def reduce(self, ranks: Ranks) -> None:
        """Sum over all ranks, in FP32 whatever the precision of the sums; of sharded weights each keeps its shards."""
        if ranks.size == 1 and not self.in_step:
            return
        for k, (weight, (_, stepped)) in enumerate(zip(self.weights, self.pairs)):
            total = self.sums[k]
            wide = torch.zeros_like(weight, dtype=stepped.dtype) if total is None else total
            wide = wide if wide.dtype == torch.float64 else wide.float()
            whole = shard_of_sum(wide, stepped) if isinstance(stepped, DTensor) else ranks.add(wide)
            self.sums[k] = whole.to(stepped.dtype)

    def deliver(self) -> None:
        """Hand the sums over as the `.grad` of the parameters that the optimizer steps (zeros where nothing came)."""
        for total, (_, stepped) in zip(self.sums, self.pairs):
            stepped.grad = torch.zeros_like(stepped) if total is None else total


def accumulate_gradient(
    policy: Policy,
    objective: Objective,
    batch: RolloutBatch,
    weights: Tensor,
    total: GradientSum,
    *,
    max_tokens: int,
    temperature: float = 1.0,
    ranks: Ranks = ALONE,
) -> tuple[float, int]:
    """Forward and backward of every rollout that can matter; the loss and the number of trained tokens.

    With several ranks these are this rank's share, and a loss that is not finite is the caller's to see: an error on
    one rank would leave the others waiting. Out of memory halves the micro-batch and tries it again; a single rollout
    that does not fit raises `RunFailure`. Raises `NonFiniteError` for a loss that is not finite.
    """
    matter = torch.ones(len(batch), dtype=torch.bool) if objective.every_row else weights.ne(0).any(1)
    rows = matter.nonzero()[:, 0].tolist()
    queue = plan_micro_batches(batch, [i for i in rows if batch.mask[i].any()], max_tokens, ranks)
    loss, tokens = 0.0, 0
    table = None
    if ranks.size == 1:  # reductions and sharding hang on autograd's own hooks
        policy, table = trunk.quick(policy), policy.head
    while queue:
        rows = queue.pop(0)
        if not rows:
            keep_step(policy).backward()
            total.join()
            continue
        embedding = RowGradients(table)
        try:
            with embedding:
                value = _backward(policy, objective, batch.select(rows), weights[rows], temperature)
            embedding.add()
        except RuntimeError as error:
            total.discard()
            if not _out_of_memory(error):
                raise
            if total.in_step:
                raise RunFailure(
                    f"out of memory in a micro-batch of {len(rows)} rollouts, which sharded ranks cannot halve alone; "
                    "lower model.micro_batch_tokens"
                ) from error
            if len(rows) == 1:
                prompt, length = len(batch.prompt_ids[rows[0]]), int(batch.lengths[rows])
                raise RunFailure(
                    f"out of memory with rollout {_names(batch, rows)} alone, {length} tokens after a prompt of "
                    f"{prompt}; lower model.max_new_tokens or free memory"
                ) from error
            print(f"rlvr-pl: out of memory in a micro-batch of {len(rows)} rollouts; halved", file=sys.stderr)
            half = (len(rows) + 1) // 2
            queue[:0] = [rows[:half], rows[half:]]
            continue
        if not math.isfinite(value) and ranks.size == 1:
            total.discard()
            raise NonFiniteError(f"the loss of rollouts {_names(batch, rows)} is {value}", rows)
        total.join()
        loss += value
        tokens += int(batch.lengths[rows].sum())
    return loss, tokens


def _out_of_memory(error: RuntimeError) -> bool:
    """GPUs have an exception of their own; on a CPU only the words tell."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _backward(policy: Policy, objective: Objective, part: RolloutBatch, weights: Tensor, temperature: float) -> float:
    device = policy.head.device
    weights = weights[:, : part.mask.shape[1]].to(device)
    known = weights if objective.linear else _first_pass_weights(objective, weights, part.to(device))
    if known is None:
        with_entropy = "entropy" in objective.needs
        logprobs, entropy = token_logprobs(policy, part, temperature=temperature, with_entropy=with_entropy)
        part = part.to(device)
        loss = objective.loss(logprobs, weights, part if entropy is None else part.replace(entropy=entropy))
        loss.backward()
        return float(loss.detach())
    hidden = completion_hidden(policy, part)
    part = part.to(device)
    targets, known = part.token_ids[part.mask], known[part.mask]
    loss, logprobs = linear_loss(hidden, policy.head, targets, known, temperature=temperature, with_logprobs=True)
    loss.backward()
    if objective.linear:
        return float(loss.detach())
    spread = logprobs.new_zeros(part.mask.shape).masked_scatter(part.mask, logprobs.where(known != 0, 0))
    with torch.no_grad():
        return float(objective.loss(spread, weights, part))


def _first_pass_weights(objective: Objective, weights: Tensor, part: RolloutBatch) -> Tensor | None:
    """[n, t] weights whose ``-sum(weight * log_prob)`` has the gradient of the objective's loss on fresh rollouts; None
    where that gradient is not known before the forward."""
    if not objective.linear_on_first_pass or part.old_logprobs is not None:
        return None
    anywhere = torch.zeros_like(weights, requires_grad=True)
    return -torch.autograd.grad(objective.loss(anywhere, weights, part), anywhere)[0]


def _names(batch: RolloutBatch, rows: Sequence[int]) -> str:
    names = [f"{batch.uids[i]}#{batch.samples[i]}" for i in rows[:4]]
    return ", ".join(names) + (", ..." if len(rows) > 4 else "")


def clip(parameters: Sequence[torch.nn.Parameter], max_norm: float | None) -> float:
    """Clip the global gradient norm in place (None: leave it) and return the norm before clipping.

    Raises `NonFiniteError` when the norm is not finite.
    """
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    total = total.full_tensor() if isinstance(total, DTensor) else total
    norm = float(total)
    if not math.isfinite(norm):
        raise NonFiniteError(f"the gradient norm is {norm}")
    if max_norm is not None and norm + 1e-6 > max_norm:  # below, torch would multiply by 1
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
    return norm


@dataclass(frozen=True)
class StepResult:
    """What one pass did: loss, pre-clip norm (0 without a gradient), whether it was clipped, whether the optimizer
    stepped, share of weights changed (of a million weights in each tensor above two million), tokens that went through
    forward and backward."""

    loss: float
    grad_norm: float
    clipped: bool
    stepped: bool
    changed_share: float
    trained_tokens: int


def update_once(
    policy: Policy,
    objective: Objective,
    batch: RolloutBatch,
    weights: Tensor,
    optimizer: torch.optim.Optimizer,
    *,
    pairs: Pairs | None = None,
    step: Callable[[], Any] | None = None,
    ranks: Ranks = ALONE,
    shards: Shards | None = None,
    max_tokens: int = 16384,
    temperature: float = 1.0,
    max_grad_norm: float | None = 1.0,
    uniform_update: UniformUpdate = "skip",
    span: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> StepResult:
    """One pass over the batch and one optimizer step.

    Args:
        weights: [N, T] from ``objective.token_weights``.
        pairs: (weight of the forward, parameter of the optimizer) pairs; the optimizer's own parameters by default.
        step: applies the step; ``optimizer.step`` by default.
        ranks: the processes that share the rows; gradients are summed over them before the clip.
        shards: how the weights lie, where they are sharded: gathered before and after, freed for the step.
        max_tokens: padded tokens in a micro-batch. Changes nothing but speed and memory (and rounding under BF16).
        temperature: of the log-probs that are learned from; 1.0 is the supplied recipe, whatever the sampler's.
        max_grad_norm: clip threshold of the global norm; None does not clip.
        uniform_update: when every weight is zero, "skip" leaves weights and optimizer state alone; "step" steps on a
            zero gradient as the supplied code does, so that momentum and decay still move the weights.
        span: gives the context in which "gradient" (forward and backward) and "optimizer" (clip, step, checks) run; for
            profilers.

    Raises `NonFiniteError` for a loss, a gradient norm or new weights that are not finite.
    """
    if pairs is None:
        pairs = [(p, p) for group in optimizer.param_groups for p in group["params"]]
    if uniform_update == "skip" and not objective.every_row and not bool(weights.ne(0).any()):
        return StepResult(0.0, 0.0, False, False, 0.0, 0)
    total = GradientSum(pairs, shards)
    with span("gradient"):
        if shards is not None:
            shards.learn()
        loss, tokens = accumulate_gradient(
            policy, objective, batch, weights, total, max_tokens=max_tokens, temperature=temperature, ranks=ranks
        )
        if ranks.size > 1:
            sums = torch.tensor([loss, tokens], dtype=torch.float64, device=policy.head.device)
            loss, tokens = ranks.add(sums).tolist()
            if not math.isfinite(loss):
                raise NonFiniteError(f"the loss is {loss}")
        if shards is not None:
            shards.free()
        total.reduce(ranks)
    with span("optimizer"):
        total.deliver()
        norm = clip([stepped for _, stepped in total.pairs], max_grad_norm)
        before = [_watched(weight).clone() for weight, _ in total.pairs]
        (step or optimizer.step)()
        optimizer.zero_grad(set_to_none=True)
        changed, wild = _changed_share(before, total.pairs), sum(not _finite(weight) for weight, _ in total.pairs)
        if shards is not None:  # shares of shares, and a word that all must hear
            told = torch.tensor([changed, wild], dtype=torch.float64, device=policy.head.device)
            changed, wild = ranks.add(told).tolist()
            shards.gather()
        if wild:
            raise NonFiniteError(f"the step (gradient norm {norm:g}) gave weights that are not finite")
    clipped = max_grad_norm is not None and norm > max_grad_norm
    return StepResult(loss, norm, clipped, True, changed, int(tokens))


def _watched(weight: Tensor) -> Tensor:
    """The weights that `changed_share` counts: all of a tensor, or every k-th of a large one (k odd, so that no column
    of a matrix is left out)."""
    flat = here(weight.detach()).reshape(-1)
    k = len(flat) // WATCHED
    return flat[:: k | 1] if k else flat


def _changed_share(before: Sequence[Tensor], pairs: Pairs) -> float:
    changed = 0.0
    for old, (weight, _) in zip(before, pairs):
        share = here(weight).numel() / max(1, len(old))
        changed += int(torch.count_nonzero(old != _watched(weight))) * share
    return changed / max(1, sum(weight.numel() for weight, _ in pairs))


def _finite(weight: Tensor) -> bool:
    """Whether every element is finite, in one pass: a NaN is both extremes."""
    mine = here(weight.detach())
    return not mine.numel() or all(math.isfinite(float(x)) for x in torch.aminmax(mine))


class UpdateReport:
    """All that happened in one update, handed to callbacks as ``outputs["update"]``.

    A plain object on purpose: Lightning walks into containers and dataclasses and would detach or copy their tensors.
    """

    def __init__(
        self,
        *,
        number: int,
        questions: Sequence[Question],
        rollouts: Sequence[Rollout],
        batch: RolloutBatch,
        weights: Tensor,
        steps: Sequence[StepResult],
        uniform_groups: int,
        seconds: dict[str, float],
        cost: dict[str, int],
        metrics: dict[str, float],
    ) -> None:
        self.number = number
        self.questions = questions
        self.rollouts = rollouts
        self.batch = batch
        self.weights = weights
        self.steps = steps
        self.uniform_groups = uniform_groups
        self.seconds = seconds
        self.cost = cost
        self.metrics = metrics
        # set by `callbacks.facts` when a callback first asks
        self.diagnoses: list[Diagnosis] | None = None
        self.facts: list[RolloutFacts] | None = None

    @property
    def loss(self) -> float:
        return self.steps[-1].loss

    @property
    def grad_norm(self) -> float:
        """Pre-clip norm of the last pass."""
        return self.steps[-1].grad_norm

    @property
    def clipped(self) -> bool:
        return self.steps[-1].clipped

    @property
    def stepped(self) -> bool:
        return any(step.stepped for step in self.steps)

    @property
    def changed_share(self) -> float:
        return self.steps[-1].changed_share


def count_uniform_groups(batch: RolloutBatch) -> int:
    """Groups whose (scorable) rewards are all equal."""
    rewards = batch.rewards.view(-1, batch.group_size)
    low = rewards.nan_to_num(nan=math.inf).amin(1)
    high = rewards.nan_to_num(nan=-math.inf).amax(1)
    return int((low >= high).sum())
