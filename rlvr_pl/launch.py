"""Before there is a trainer: which process of a run this is, and what rank 0 has settled for all of them.

Lightning starts the other local ranks by calling the same command again; torchrun and SLURM start all ranks at once.
Only rank 0 may look at the run folder and decide whether the run begins, goes on or is refused.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from rlvr_pl.errors import RunFailure, UserError
from rlvr_pl.records import RunFolder

Settled = tuple[RunFolder, Path | None]
FOLDER, CHECKPOINT = "RLVR_PL_FOLDER", "RLVR_PL_CHECKPOINT"
PATIENCE = timedelta(minutes=10)
HEARING = 3.0
"""Seconds that a rank gives rank 0, whose words are read first, to say what is wrong."""
_stores: list[TCPStore] = []  # kept open as long as the process lives


def agreed(settle: Callable[[], Settled]) -> Settled:
    """What `settle` gives on rank 0: the run folder, and the checkpoint to continue from.

    Raises UserError on every rank when it does on rank 0, or when a rank has met a mistake before; of which `said_once`
    has one say what it is.
    """
    cluster = launched_by()
    if cluster is not None and cluster.world_size() > 1:
        return _over_the_network(cluster, _stores[-1], settle)
    if "LOCAL_RANK" in os.environ and FOLDER in os.environ and os.environ["LOCAL_RANK"] != "0":
        return _read(os.environ[FOLDER], os.environ[CHECKPOINT])
    folder, checkpoint = settle()
    os.environ[FOLDER], os.environ[CHECKPOINT] = str(folder.path), str(checkpoint or "")
    return folder, checkpoint


def launched_by() -> ClusterEnvironment | None:
    """torchrun or SLURM, if one of them started this process."""
    return next((kind() for kind in (TorchElasticEnvironment, SLURMEnvironment) if kind.detect()), None)


@contextmanager
def said_once() -> Iterator[None]:
    """Of the ranks that meet the same mistake, or the end of the rank that met it, one says so, rank 0 if it is among
    them; the others end with its status and without a word. Ranks that were started all at once gather first."""
    cluster = launched_by()
    if cluster is not None and cluster.world_size() > 1:
        _stores.append(_meet(cluster))
    try:
        yield
    except (UserError, RunFailure) as error:
        said = _said_before(2 if isinstance(error, UserError) else 1)
        if said is None:
            raise
        raise SystemExit(said) from None


def rank_lost(error: BaseException) -> bool:
    """Whether an error is that another rank is there no more."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "closed by peer"))
    )


def _said_before(status: int) -> int | None:
    """The status with which another rank has ended after saying why; None if none has, and this one is to say it."""
    store, rank = _store()
    if store is None:
        return None
    try:
        patient_until = time.monotonic() + HEARING
        while rank and not store.check(["said"]) and time.monotonic() < patient_until:
            time.sleep(0.05)
        first = store.compare_set("said", "", f"{rank} {status}").decode().split()
        for key in [f"read by {rank}"] if rank else ["folder", "checkpoint"]:  # for whom waits in `agreed`
            store.set(key, "")
    except RuntimeError:  # rank 0, which keeps the store, has ended
        return status
    return None if int(first[0]) == rank else int(first[1])


def _store() -> tuple[Any, int]:
    """What all ranks of this run can read and write, and this one's number; None for a process alone."""
    cluster = launched_by()
    if cluster is not None and cluster.world_size() > 1 and _stores:
        return _stores[-1], cluster.global_rank()
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return dist.distributed_c10d._get_default_store(), dist.get_rank()
    return None, 0


def _meet(cluster: ClusterEnvironment) -> TCPStore:
    """What all ranks can read and write, once they are all there."""
    rank, size = cluster.global_rank(), cluster.world_size()
    try:
        return TCPStore(cluster.main_address, cluster.main_port + 1, size, rank == 0, PATIENCE, wait_for_workers=True)
    except dist.DistError:
        raise RunFailure(
            f"not all {size} processes of this run came within {PATIENCE}; start the command once for each of them"
        ) from None


def _over_the_network(cluster: ClusterEnvironment, store: TCPStore, settle: Callable[[], Settled]) -> Settled:
    rank, size = cluster.global_rank(), cluster.world_size()
    if rank:
        try:
            folder, checkpoint = store.get("folder").decode(), store.get("checkpoint").decode()
        except dist.DistError:
            raise UserError("rank 0 has ended") from None
        if store.check(["said"]):
            raise UserError("rank 0 has met a mistake")
        store.set(f"read by {rank}", "")
        return _read(folder, checkpoint)
    found = settle()
    store.set("folder", str(found[0].path))
    store.set("checkpoint", str(found[1] or ""))
    store.wait([f"read by {other}" for other in range(1, size)])
    if store.check(["said"]):
        raise UserError("another rank has met a mistake")
    return found


def _read(folder: str, checkpoint: str) -> Settled:
    return RunFolder(folder), Path(checkpoint) if checkpoint else None
