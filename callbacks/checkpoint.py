"""Checkpoints of a run: written atomically, verified by hash, the newest good one found again after a crash."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from rlvr_pl.errors import UserError
from rlvr_pl.mistakes import is_ours
from rlvr_pl.records import PARTIAL, RunFolder, atomic_write_text, sha256_file

CONTENT: dict[str, type] = {
    "pytorch-lightning_version": str,
    "state_dict": dict,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "rlvr": dict,
}
"""What a checkpoint of a run holds; the precision and the data add their own."""


AVERAGES = {"exp_avg", "exp_avg_sq", "momentum_buffer"}
"""What torch's optimizers keep in the shape of the weight."""


class CheckpointFile(TorchCheckpointIO):
    """Writes a checkpoint straight to its file. (Lightning builds it in memory, copies it, and writes it elsewhere
    first, which for a real policy is twice its size in memory.)"""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        with open(path, "wb") as f:
            try:
                torch.save(checkpoint, f)
            except RuntimeError as error:
                if isinstance(fault := error.__context__, OSError):  # torch's own complaint hides that of the file
                    raise OSError(fault.errno, fault.strerror, str(path)) from None
                raise
            f.flush()
            os.fsync(f.fileno())


class RunCheckpoint(Checkpoint):
    """Saves everything that a bit-exact continuation needs.

    Runs after every other callback of an update, so that a checkpoint holds what the update recorded.

    Args:
        every_n_updates: updates between checkpoints. The last update of a run, and one that a stop rule or a time
            limit ends, is saved as well.
        keep: how many of the newest to keep.
    """

    def __init__(self, every_n_updates: int = 20, keep: int = 2) -> None:
        if every_n_updates < 1 or keep < 1:
            raise ValueError("every_n_updates and keep must be at least 1")
        self.every_n_updates = every_n_updates
        self.keep = keep

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        trainer.strategy.checkpoint_io = CheckpointFile()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        update = pl_module.updates_done
        last = update >= trainer.num_training_batches
        if update % self.every_n_updates == 0 or last or trainer.should_stop:
            self.save(trainer, update)

    def save(self, trainer: Trainer, update: int) -> None:
        """Write the checkpoint of `update`, then its hash, then drop the oldest."""
        for part in (*trainer.callbacks, cast("Any", trainer.lightning_module).objective):  # type: ignore[attr-defined]
            check_state(part)
        folder = RunFolder.of(trainer).checkpoints
        folder.mkdir(parents=True, exist_ok=True)
        final = folder / f"update-{update:06d}.ckpt"
        partial = folder / f".{final.name}{PARTIAL}"
        try:
            trainer.save_checkpoint(partial)
        except OSError:
            partial.unlink(missing_ok=True)  # a full disk needs the room
            raise
        if not trainer.is_global_zero:
            return
        digest = sha256_file(partial)
        partial.replace(final)
        atomic_write_text(final.with_suffix(".json"), json.dumps({"update": update, "sha256": digest}) + "\n")
        for old in sorted(folder.glob("update-*.ckpt"))[: -self.keep]:
            old.with_suffix(".json").unlink(missing_ok=True)
            old.unlink()


def check_state(part: Any) -> None:
    """UserError when the state of a callback or an objective of the user's is nothing that a checkpoint can keep and
    give back."""
    if is_ours(type(part)) or not (state := part.state_dict()):
        return
    file = io.BytesIO()
    try:
        torch.save(state, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except (MemoryError, OSError):
        raise
    except Exception as error:  # pickle and torch raise many kinds
        name, unknown = type(part).__name__, re.search(r"Unsupported \w+: GLOBAL ([\w.]+)", str(error))
        what = f"{unknown[1]} is no plain data" if unknown else " ".join(str(error).split())[:200]
        raise UserError(
            f"{name}.state_dict holds what a checkpoint cannot keep ({what}); keep numbers, strings, lists, dicts and "
            "tensors"
        ) from None


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint whose content has the hash written beside it; damaged ones are set aside, with a
    message."""
    for path in sorted(folder.glob("update-*.ckpt"), reverse=True):
        if _is_whole(path):
            return path
        aside = path.with_suffix(".damaged")
        path.replace(aside)
        path.with_suffix(".json").unlink(missing_ok=True)
        print(f"rlvr-pl: {path} is damaged or incomplete; set aside as {aside.name}", file=sys.stderr)
    return None


def check_content(path: Path, shapes: Mapping[str, Sequence[int]] | None = None) -> dict[str, Any]:
    """What a checkpoint says of its run: ``updates_done``, ``validation`` (correct answers by update) and more.

    UserError when a file is no checkpoint of a run although it has the hash written beside it, or when a weight in it
    has another shape than in `shapes`.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (MemoryError, OSError):
        raise
    except Exception as error:  # torch raises many kinds on what it does not know
        raise UserError(f"{path}: not a checkpoint of a run ({' '.join(str(error).split())[:200]})") from None
    for name, kind in CONTENT.items():
        if not isinstance(content, dict) or name not in content:
            raise UserError(f"{path}: not a checkpoint of a run: it has no {name!r}")
        if not isinstance(content[name], kind):
            raise UserError(f"{path}: not a checkpoint of a run: {name!r} is no {kind.__name__}")
    for name, shape in (shapes or {}).items():
        found = getattr(content["state_dict"].get(name), "shape", shape)  # of an adapter's run it has a part alone
        if tuple(found) != tuple(shape):
            raise UserError(
                f"{path}: not a checkpoint of this run: {name} has shape {tuple(found)}, the policy's {tuple(shape)}"
            )
    if shapes:
        _check_averages(path, content["optimizer_states"], {tuple(shape) for shape in shapes.values()})
    return content["rlvr"]


def _check_averages(path: Path, optimizers: list[Any], known: set[tuple[int, ...]]) -> None:
    try:
        states = [state for optimizer in optimizers for state in optimizer["state"].values()]
        found = [(name, tuple(state[name].shape)) for state in states for name in AVERAGES & state.keys()]
    except (AttributeError, KeyError, TypeError):
        raise UserError(f"{path}: not a checkpoint of a run: 'optimizer_states' has no state of an optimizer") from None
    for name, shape in found:
        if shape not in known:
            raise UserError(
                f"{path}: not a checkpoint of this run: the optimizer's {name} has shape {shape}, which no weight of "
                "the policy has"
            )


def _is_whole(path: Path) -> bool:
    if not path.is_file():  # a link that leads nowhere
        return False
    try:
        expected = json.loads(path.with_suffix(".json").read_text())["sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return sha256_file(path) == expected
