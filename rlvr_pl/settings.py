"""What `rlvr-pl fit` can be told: one flat parser, its defaults, and one line for every mistake."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jsonargparse import (
    ArgumentError,
    class_from_function,  # pyright: ignore[reportPrivateImportUsage]
    set_parsing_settings,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

import rlvr_pl.callbacks
import rlvr_pl.grading
import rlvr_pl.objectives
import rlvr_pl.sampling.torch
import rlvr_pl.sampling.vllm
from rlvr_pl.config_file import read_config
from rlvr_pl.configs import FOLDER
from rlvr_pl.data.module import RunData
from rlvr_pl.data.reasoning_gym import ReasoningGym
from rlvr_pl.data.solutions import SolutionData
from rlvr_pl.errors import UserError
from rlvr_pl.grading.base import Grader
from rlvr_pl.mistakes import known_classes, worded
from rlvr_pl.module import RLVRModule
from rlvr_pl.objectives.base import Objective
from rlvr_pl.policy import Policy, load_policy
from rlvr_pl.precision import BF16Precision
from rlvr_pl.records import RunFolder
from rlvr_pl.sampling.base import Sampler
from rlvr_pl.schedulers import WarmupCosine

# A setting without a type is data: a class path in it names nothing that would be imported and called. And no setting
# may name what runs programs or loads code (the parser's list: os, subprocess, pickle, ...); by default it only warns.
set_parsing_settings(instantiate_subclass_spec_in_any=False, import_path_denylist=[])

Settle = Callable[[Any, str], tuple[RunFolder, Path | None]]
# Imported, so that the parser finds their classes by name.
ROOMS = (rlvr_pl.grading, rlvr_pl.objectives, ReasoningGym, rlvr_pl.sampling.torch, rlvr_pl.sampling.vllm, SolutionData)
CALLBACKS: dict[str, type] = {name: getattr(rlvr_pl.callbacks, name) for name in rlvr_pl.callbacks.__all__}
# Callbacks of every run, in the order in which they see an update; RunRecord and checkpoints come last.
STANDING = {
    "progress": CALLBACKS["RunProgress"],
    "rollout_stats": CALLBACKS["RolloutStats"],
    "recorder": CALLBACKS["RolloutRecorder"],
    "tracker": CALLBACKS["Tracker"],
    "validation": CALLBACKS["Validation"],
    "time_limit": CALLBACKS["TimeLimit"],
    "checkpoint": CALLBACKS["RunCheckpoint"],
}
SLOTS: dict[str, type] = {"objective": Objective, "sampler": Sampler, "grader": Grader, "data": RunData}
ADAMW = {
    "class_path": "torch.optim.AdamW",
    "init_args": {"lr": 1e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
}
DEFAULTS: dict[str, Any] = {
    "policy.name": "embedded:start",
    "data": {"class_path": "rlvr_pl.data.module.QuestionData"},
    "objective": {"class_path": "rlvr_pl.objectives.GRPO"},
    "sampler": {"class_path": "rlvr_pl.sampling.torch.TorchSampler"},
    "grader": {"class_path": "rlvr_pl.grading.MathGrader"},
    "optimizer": ADAMW,
}
TRAINER_DEFAULTS: dict[str, Any] = {
    "max_epochs": 1,
    "num_sanity_val_steps": 0,
    "check_val_every_n_epoch": 10**9,  # callbacks.Validation decides when, on the module's own update counter
    "enable_model_summary": False,
    "log_every_n_steps": 1,
    "use_distributed_sampler": False,
}
# Profilers by name, with rows enough that no stage of an update drops out of their tables.
PROFILERS: dict[str, Callable[..., Any]] = {
    "simple": partial(SimpleProfiler, extended=True),
    "advanced": AdvancedProfiler,
    "pytorch": partial(PyTorchProfiler, row_limit=-1, sort_by_key="cpu_time_total"),
}
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
    "BackboneFinetuning": "it freezes layers by epochs; to train a part of the weights set policy.peft",
}
# Where loggers write unless told otherwise: not in the current folder, but in the run's.
NOWHERE = (None, ".", "./mlruns")
HUSHED = (
    ".*does not have many workers.*",
    ".*dataloader is not resumable.*",
    ".*LightningCLI's args.*",
    ".*will be overridden by `FitCLI.*",
    ".*in eval mode at the start of training.*",
    ".*overridden `transfer_batch_to_device`.*",
    ".*isinstance\\(treespec, LeafSpec\\).*",
    ".*across ranks is zero.*",
    ".*sync_dist=True.*",  # every rank logs figures of the whole update
    ".*lr_scheduler.step.*before `optimizer.step.*",  # a skipped update; schedulers count updates
    "(?s).*was deprecated in v4.*removed in v5.*",  # jsonargparse, about calls that Lightning makes
)


class FitCLI(LightningCLI):
    """One parser for `fit`: run, seed, policy, objective, sampler, grader, data, model, precision, optimizer,
    lr_scheduler, trainer, and a group for each standing callback.

    Args:
        argv: the words after ``rlvr-pl fit``.
        settle: chooses the run folder, given the parsed config and its text.

    Attributes:
        folder: the run folder.
        checkpoint: what the run continues from, if anything.
        text: the full configuration as YAML.

    Raises `UserError` for every mistake in the arguments or config files.
    """

    def __init__(self, argv: Sequence[str], settle: Settle) -> None:
        argv = shipped_configs(argv)
        self._settle = settle
        self._given = [read_config(path) for path in config_files(argv)]
        super().__init__(
            RLVRModule,
            RunData,
            subclass_mode_data=True,
            save_config_callback=None,
            trainer_defaults={**TRAINER_DEFAULTS, "callbacks": [CALLBACKS["RunRecord"]()]},
            parser_kwargs={"prog": "rlvr-pl fit", "exit_on_error": False},
            args=fresh_classes(full_names(argv)),
            run=False,
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        try:
            super().parse_arguments(parser, args)
        except (ArgumentError, UnicodeDecodeError) as error:
            raise UserError(worded(str(error), {**SLOTS, "trainer.callbacks": Callback})) from None

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        optional = str | None
        parser.add_argument("--run", type=optional, help="run folder (default: runs/<config>-<objective>-<time>)")
        parser.add_argument("--start", type=optional, help="policy to start from, with a fresh optimizer")
        parser.add_argument("--resume", type=optional, metavar="RUN", help="run folder to continue with its own config")
        parser.add_argument("--overwrite", action="store_true", help="replace an existing run folder")
        parser.add_argument("--seed", type=int, default=0, help="names the random numbers of sampling")

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        loader = class_from_function(load_policy, Policy)
        parser.add_class_arguments(loader, "policy", skip={"device", "dtype"})
        parser.add_subclass_arguments(Objective, "objective", help="see `rlvr-pl objectives`")
        parser.add_subclass_arguments(Sampler, "sampler")
        parser.add_subclass_arguments(Grader, "grader")
        parser.add_class_arguments(BF16Precision, "precision")
        for name, callback in STANDING.items():
            parser.add_lightning_class_args(callback, name)
        parser.add_optimizer_args((torch.optim.Optimizer,))
        parser.set_defaults(DEFAULTS)
        for part in ("policy", "objective", "sampler", "grader"):
            parser.link_arguments(part, f"model.{part}", apply_on="instantiate")
        parser.link_arguments("seed", "model.seed")
        parser.link_arguments("model.eval_batch_size", "data.init_args.validation_batch")

    def _set_seed(self) -> None:
        if not 0 <= self.config["seed"] < 2**32:
            raise UserError(f"--seed {self.config['seed']}: must be at least 0 and below 2**32")
        seed_everything(self.config["seed"], verbose=False)

    def before_instantiate_classes(self) -> None:
        config = self.config
        for name, instead in ELSEWHERE.items():
            if config.trainer[name] != self.parser.get_default(f"trainer.{name}"):
                raise UserError(f"trainer.{name}: {instead}; leave this unset")
        refuse_unfit(config)
        if config.start is not None:
            config.policy.name = config.start
        for line in dict.fromkeys(line for given in self._given for line in left_out(given, config)):
            print(f"rlvr-pl: {line}", file=sys.stderr)
        stored = config.clone()
        for key in ("config", "run", "resume", "overwrite", "start"):
            stored.pop(key, None)
        self.text = self.parser.dump(stored, skip_none=False, skip_validation=True)
        self.folder, self.checkpoint = self._settle(config, self.text)
        config.trainer.default_root_dir = str(self.folder.path)
        for spec in specs(config.trainer.logger):
            if spec.get("init_args", {}).get("save_dir", "elsewhere") in NOWHERE:
                mlflow = spec.class_path.endswith("MLFlowLogger")
                spec.init_args.save_dir = str(self.folder.path / ("mlruns" if mlflow else ""))
                if mlflow:  # which refuses a store of files unless told that it is meant
                    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except Exception as error:  # the parser wraps what a class raises when the class may also be absent
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, UserError):
                cause = cause.__cause__
            if cause is None and isinstance(error, (TypeError, ValueError, MisconfigurationException)):
                cause = UserError(worded(str(error), {}))  # a class refuses its settings
            if cause is None:
                raise
            raise cause from None

    @staticmethod
    def configure_optimizers(lightning_module: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
        if isinstance(lr_scheduler, WarmupCosine):
            lr_scheduler.plan(lightning_module.trainer.datamodule.updates)
        return LightningCLI.configure_optimizers(lightning_module, optimizer, lr_scheduler)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        if self.config.trainer.logger in (None, True):
            kwargs["logger"] = TensorBoardLogger(self.folder.path, name="", version="tensorboard")
        if isinstance(name := self.config.trainer.profiler, str):
            if name not in PROFILERS:
                raise UserError(f"trainer.profiler is {name!r}: choose one of {', '.join(PROFILERS)}, or give a class")
            kwargs["profiler"] = PROFILERS[name](dirpath=self.folder.path, filename="profile")
        silent = self.config.trainer.enable_progress_bar is False
        # the progress callback stands; it is told to say nothing
        self.config_init["trainer"]["enable_progress_bar"] = True
        trainer = super().instantiate_trainer(plugins=[self.config_init["precision"]], **kwargs)
        watch_engine(trainer, self.config_init["sampler"])
        check_strategy(trainer.strategy)
        if silent and trainer.progress_bar_callback is not None:
            trainer.progress_bar_callback.disable()
        return trainer


def specs(value: Any) -> list[Any]:
    """The classes that a setting names: none, one, or a list of them."""
    found = value if isinstance(value, list) else [value]
    return [spec for spec in found if spec is not None and not isinstance(spec, (bool, str)) and "class_path" in spec]


def refuse_unfit(config: Any) -> None:
    """Refuse classes of Lightning's that a run cannot use, with the reason."""
    for spec in specs(config.trainer.callbacks):
        name = spec.class_path.rpartition(".")[2]
        if name in REFUSED and not spec.class_path.startswith("rlvr_pl."):
            raise UserError(f"trainer.callbacks {name}: {REFUSED[name]}; leave it out")
    scheduler = config.get("lr_scheduler")
    if scheduler is not None and scheduler.class_path.endswith("ReduceLROnPlateau"):
        raise UserError(
            "lr_scheduler ReduceLROnPlateau: waits for a figure, and rates here are a function of the update; choose "
            "WarmupCosine, LinearLR (a warm-up) or another of torch.optim.lr_scheduler"
        )


