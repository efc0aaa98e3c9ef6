"""What Lightning offers and a run cannot use: each with the reason and what to use instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch.optim import Optimizer, SparseAdam
from torch.optim.lr_scheduler import ReduceLROnPlateau

from rlvr_pl.errors import UserError
from rlvr_pl.mistakes import named_class
from rlvr_pl.policy import Policy
from rlvr_pl.sharded_strategy import ShardedStrategy
from rlvr_pl.slots import CALLBACKS, STANDING

# What Lightning would refuse, or worse, half follow, in a module that steps by itself.
ELSEWHERE = {
    "precision": "the precision of a run is precision.master_weights",
    "accumulate_grad_batches": "an update is one batch, whose size is data.questions_per_update",
    "gradient_clip_val": "gradients are clipped by model.max_grad_norm",
    "gradient_clip_algorithm": "gradients are clipped by model.max_grad_norm",
    "max_steps": "the length of a run is data.updates",
    "max_epochs": "the length of a run is data.updates",
    "fast_dev_run": "the length of a run is data.updates",
    "limit_train_batches": "the length of a run is data.updates",
    "min_epochs": "the length of a run is data.updates",
    "min_steps": "the length of a run is data.updates",
    "max_time": "the time limit of a run is time_limit.limit",
    "val_check_interval": "validation is timed by validation.every_n_updates",
    "check_val_every_n_epoch": "validation is timed by validation.every_n_updates",
    "reload_dataloaders_every_n_epochs": "the questions of every update are known before the first",
    "enable_checkpointing": "checkpoints are timed by checkpoint.every_n_updates",
    "default_root_dir": "the folder of a run is --run",
}
# Lightning's callbacks that cannot do here what they do elsewhere, and why.
REFUSED = {
    "StochasticWeightAveraging": "it averages over epochs, and a run is one epoch",
    "WeightAveraging": "it swaps weights behind the sampler, which would validate with the old ones",
    "EMAWeightAveraging": "it swaps weights behind the sampler, which would validate with the old ones",
    "GradientAccumulationScheduler": "an update is one batch, whose size is data.questions_per_update; micro-batches "
    "accumulate within it (model.micro_batch_tokens)",
    "ModelCheckpoint": "checkpoints are timed by checkpoint.every_n_updates, snapshots by the callback Snapshots",
    "OnExceptionCheckpoint": "checkpoints are timed by checkpoint.every_n_updates",
    "Timer": "the time limit of a run is time_limit.limit",
    "BatchSizeFinder": "an update is as large as data.questions_per_update x model.group_size says",
    "LearningRateFinder": "it trains by losses of its own batches, and here a batch is sampled",
    "BaseFinetuning": "it freezes layers by epochs; to train a part of the weights set policy.peft",
    "RichProgressBar": "the progress of a run is shown by RunProgress, whose settings are progress.*",
    "TQDMProgressBar": "the progress of a run is shown by RunProgress, whose settings are progress.*",
    "BackboneFinetuning": "it freezes layers by epochs; to train a part of the weights set policy.peft",
}
# Of libraries, whose classes are found with the others.
INTERNAL = ("AcceleratedOptimizer", "DummyLogger", "MegatronLMOptimizerWrapper")
# What to choose in the place of a class that is unfit.
OTHERS = {
    "optimizer": "AdamW, SGD or another of torch.optim",
    "lr_scheduler": "WarmupCosine, LinearLR (a warm-up) or another of torch.optim.lr_scheduler",
}


def specs(value: Any) -> list[Any]:
    """The classes that a setting names: none, one, or a list of them."""
    found = value if isinstance(value, list) else [value]
    return [spec for spec in found if spec is not None and not isinstance(spec, (bool, str)) and "class_path" in spec]


def refuse_settings(config: Any, default: Callable[[str], Any]) -> None:
    """UserError for the first of Lightning's settings and classes that a run cannot use.

    Args:
        config: the parsed settings.
        default: gives the default of a setting by its name.
    """
    for name, instead in ELSEWHERE.items():
        if config.trainer[name] != default(f"trainer.{name}"):
            raise UserError(f"trainer.{name}: {instead}; leave this unset")
    for spec in specs(config.trainer.callbacks):
        name = spec.class_path.rpartition(".")[2]
        if name in REFUSED and not spec.class_path.startswith("rlvr_pl."):
            raise UserError(f"trainer.callbacks {name}: {REFUSED[name]}; leave it out")
        _refuse_standing(spec.class_path)
    for slot, others in OTHERS.items():
        spec = config.get(slot)
        if spec is not None and (why := why_unfit(named_class(spec.class_path))) is not None:
            raise UserError(f"--{slot} {spec.class_path.rpartition('.')[2]}: {why}; choose {others}")


def _refuse_standing(class_path: str) -> None:
    """UserError for a second one of what every run has, which would record, validate or save everything twice."""
    groups = {cls.__name__: (cls, f"its settings are {group}.*") for group, cls in STANDING.items()}
    groups["RunRecord"] = CALLBACKS["RunRecord"], "it has no settings"
    name = class_path.rpartition(".")[2]
    if name in groups and named_class(class_path) is groups[name][0]:
        raise UserError(f"trainer.callbacks {name}: every run has one already ({groups[name][1]}); leave it out")


def why_unfit(cls: type) -> str | None:
    """Why no run can use an optimizer, a scheduler or a logger, although its slot would take it; None for one that it
    can use."""
    if cls.__name__ in INTERNAL:
        return "a library keeps it for its own use"
    if issubclass(cls, Optimizer):
        closure = inspect.signature(cls.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            return "it computes the loss again and again within a step (a closure), and an update has one gradient"
        if issubclass(cls, SparseAdam):
            return "it takes sparse gradients, and a policy's are dense"
    if issubclass(cls, ReduceLROnPlateau):
        return "it waits for a figure, and rates here are a function of the update"
    return None


def check_strategy(strategy: Strategy, policy: Policy) -> None:
    """UserError for a strategy under which an update would not be the same as in one process."""
    copies = isinstance(strategy, DDPStrategy) and strategy._start_method == "popen"
    if isinstance(strategy, ShardedStrategy):
        strategy.check(policy)
    elif not copies and not isinstance(strategy, SingleDeviceStrategy):
        raise UserError(
            f"trainer.strategy {type(strategy).__name__}: choose ddp, with which every device has a whole copy of the "
            "policy, or lightning.pytorch.strategies.ModelParallelStrategy, with which it has a shard; started threads "
            "and forks are not supported"
        )
