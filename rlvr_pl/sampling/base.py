"""What a sampler is: prompts in, completions out, every draw named by a key."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from rlvr_pl.errors import RunFailure, UserError
from rlvr_pl.types import Completion, StopReason

if TYPE_CHECKING:
    from rlvr_pl.policy import Policy


@dataclass(frozen=True, slots=True)
class Decoding:
    """How tokens are drawn. Temperature 0 is greedy; `top_p` keeps the smallest set of tokens whose probability
    reaches it (the crossing token included); `max_new_tokens` is the cap on a completion, EOS included.

    >>> Decoding(temperature=0.8, top_p=0.9, max_new_tokens=80).greedy()
    Decoding(temperature=0.0, top_p=1.0, max_new_tokens=80)
    """

    temperature: float = 0.8
    top_p: float = 0.9
    max_new_tokens: int = 1024

    def greedy(self) -> Decoding:
        """The same cap at temperature 0."""
        return Decoding(0.0, 1.0, self.max_new_tokens)


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One completion to draw: the prompt's ids, the key that names its random numbers, and its own cap, if shorter.

    >>> SampleRequest((7, 8), key=("rollout", 0, 1, "q", 0)).prompt_ids
    (7, 8)
    """

    prompt_ids: tuple[int, ...]
    key: tuple[int | str, ...] = ()
    max_new_tokens: int | None = None


def uniforms(key: tuple[int | str, ...], count: int) -> np.ndarray:
    """`count` uniforms in [0, 1), a pure function of `key` (SHA-256 of its text seeds a Philox counter generator)."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little"))).random(count)


def seed_of(key: tuple[int | str, ...]) -> int:
    """A seed below 2^63, a pure function of `key`, for engines that have generators of their own."""
    return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:8], "little") >> 1


def check_decoding(decoding: Decoding) -> None:
    """UserError for a temperature or a nucleus that cannot be."""
    if not 0 <= decoding.temperature < math.inf:
        raise UserError(f"temperature is {decoding.temperature}: it must be 0 (greedy) or above")
    if not 0 < decoding.top_p <= 1:
        raise UserError(f"top_p is {decoding.top_p}: it must be above 0 and at most 1")


def caps_of(requests: Sequence[SampleRequest], decoding: Decoding, context: int) -> list[int]:
    """Tokens that each request may draw. UserError for one that may draw none, or that does not fit into `context`."""
    return [_cap(number, request, decoding, context) for number, request in enumerate(requests)]


def _cap(number: int, request: SampleRequest, decoding: Decoding, context: int) -> int:
    own = decoding.max_new_tokens if request.max_new_tokens is None else request.max_new_tokens
    cap = min(decoding.max_new_tokens, own)
    if cap < 1:
        raise UserError(f"request {number} may draw {cap} tokens: max_new_tokens must be at least 1")
    prompt = len(request.prompt_ids)
    if prompt == 0:
        raise UserError(f"request {number} has an empty prompt: a sampler needs one token at least")
    if prompt + cap > context:
        raise UserError(
            f"a prompt of {prompt} tokens with max_new_tokens {cap} exceeds the model's context of {context}: "
            f"lower max_new_tokens to {context - prompt} or leave the question out"
            if prompt < context
            else f"a prompt of {prompt} tokens exceeds the model's context of {context}: leave the question out"
        )
    return cap


class NonFiniteLogits(RunFailure, ArithmeticError):
    """The policy's logits hold NaN or infinity: its weights have diverged, or its activations overflow.

    `request` is the number of the request, `token_ids` what it had drawn before.
    """

    def __init__(self, request: int, token_ids: tuple[int, ...]) -> None:
        super().__init__(f"the logits of request {request} are not finite at completion token {len(token_ids) + 1}")
        self.request = request
        self.token_ids = token_ids


def engine_completion(
    request: int, ids: Sequence[int], logprobs: Sequence[float], eos_ids: Sequence[int]
) -> Completion:
    """What an engine drew for request number `request`. Raises NonFiniteLogits where a log-prob is not finite.

    >>> engine_completion(0, [7, 1], [-0.5, -0.1], eos_ids=(1,)).stop_reason.value
    'eos'
    """
    ids = tuple(ids)
    finite = [math.isfinite(x) for x in logprobs]
    if not all(finite):
        raise NonFiniteLogits(request, ids[: finite.index(False)])
    ended = bool(ids) and ids[-1] in eos_ids
    return Completion(ids, StopReason.EOS if ended else StopReason.LENGTH, tuple(logprobs))


class Sampler(ABC):
    """Draws completions from a policy.

    Attributes:
        engine: name and version recorded with every file of results, e.g. "torch" or "vllm-0.32.0+cpu".
        deterministic: whether the same keys give the same tokens whatever else is in the batch (up to rounding).
        own_weights: whether it computes with a copy of the weights in an engine of its own, which may be stale.
    """

    engine: str = ""
    deterministic: ClassVar[bool] = True
    own_weights: ClassVar[bool] = False

    @abstractmethod
    def sync(self, policy: Policy) -> None:
        """Take over the policy's current weights. Called before the first use and after every change of weights."""

    @abstractmethod
    def generate(
        self,
        requests: Sequence[SampleRequest],
        decoding: Decoding,
        progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Completions in the order of `requests`. Requests with equal prompts share one prefill.

        `progress` is told the number of finished completions as they finish.
        """

    def check_ranks(self, size: int) -> None:  # noqa: B027 (most samplers do not mind)
        """UserError if the sampler cannot be one of `size`, each of a rank of its own."""

    def close(self) -> None:  # noqa: B027 (most samplers hold nothing)
        """Release what the sampler holds."""
