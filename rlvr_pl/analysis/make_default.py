"""Regenerate the embedded policies: `base` by imitation, and `start` = `base` + 60 updates of the supplied recipe.

Under two minutes of CPU, on one thread. The weights are the same, bit for bit, on one machine with the same versions of
torch and transformers. Writes OUT/base, OUT/start and OUT/manifest.json (the SHA-256 of every file and of the task).

JSON keys: out, seconds, files {name: sha256}.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlvr_pl.analysis.command import Result, Table, add_output_arguments, progress_bar
from rlvr_pl.data import walk
from rlvr_pl.errors import UserError
from rlvr_pl.records import atomic_write_text, check_place, sha256_file

if TYPE_CHECKING:
    from rlvr_pl.data.imitation import Stage

POLICIES = ("base", "start")
MANIFEST = "manifest.json"
UPDATES = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write into")
    parser.add_argument("--overwrite", action="store_true", help="replace the policies that are in DIR")
    add_output_arguments(parser, table=False)


def run(args: argparse.Namespace) -> Result:
    held = [name for name in POLICIES if (args.out / name).exists()]
    if held and not args.overwrite:
        raise UserError(f"--out {args.out}: has {held[0]} in it; choose another folder or pass --overwrite")
    check_place(args.out / MANIFEST, "--out")
    begin = time.perf_counter()
    files = make_default(args.out)
    data = {"out": str(args.out), "seconds": round(time.perf_counter() - begin, 1), "files": files}
    table = Table(f"The embedded default in {args.out}", ["file", "SHA-256"], list(files.items()))
    return Result(data, [table])


def make_default(out: Path, stages: tuple[Stage, ...] | None = None, updates: int = UPDATES) -> dict[str, str]:
    """Make both policies and the manifest in `out`; the SHA-256 of each file, by its path below `out`.

    `stages` of imitation and `updates` of reinforcement learning are those of the shipped policies unless a test
    shortens them.
    """
    from rlvr_pl.data.imitation import STAGES, make_base

    stages = stages or STAGES
    with _one_thread():
        with _progress("imitation", sum(stage.steps for stage in stages)) as tick:
            make_base(stages, progress=tick).save(out / "base", overwrite=True)
        reinforce(out / "base", out / "start", updates)
    files = {str(p.relative_to(out)): sha256_file(p) for name in POLICIES for p in sorted((out / name).iterdir())}
    atomic_write_text(out / MANIFEST, json.dumps({"task": task_sha256(), "files": files}, indent=2) + "\n")
    return files


def task_sha256() -> str:
    """SHA-256 of vocabulary and question sets: what the weights were made for."""
    questions = {name: [(q.uid, q.problem, q.answer) for q in walk.questions(name)] for name in walk.SPLITS}
    return hashlib.sha256(json.dumps([walk.VOCABULARY, questions]).encode()).hexdigest()


def reinforce(base: Path, start: Path, updates: int) -> None:
    """The quickstart run without its validations; its last policy becomes `start`."""
    from rlvr_pl.configs import find_config
    from rlvr_pl.fit import fit
    from rlvr_pl.policy import load_policy

    config = str(find_config("quickstart.yaml"))
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        plan = ["--data.updates", str(updates), "--data.validation", "null"]
        fit(["--config", config, "--start", str(base), "--run", str(run), *plan])
        load_policy(run / "snapshots" / "final").save(start, overwrite=True)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Sums over several threads are rounded in another order: the weights belong to one thread."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def _progress(what: str, steps: int) -> Iterator[Callable[[float], None]]:
    """A bar with ETA on stderr; the function is told the loss of each step."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with progress_bar(*columns) as bar:
        task = bar.add_task(what, total=steps, loss="")
        yield lambda loss: bar.update(task, advance=1, loss=f"loss {loss:.3f}")
