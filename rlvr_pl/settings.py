"""What `rlvr-pl fit` can be told: one flat parser, its defaults, and one line for every mistake."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jsonargparse import (
    ArgumentError,
    Namespace,
    class_from_function,  # pyright: ignore[reportPrivateImportUsage]
    set_parsing_settings,
)
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning.pytorch.strategies import ModelParallelStrategy

from rlvr_pl.arguments import config_files, fresh_classes, full_names, left_out, shipped_configs
from rlvr_pl.config_file import place, read_config
from rlvr_pl.data.module import RunData
from rlvr_pl.errors import UserError
from rlvr_pl.grading.base import Grader
from rlvr_pl.mistakes import key_of, mistake_in, worded
from rlvr_pl.module import RLVRModule
from rlvr_pl.nulls import empty_part, null_setting
from rlvr_pl.objectives.base import Objective
from rlvr_pl.policy import Policy, load_policy
from rlvr_pl.precision import BF16Precision
from rlvr_pl.records import RunFolder
from rlvr_pl.refusals import check_strategy, refuse_settings, specs, why_unfit
from rlvr_pl.sampling.base import Sampler
from rlvr_pl.schedulers import WarmupCosine
from rlvr_pl.sharded_strategy import ShardedStrategy
from rlvr_pl.slots import CALLBACKS, DEFAULTS, SLOTS, STANDING

# A setting without a type is data: a class path in it names nothing that would be imported and called. And no setting
# may name what runs programs or loads code (the parser's list: os, subprocess, pickle, ...); by default it only warns.
set_parsing_settings(instantiate_subclass_spec_in_any=False, import_path_denylist=[])

Settle = Callable[[Any, str], tuple[RunFolder, Path | None]]
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


# Settings that name a class, in whose mistakes the known ones are listed.
CLASSES = {
    **SLOTS,
    "optimizer": torch.optim.Optimizer,
    "lr_scheduler": torch.optim.lr_scheduler.LRScheduler,
    "trainer.logger": Logger,
    "trainer.callbacks": Callback,
}
# Where loggers write unless told otherwise: not in the current folder, but in the run's.
NOWHERE = (None, ".", "./mlruns")


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
        notes: what is to be said once no mistake was found.

    Raises `UserError` for every mistake in the arguments or config files.
    """

    def __init__(self, argv: Sequence[str], settle: Settle) -> None:
        argv = shipped_configs(argv)
        self._settle = settle
        self._argv = argv
        self._given = {path: read_config(path) for path in config_files(argv)}
        for path, given in self._given.items():
            if (name := empty_part(given)) is not None:
                raise UserError(f"{place(path, [name])}: {name}: null; give it a value, or leave it out")
        self.notes: list[str] = []
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
            text = worded(str(error), CLASSES, lambda cls: why_unfit(cls) is None)
            help_ = "; see rlvr-pl fit --help" if text.startswith(("unrecognized arguments", "argument ")) else ""
            raise UserError(self._located(text, key_of(str(error))) + help_) from None
        except SystemExit as stop:
            if stop.code == 0:  # --help
                raise
            frames = traceback.extract_tb(stop.__traceback__)
            # the module that ended; further in may be a library's own sys.exit (wandb puts one in its place)
            frame = next((frame for frame in reversed(frames) if frame.name == "<module>"), frames[-1])
            raise UserError(f"{frame.filename}:{frame.lineno}: ended with SystemExit when it was imported") from stop

    def _located(self, text: str, key: str) -> str:
        """The message with file and line of the setting where a config file, and no word of the command, says it."""
        slot = key.split(".")[0]
        saying = [path for path, given in self._given.items() if slot in given]
        if not saying or any(word.startswith((f"--{key}", f"--{slot}=")) for word in self._argv):
            return text
        return f"{place(saying[-1], key.split('.'))}: {text.removeprefix('--')}"

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
        for name in ("run", "start"):
            if config[name] == "":
                raise UserError(f"--{name} '': name a {'folder' if name == 'run' else 'policy'}, or leave it out")
        if config.policy.name == "null" and not os.path.lexists("null"):  # of a flag it is a word like any other
            config.policy.name = None
        if (null := null_setting(config)) is not None:
            raise UserError(self._located(null[1], null[0]))
        refuse_settings(config, self.parser.get_default)
        if config.start is not None:
            config.policy.name = config.start
        self.notes += dict.fromkeys(line for given in self._given.values() for line in left_out(given, config))
        stored = config.clone()
        for key in ("config", "run", "resume", "overwrite", "start"):
            stored.pop(key, None)
        self.text = self.parser.dump(stored, skip_none=False, skip_validation=True)
        self.folder, self.checkpoint = self._settle(config, self.text)
        config.trainer.default_root_dir = str(self.folder.path)
        config.trainer.strategy = ours_if_sharded(config.trainer.strategy)
        for spec in specs(config.trainer.logger):
            if spec.get("init_args", {}).get("save_dir", "elsewhere") in NOWHERE:
                mlflow = spec.class_path.endswith("MLFlowLogger")
                spec.init_args.save_dir = str(self.folder.path / ("mlruns" if mlflow else ""))
                if mlflow:  # which refuses a store of files unless told that it is meant
                    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (Exception, SystemExit) as error:
            found = mistake_in(error)
            if found is None:
                raise
            raise found from error
        self.notes += self.datamodule.notes()

    @staticmethod
    def configure_optimizers(lightning_module: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
        if optimizer.state and isinstance(lightning_module.trainer.strategy, ShardedStrategy):
            raise UserError(
                f"optimizer {type(optimizer).__name__}: makes its state before the weights are sharded; choose AdamW "
                "or SGD, or trainer.strategy ddp"
            )
        (group,) = optimizer.param_groups
        group["params"] = list(lightning_module.parameters())  # sharded, it may be, since the optimizer was made
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
        try:
            trainer = super().instantiate_trainer(plugins=[self.config_init["precision"]], **kwargs)
        except RuntimeError as error:
            if twice := re.search(r"more than one stateful callback of type `(\w+)`", str(error)):
                text = f"--trainer.callbacks: {twice[1]} is there twice; leave one of the two out"
                raise UserError(self._located(text, "trainer.callbacks")) from None
            raise
        watch_engine(trainer, self.config_init["sampler"])
        check_strategy(trainer.strategy, self.config_init["policy"])
        self.config_init["sampler"].check_ranks(trainer.world_size)
        if silent and trainer.progress_bar_callback is not None:
            trainer.progress_bar_callback.disable()
        return trainer


def ours_if_sharded(strategy: Any) -> Any:
    """The setting of a strategy, with our class in the place of Lightning's `ModelParallelStrategy`, be that a word or
    a class with arguments. Checkpoints of Lightning's hang on the number of ranks."""
    name = strategy if isinstance(strategy, str) else getattr(strategy, "class_path", "")
    if name.rpartition(".")[2] != ModelParallelStrategy.__name__:
        return strategy
    path = f"{ShardedStrategy.__module__}.{ShardedStrategy.__name__}"
    return Namespace(class_path=path, init_args=getattr(strategy, "init_args", Namespace()))


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


def watch_engine(trainer: Any, sampler: Sampler) -> None:
    """A sampler with weights of its own is held to the policy's in every update, unless a canary is set already."""
    canary = CALLBACKS["SamplerCanary"]
    if sampler.own_weights and not any(isinstance(callback, canary) for callback in trainer.callbacks):
        trainer.callbacks.insert(0, canary(every_n_updates=1))