class _Built(Exception):
    """Carries a finished parser out of the class that would go on to use it."""


class _ParserOnly(FitCLI):
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        raise _Built(parser)


def fit_parser() -> LightningArgumentParser:
    """The parser of `fit`, nothing parsed."""
    try:
        _ParserOnly([], _never)
    except _Built as built:
        return built.args[0]
    raise AssertionError("unreachable")


def _never(config: Any, text: str) -> tuple[RunFolder, Path | None]:
    raise AssertionError("nothing is parsed, so nothing is settled")


def check_strategy(strategy: Strategy) -> None:
    """UserError for a strategy under which an update would not be the same as in one process."""
    copies = isinstance(strategy, DDPStrategy) and strategy._start_method == "popen"
    if not copies and not isinstance(strategy, SingleDeviceStrategy):
        raise UserError(
            f"trainer.strategy {type(strategy).__name__}: choose ddp, with which every device has a whole copy of the "
            "policy; sharded policies and started threads or forks are not supported"
        )


def watch_engine(trainer: Any, sampler: Sampler) -> None:
    """A sampler with weights of its own is held to the policy's in every update, unless a canary is set already."""
    canary = CALLBACKS["SamplerCanary"]
    if sampler.own_weights and not any(isinstance(callback, canary) for callback in trainer.callbacks):
        trainer.callbacks.insert(0, canary(every_n_updates=1))


