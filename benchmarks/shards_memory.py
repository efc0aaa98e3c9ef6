"""Peak memory of each of two ranks, with whole and with sharded weights (Linux).

    for strategy in ddp ModelParallelStrategy; do
      PYTHONPATH=benchmarks rlvr-pl fit --policy.name models/smollm2 --precision.master_weights true \\
        --optimizer.lr 1e-6 --data.train embedded:train --data.updates 2 --data.questions_per_update 2 \\
        --data.validation null --model.group_size 4 --model.max_new_tokens 16 --model.micro_batch_tokens 400 \\
        --grader shards_memory.Coin --trainer.accelerator cpu --trainer.devices 2 --trainer.strategy $strategy \\
        --trainer.callbacks+=shards_memory.Peak --checkpoint.every_n_updates 1000 --run runs/$strategy
    done

Prints for each rank what its process held at most since training began, and what it held then.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from rlvr_pl.grading.base import Grader, GradeRequest
from rlvr_pl.types import Grade, GradeStatus


class Coin(Grader):
    """Rewards that no policy decides, so that every update learns from something."""

    def grade(self, requests: Sequence[GradeRequest], *, require_box: bool) -> list[Grade]:
        odd = [sum(request.token_ids) % 2 for request in requests]
        return [Grade(GradeStatus.CORRECT if x else GradeStatus.WRONG, float(x)) for x in odd]


class Peak(Callback):
    """Says on stdout what each rank held at most during the updates."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._before = _resident()
        Path("/proc/self/clear_refs").write_text("5")  # forget the high-water mark so far

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        stepped = outputs["update"].stepped
        print(
            f"rank {trainer.global_rank}, update {pl_module.updates_done} (stepped: {stepped}): at most "
            f"{_resident('VmHWM') / 1e9:.2f} GB, {self._before / 1e9:.2f} GB before update 1",
            flush=True,
        )


def _resident(which: str = "VmRSS") -> int:
    """Bytes, now or (VmHWM) at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))
