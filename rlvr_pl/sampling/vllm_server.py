"""Samples through `vllm serve` processes, here or on other machines: weights are pushed to them by way of a shared
folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from rlvr_pl.errors import UserError
from rlvr_pl.model_weights import state_of
from rlvr_pl.ranks import Ranks
from rlvr_pl.sampling.base import (
    Decoding,
    NonFiniteLogits,
    Sampler,
    SampleRequest,
    caps_of,
    check_decoding,
    engine_completion,
    seed_of,
)
from rlvr_pl.sampling.endpoint import Endpoint, EndpointError
from rlvr_pl.sampling.pushed import PushedWeights
from rlvr_pl.sampling.vllm import check_names, plain_policy
from rlvr_pl.types import Completion, StopReason

if TYPE_CHECKING:
    from rlvr_pl.policy import Policy

# What a server must be started with, and how `vllm serve` names it.
SETTINGS = {"logprobs_mode": "processed_logprobs", "generation_config": "vllm"}
# Fields of a model's config that change neither the names and shapes of its weights nor what it computes.
NEUTRAL = (
    "_name_or_path", "architectures", "attn_implementation", "_attn_implementation", "bos_token_id", "dtype",
    "eos_token_id", "initializer_range", "pad_token_id", "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip
# The server's word for a log-prob that is NaN.
NOT_FINITE = "Out of range float values are not JSON compliant"
PATIENCE = 10.0  # seconds in which a server must have let go of the cache of answered requests


class VLLMServer(Sampler):
    """Samples with one or more external `vllm serve` (docs/scaling.md has the commands).

    At every `sync` rank 0 writes the policy's weights into `folder`, each server reloads from there and forgets what
    it had cached of the old ones; an adapter is merged, in FP32. Requests are dealt to the servers in equal parts and
    in order, under several ranks each rank's own share. A server is one run's: another that pushed to it would change
    the weights under this one, which the canary of `fit` would notice.
    Each request has a seed of its own, a function of its key; numerics still depend on what else is in the batch.

    Args:
        url: ``http://HOST:PORT`` of the server, or a list of them.
        folder: a folder that trainer and servers see under the same path. Only the newest push is kept in it, and none
            when the run has ended.
        concurrency: requests that each process has at each server together; the server's ``--max-num-seqs`` decides how
            many of them are decoded together.
        timeout: seconds that one request may take.

    Raises:
        UserError: a server is down, lacks its development mode, or was started with other settings.
    """

    deterministic: ClassVar[bool] = False
    own_weights: ClassVar[bool] = True

    def __init__(self, url: str | list[str], folder: str, concurrency: int = 256, timeout: float = 3600.0) -> None:
        urls = [url] if isinstance(url, str) else list(url)
        if not urls or len(set(urls)) < len(urls):
            raise UserError(f"sampler.url is {url}: name each server once")
        for name, value in (("concurrency", concurrency), ("timeout", timeout)):
            if not value > 0:
                raise UserError(f"sampler.{name} is {value}: it must be above 0")
        self._pushed = PushedWeights(folder)
        self._servers = [Endpoint(each, timeout) for each in urls]
        self._facts = [_facts(server) for server in self._servers]
        versions = {facts.version for facts in self._facts}
        if len(versions) > 1:
            raise UserError(f"sampler.url: the servers have vLLM {', '.join(sorted(versions))}; start them with one")
        self.engine = f"vllm-server-{versions.pop()}"
        self._concurrency = concurrency
        self._policy: Policy | None = None
        self._names: set[str] | None = None

    def sync(self, policy: Policy) -> None:
        """Push the weights from rank 0 to every server; the other ranks wait for it.

        Raises:
            UserError: a server has another model, or another precision, than the policy.
            RunFailure: a server does not answer or cannot load the weights, or they have other names than before.
        """
        ranks = Ranks.here()
        ranks.together(partial(self._push, policy) if ranks.rank == 0 else list)
        self._policy = policy

    def _push(self, policy: Policy) -> list[Any]:
        plain = plain_policy(policy)
        if self._names is None:
            for server, facts in zip(self._servers, self._facts):
                _check_model(server, facts, plain)
            self._names = set(state_of(plain.model))
        check_names(self._names, plain)
        folder = self._pushed.write(plain)
        with ThreadPoolExecutor(len(self._servers)) as pool:
            self._finish([pool.submit(_load, server, str(folder)) for server in self._servers])
        self._pushed.keep(folder)
        return []

    def generate(
        self,
        requests: Sequence[SampleRequest],
        decoding: Decoding,
        progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Completions in the order of `requests`.

        Raises:
            UserError: a prompt and its cap do not fit into the context, or the decoding makes no sense.
            NonFiniteLogits: the policy gives NaN logits.
            RunFailure: a server does not answer, or not with what was asked for.
        """
        if self._policy is None:
            raise RuntimeError("sync(policy) comes before generate")
        check_decoding(decoding)
        caps = caps_of(requests, decoding, min(self._policy.max_context, *(facts.context for facts in self._facts)))
        stops = list(self._policy.eos_ids)
        bodies = [_body(request, cap, decoding, stops) for request, cap in zip(requests, caps)]
        pools = [ThreadPoolExecutor(self._concurrency) for _ in self._servers]
        futures: list[Future[Completion]] = []
        try:
            for k, (server, pool) in enumerate(zip(self._servers, pools)):
                mine = Ranks(k, len(pools)).part(len(bodies))  # groups stay together, for the prefix cache
                numbers = range(len(bodies))[mine]
                futures += [pool.submit(self._answer, server, number, bodies[number]) for number in numbers]
            self._finish(futures, progress)
        finally:
            for pool in pools:
                pool.shutdown()
        return [future.result() for future in futures]

    def _answer(self, server: Endpoint, number: int, body: dict[str, Any]) -> Completion:
        try:
            reply = server.ask("POST", "/v1/completions", body)
        except EndpointError as error:
            if NOT_FINITE in error.reason:
                raise NonFiniteLogits(number, ()) from error
            raise
        ids, logprobs = _read(server, reply)
        assert self._policy is not None
        completion = engine_completion(number, ids, logprobs, self._policy.eos_ids)
        if completion.stop_reason is StopReason.LENGTH and len(ids) != body["max_tokens"]:
            raise EndpointError(f"{server.url} gave {len(ids)} tokens of {body['max_tokens']} and no end")
        return completion

    def _finish(self, futures: Sequence[Future[Any]], progress: Callable[[int], None] | None = None) -> None:
        """Wait for all; at the first error, or Ctrl-C, end the others and raise it."""
        try:
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                if progress is not None:
                    progress(done)
        except BaseException as error:
            for future in futures:
                future.cancel()
            for server in self._servers:
                server.abort()
            if isinstance(error, EndpointError):
                again = " and ".join(dict.fromkeys(f"`{serve_command(facts.model)}`" for facts in self._facts))
                raise EndpointError(
                    f"sampler VLLMServer: {error}; see to the server (it is started with {again}), then continue with "
                    "--resume or the same command",
                    error.status,
                    error.reason,
                ) from error
            raise

    def close(self) -> None:
        """Remove what was pushed. The servers stay as they are."""
        self._pushed.remove()