def fresh_classes(words: Sequence[str]) -> list[str]:
    """Clear a slot before a flag or a config file names another class for it than stood there, the default included.

    The parser would carry over the old class's arguments wherever the new one has arguments of the same names, so that
    `ORLMask` over a config of `GRPO` would not mask.
    """
    out: list[str] = []
    current = {slot: _class_path(DEFAULTS[slot]).rpartition(".")[2] for slot in SLOTS}
    for i, word in enumerate(words):
        flag, equals, value = word.partition("=")
        value = value if equals or i + 1 == len(words) else words[i + 1]
        for slot, name in _classes(flag, value).items():
            if current.get(slot, name) != name:
                out.append(f"--{slot}=null")
            current[slot] = name
        out.append(word)
    return out


def _classes(flag: str, value: str) -> dict[str, str]:
    """The classes that one argument puts into slots, by their last names."""
    if flag.removeprefix("--") in SLOTS:
        named = {flag.removeprefix("--"): value}
    elif flag in ("--config", "-c") and os.path.lexists(value):
        given = read_config(value)
        named = {slot: _class_path(given[slot]) for slot in SLOTS if given.get(slot) is not None}
    else:
        named = {}
    return {slot: name.rsplit(".", 1)[-1] for slot, name in named.items() if name}


def _class_path(spec: Any) -> str:
    return str(spec.get("class_path", "")) if isinstance(spec, Mapping) else str(spec)


