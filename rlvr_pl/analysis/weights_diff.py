"""Share of weights that differ at all between two checkpoints, by module and by magnitude.

BF16 training rounds away an update smaller than about |w|/256, so that few weights change (4.65% in the paper, section
4.5). Tensors are read one after the other in pieces: neither model is ever in memory. Weights of one dtype are compared
bit by bit, weights of two dtypes by value.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlvr_pl.analysis.command import Result, Table, add_output_arguments, progress_bar
from rlvr_pl.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

EPILOG = """\
JSON keys: weights, changed (numbers), changed_share (of all weights), by_module {module: {weights, changed, share,
by_magnitude}} with layers pooled, by_magnitude {"[low, high)": {weights, changed, share}} of |w| in START. A tied START
against an untied CKPT: the head of START is its embedding.

example: rlvr-pl weights-diff runs/start runs/supplied/snapshots/update-160"""

EDGES = (0.0, 1e-4, 1e-3, 1e-2, 1e-1, float("inf"))
BINS = tuple(f"[{low:g}, {high:g})" for low, high in pairwise(EDGES))
_PIECE = 2**23  # weights compared at once
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("start", metavar="START", help="model folder, embedded:base, embedded:start or a hub name")
    parser.add_argument("checkpoint", metavar="CKPT", help="the same kind of model after training")
    parser.epilog = EPILOG
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> Result:
    with ExitStack() as stack:
        start, checkpoint = Weights(args.start, stack), Weights(args.checkpoint, stack)
        pairs = matched_names(start, checkpoint)
        bar = stack.enter_context(progress_bar())
        counts: dict[str, np.ndarray] = {}
        for name, in_start, in_checkpoint in bar.track(pairs, description="tensors"):
            counts.setdefault(module_of(name), np.zeros((2, len(BINS)), dtype=np.int64))
            for old, new in pieces(start, in_start, checkpoint, in_checkpoint):
                counts[module_of(name)] += count(old, new)
    total = np.sum(list(counts.values()), axis=0)
    data = {
        **_shares(total, "changed_share"),
        "by_module": {
            module: {**_shares(c, "share"), "by_magnitude": _by_magnitude(c)} for module, c in counts.items()
        },
        "by_magnitude": _by_magnitude(total),
    }
    columns = ("weights", "changed", "share")
    tables = [
        Table(
            f"Changed weights by {what}",
            (what, *columns),
            [[key, *(row[c] for c in columns)] for key, row in part.items()],
        )
        for what, part in (("module", data["by_module"]), ("magnitude", data["by_magnitude"]))
    ]
    share = f"{100 * data['changed_share']:.2f}%"
    return Result(data, tables, [f"{share} of {data['weights']:,} weights changed."])


@dataclass
class Weights:
    """The tensors of a model folder, opened but not read."""

    name: str
    stack: ExitStack
    files: dict[str, Any] = field(default_factory=dict, init=False)  # tensor name -> open safetensors file
    tied: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        from safetensors import SafetensorError, safe_open

        from rlvr_pl.policy_folder import find_folder

        folder = find_folder(self.name)
        shards = sorted(folder.glob("*.safetensors"))
        if not shards:
            raise UserError(f"{self.name}: no *.safetensors in the folder")
        for shard in shards:
            try:
                file = self.stack.enter_context(safe_open(shard, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise UserError(f"{shard}: cannot be read as safetensors ({error})") from None
            for key in file.keys():  # noqa: SIM118 (not a dict)
                if key in self.files:
                    raise UserError(f"{self.name}: two files hold the tensor {key}")
                self.files[key] = file
        self.tied = _tied(folder)


def _tied(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings"))
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / 'config.json'}: cannot be read ({error})") from None


def matched_names(start: Weights, checkpoint: Weights) -> list[tuple[str, str, str]]:
    """``(name, its name in start, its name in checkpoint)`` of every tensor; UserError where one side lacks it."""
    triples = []
    for name in sorted(start.files.keys() | checkpoint.files.keys()):
        names = [name if name in side.files else _stand_in(name, side) for side in (start, checkpoint)]
        if None in names:
            lacking = start.name if names[0] is None else checkpoint.name
            raise UserError(f"{lacking}: has no tensor {name}; the two models are not of one kind")
        triples.append((name, *names))
    return triples


def _stand_in(name: str, side: Weights) -> str | None:
    return _EMBEDDING if name == _HEAD and side.tied and _EMBEDDING in side.files else None


def pieces(start: Weights, name: str, checkpoint: Weights, other: str) -> Iterator[tuple[Tensor, Tensor]]:
    """The two tensors in pieces of whole rows; UserError where their shapes differ."""
    old, new = start.files[name].get_slice(name), checkpoint.files[other].get_slice(other)
    shape = old.get_shape()
    if shape != new.get_shape():
        raise UserError(f"{name}: has shape {shape} in {start.name} and {new.get_shape()} in {checkpoint.name}")
    if not shape:
        yield start.files[name].get_tensor(name), checkpoint.files[other].get_tensor(other)
        return
    rows = max(1, _PIECE // max(1, int(np.prod(shape[1:]))))
    for begin in range(0, shape[0], rows):
        yield old[begin : begin + rows], new[begin : begin + rows]


def count(old: Tensor, new: Tensor) -> np.ndarray:
    """[2, bins] int64: weights and changed weights in each bin of ``|old|``; NaN counts in the last bin."""
    import torch

    if old.dtype == new.dtype:
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[old.element_size()]
        changed = old.contiguous().view(bits) != new.contiguous().view(bits)
    else:
        changed = old.double() != new.double()
    edges = torch.tensor(EDGES[1:-1], dtype=torch.float64)
    bins = torch.bucketize(old.double().abs(), edges, right=True).flatten()
    return np.stack(
        [
            torch.bincount(bins, minlength=len(BINS)).numpy(),
            torch.bincount(bins[changed.flatten()], minlength=len(BINS)).numpy(),
        ]
    )


def module_of(name: str) -> str:
    """The module of a tensor with layers pooled: ``model.layers.3.mlp.up_proj.weight`` is ``mlp.up_proj``."""
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    parts = [part for part in parts[numbers[0] if numbers else 0 :] if not part.isdigit() and part != "model"]
    return ".".join(parts[:-1] if parts[-1] == "weight" else parts) or name


def _shares(counts: np.ndarray, share: str) -> dict[str, Any]:
    weights, changed = (int(x) for x in counts.reshape(2, -1).sum(1))
    return {"weights": weights, "changed": changed, share: changed / weights if weights else 0.0}


def _by_magnitude(counts: np.ndarray) -> dict[str, Any]:
    return {name: _shares(counts[:, i], "share") for i, name in enumerate(BINS)}
