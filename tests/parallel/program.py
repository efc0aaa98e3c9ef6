"""Trains the embedded start for three updates in FP32, once for each case; started by test_two_ranks.py.

usage: program.py FOLDER STRATEGY

STRATEGY is one, ddp or sharded, the latter two with two processes; its runs are in FOLDER/STRATEGY, which exists.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from lightning.pytorch import Callback, Trainer

from rlvr_pl.callbacks import DamageStop, DriftMonitor, Snapshots
from rlvr_pl.callbacks.checkpoint import RunCheckpoint
from rlvr_pl.callbacks.recorder import RolloutRecorder
from rlvr_pl.callbacks.run_record import RunRecord
from rlvr_pl.callbacks.sampler_canary import SamplerCanary
from rlvr_pl.callbacks.time_limit import TimeLimit
from rlvr_pl.callbacks.validation import Validation
from rlvr_pl.core.collapse import CollapseCriterion
from rlvr_pl.data.module import QuestionData
from rlvr_pl.grading import Grader, GradeRequest, MathGrader
from rlvr_pl.model_weights import state_of
from rlvr_pl.module import RLVRModule
from rlvr_pl.objectives import GRPO, ClippedGRPO, ForkCredit, Objective
from rlvr_pl.objectives.terms import KLPenalty
from rlvr_pl.policy import load_policy
from rlvr_pl.ranks import Ranks
from rlvr_pl.sampling.torch import TorchSampler
from rlvr_pl.sharded_strategy import ShardedStrategy
from rlvr_pl.shards import here
from rlvr_pl.types import Grade
from rlvr_pl.update import NonFiniteError

TOWER = r"\boxed{9^{9^{9^8}}}"  # compared with another tower it uses up its limit


class Attacked(MathGrader):
    """Puts a hostile answer in the place of every third rollout's, whoever samples it: one that never ends, one nested
    beyond reason, one that is code, and a right one behind a megabyte of padding."""

    ANSWERS = (
        (TOWER, r"9^{9^{9^9}}"),
        (r"\boxed{x+" + "(" * 4000 + "1" + ")" * 4000 + "}", "x+2"),
        (r"\boxed{__import__('os').system('touch pwned')}", "42"),
        ("so " * 350_000 + r"\boxed{\frac{x}{2}}", r"\frac{1}{2}x"),
    )

    def grade(self, requests: Sequence[GradeRequest], *, require_box: bool) -> list[Grade]:
        return super().grade([self._attack(r) if require_box else r for r in requests], require_box=require_box)

    def _attack(self, request: GradeRequest) -> GradeRequest:
        number = crc32(repr((request.question.uid, request.token_ids)).encode())
        if number % 3:
            return request
        response, gold = self.ANSWERS[number // 3 % len(self.ANSWERS)]
        return replace(request, response=response, question=replace(request.question, answer=gold))


CASES: dict[str, tuple[Objective, Grader]] = {
    "grpo": (GRPO(), MathGrader()),  # the plain weighted sum
    "clipped": (ClippedGRPO(inner_epochs=2, kl=KLPenalty()), MathGrader()),  # log-probs of sampling and start policy
    "branch": (ForkCredit(source="branch"), MathGrader()),  # continuations
    "attacked": (GRPO(), Attacked(cpu_limit=0.5, workers=2)),
}
RULE = CollapseCriterion(window=1)
SECOND = "update-000002.ckpt"


class FP32Module(RLVRModule):
    def configure_optimizers(self):
        # eps keeps a gradient of rounding errors alone from being a step of its own
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3, eps=1e-4)


class StopAtTwo(DamageStop):
    def damage(self, window):
        return "two updates" if window.update == 2 else None


def train(
    name: str, folder: Path, strategy: str, *, callbacks: Sequence[Callback] = (), checkpoint: Path | None = None
) -> FP32Module:
    """The run `folder`/`name`; `checkpoint` is what it continues from."""
    # under sharding blocks are computed again in backward, and gathered for it
    policy = load_policy("embedded:start", dtype="float32", gradient_checkpointing=strategy == "sharded")
    settings: Any = {"group_size": 4, "max_new_tokens": 48, "eval_max_new_tokens": 48, "micro_batch_tokens": 500}
    objective, grader = CASES[name.partition("-")[0]]
    module = FP32Module(policy, objective, TorchSampler(dtype="float32"), grader, seed=3, **settings)
    data = QuestionData(updates=3, questions_per_update=3, validation_batch=16)  # 12 rollouts: 1.5 groups a rank
    data.validation = data.validation[:40]  # three batches, of which one is short
    trainer = Trainer(
        accelerator="cpu",
        devices=1 if strategy == "one" else 2,
        strategy={"one": "auto", "ddp": "ddp", "sharded": ShardedStrategy()}[strategy],
        max_epochs=1,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=10**9,
        enable_model_summary=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
        logger=False,
        default_root_dir=folder / name,
        callbacks=[
            *callbacks,
            RolloutRecorder(texts=True),
            Validation(3),
            TimeLimit(),
            SamplerCanary(every_n_updates=1),
            RunRecord(),
            RunCheckpoint(1),
        ],
    )
    trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
    grader.close()
    torch.save(state_of(module.policy.model), folder / f"{name}-{trainer.global_rank}.pt")
    moments = [t for state in trainer.optimizers[0].state.values() for t in state.values() if t.ndim]
    facts = {
        "updates": module.updates_done,
        "stopped_by": module.stopped_by,
        "moments": sum(here(moment).numel() for moment in moments),
    }
    (folder / f"{name}-{trainer.global_rank}.json").write_text(json.dumps(facts))
    return module


def main(folder: Path, strategy: str) -> None:
    """Every case; a run that a rule stops; and the runs of `folder` so far, continued from their second update."""
    mine = folder / strategy
    for case in CASES:
        train(case, mine, strategy)
    train("grpo-stop", mine, strategy, callbacks=[DriftMonitor(n=4, every_n_updates=1), Snapshots(1), StopAtTwo(RULE)])
    for other in sorted(path.name for path in folder.iterdir()):
        train(f"grpo-{other}", mine, strategy, checkpoint=folder / other / "grpo" / "checkpoints" / SECOND)


def fail_on_rank_1(folder: Path) -> None:
    rank = torch.distributed.get_rank()

    def work() -> list[int]:
        if rank == 1:
            raise NonFiniteError("on rank 1 alone")
        return [rank]

    try:
        Ranks(rank, 2).together(work)
    except NonFiniteError as error:
        (folder / f"error-{rank}.txt").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
    if torch.distributed.is_initialized():
        fail_on_rank_1(Path(sys.argv[1]) / sys.argv[2])