@dataclass(frozen=True)
class Facts:
    """What a server says of itself: vLLM's version, its model (folder or hub name), dtype and longest context."""

    version: str
    model: str
    dtype: str
    context: int


def serve_command(model: str = "MODEL", dtype: str = "auto") -> str:
    """How a server is started."""
    flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in SETTINGS.items())
    return f"VLLM_SERVER_DEV_MODE=1 vllm serve {model} --dtype {dtype} {flags}"


def _facts(server: Endpoint) -> Facts:
    """Ask a server what it is. UserError when it is down, is none of vLLM's or was started otherwise."""
    try:
        version = server.ask("GET", "/version")
        info = server.ask("GET", "/server_info?config_format=json")
    except EndpointError as error:
        why = "its development mode is off" if error.status == 404 else str(error)
        raise UserError(f"sampler.url {server.url}: {why}; start it with `{serve_command()}`") from error
    try:
        model = info["vllm_config"]["model_config"]
        facts = Facts(version["version"], model["model"], model["dtype"].removeprefix("torch."), model["max_model_len"])
        settings = {name: model[name] for name in SETTINGS}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"sampler.url {server.url}: no server of vLLM, or of a version that does not tell its settings "
            f"({type(error).__name__}: {error})"
        ) from error
    for name, value in SETTINGS.items():
        if settings[name] != value:
            raise UserError(
                f"sampler.url {server.url}: its {name} is {settings[name]}, which makes other log-probs or draws than "
                f"are asked for; start it with `{serve_command(facts.model)}`"
            )
    return facts


