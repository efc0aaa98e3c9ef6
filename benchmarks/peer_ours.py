"""rlvr-pl as a worker of `peers.py`: `RLVRModule` under Lightning's Trainer."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler
from peer_task import CASES, GROUP, LEARNING_RATE, PROMPTS, TEMPERATURE, Case, Worker, question, reward

from rlvr_pl import __version__
from rlvr_pl.grading.base import Grader, GradeRequest
from rlvr_pl.module import RLVRModule
from rlvr_pl.objectives import BNPO, GRPO
from rlvr_pl.policy import load_policy
from rlvr_pl.precision import BF16Precision
from rlvr_pl.sampling.base import Decoding, SampleRequest
from rlvr_pl.sampling.torch import TorchSampler
from rlvr_pl.types import Completion, Grade, GradeStatus, Question, StopReason


class ReplaySampler(TorchSampler):
    """The torch sampler, or given completions once `replay` holds them."""

    replay: list[list[int]] | None = None

    def generate(self, requests: Sequence[SampleRequest], decoding: Decoding, progress: Any = None) -> list[Completion]:
        if self.replay is None:
            return super().generate(requests, decoding, progress)
        eos = set(self._policy.eos_ids)
        return [Completion(tuple(x), StopReason.EOS if x[-1] in eos else StopReason.LENGTH) for x in self.replay]


class EvenGrader(Grader):
    name = "even"

    def __init__(self, case: Case) -> None:
        self.case = case

    def grade(self, requests: Sequence[GradeRequest], *, require_box: bool) -> list[Grade]:
        rewards = [reward(self.case, r.question.problem, r.token_ids) for r in requests]
        return [Grade(GradeStatus.CORRECT if x > 0.5 else GradeStatus.WRONG, x) for x in rewards]


class StageProfiler(Profiler):
    """Hands CPU-seconds of the update's stages to the worker."""

    names: ClassVar = {
        "rlvr.sample": "generation",
        "rlvr.grade": "grading",
        "rlvr.weigh": "weights",
        "rlvr.gradient": "gradient",
        "rlvr.optimizer": "optimizer",
    }

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker
        self._open: dict[str, Any] = {}

    def start(self, action_name: str) -> None:
        if action_name in self.names:
            self._open[action_name] = self._worker.stage(self.names[action_name])
            self._open[action_name].__enter__()

    def stop(self, action_name: str) -> None:
        if action_name in self._open:
            self._open.pop(action_name).__exit__(None, None, None)


class Turns(Callback):
    """One command an update. The recipe "supplied" has that objective and temperature, otherwise they are TRL's."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._facts: dict[str, Any] = {"version": __version__}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = LEARNING_RATE

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        command = self._worker.turn(**self._facts)
        supplied = command.get("recipe") == "supplied"
        pl_module.objective = GRPO() if supplied else BNPO()
        pl_module.logprob_temperature = 1.0 if supplied else TEMPERATURE
        pl_module.sampler.replay = command.get("rollouts")

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        update = outputs["update"]
        tokens = [r.completion.token_ids for r in update.rollouts]
        self._facts = {
            "tokens": sum(map(len, tokens)),
            "trained_tokens": update.cost["trained_tokens"],
            "rollouts": tokens,
            "rewards": [r.grade.reward for r in update.rollouts],
            "loss": update.loss,
            "grad_norm": update.grad_norm,
        }


class Batches:
    """The questions of update after update."""

    def __init__(self, updates: int) -> None:
        self._updates = updates

    def __len__(self) -> int:
        return self._updates

    def __iter__(self) -> Iterator[list[Question]]:
        for first in range(0, self._updates * PROMPTS, PROMPTS):
            yield [Question(str(i), question(i), "0") for i in range(first, first + PROMPTS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=list(CASES), required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    args = parser.parse_args()
    worker = Worker()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    case = CASES[args.case]
    policy = load_policy(args.model, dtype="float32", template="{problem}")
    if not case.ends:
        policy = dataclasses.replace(policy, eos_ids=(policy.head.shape[0],))  # an id that is never drawn
    module = RLVRModule(
        policy,
        BNPO(),
        ReplaySampler(),
        EvenGrader(case),
        group_size=GROUP,
        temperature=TEMPERATURE,
        top_p=case.top_p,
        max_new_tokens=case.max_new_tokens,
        micro_batch_tokens=args.micro_batch_tokens,
    )
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[BF16Precision(master_weights=True)] if args.bf16 else None,
        callbacks=[Turns(worker)],
        profiler=StageProfiler(worker),
    )
    trainer.fit(module, train_dataloaders=Batches(args.updates))


if __name__ == "__main__":
    main()
