"""`rlvr-pl fit`: LightningCLI with one flat parser, and the life of a run folder around `Trainer.fit`."""

from __future__ import annotations

import os
import logging
import platform
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from jsonargparse import class_from_function
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger

from rlvr_pl import __version__
from rlvr_pl.callbacks.checkpoint import RunCheckpoint, latest_checkpoint
from rlvr_pl.callbacks.run_record import RunRecord
from rlvr_pl.callbacks.validation import Validation
from rlvr_pl.data.module import QuestionData
from rlvr_pl.errors import UserError
from rlvr_pl.grading.base import Grader
from rlvr_pl.module import RLVRModule
from rlvr_pl.objectives.base import Objective
from rlvr_pl.policy import Policy, load_policy
from rlvr_pl.precision import BF16Precision
from rlvr_pl.records import RunFolder, atomic_write_text
from rlvr_pl.sampling.base import Sampler

ADAMW = {
    "class_path": "torch.optim.AdamW",
    "init_args": {"lr": 1e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
}
TRAINER_DEFAULTS: dict[str, Any] = {
    "max_epochs": 1,
    "num_sanity_val_steps": 0,
    "check_val_every_n_epoch": 10**9,  # callbacks.Validation decides when, on the module's own update counter
    "enable_model_summary": False,
    "log_every_n_steps": 1,
    "use_distributed_sampler": False,
}
HUSHED = (
    ".*does not have many workers.*",
    ".*dataloader is not resumable.*",
    ".*LightningCLI's args.*",
    ".*will be overridden by `FitCLI.*",
    ".*in eval mode at the start of training.*",
    ".*overridden `transfer_batch_to_device`.*",
    ".*isinstance\\(treespec, LeafSpec\\).*",
    ".*Checkpoint directory.*",
)
PACKAGES = ("torch", "lightning", "transformers", "math-verify", "numpy")


def fit(argv: Sequence[str]) -> int:
    """Run ``rlvr-pl fit`` with these arguments and return the exit status. A user's mistake raises `UserError`."""
    with quiet_lightning():
        cli = FitCLI(_expand_resume(list(argv)))
        module, data = cli.model, cli.datamodule
        run = Run(cli.folder, cli.text, module, data, ["rlvr-pl", "fit", *argv])
        check_prompts(module, data)
        run.open(fresh=cli.checkpoint is None, replace=cli.config["overwrite"])
        try:
            cli.trainer.fit(module, datamodule=data, ckpt_path=cli.checkpoint, weights_only=True)
        finally:
            module.sampler.close()
            module.grader.close()
        run.close()
    return 0


class FitCLI(LightningCLI):
    """One parser for `fit`: run, seed, policy, objective, sampler, grader, data, model, precision, optimizer,
    lr_scheduler, trainer, and a group for each standing callback.

    Attributes:
        folder: the run folder.
        checkpoint: what the run continues from, if anything.
        text: the full configuration as YAML.
    """

    def __init__(self, argv: list[str]) -> None:
        self.argv = argv
        super().__init__(
            RLVRModule,
            QuestionData,
            save_config_callback=None,
            trainer_defaults={**TRAINER_DEFAULTS, "callbacks": [RunRecord()]},
            parser_kwargs={"prog": "rlvr-pl fit", "exit_on_error": False},
            args=argv,
            run=False,
        )

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
        parser.add_lightning_class_args(Validation, "validation")
        parser.add_lightning_class_args(RunCheckpoint, "checkpoint")
        parser.add_optimizer_args((torch.optim.Optimizer,))
        parser.set_defaults(
            {
                "policy.name": "embedded:start",
                "objective": {"class_path": "rlvr_pl.objectives.GRPO"},
                "sampler": {"class_path": "rlvr_pl.sampling.torch.TorchSampler"},
                "grader": {"class_path": "rlvr_pl.grading.MathGrader"},
                "optimizer": ADAMW,
            }
        )
        for part in ("policy", "objective", "sampler", "grader"):
            parser.link_arguments(part, f"model.{part}", apply_on="instantiate")
        parser.link_arguments("seed", "model.seed")
        parser.link_arguments("model.eval_batch_size", "data.validation_batch")

    def _set_seed(self) -> None:
        seed_everything(self.config["seed"], verbose=False)

    def before_instantiate_classes(self) -> None:
        config = self.config
        if config.trainer.precision is not None:
            raise UserError("trainer.precision: the precision of a run is precision.master_weights; leave this unset")
        if config.start is not None:
            config.policy.name = config.start
        stored = config.clone()
        for key in ("config", "run", "resume", "overwrite", "start"):
            stored.pop(key, None)
        self.text = self.parser.dump(stored, skip_none=False, skip_validation=True)
        self.folder, self.checkpoint = settle(config, self.text, default_run(self.argv, config))
        config.trainer.default_root_dir = str(self.folder.path)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        if self.config.trainer.logger in (None, True):
            kwargs["logger"] = TensorBoardLogger(self.folder.path, name="", version="tensorboard")
        return super().instantiate_trainer(plugins=[self.config_init["precision"]], **kwargs)


def settle(config: Any, text: str, default: Path) -> tuple[RunFolder, Path | None]:
    """The run folder and the checkpoint it continues from, if any. Changes nothing on disk."""
    folder = RunFolder(config.resume or config.run or default)
    state = folder.read_json("run.json")
    if config.resume is not None:
        if state is None:
            raise UserError(f"--resume {folder.path}: no run to continue here (no run.json)")
        if state["state"] == "finished":
            raise UserError(f"--resume {folder.path}: finished after {state['updates']} updates; begin a new run")
        return folder, latest_checkpoint(folder.checkpoints)
    if not folder.path.exists() or not any(folder.path.iterdir()):
        return folder, None
    if config.overwrite:
        if state is None:
            raise UserError(f"--overwrite: {folder.path} is not a run folder (no run.json); it will not be removed")
        return folder, None
    same = (folder.path / "config.yaml").exists() and (folder.path / "config.yaml").read_text() == text
    if same and (state is None or state["state"] != "finished"):
        print(f"rlvr-pl: {folder.path} holds this run unfinished; continuing it", file=sys.stderr)
        return folder, latest_checkpoint(folder.checkpoints)
    what = "this run, finished" if same else "another run"
    raise UserError(f"{folder.path} holds {what}; choose another --run, or pass --overwrite to replace it")


def default_run(argv: Sequence[str], config: Any) -> Path:
    """``runs/<config file>-<objective>-<time>``, a name that nothing has yet."""
    files = [Path(v).stem for k, v in zip(argv, argv[1:]) if k in ("--config", "-c")]
    objective = config.objective.class_path.rsplit(".", 1)[-1]
    base = "-".join([*files[:1], objective, time.strftime("%Y%m%d-%H%M%S")])
    path, copy = Path("runs") / base, 1
    while path.exists():
        copy += 1
        path = Path("runs") / f"{base}-{copy}"
    return path


class Run:
    """The life of a run folder: opened before the first update, closed after the last."""

    def __init__(
        self, folder: RunFolder, text: str, module: RLVRModule, data: QuestionData, command: Sequence[str]
    ) -> None:
        self.folder = folder
        self.text = text
        self.module = module
        self.data = data
        self.command = list(command)

    def open(self, *, fresh: bool, replace: bool) -> None:
        """Make the folder (or take over the unfinished one) and say in run.json that it runs."""
        path = self.folder.path
        if replace and path.exists():
            shutil.rmtree(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            if fresh:
                atomic_write_text(path / "config.yaml", self.text)
        except OSError as error:
            raise UserError(f"--run {path}: cannot write there ({error.strerror})") from None
        self._write("running")

    def close(self) -> None:
        """Keep the final policy of a run that reached its end or its stop rule; leave any other to be resumed."""
        module = self.module
        finished = module.updates_done >= self.data.updates or module.stopped_by == "damage"
        if finished:
            module.policy.save(self.folder.snapshots / "final", overwrite=True)
        self._write("finished" if finished else "stopped")

    def _write(self, state: str) -> None:
        before = self.folder.read_json("run.json") or {}
        module = self.module
        now = time.strftime("%Y-%m-%dT%H:%M:%S")
        manifest = {
            "state": state,
            "updates": module.updates_done,
            "planned_updates": self.data.updates,
            "stopped_by": module.stopped_by,
            "objective": type(module.objective).__name__,
            "start": module.policy.name,
            "start_sha256": module.policy.sha256,
            "order_sha256": self.data.schedule.sha256,
            "seed": module.seed,
            "engine": module.sampler.engine,
            "deterministic": module.sampler.deterministic,
            "started": before.get("started", now),
            "written": now,
            "command": before.get("command", self.command),
            "versions": {"python": platform.python_version(), "rlvr-pl": __version__, **_versions()},
            "threads": torch.get_num_threads(),
        }
        self.folder.write_json("run.json", manifest)


def check_prompts(module: RLVRModule, data: QuestionData) -> None:
    """Refuse, before anything is written, a question whose prompt and completion do not fit the policy's context."""
    policy = module.policy
    room = policy.max_context - max(module.decoding.max_new_tokens, module.eval_decoding.max_new_tokens)
    for question in {q.uid: q for q in data.planned_questions()}.values():
        length = len(policy.prompt_ids(question))
        if length > room:
            raise UserError(
                f"question {question.uid}: its prompt has {length} tokens, which leaves no room for the completion in a "
                f"context of {policy.max_context}; lower model.max_new_tokens or leave the question out"
            )


def _expand_resume(argv: list[str]) -> list[str]:
    """Put the config of a run to be resumed in front; the run's own settings are the only ones."""
    for i, word in enumerate(argv):
        if word == "--resume" or word.startswith("--resume="):
            run = word.partition("=")[2] or (argv[i + 1] if i + 1 < len(argv) else "")
            if len(argv) > i + (1 if "=" in word else 2) or i > 0:
                raise UserError("--resume takes every setting from the run folder; give it no other argument")
            config = Path(run) / "config.yaml"
            if not config.is_file():
                raise UserError(f"--resume {run}: no run to continue here (no config.yaml)")
            return ["--config", str(config), "--resume", run]
    return argv


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


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