def _check_model(server: Endpoint, facts: Facts, policy: Policy) -> None:
    """UserError unless the server has a model of the policy's names and shapes, in its precision.

    vLLM says nothing when weights are missing from a push, and keeps its own. Which names and shapes a model has is
    settled by its config, so configs are compared: the policy's, and that of the folder or hub name that is served.
    """
    from transformers import AutoConfig

    from rlvr_pl.policy_folder import quiet_transformers, readable

    where = f"sampler.url {server.url}: serves {facts.model}"
    with quiet_transformers(), readable(f"{where}, whose config.json cannot be read here to compare it"):
        served = _telling(AutoConfig.from_pretrained(facts.model))
    mine = _telling(policy.model.config)
    odd = sorted(name for name in mine.keys() | served.keys() if mine.get(name) != served.get(name))
    if odd:
        what = ", ".join(f"{name} {served.get(name)} instead of {mine.get(name)}" for name in odd[:3])
        raise UserError(
            f"{where}, which is not the policy's model ({what}); start it with "
            f"`{serve_command(_servable(policy))}`, or with a folder saved from the policy"
        )
    dtype = str(policy.head.dtype).removeprefix("torch.")
    if facts.dtype != dtype:
        raise UserError(
            f"{where} in {facts.dtype}, but the policy is pushed in {dtype}; start it with "
            f"`{serve_command(facts.model, dtype)}`"
        )


def _servable(policy: Policy) -> str:
    from rlvr_pl.policy_folder import find_folder

    return str(find_folder(policy.name)) if policy.name.startswith("embedded:") else policy.name


def _telling(config: Any) -> dict[str, Any]:
    fields = config.get_text_config().to_dict()
    return {name: value for name, value in fields.items() if name not in NEUTRAL and "drop" not in name}


def _load(server: Endpoint, folder: str) -> None:
    """Let a server take the weights of a folder in place of its own, and forget what it computed with those."""
    try:
        server.ask("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
    except EndpointError as error:
        if error.status != 500:
            raise
        raise EndpointError(
            f"{server.url} cannot load {folder} (does it see it under this path?): {error.reason}", 500, error.reason
        ) from error
    deadline = time.monotonic() + PATIENCE
    while True:
        reply = server.ask("POST", "/reset_prefix_cache")
        if isinstance(reply, dict) and reply.get("success") is True:
            return
        if time.monotonic() > deadline:
            raise EndpointError(f"{server.url} keeps keys and values of the old weights ({reply}): others use it too")
        time.sleep(0.05)


def _body(request: SampleRequest, cap: int, decoding: Decoding, stops: list[int]) -> dict[str, Any]:
    drawn = decoding.temperature > 0
    return {
        "prompt": list(request.prompt_ids),
        "max_tokens": cap,
        "temperature": decoding.temperature,
        "top_p": decoding.top_p if drawn else 1.0,
        "seed": seed_of(request.key) if drawn else None,
        "logprobs": 0,  # of the drawn token
        "stop_token_ids": stops,
        "return_token_ids": True,
        "skip_special_tokens": False,
    }


def _read(server: Endpoint, reply: Any) -> tuple[list[int], list[float]]:
    """Ids and log-probs of the one completion in a reply; EndpointError when they are not there."""
    try:
        (choice,) = reply["choices"]
        ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        if not ids or len(ids) != len(logprobs) or not all(type(i) is int for i in ids):
            raise ValueError("ids and log-probs do not match")
        return ids, [float(x) for x in logprobs]
    except (KeyError, TypeError, ValueError) as error:
        raise EndpointError(f"{server.url} answers without ids and their log-probs: {str(reply)[:200]}") from error
