"""Before there is a trainer: which process of a run this is, and what rank 0 has settled for all of them.

Lightning starts the other local ranks by calling the same command again; torchrun and SLURM start all ranks at once.
Only rank 0 may look at the run folder and decide whether the run begins, goes on or is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from rlvr_pl.errors import UserError
from rlvr_pl.records import RunFolder

Settled = tuple[RunFolder, Path | None]
FOLDER, CHECKPOINT = "RLVR_PL_FOLDER", "RLVR_PL_CHECKPOINT"
PATIENCE = timedelta(minutes=10)
_stores: list[TCPStore] = []  # kept open as long as the process lives


def agreed(settle: Callable[[], Settled]) -> Settled:
    """What `settle` gives on rank 0: the run folder, and the checkpoint to continue from.

    Raises UserError on every rank when it does on rank 0.
    """
    cluster = launched_by()
    if cluster is not None and cluster.world_size() > 1:
        return _over_the_network(cluster, settle)
    if "LOCAL_RANK" in os.environ and FOLDER in os.environ and os.environ["LOCAL_RANK"] != "0":
        return _read(os.environ[FOLDER], os.environ[CHECKPOINT])
    folder, checkpoint = settle()
    os.environ[FOLDER], os.environ[CHECKPOINT] = str(folder.path), str(checkpoint or "")
    return folder, checkpoint


def launched_by() -> ClusterEnvironment | None:
    """torchrun or SLURM, if one of them started this process."""
    return next((kind() for kind in (TorchElasticEnvironment, SLURMEnvironment) if kind.detect()), None)


def _over_the_network(cluster: ClusterEnvironment, settle: Callable[[], Settled]) -> Settled:
    rank, size = cluster.global_rank(), cluster.world_size()
    store = TCPStore(cluster.main_address, cluster.main_port + 1, size, rank == 0, PATIENCE, wait_for_workers=False)
    _stores.append(store)
    if rank:
        mistake = store.get("mistake").decode()
        folder, checkpoint = store.get("folder").decode(), store.get("checkpoint").decode()
        store.set(f"read by {rank}", "")
        if mistake:
            raise UserError(mistake)
        return _read(folder, checkpoint)
    try:
        found, mistake = settle(), ""
    except UserError as error:
        found, mistake = None, str(error)
    store.set("mistake", mistake)
    store.set("folder", "" if found is None else str(found[0].path))
    store.set("checkpoint", "" if found is None else str(found[1] or ""))
    store.wait([f"read by {other}" for other in range(1, size)])
    if found is None:
        raise UserError(mistake)
    return found


def _read(folder: str, checkpoint: str) -> Settled:
    return RunFolder(folder), Path(checkpoint) if checkpoint else None