def shipped_configs(argv: Sequence[str]) -> list[str]:
    """``--config quickstart.yaml`` means the shipped file wherever there is no file of that name here."""
    words = list(argv)
    for i, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag in ("--config", "-c") and (equals or i + 1 < len(words)):
            value = value if equals else words[i + 1]
            shipped = FOLDER / value
            if not os.path.lexists(value) and shipped.is_file():
                words[i if equals else i + 1] = f"{flag}={shipped}" if equals else str(shipped)
    return words


def config_files(argv: Sequence[str]) -> list[str]:
    """The files that follow ``--config`` and ``-c``."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    named = [value for flag, value in pairwise(words) if flag in ("--config", "-c")]
    return [value for value in named if os.path.lexists(value)]


def left_out(given: Mapping[str, Any], config: Any) -> list[str]:
    """What a config file says of classes that the command line then replaced by others, one line each."""
    lines = []
    for slot, spec in given.items():
        final = config.get(slot)
        if not isinstance(spec, dict) or "class_path" not in spec or final is None or "class_path" not in final:
            continue
        old, new = (str(path).rsplit(".", 1)[-1] for path in (spec["class_path"], final["class_path"]))
        kept = final.get("init_args") or {}
        lost = [k for k, value in (spec.get("init_args") or {}).items() if k not in kept or kept[k] != value]
        if old != new and lost:
            lines.append(f"--{slot}: {new} takes the place of {old}; left out: {', '.join(lost)}")
    return lines


def full_names(argv: Sequence[str]) -> list[str]:
    """``--sampler VLLM`` means VLLMSampler and ``--grader Math`` MathGrader; the slot's name may be left out.
    ``--profiler`` is the trainer's."""
    words = [
        f"--trainer{word[1:].replace('-', '.', 1)}" if word.split("=")[0] == "--profiler" else word for word in argv
    ]
    for slot, base in (("sampler", Sampler), ("grader", Grader)):
        known = known_classes(base)
        for i, word in enumerate(words):
            flag, equals, value = word.partition("=")
            if flag != f"--{slot}" or (not equals and i + 1 == len(words)):
                continue
            name = value if equals else words[i + 1]
            full = next((k for k in known if k.lower() in (name.lower(), f"{name}{slot}".lower())), name)
            if equals:
                words[i] = f"{flag}={full}"
            else:
                words[i + 1] = full
    return words


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Leave out Lightning's advice that does not apply here (loaders without workers, modules in eval mode, the step
    inside our own hooks); its errors and other warnings pass."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        for text in HUSHED:
            warnings.filterwarnings("ignore", message=text)
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels):
                logger.setLevel(level)
