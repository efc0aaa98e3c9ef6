"""Compares the sampler's log-probs with the trainer's on the same tokens, before anything is learned from them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from rlvr_pl.callbacks.base import UpdateCallback
from rlvr_pl.errors import RunFailure
from rlvr_pl.sampling.nucleus import largest
from rlvr_pl.types import Completion, Grade, GradeStatus, Rollout, build_batch
from rlvr_pl.update import completion_hidden

if TYPE_CHECKING:
    from rlvr_pl.module import RLVRModule
    from rlvr_pl.policy import Policy
    from rlvr_pl.sampling.base import Decoding, SampleRequest
    from rlvr_pl.update import UpdateReport


class StaleSamplerError(RunFailure):
    """The sampler's log-probs are not those of the policy that is being trained."""


class SamplerCanary(UpdateCallback):
    """Says when the sampler is stale or broken, which would otherwise look like a collapse.

    In the first two updates and then every n-th, a few completions are read again by the policy, and their tokens'
    log-probs are computed under the very distribution that was asked for: softmax at the sampling temperature,
    restricted to its top-p nucleus and renormalised. (Comparing with plain log-probs would show the nucleus's mass
    instead: up to ``-log(top_p)`` a token.) The mean absolute gap over the tokens checked is logged as ``canary/gap``,
    the largest one as ``canary/max_gap``, and both are columns of ``metrics.csv``.

    A sampler in the policy's own precision agrees to rounding: about 1e-5 in FP32, and up to a few hundredths a token
    in BF16. A sampler that missed one small update can hide within that; one that keeps missing them cannot.

    `fit` adds it, checking every update, where the sampler is an engine with weights of its own.

    Args:
        tolerance: mean gap in nats a token above which the sampler is called stale.
        completions: completions read again in each check. They cost one forward pass.
        every_n_updates: updates between checks.
        action: "stop" raises before the step is taken; "warn" goes on.
    """

    def __init__(
        self,
        tolerance: float = 0.1,
        completions: int = 2,
        every_n_updates: int = 10,
        action: Literal["stop", "warn"] = "stop",
    ) -> None:
        if not tolerance > 0:
            raise ValueError(f"tolerance={tolerance}: must be above 0 nats a token")
        if completions < 1 or every_n_updates < 1:
            raise ValueError(f"completions={completions}, every_n_updates={every_n_updates}: must be at least 1")
        if action not in ("stop", "warn"):
            raise ValueError(f"action={action!r}: must be stop or warn")
        self.tolerance = tolerance
        self.completions = completions
        self.every_n_updates = every_n_updates
        self.action = action
        self._gaps: list[float] = []

    def begin(self, trainer: Trainer, module: RLVRModule) -> None:
        # the tokens must be read again by the weights that sampled them, and these are gone once the step is taken
        sampler: Any = module.sampler
        generate = sampler.generate

        def checked(requests: Sequence[SampleRequest], decoding: Decoding, *args: Any, **kwargs: Any) -> Any:
            found = generate(requests, decoding, *args, **kwargs)
            number = module.updates_done + 1
            if decoding.temperature > 0 and (number <= 2 or number % self.every_n_updates == 0):
                self._check(module.policy, requests, found, decoding)
            return found

        sampler.generate = checked

    def after_update(self, trainer: Trainer, module: RLVRModule, report: UpdateReport) -> None:
        if self._gaps:
            figures = {"canary/gap": sum(self._gaps) / len(self._gaps), "canary/max_gap": max(self._gaps)}
            report.metrics.update(figures)
            module.log_dict(figures)
        self._gaps = []

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        vars(pl_module.sampler).pop("generate", None)

    def _check(
        self, policy: Policy, requests: Sequence[SampleRequest], found: Sequence[Completion], decoding: Decoding
    ) -> None:
        step = max(1, len(found) // self.completions)
        picked = [(requests[i], found[i]) for i in range(0, len(found), step)][: self.completions]
        gaps = logprob_gaps(policy, picked, decoding)
        if not gaps:
            return
        self._gaps += gaps
        mean = sum(gaps) / len(gaps)
        if not mean <= self.tolerance:  # NaN is no agreement
            message = (
                f"the sampler's log-probs differ from the policy's by {mean:.3g} nats a token on the same {len(gaps)} "
                f"tokens (tolerance {self.tolerance:g}): the sampler holds stale weights or draws from another "
                "distribution than it was asked for; this is not a collapse of the policy"
            )
            if self.action == "stop":
                raise StaleSamplerError(message)
            print(f"rlvr-pl: {message}", file=sys.stderr)


@torch.no_grad()
def logprob_gaps(
    policy: Policy, samples: Sequence[tuple[SampleRequest, Completion]], decoding: Decoding
) -> list[float]:
    """``|log q(token) reported - log q(token) recomputed|`` of every token, q the renormalised nucleus at the sampling
    temperature. A token outside the recomputed nucleus counts by its probability in the full softmax over the nucleus's
    mass, so that a near-tie at the edge is a small gap. Empty where the sampler reported no log-probs."""
    grade = Grade(GradeStatus.NO_ANSWER, 0.0)
    rollouts = [Rollout("", 0, r.prompt_ids, c, "", grade) for r, c in samples if c.logprobs]
    if not rollouts:
        return []
    batch = build_batch(rollouts, 1)
    assert batch.sampling_logprobs is not None
    logits = completion_hidden(policy, batch) @ policy.head.T
    probs = torch.softmax(logits.float() / decoding.temperature, -1)
    targets = batch.token_ids[batch.mask].to(probs.device)[:, None]
    recomputed = (probs.gather(1, targets)[:, 0] / nucleus_mass(probs, decoding.top_p)).log().cpu()
    return (batch.sampling_logprobs[batch.mask] - recomputed).abs().tolist()


def nucleus_mass(probs: Tensor, top_p: float) -> Tensor:
    """[n] what the smallest set of tokens that reaches `top_p` holds of each row of `probs` [n, V]: `top_p` or more."""
    ordered = largest(probs, probs.shape[1])
    keep = ordered.cumsum(1) - ordered < top_p
    keep[:, 0] = True
    return torch.where(keep, ordered, 0).sum(1)
