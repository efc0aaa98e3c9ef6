"""Short real runs of the embedded default, with a sampler and a grader that play a written script."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ProgressBar

from rlvr_pl.callbacks.checkpoint import RunCheckpoint, latest_checkpoint
from rlvr_pl.callbacks.run_record import RunRecord
from rlvr_pl.callbacks.validation import Validation
from rlvr_pl.data.module import QuestionData
from rlvr_pl.grading.base import Grader, GradeRequest
from rlvr_pl.module import RLVRModule
from rlvr_pl.objectives import GRPO
from rlvr_pl.policy import load_policy
from rlvr_pl.precision import BF16Precision
from rlvr_pl.records import RunFolder
from rlvr_pl.sampling.base import Decoding, Sampler, SampleRequest, uniforms
from rlvr_pl.types import Completion, Grade, GradeStatus, StopReason

UPDATES, GROUP, VALIDATION = 12, 4, 20


class ScriptedSampler(Sampler):
    """Draws 3 to 8 random tokens and reports `logprob` for each; `truncation(update)` is the share of an update's
    rollouts that "hit the cap"."""

    engine = "scripted"

    def __init__(self, truncation: Callable[[int], float] = lambda update: 0.0, logprob: float = -2.0) -> None:
        self.truncation = truncation
        self.logprob = logprob

    def sync(self, policy: Any) -> None:
        self.eos = policy.eos_ids[0]

    def generate(self, requests: Sequence[SampleRequest], decoding: Decoding, progress: Any = None) -> list[Completion]:
        return [self._draw(request) for request in requests]

    def _draw(self, request: SampleRequest) -> Completion:
        draws = uniforms(("script", *request.prompt_ids, *request.key), 9)
        ids = [200 + int(u * 800) for u in draws[1 : 4 + int(draws[0] * 6)]]
        if request.key and request.key[-1] < self.truncation(int(request.key[2])) * GROUP:
            return Completion(tuple(ids), StopReason.LENGTH, tuple(self.logprob for _ in ids))
        return Completion((*ids, self.eos), StopReason.EOS, tuple(self.logprob for _ in [*ids, 0]))


class ScriptedGrader(Grader):
    """In training the even samples are right; in validation the first `validation(k)` of call k."""

    name = "scripted"

    def __init__(self, validation: Callable[[int], int] = lambda call: VALIDATION) -> None:
        self.validation = validation
        self.calls = 0

    def grade(self, requests: Sequence[GradeRequest], *, require_box: bool) -> list[Grade]:
        right = [i % 2 == 0 for i in range(len(requests))]
        if not require_box:
            right = [i < self.validation(self.calls) for i in range(len(requests))]
            self.calls += 1
        return [Grade(GradeStatus.CORRECT, 1.0, "1") if r else Grade(GradeStatus.WRONG, 0.0, "2") for r in right]


class Killed(Exception):
    """Stands for a kill: nothing after it runs."""


class KillAfter(Callback):
    """Raises at the end of an update, after the other callbacks and before the checkpoint."""

    def __init__(self, update: int) -> None:
        self.update = update

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if pl_module.updates_done == self.update:
            raise Killed


@pytest.fixture
def scripted() -> type[ScriptedSampler]:
    """`ScriptedSampler` for tests, which import nothing from this file."""
    return ScriptedSampler


@pytest.fixture
def grader() -> type[ScriptedGrader]:
    """`ScriptedGrader` likewise."""
    return ScriptedGrader


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., SimpleNamespace]:
    """``run(*callbacks, **settings)`` fits and returns module, trainer and folder; ``resume=True`` goes on from the
    newest checkpoint in ``folder``; ``kill_after=u`` ends the process, as it were, at the end of update u."""
    torch.set_num_threads(1)

    def fit(
        *callbacks: Callback,
        folder: Path = tmp_path / "run",
        updates: int = UPDATES,
        sampler: Sampler | None = None,
        grader: Grader | None = None,
        objective: Any = None,
        validate_every: int | None = None,
        checkpoint_every: int = 4,
        resume: bool = False,
        kill_after: int | None = None,
        fresh: bool = False,
        **settings: Any,
    ) -> SimpleNamespace:
        if fresh:
            shutil.rmtree(folder, ignore_errors=True)
        module = RLVRModule(
            load_policy("embedded:start", dtype="bfloat16"),
            objective or GRPO(),
            sampler or ScriptedSampler(),
            grader or ScriptedGrader(),
            **{"group_size": GROUP, "max_new_tokens": 8, "eval_max_new_tokens": 8, **settings},
        )
        data = QuestionData(validation="embedded:val350", updates=updates, validation_batch=VALIDATION)
        data.validation = data.validation[:VALIDATION]
        kill = [KillAfter(kill_after)] if kill_after is not None else []
        standing = [Validation(validate_every), RunRecord(), RunCheckpoint(checkpoint_every)]
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=1,
            num_sanity_val_steps=0,
            check_val_every_n_epoch=10**9,
            enable_model_summary=False,
            enable_progress_bar=any(isinstance(c, ProgressBar) for c in callbacks),
            logger=False,
            default_root_dir=folder,
            plugins=[BF16Precision()],
            callbacks=[*callbacks, *standing, *kill],
        )
        result = SimpleNamespace(module=module, trainer=trainer, folder=RunFolder(folder), killed=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                checkpoint = latest_checkpoint(RunFolder(folder).checkpoints) if resume else None
                trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
            except Killed:
                result.killed = True
        return result

    return fit
