"""Rank 0 settles the run folder, and every other rank is told: by the environment, or over the network."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlvr_pl import launch
from rlvr_pl.errors import UserError
from rlvr_pl.records import RunFolder


@dataclass
class Cluster:
    """What torchrun or SLURM tell a process."""

    rank: int
    size: int
    main_port: int
    main_address: str = "127.0.0.1"

    def global_rank(self) -> int:
        return self.rank

    def world_size(self) -> int:
        return self.size


def never():
    raise AssertionError("only rank 0 settles")


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("LOCAL_RANK", launch.FOLDER, launch.CHECKPOINT):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(launch, "launched_by", lambda: None)


@pytest.mark.parametrize("checkpoint", [None, Path("runs/a/checkpoints/update-000002.ckpt")])
def test_a_process_that_rank_0_starts_inherits_the_answer(monkeypatch, checkpoint):
    found = launch.agreed(lambda: (RunFolder("runs/a"), checkpoint))
    assert (found[0].path, found[1]) == (Path("runs/a"), checkpoint)
    monkeypatch.setenv("LOCAL_RANK", "1")
    folder, told = launch.agreed(never)
    assert (folder.path, told) == (Path("runs/a"), checkpoint)


def test_a_later_run_of_the_same_process_settles_again():
    launch.agreed(lambda: (RunFolder("runs/a"), None))
    assert launch.agreed(lambda: (RunFolder("runs/b"), None))[0].path == Path("runs/b")
    assert os.environ[launch.FOLDER] == "runs/b"


def everywhere(settle, size: int = 3):
    """`_over_the_network` of all ranks, each in a thread: what it gives or raises."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1] - 1  # the rendezvous has the port itself, and we the next

    def rank(number: int):
        try:
            return launch._over_the_network(Cluster(number, size, port), settle if number == 0 else never)
        except UserError as error:
            return str(error)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


def test_ranks_that_torchrun_started_are_told():
    checkpoint = Path("runs/a/checkpoints/update-000002.ckpt")
    found = everywhere(lambda: (RunFolder("runs/a"), checkpoint))
    assert [(folder.path, told) for folder, told in found] == [(Path("runs/a"), checkpoint)] * 3
    assert [told for _, told in everywhere(lambda: (RunFolder("runs/a"), None))] == [None] * 3


def test_a_mistake_that_rank_0_finds_ends_all():
    def refuse():
        raise UserError("runs/a holds another run")

    assert everywhere(refuse) == ["runs/a holds another run"] * 3
