"""How sharded weights lie, on a mesh of one rank: what is freed when, and an update that is the same as without."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from jsonargparse import Namespace
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from rlvr_pl.errors import RunFailure, UserError
from rlvr_pl.grading import MathGrader
from rlvr_pl.model_weights import state_of
from rlvr_pl.module import RLVRModule
from rlvr_pl.objectives import GRPO
from rlvr_pl.policy import load_policy
from rlvr_pl.sampling.fused import fusable
from rlvr_pl.sampling.torch import TorchSampler
from rlvr_pl.settings import FitCLI, ours_if_sharded
from rlvr_pl.sharded_strategy import ShardedStrategy
from rlvr_pl.shards import Shards, part_of, whole_of
from rlvr_pl.types import Completion, Grade, GradeStatus, Rollout, StopReason, build_batch
from rlvr_pl.update import NonFiniteError, update_once


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def start(*, tied: bool = False, **settings):
    policy = load_policy("embedded:start", dtype="float32", **settings)
    if tied:
        policy.model.lm_head.weight = policy.model.model.embed_tokens.weight
    return policy


def adamw(model):
    # eps keeps a gradient of rounding errors alone from being a step of its own
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


def sharded(mesh, **settings):
    """A policy in FP32, its shards, and AdamW over them."""
    policy = start(**settings)
    shards = Shards(policy.model, mesh)
    optimizer = adamw(policy.model)
    shards.gather()
    return policy, shards, optimizer


def batch_of_two():
    grades = [Grade(GradeStatus.CORRECT, 1.0), Grade(GradeStatus.WRONG, 0.0)]
    rollouts = [
        Rollout("q", i, (5, 6, 7), Completion((8, 9 + i, 10), StopReason.EOS), "", grade)
        for i, grade in enumerate(grades)
    ]
    return build_batch(rollouts, 2)


def bytes_of(weight: torch.Tensor) -> int:
    return weight.untyped_storage().nbytes()


def test_where_the_weights_are_in_each_part_of_an_update(mesh):
    policy, shards, optimizer = sharded(mesh)
    shard = dict(zip([name for name, _ in policy.model.named_parameters()], optimizer.param_groups[0]["params"]))
    whole = dict(policy.model.named_parameters())
    assert all(isinstance(weight, DTensor) for weight in shard.values())
    assert not any(isinstance(weight, DTensor) for weight in whole.values())
    assert all(shards.whole(shard[name]) is whole[name] for name in whole)
    in_blocks = {name for name in whole if ".layers." in name}
    assert 0 < len(in_blocks) < len(whole)

    shards.learn()
    assert {name for name, weight in whole.items() if not bytes_of(weight)} == in_blocks
    ids = torch.tensor([[5, 6, 7]])
    policy.hidden_states(ids, torch.ones_like(ids)).sum().backward()
    assert {name for name, weight in whole.items() if not bytes_of(weight)} == in_blocks
    assert all(whole[name].grad is not None for name in in_blocks)  # this rank's, of whole weights
    assert all(weight.grad is None for weight in shard.values())

    shards.free()
    assert not any(bytes_of(weight) for weight in whole.values())
    assert dict(policy.model.named_parameters()) == shard
    shards.gather()
    assert dict(policy.model.named_parameters()) == whole
    fresh = load_policy("embedded:start", dtype="float32").model.state_dict()
    assert all(torch.equal(value, fresh[name]) for name, value in policy.model.named_parameters())


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}, {"tied": True}])
def test_an_update_of_shards_is_that_of_whole_weights(mesh, settings):
    """Twice, so that what the first gathered and freed is used again; forwards outside of an update in between."""
    policy, shards, optimizer = sharded(mesh, **settings)
    plain = start(**settings)
    other = adamw(plain.model)
    batch = batch_of_two()
    weights = GRPO().token_weights(batch)
    ids = torch.tensor([[5, 6, 7]])
    for _ in range(2):
        one = update_once(plain, GRPO(), batch, weights, other)
        two = update_once(policy, GRPO(), batch, weights, optimizer, shards=shards)
        assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
        assert (two.changed_share, two.stepped) == (pytest.approx(one.changed_share, abs=1e-3), True)
        seen = [p.hidden_states(ids, torch.ones_like(ids)).detach() for p in (plain, policy)]
        assert float((seen[0] - seen[1]).abs().max()) < 1e-4
    for (name, a), (_, b) in zip(plain.model.named_parameters(), policy.model.named_parameters()):
        assert float((a - b).detach().abs().max()) <= 1e-6, name


def test_out_of_memory_ends_the_run_because_ranks_cannot_halve_alone(mesh, monkeypatch):
    policy, shards, optimizer = sharded(mesh)
    batch = batch_of_two()

    def full(*_args, **_settings):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("rlvr_pl.update._backward", full)
    with pytest.raises(RunFailure, match=r"out of memory in a micro-batch of 2 rollouts, .*micro_batch_tokens"):
        update_once(policy, GRPO(), batch, GRPO().token_weights(batch), optimizer, shards=shards)


def test_weights_that_a_step_made_infinite_end_the_run_gathered(mesh):
    policy, shards, optimizer = sharded(mesh)
    optimizer.param_groups[0]["lr"] = float("inf")
    batch = batch_of_two()
    with pytest.raises(NonFiniteError, match="gave weights that are not finite"):
        update_once(policy, GRPO(), batch, GRPO().token_weights(batch), optimizer, shards=shards)
    assert not any(isinstance(weight, DTensor) for weight in policy.model.parameters())


@pytest.mark.parametrize(("name", "said"), [("AdamW", None), ("Adagrad", "makes its state before")])
def test_an_optimizer_with_state_from_the_start_is_refused(name, said):
    model = torch.nn.Linear(2, 2)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1.0)
    model.trainer = SimpleNamespace(strategy=ShardedStrategy())  # type: ignore[assignment]
    if said is None:
        assert FitCLI.configure_optimizers(model, optimizer) is optimizer
        return
    with pytest.raises(UserError, match=f"optimizer {name}: {said}"):
        FitCLI.configure_optimizers(model, optimizer)


def test_state_of_another_shape_than_the_weights_cannot_be_shared_out():
    strategy = ShardedStrategy()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3, 2))], lr=1.0)
    strategy.optimizers = [optimizer]
    state = {"state": {0: {"row_var": torch.zeros(3, 1)}}, "param_groups": optimizer.state_dict()["param_groups"]}
    with pytest.raises(UserError, match="optimizer SGD: its state does not have the shape of the weights"):
        strategy.load_optimizer_state_dict({"optimizer_states": [state]})


def test_a_saved_folder_is_a_plain_models_and_saving_leaves_the_weights_gathered(mesh, tmp_path):
    policy, _, _ = sharded(mesh)
    policy.save(tmp_path / "saved")
    policy.weights_sha256()
    assert not any(isinstance(weight, DTensor) for weight in policy.model.parameters())
    plain = load_policy("embedded:start", dtype="float32")
    plain.save(tmp_path / "plain")
    files = {name: {p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("saved", "plain")}
    assert files["saved"] == files["plain"]


def test_the_samplers_fused_path_knows_a_sharded_model(mesh):
    policy, _, _ = sharded(mesh)
    assert fusable(policy.model)


@pytest.mark.parametrize("tied", [True, False])
def test_the_state_of_a_model_is_its_state_dict(tied):
    model = start(tied=tied).model
    expected = model.state_dict()
    found = state_of(model)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert (found["lm_head.weight"].data_ptr() == found["model.embed_tokens.weight"].data_ptr()) is tied


def test_parts_make_a_whole(mesh):
    whole = torch.arange(6.0).view(3, 2)
    _, _, optimizer = sharded(mesh)
    like = optimizer.param_groups[0]["params"][0]
    part = part_of(whole, like)
    assert isinstance(part, DTensor) and torch.equal(whole_of(part), whole)
    assert whole_of(whole) is whole and part_of(whole, torch.empty(0)) is whole


def test_a_model_without_blocks_is_refused(mesh):
    class NoBlocks(torch.nn.Module):
        def get_decoder(self):
            return torch.nn.Linear(2, 2)

    with pytest.raises(UserError, match="NoBlocks: has no list of blocks to shard"):
        Shards(NoBlocks(), mesh)  # type: ignore[arg-type]


def test_lightnings_own_class_is_refused_where_nothing_replaces_it(monkeypatch):
    module = RLVRModule(load_policy("embedded:start"), GRPO(), TorchSampler(), MathGrader())
    monkeypatch.setattr(RLVRModule, "trainer", SimpleNamespace(strategy=ModelParallelStrategy()))
    with pytest.raises(UserError, match=r"give rlvr_pl.sharded_strategy.ShardedStrategy"):
        module.configure_model()


@pytest.mark.parametrize(
    ("setting", "ours"),
    [
        ("lightning.pytorch.strategies.ModelParallelStrategy", True),
        ("ModelParallelStrategy", True),
        (Namespace(class_path="lightning.pytorch.strategies.ModelParallelStrategy", init_args=Namespace(a=1)), True),
        ("ddp", False),
        (None, False),
        (Namespace(class_path="lightning.pytorch.strategies.DDPStrategy"), False),
    ],
)
def test_the_setting_of_lightnings_class_means_ours(setting, ours):
    found = ours_if_sharded(setting)
    if not ours:
        assert found is setting
        return
    assert found.class_path == "rlvr_pl.sharded_strategy.ShardedStrategy"
    assert found.init_args == getattr(setting, "init_args", Namespace())
