"""Two processes train as one does: the same rollouts, weights and records."""

from __future__ import annotations

import csv
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rlvr_pl.cli import main
from rlvr_pl.policy import load_policy
from rlvr_pl.ranks import ALONE, Ranks
from rlvr_pl.types import Completion, Grade, GradeStatus, Rollout, StopReason, build_batch
from rlvr_pl.update import plan_micro_batches

PROGRAM = Path(__file__).with_name("program.py")
RLVR_PL = "import sys; from rlvr_pl.cli import entry; sys.argv[0] = 'rlvr-pl'; entry()\n"
CLOCK = ("seconds/", "tokens_per_s")


# ---- shares ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 16])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_parts_are_all_and_as_equal_as_can_be(count, size):
    parts = [list(range(count)[Ranks(rank, size).part(count)]) for rank in range(size)]
    assert [i for part in parts for i in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def batch_of(lengths: list[int]):
    grade = Grade(GradeStatus.WRONG, 0.0)
    rollouts = [
        Rollout(f"q{i}", 0, (1, 2), Completion((5,) * n, StopReason.EOS), "", grade) for i, n in enumerate(lengths)
    ]
    return build_batch(rollouts, 1)


def test_rows_are_dealt_longest_first_and_all_ranks_have_as_many_micro_batches():
    """Prompts of 2, so totals 12, 10, 8, 6 and 4; dealt: rank 0 gets 12, 8, 4 and rank 1 gets 10, 6. With at most 20
    padded tokens rank 0 has [12] [8, 4] (2 x 12 > 20, 2 x 8 = 16), and rank 1 has [10, 6] (2 x 10 = 20) and then
    nothing."""
    batch = batch_of([2, 10, 4, 8, 6])
    assert plan_micro_batches(batch, range(5), 20, Ranks(0, 2)) == [[1], [4, 0]]
    assert plan_micro_batches(batch, range(5), 20, Ranks(1, 2)) == [[3, 2], []]
    assert plan_micro_batches(batch, [], 20, Ranks(1, 2)) == []
    assert plan_micro_batches(batch, range(5), 20) == plan_micro_batches(batch, range(5), 20, ALONE)


def test_alone_an_error_is_raised_as_it_is():
    with pytest.raises(KeyError):
        ALONE.together(lambda: {}["absent"])


# ---- two processes ---------------------------------------------------------------------------------------------------


def started(command: list[str], folder: Path) -> str:
    """Run a command as a user would, and return its stderr."""
    where = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env={**os.environ, **where}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The folders of one process and of two."""
    folder = tmp_path_factory.mktemp("ranks")
    for devices in (1, 2):
        (folder / str(devices)).mkdir()
        started([sys.executable, str(PROGRAM), str(folder / str(devices)), str(devices)], folder)
    return SimpleNamespace(one=folder / "1", two=folder / "2")


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as f:
        return list(csv.DictReader(f))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["grpo", "clipped", "branch", "attacked"])
def test_two_ranks_do_what_one_does(both, case):
    one, two = (folder / case for folder in (both.one, both.two))
    rollouts = [(folder / "rollouts" / "000001-000100.jsonl").read_text().splitlines() for folder in (one, two)]
    assert len(rollouts[0]) == len(rollouts[1]) == 3 * 12  # one record a rollout, whoever sampled it
    for a, b in zip(*(map(json.loads, lines) for lines in rollouts)):
        for key in ("m_plus", "m_minus"):
            assert a.pop(key) == pytest.approx(b.pop(key), abs=1e-6)
        assert a == b
    weights = [torch.load(folder / f"{case}-0.pt", weights_only=True) for folder in (both.one, both.two)]
    start = load_policy("embedded:start", dtype="float32").model.state_dict()
    assert weights[0].keys() == weights[1].keys() == start.keys()
    assert max(float((value - start[name]).abs().max()) for name, value in weights[0].items()) > 1e-3  # they have moved
    for name, value in weights[0].items():
        assert float((value - weights[1][name]).abs().max()) <= 1e-6, name
    other_rank = torch.load(both.two / f"{case}-1.pt", weights_only=True)
    assert all(torch.equal(value, other_rank[name]) for name, value in weights[1].items())
    figures = [table(folder / "metrics.csv") for folder in (one, two)]
    assert [row["update"] for row in figures[1]] == ["1", "2", "3"]
    for a, b in zip(*figures):
        for name, value in a.items():
            if not name.startswith((*CLOCK, "canary/")):
                assert float(value) == pytest.approx(float(b[name]), rel=1e-4, abs=1e-6), name
    costs = [json.loads((folder / "cost.json").read_text()) for folder in (one, two)]
    assert {k: v for k, v in costs[0].items() if k != "wall_seconds"} == {
        k: v for k, v in costs[1].items() if k != "wall_seconds"
    }
    items = [(folder / "items" / "val-000003.jsonl").read_text().splitlines()[1:] for folder in (one, two)]
    assert len(items[0]) == 40 and items[0] == items[1]


@pytest.mark.slow
def test_hostile_answers_have_their_statuses_and_honest_ones_their_rewards_on_both_ranks(both):
    """The two runs of `attacked` are equal (above). In update 1, before the weights differ, its rollouts are those of
    `grpo`, and those that are not attacked are graded as there."""
    plain, attacked = (rollouts(both.two / case) for case in ("grpo", "attacked"))
    statuses = Counter(row["status"] for row in attacked)
    assert statuses["timeout"] >= 1 and sum(statuses.values()) == 36
    assert all(row["reward"] == 0 for row in attacked if row["status"] in ("timeout", "error"))
    pairs = list(zip(plain[:12], attacked[:12]))
    assert all(a["text"] == b["text"] for a, b in pairs)
    alike = [all(a[key] == b[key] for key in ("reward", "status", "answer")) for a, b in pairs]
    assert 0 < alike.count(False) < 12
    assert not list(both.two.parent.rglob("pwned"))


@pytest.mark.slow
def test_an_error_on_one_rank_is_raised_on_both(both):
    for rank in (0, 1):
        assert (both.two / f"error-{rank}.txt").read_text() == "NonFiniteError: on rank 1 alone"


@pytest.mark.slow
def test_the_command_under_torchrun_and_its_resume_in_one_process(tmp_path, monkeypatch, capsys):
    """torchrun starts both ranks; rank 0 alone settles and writes. The run ends after two updates of four, and goes on
    in one process: every question comes once, in the order of a run that was never interrupted."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ending.py").write_text(ENDING)
    (tmp_path / "command.py").write_text(RLVR_PL)
    words = ["fit", "--policy.name=embedded:start", "--data.updates=4", "--data.questions_per_update=3"]
    words += ["--data.validation=null", "--model.group_size=4", "--model.max_new_tokens=32"]
    words += ["--checkpoint.every_n_updates=1", "--trainer.accelerator=cpu"]
    two = ["--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.callbacks+=ending.EndAtTwo", "--run=two"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    told = started([*torchrun, "--", "command.py", *words, *two], tmp_path)
    assert told.count("stopped after 2 of 4 updates") == 1
    state = json.loads((tmp_path / "two" / "run.json").read_text())
    assert (state["state"], state["updates"]) == ("stopped", 2)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["fit", "--resume=two", "--trainer.devices=1", "--trainer.strategy=auto"]) == 0
    assert main([*words, "--run=one"]) == 0
    asked = {name: [row["uid"] for row in rollouts(tmp_path / name)] for name in ("one", "two")}
    assert asked["one"] == asked["two"] and len(asked["one"]) == 4 * 12
    first = {name: rollouts(tmp_path / name)[:12] for name in ("one", "two")}
    assert first["one"] == first["two"]  # of the same weights
    capsys.readouterr()
    assert main(["fit", "--resume=two", "--model.group_size=2"]) == 2
    assert "--trainer.devices" in capsys.readouterr().err


ENDING = """
from lightning.pytorch import Callback

class EndAtTwo(Callback):
    def on_train_batch_end(self, trainer, module, *_):
        if module.updates_done == 2 and trainer.world_size == 2:
            trainer.should_stop = True
"""


def rollouts(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "rollouts" / "000001-000100.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_notebook"])
def test_a_strategy_that_is_not_supported_is_refused(tmp_path, monkeypatch, capsys, strategy):
    monkeypatch.chdir(tmp_path)
    words = ["--trainer.accelerator=cpu", "--trainer.devices=2", f"--trainer.strategy={strategy}"]
    assert main(["fit", *words]) == 2
    assert "choose ddp" in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())
