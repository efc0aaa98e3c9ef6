"""Two processes train as one does: the same rollouts, weights and records."""

from __future__ import annotations

import csv
import importlib
import json
import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

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


def ended(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as a user would, to its end."""
    where = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env={**os.environ, **where}, capture_output=True, text=True, check=False)


def started(command: list[str], folder: Path) -> str:
    """The stderr of a command that must succeed."""
    done = ended(command, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


TWO = ("ddp", "sharded")
SHARDED = "lightning.pytorch.strategies.ModelParallelStrategy"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What program.py leaves of one process, and of two with each strategy."""
    folder = tmp_path_factory.mktemp("ranks")
    for strategy in ("one", *TWO):
        (folder / strategy).mkdir()
        started([sys.executable, str(PROGRAM), str(folder), strategy], folder)
    return folder


def weights_of(runs: Path, strategy: str, name: str, rank: int = 0) -> dict[str, torch.Tensor]:
    return torch.load(runs / strategy / f"{name}-{rank}.pt", weights_only=True)


def facts_of(runs: Path, strategy: str, name: str) -> list[dict]:
    ranks = range(1 if strategy == "one" else 2)
    return [json.loads((runs / strategy / f"{name}-{rank}.json").read_text()) for rank in ranks]


def furthest(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    assert one.keys() == two.keys()
    return max(float((value - two[name]).abs().max()) for name, value in one.items())


def table(path: Path) -> list[dict[str, str]]:
    with path.open() as f:
        return list(csv.DictReader(f))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", TWO)
@pytest.mark.parametrize("case", ["grpo", "clipped", "branch", "attacked"])
def test_two_ranks_do_what_one_does(runs, case, strategy):
    one, two = (runs / name / case for name in ("one", strategy))
    rollouts = [(folder / "rollouts" / "000001-000100.jsonl").read_text().splitlines() for folder in (one, two)]
    assert len(rollouts[0]) == len(rollouts[1]) == 3 * 12  # one record a rollout, whoever sampled it
    for a, b in zip(*(map(json.loads, lines) for lines in rollouts)):
        for key in ("m_plus", "m_minus"):
            assert a.pop(key) == pytest.approx(b.pop(key), abs=1e-6)
        assert a == b
    alone, together = (weights_of(runs, name, case) for name in ("one", strategy))
    assert furthest(alone, load_policy("embedded:start", dtype="float32").model.state_dict()) > 1e-3  # they have moved
    assert furthest(alone, together) <= 1e-6
    assert furthest(together, weights_of(runs, strategy, case, rank=1)) == 0
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
@pytest.mark.parametrize("strategy", TWO)
def test_hostile_answers_have_their_statuses_and_honest_ones_their_rewards_on_both_ranks(runs, strategy):
    """The two runs of `attacked` are equal (above). In update 1, before the weights differ, its rollouts are those of
    `grpo`, and those that are not attacked are graded as there."""
    folders = (runs / strategy / case / "rollouts" for case in ("grpo", "attacked"))
    plain, attacked = (read_lines(folder / "000001-000100.jsonl") for folder in folders)
    statuses = Counter(row["status"] for row in attacked)
    assert statuses["timeout"] >= 1 and sum(statuses.values()) == 36
    assert all(row["reward"] == 0 for row in attacked if row["status"] in ("timeout", "error"))
    pairs = list(zip(plain[:12], attacked[:12]))
    assert all(a["text"] == b["text"] for a, b in pairs)
    alike = [all(a[key] == b[key] for key in ("reward", "status", "answer")) for a, b in pairs]
    assert 0 < alike.count(False) < 12
    assert not list(runs.rglob("pwned"))


@pytest.mark.slow
def test_sharded_ranks_share_the_optimizers_state(runs):
    """AdamW has two moments a weight. A shard is of rows, and rank 0 has the odd one."""
    weights = load_policy("embedded:start").model.named_parameters()
    rows = [(weight.shape[0], weight[0].numel()) for _, weight in weights]
    shares = [2 * sum((n + 1) // 2 * width for n, width in rows), 2 * sum(n // 2 * width for n, width in rows)]
    assert [facts["moments"] for facts in facts_of(runs, "sharded", "grpo")] == shares
    assert [facts["moments"] for facts in facts_of(runs, "ddp", "grpo")] == [sum(shares)] * 2
    assert max(shares) < 0.501 * sum(shares)


CONTINUED = [(a, b) for a in ("one", *TWO) for b in ("one", *TWO) if (a, b) != ("sharded", "ddp")]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), CONTINUED)
def test_a_checkpoint_goes_on_anywhere(runs, first, then, monkeypatch):
    """Update 3 after the checkpoint of update 2: the same bits where the run began, and close to them elsewhere."""
    name = f"grpo-{first}"
    if then == "one" and first != "one":  # which had not run yet
        monkeypatch.syspath_prepend(str(PROGRAM.parent))
        checkpoint = runs / first / "grpo" / "checkpoints" / "update-000002.ckpt"
        importlib.import_module("program").train(name, runs / then, then, checkpoint=checkpoint)
    drawn = [
        [(row["uid"], row["sample"], row["text"]) for row in read_lines(run / "rollouts" / "000001-000100.jsonl")]
        for run in (runs / first / "grpo", runs / then / name)
    ]
    assert drawn[0][-12:] == drawn[1] and len(drawn[0]) == 36
    assert furthest(weights_of(runs, first, "grpo"), weights_of(runs, then, name)) <= (0 if first == then else 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", TWO)
def test_a_rule_stops_all_ranks_at_once_and_what_is_saved_can_be_loaded(runs, strategy):
    from transformers import AutoModelForCausalLM

    assert [(f["updates"], f["stopped_by"]) for f in facts_of(runs, strategy, "grpo-stop")] == [(2, "damage")] * 2
    folder = runs / strategy / "grpo-stop"
    assert json.loads((folder / "verdict-StopAtTwo.json").read_text())["last_update"] == 2
    assert sorted(path.name for path in (folder / "snapshots").iterdir()) == [
        *("good-000001", "update-000001", "update-000002")
    ]
    loaded = AutoModelForCausalLM.from_pretrained(folder / "snapshots" / "update-000002")
    assert type(loaded).__name__ == type(load_policy("embedded:start").model).__name__
    assert furthest(loaded.state_dict(), weights_of(runs, strategy, "grpo-stop")) == 0
    drift = [table(runs / name / "grpo-stop" / "drift.csv") for name in ("one", strategy)]
    assert [row["update"] for row in drift[1]] == ["0", "1", "2"]
    for a, b in zip(*drift):
        assert {k: float(v) for k, v in a.items()} == pytest.approx({k: float(v) for k, v in b.items()}, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", TWO)
def test_an_error_on_one_rank_is_raised_on_both(runs, strategy):
    for rank in (0, 1):
        assert (runs / strategy / f"error-{rank}.txt").read_text() == "NonFiniteError: on rank 1 alone"


# ---- the command -----------------------------------------------------------------------------------------------------

WORDS = ["fit", "--policy.name=embedded:start", "--data.updates=4", "--data.questions_per_update=3"]
WORDS += ["--data.validation=null", "--model.group_size=4", "--model.max_new_tokens=32"]
WORDS += ["--checkpoint.every_n_updates=1", "--trainer.accelerator=cpu"]
ENDING = """
from lightning.pytorch import Callback

class EndAtTwo(Callback):
    def on_train_batch_end(self, trainer, module, *_):
        if module.updates_done == 2:
            trainer.should_stop = True
"""


def torchrun(folder: Path, *words: str) -> list[str]:
    """The command on two ranks, which torchrun starts."""
    (folder / "ending.py").write_text(ENDING)
    (folder / "command.py").write_text(RLVR_PL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    return [*start, "--", "command.py", *words]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", SHARDED])
def test_the_command_under_torchrun_and_its_resume_in_one_process(here, capsys, strategy):
    """torchrun starts both ranks; rank 0 alone settles and writes. The run ends after two updates of four, and goes on
    in one process: every question comes once, in the order of a run that was never interrupted."""
    two = ["--trainer.devices=2", f"--trainer.strategy={strategy}", "--trainer.callbacks+=ending.EndAtTwo"]
    told = started(torchrun(here, *WORDS, *two, "--precision.master_weights=true", "--run=two"), here)
    assert told.count("stopped after 2 of 4 updates") == 1
    state = json.loads((here / "two" / "run.json").read_text())
    assert (state["state"], state["updates"]) == ("stopped", 2)
    assert main(["fit", "--resume=two", "--trainer.devices=1", "--trainer.strategy=auto"]) == 0
    assert main([*WORDS, "--precision.master_weights=true", "--run=one"]) == 0
    assert same_questions(here)
    capsys.readouterr()
    assert main(["fit", "--resume=two", "--model.group_size=2"]) == 2
    assert "--trainer.devices" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("masters", ["true", "false"])
def test_a_run_of_one_process_goes_on_sharded(here, masters):
    settings = [*WORDS, f"--precision.master_weights={masters}"]
    (here / "ending.py").write_text(ENDING)
    assert main([*settings, "--trainer.callbacks+=ending.EndAtTwo", "--run=two"]) == 0
    told = started(torchrun(here, "fit", "--resume=two", "--trainer.devices=2", f"--trainer.strategy={SHARDED}"), here)
    assert told.count("finished after 4 of 4 updates") == 1
    assert main([*settings, "--run=one"]) == 0
    assert same_questions(here)
    policy = load_policy(here / "two" / "snapshots" / "final")
    assert policy.head.dtype == torch.bfloat16


def same_questions(folder: Path) -> bool:
    """Whether runs one and two asked the same questions in the same order, and drew the same at first, of the same
    weights."""
    one, two = (read_lines(folder / run / "rollouts" / "000001-000100.jsonl") for run in ("one", "two"))
    asked = [[row["uid"] for row in rows] for rows in (one, two)]
    return asked[0] == asked[1] and len(asked[0]) == 4 * 12 and one[:12] == two[:12]


def read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


FAULTS = """
import os
import signal

from rlvr_pl.callbacks import UpdateCallback
from rlvr_pl.grading import ExactGrader
from rlvr_pl.sampling.torch import TorchSampler

class Both(UpdateCallback):
    def after_update(self, trainer, module, report):
        raise ValueError("no")

class Second(UpdateCallback):
    def after_update(self, trainer, module, report):
        if trainer.global_rank == 1:
            raise ValueError("no")

class Killed(UpdateCallback):
    def after_update(self, trainer, module, report):
        if trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

class Grades(ExactGrader):
    def grade(self, requests, *, require_box):
        raise KeyError("no")

class Samples(TorchSampler):
    def generate(self, requests, decoding, *more, **named):
        if os.environ.get("LOCAL_RANK") == "1":
            raise SystemExit("no")
        return super().generate(requests, decoding, *more, **named)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "status", "told"),
    [
        ("trainer.callbacks+=faults.Both", 2, "Both ({file}:11, in after_update): ValueError: no"),
        ("trainer.callbacks+=faults.Second", 2, "Second ({file}:16, in after_update): ValueError: no"),
        ("grader=faults.Grades", 2, "Grades ({file}:25, in grade): KeyError: 'no'"),
        ("sampler=faults.Samples", 2, "Samples ({file}:30, in generate): SystemExit: no"),
        (
            "trainer.callbacks+=faults.Killed",
            1,
            "another process of this run ended (killed, or its machine lost); the run ended after update 1; continue "
            "it with --resume run",
        ),
    ],
)
def test_what_ends_a_run_of_two_ranks_is_said_once(here, part, status, told):
    (here / "faults.py").write_text(FAULTS)
    (here / "command.py").write_text("from rlvr_pl.cli import entry; entry()\n")  # the second rank runs it by its name
    words = [*WORDS, "--trainer.devices=2", "--trainer.strategy=ddp", f"--{part}"]
    done = ended([sys.executable, "command.py", *words, "--run=run"], here)
    assert done.returncode == status
    lines = [line for line in done.stderr.splitlines() if not line.startswith("update ")]
    assert lines == ["rlvr-pl: " + told.format(file=here / "faults.py")]


@pytest.mark.slow
def test_a_mistake_in_the_settings_is_said_by_one_of_the_ranks_that_torchrun_started(here):
    two = ["--trainer.devices=2", "--trainer.strategy=ddp"]
    done = ended(torchrun(here, *WORDS, *two, "--objective=Nope", "--run=run"), here)
    assert [line[:53] for line in done.stderr.splitlines() if line.startswith("rlvr-pl: ")] == [
        "rlvr-pl: --objective Nope: no objective of that name;"
    ]
    assert "exitcode  : 2" in done.stderr and "exitcode  : 1" not in done.stderr
    assert not (here / "run").exists()


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_notebook"])
def test_a_strategy_that_is_not_supported_is_refused(tmp_path, monkeypatch, capsys, strategy):
    monkeypatch.chdir(tmp_path)
    words = ["--trainer.accelerator=cpu", "--trainer.devices=2", f"--trainer.strategy={strategy}"]
    assert main(["fit", *words]) == 2
    assert "choose ddp" in capsys.readouterr().err.splitlines()[-1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--trainer.strategy.init_args.tensor_parallel_size=2"], "tensor_parallel_size is 2"),
        (["--trainer.strategy.init_args.data_parallel_size=3"], "data_parallel_size is 3, but the run has 2 devices"),
        (["--policy.compile=true"], "policy.compile does not go with sharding"),
        (["--policy.peft={r: 2}"], "policy.peft trains an adapter"),
    ],
)
def test_what_sharding_does_not_do_is_refused(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    strategy = ["--trainer.accelerator=cpu", "--trainer.devices=2", f"--trainer.strategy.class_path={SHARDED}"]
    assert main(["fit", *strategy, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line
    assert not list(tmp_path.iterdir())


def test_an_engine_over_several_devices_is_refused_where_every_rank_has_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlvr_pl.sampling.vllm.installed", lambda: "0.32.0")
    words = ["--sampler=VLLM", "--sampler.tensor_parallel_size=2", "--trainer.accelerator=cpu", "--trainer.devices=2"]
    assert main(["fit", *words, "--trainer.strategy=ddp"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "sampler.tensor_parallel_size is 2: with several ranks each has an engine of its own" in line
    assert not list(tmp_path.iterdir())
