"""Trains the embedded start for three updates in FP32, once for each objective; started by test_two_ranks.py.

usage: program.py FOLDER DEVICES
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Trainer

from rlvr_pl.callbacks.checkpoint import RunCheckpoint
from rlvr_pl.callbacks.recorder import RolloutRecorder
from rlvr_pl.callbacks.run_record import RunRecord
from rlvr_pl.callbacks.sampler_canary import SamplerCanary
from rlvr_pl.callbacks.time_limit import TimeLimit
from rlvr_pl.callbacks.validation import Validation
from rlvr_pl.data.module import QuestionData
from rlvr_pl.grading import MathGrader
from rlvr_pl.module import RLVRModule
from rlvr_pl.objectives import GRPO, ClippedGRPO, ForkCredit
from rlvr_pl.objectives.terms import KLPenalty
from rlvr_pl.policy import load_policy
from rlvr_pl.ranks import Ranks
from rlvr_pl.sampling.torch import TorchSampler
from rlvr_pl.update import NonFiniteError

OBJECTIVES = {
    "grpo": GRPO(),  # the plain weighted sum
    "clipped": ClippedGRPO(inner_epochs=2, kl=KLPenalty()),  # log-probs of the sampling and of the start policy
    "branch": ForkCredit(source="branch"),  # continuations
}


class FP32Module(RLVRModule):
    def configure_optimizers(self):
        # eps keeps a gradient of rounding errors alone from being a step of its own
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3, eps=1e-4)


def train(name: str, folder: Path, devices: int) -> None:
    policy = load_policy("embedded:start", dtype="float32")
    settings = {"group_size": 4, "max_new_tokens": 48, "eval_max_new_tokens": 48, "micro_batch_tokens": 500}
    module = FP32Module(policy, OBJECTIVES[name], TorchSampler(dtype="float32"), MathGrader(), seed=3, **settings)
    data = QuestionData(updates=3, questions_per_update=3, validation_batch=16)  # 12 rollouts: 1.5 groups a rank
    data.validation = data.validation[:40]  # three batches, of which one is short
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=1,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=10**9,
        enable_model_summary=False,
        enable_progress_bar=False,
        use_distributed_sampler=False,
        logger=False,
        default_root_dir=folder / name,
        callbacks=[
            RolloutRecorder(texts=True),
            Validation(3),
            TimeLimit(),
            SamplerCanary(every_n_updates=1),
            RunRecord(),
            RunCheckpoint(1),
        ],
    )
    trainer.fit(module, datamodule=data)
    torch.save(module.policy.model.state_dict(), folder / f"{name}-{trainer.global_rank}.pt")


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
    for objective in OBJECTIVES:
        train(objective, Path(sys.argv[1]), int(sys.argv[2]))
    if torch.distributed.is_initialized():
        fail_on_rank_1(Path(sys.argv[1]))
