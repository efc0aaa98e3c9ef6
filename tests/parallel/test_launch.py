"""Rank 0 settles the run folder, and every other rank is told: by the environment, or over the network."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
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


@pytest.fixture
def everywhere(monkeypatch):
    """``everywhere(work)``: what ``work(rank, agreed)`` gives on three ranks, each in a thread and inside `said_once`;
    the message of a rank that says what is wrong, the status of one that ends without a word."""
    size, here = 3, threading.local()
    monkeypatch.setattr(launch, "_store", lambda: (here.store, here.rank))
    monkeypatch.setattr(launch, "HEARING", 1.0)

    def on(number: int, port: int, work):
        cluster = Cluster(number, size, port)
        here.store, here.rank = launch._meet(cluster), number
        try:
            with launch.said_once():
                return work(number, lambda settle: launch._over_the_network(cluster, here.store, settle))
        except UserError as error:
            return str(error)
        except SystemExit as stop:
            return stop.code

    def run(work):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1] - 1  # the rendezvous has the port itself, and we the next
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(partial(on, port=port, work=work), range(size)))

    return run


def settling(found):
    """Work of all ranks in which rank 0 settles with what `found` gives."""
    return lambda rank, agreed: agreed(found if rank == 0 else never)


def test_ranks_that_torchrun_started_are_told(everywhere):
    checkpoint = Path("runs/a/checkpoints/update-000002.ckpt")
    found = everywhere(settling(lambda: (RunFolder("runs/a"), checkpoint)))
    assert [(folder.path, told) for folder, told in found] == [(Path("runs/a"), checkpoint)] * 3
    assert [told for _, told in everywhere(settling(lambda: (RunFolder("runs/a"), None)))] == [None] * 3


def refuse(*_):
    raise UserError("runs/a holds another run")


def test_a_mistake_that_rank_0_finds_ends_all_and_is_said_once(everywhere):
    assert everywhere(settling(refuse)) == ["runs/a holds another run", 2, 2]


def test_a_mistake_that_all_find_is_said_by_rank_0(everywhere):
    def slow_at_0(rank, agreed):
        time.sleep(0 if rank else 0.2)
        refuse()

    assert everywhere(slow_at_0) == ["runs/a holds another run", 2, 2]


@pytest.mark.parametrize("at", [0, 2])
def test_a_mistake_that_one_rank_alone_finds_ends_all(everywhere, at):
    """Before the others ask what is agreed."""

    def work(rank, agreed):
        if rank == at:
            refuse()
        return agreed((lambda: (RunFolder("runs/a"), None)) if rank == 0 else never)

    found = everywhere(work)
    assert found[at] == "runs/a holds another run"
    # whom rank 0 has told before the mistake was met goes on; the launcher ends it
    assert all(outcome == 2 for rank, outcome in enumerate(found) if rank in ({0} if at else {1, 2}))
