"""`rlvr-pl fit` in process: settings, mistakes, run folders, resuming."""

from __future__ import annotations

import csv
import json
import textwrap

import pytest
import torch
from lightning.pytorch import Callback

from rlvr_pl.cli import main
from rlvr_pl.configs import FOLDER
from rlvr_pl.records import RunFolder
from rlvr_pl.settings import FitCLI

SMALL = [
    "--policy.name=embedded:base",
    "--data.updates=3",
    "--data.validation=null",
    "--model.group_size=4",
    "--model.max_new_tokens=24",
    "--optimizer=AdamW",
    "--optimizer.lr=1e-4",
]
CLOCK = ("seconds/", "tokens_per_s")


@pytest.fixture(autouse=True)
def in_a_fresh_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def fit(*words: str) -> int:
    return main(["fit", *SMALL, *words])


def metrics(run) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as f:
        return [{k: v for k, v in row.items() if not k.startswith(CLOCK)} for row in csv.DictReader(f)]


def final_weights(run) -> bytes:
    return (run / "snapshots" / "final" / "model.safetensors").read_bytes()


def test_a_run_leaves_its_folder(tmp_path):
    words = ["--data.validation=embedded:drift", "--validation.every_n_updates=2", "--trainer.callbacks+=DriftMonitor"]
    assert fit("--run=r", *words) == 0
    run = tmp_path / "r"
    state = json.loads((run / "run.json").read_text())
    assert (state["state"], state["updates"], state["deterministic"]) == ("finished", 3, True)
    assert [row["update"] for row in metrics(run)] == ["1", "2", "3"]
    names = {p.name for p in run.iterdir()}
    assert {"config.yaml", "metrics.csv", "windows.csv", "drift.csv", "cost.json", "rollouts", "items"} <= names
    assert sorted(p.name for p in (run / "items").iterdir()) == [f"val-{u:06d}.jsonl" for u in (0, 2, 3)]
    cost = json.loads((run / "cost.json").read_text())
    # 3 updates x 1 question x 4 rollouts, each graded once
    assert (cost["updates"], cost["graded"]) == (3, 12)


@pytest.mark.parametrize("credit", ["rankc", "shuffled"])
def test_fork_credit_from_the_command_line(tmp_path, credit):
    assert fit("--run=r", "--data.updates=1", "--objective", "ForkCredit", "--objective.credit", credit) == 0
    assert "fork/depth" in metrics(tmp_path / "r")[0]


def test_an_objective_in_the_users_own_file(tmp_path):
    (tmp_path / "my_file.py").write_text(
        textwrap.dedent("""
        from rlvr_pl.core.advantage import leave_one_out
        from rlvr_pl.core.weights import token_weights
        from rlvr_pl.objectives import Objective

        class LeaveOneOut(Objective):
            equation = "w = (r - mean of the others) / N"

            def token_weights(self, batch):
                advantage = leave_one_out(batch.rewards, batch.group_size)
                return token_weights(advantage, batch.lengths)
        """)
    )
    assert fit("--run=r", "--data.updates=1", "--objective", "my_file.LeaveOneOut") == 0
    assert json.loads((tmp_path / "r" / "run.json").read_text())["objective"] == "LeaveOneOut"


MISTAKES = {
    "--objective=Nope": "there are BNPO",
    "--objective.credit=rankc": "no setting 'credit'",
    "--objective=nope.Nope": "No module named 'nope'",
    "--sampler=rlvr_pl.objectives.GRPO": "not correspond to a subclass of Sampler",
    "--model.group_size=1": "group_size",
    "--model.group_size=x": "model.group_size",
    "--trainer.precision=16": "precision.master_weights",
    "--data.train=missing.jsonl": "missing.jsonl",
    "--config=missing.yaml": "missing.yaml",
    "--model.max_new_tokens=100000": "context",
    "--bogus=1": "--bogus",
    "--resume=r": "--resume",
}


@pytest.mark.parametrize("word", MISTAKES)
def test_a_mistake_is_one_line_and_status_2_and_writes_nothing(tmp_path, capsys, word):
    assert fit("--run=r", word) == 2
    err = capsys.readouterr().err
    assert err.startswith("rlvr-pl: ") and err.count("\n") == 1, err
    assert MISTAKES[word] in err
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_not_overwritten_unless_asked(tmp_path, capsys):
    assert fit("--run=r", "--data.updates=1") == 0
    first = final_weights(tmp_path / "r")
    assert fit("--run=r", "--data.updates=1") == 2
    assert "this run, finished" in capsys.readouterr().err
    assert fit("--run=r", "--data.updates=2") == 2
    assert "another run" in capsys.readouterr().err
    assert final_weights(tmp_path / "r") == first
    assert fit("--run=r", "--data.updates=2", "--overwrite") == 0
    assert len(metrics(tmp_path / "r")) == 2


def test_hidden_files_of_the_users_make_no_empty_folder_and_are_never_removed(tmp_path, capsys):
    git = tmp_path / "r" / ".git" / "HEAD"
    git.parent.mkdir(parents=True)
    git.write_text("ref")
    assert fit("--run=r") == 2
    assert "holds files that are no run's" in capsys.readouterr().err
    git.unlink()
    git.parent.rmdir()
    assert fit("--run=r", "--data.updates=1") == 0
    (tmp_path / "r" / ".env").write_text("secret")
    (tmp_path / "r" / "sub").mkdir()
    (tmp_path / "r" / "sub" / "run.json").write_text("{}")
    capsys.readouterr()
    assert fit("--run=r", "--data.updates=2", "--overwrite") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("r holds what is not this run's (.env, sub); move it")
    assert (tmp_path / "r" / ".env").read_text() == "secret"


def test_a_folder_beside_the_run_is_never_removed(tmp_path):
    for name in (".r.removed", ".r.removed-thesis"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("precious")
    assert fit("--run=r", "--data.updates=1") == 0
    assert fit("--run=r", "--data.updates=2", "--overwrite") == 0
    assert len(list(tmp_path.glob(".r.removed*/thesis.txt"))) == 2
    assert len(list(tmp_path.glob(".r*"))) == 2


def test_a_run_that_begins_again_says_so_and_leaves_files_that_are_not_its_own(tmp_path, monkeypatch, capsys):
    build = FitCLI.instantiate_trainer
    monkeypatch.setattr(FitCLI, "instantiate_trainer", lambda self: add(build(self), Crash(2, "start")))
    words = ("--run=r", "--data.updates=3", "--checkpoint.every_n_updates=1")
    with pytest.raises(Killed):
        fit(*words)
    monkeypatch.setattr(FitCLI, "instantiate_trainer", build)
    for checkpoint in (tmp_path / "r" / "checkpoints").glob("*.ckpt"):
        checkpoint.write_bytes(b"damaged")
    mine = [tmp_path / "r" / name for name in ("analysis.csv", "items/note.txt", "rollouts/best.jsonl")]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    capsys.readouterr()
    assert fit(*words) == 0
    assert "no checkpoint to go on from; begins again, its records of updates removed" in capsys.readouterr().err
    assert [path.read_text() for path in mine] == ["mine"] * 3
    assert [row["update"] for row in RunFolder("r").table("metrics.csv").rows()] == ["1", "2", "3"]


def test_settings_changed_by_hand_are_not_continued(tmp_path, monkeypatch, capsys):
    build = FitCLI.instantiate_trainer
    monkeypatch.setattr(FitCLI, "instantiate_trainer", lambda self: add(build(self), Crash(2, "start")))
    with pytest.raises(Killed):
        fit("--run=r", "--data.updates=3", "--checkpoint.every_n_updates=1")
    monkeypatch.setattr(FitCLI, "instantiate_trainer", build)
    config = tmp_path / "r" / "config.yaml"
    begun = config.read_text()
    config.write_text(begun.replace("seed: 0", "seed: 8", 1))
    assert config.read_text() != begun
    capsys.readouterr()
    assert main(["fit", "--resume=r"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "config.yaml was changed since the run began" in line
    config.write_text(begun)
    assert main(["fit", "--resume=r"]) == 0


def test_overwrite_removes_run_folders_only(tmp_path, capsys):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "thesis.txt").write_text("mine")
    assert fit("--run=r", "--overwrite") == 2
    assert "not a run folder" in capsys.readouterr().err
    assert (tmp_path / "r" / "thesis.txt").read_text() == "mine"


class Killed(BaseException):
    """Passes through everything that handles errors, as the end of the process does."""


class Crash(Callback):
    """Ends the process's training as a crash would: an exception at one moment, nothing saved."""

    def __init__(self, update: int, moment: str) -> None:
        self.update, self.moment = update, moment

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if self.moment == "start" and pl_module.updates_done + 1 == self.update:
            raise Killed("crash")

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        if self.moment == "learn" and pl_module.updates_done + 1 == self.update:
            raise Killed("crash")

    def on_validation_end(self, trainer, pl_module):
        if self.moment == "validation" and pl_module.updates_done == self.update:
            raise Killed("crash")


@pytest.mark.parametrize("master", ["false", "true"])
def test_a_crashed_run_continues_bit_identically(tmp_path, monkeypatch, master):
    """Three crashes at different moments; each time the same command is given again."""
    words = [
        "--data.updates=6",
        "--data.validation=embedded:drift",
        "--validation.every_n_updates=2",
        "--checkpoint.every_n_updates=2",
        f"--precision.master_weights={master}",
        "--trainer.callbacks+=DriftMonitor",
        "--trainer.callbacks.every_n_updates=2",
        "--objective=ForkCredit",
        "--objective.credit=shuffled",
        "--lr_scheduler=CosineAnnealingLR",
        "--lr_scheduler.T_max=6",
    ]
    assert fit("--run=whole", *words) == 0
    build = FitCLI.instantiate_trainer
    for crash in (Crash(2, "start"), Crash(4, "validation"), Crash(6, "start")):
        monkeypatch.setattr(FitCLI, "instantiate_trainer", lambda self, crash=crash: add(build(self), crash))
        with pytest.raises(Killed):
            fit("--run=broken", *words)
    monkeypatch.setattr(FitCLI, "instantiate_trainer", build)
    assert fit("--run=broken", *words) == 0
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert final_weights(whole) == final_weights(broken)
    assert metrics(whole) == metrics(broken)
    for name in ("validation.csv", "windows.csv", "drift.csv"):
        assert (whole / name).read_text() == (broken / name).read_text(), name
    for folder in ("rollouts", "items"):
        assert {p.name: p.read_text() for p in (whole / folder).iterdir()} == {
            p.name: p.read_text() for p in (broken / folder).iterdir()
        }
    last = [torch.load(sorted((r / "checkpoints").glob("*.ckpt"))[-1], weights_only=True) for r in (whole, broken)]
    moments = [[v["exp_avg"] for v in c["optimizer_states"][0]["state"].values()] for c in last]
    assert all(torch.equal(a, b) for a, b in zip(*moments))


def add(trainer, callback):
    trainer.callbacks.insert(0, callback)
    return trainer


def test_resume_by_name_and_a_damaged_checkpoint(tmp_path, monkeypatch, capsys):
    words = ["--data.updates=4", "--checkpoint.every_n_updates=1"]
    assert fit("--run=whole", *words) == 0
    build = FitCLI.instantiate_trainer
    monkeypatch.setattr(FitCLI, "instantiate_trainer", lambda self: add(build(self), Crash(4, "start")))
    with pytest.raises(Killed):
        fit("--run=r", *words)
    monkeypatch.setattr(FitCLI, "instantiate_trainer", build)
    newest = sorted((tmp_path / "r" / "checkpoints").glob("*.ckpt"))[-1]
    newest.write_bytes(newest.read_bytes()[:1000])
    assert main(["fit", "--resume", "r"]) == 0
    assert "set aside" in capsys.readouterr().err
    assert final_weights(tmp_path / "whole") == final_weights(tmp_path / "r")
    assert main(["fit", "--resume", "r"]) == 2
    assert "finished after 4 updates" in capsys.readouterr().err


@pytest.fixture
def broken_off(tmp_path, monkeypatch):
    """A run with drift that was stopped after two of three updates, with the checkpoint of the second."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "ends.py").write_text(textwrap.dedent(ENDS_AT_2))
    words = [
        "--rollout_stats.window=2",
        "--trainer.callbacks+=DriftMonitor",
        "--trainer.callbacks.n=2",
        "--trainer.callbacks.every_n_updates=1",
    ]
    assert fit("--run=r", *words, "--checkpoint.every_n_updates=1", "--trainer.callbacks+=ends.EndsAt2") == 0
    return tmp_path / "r"


ENDS_AT_2 = """
    from lightning.pytorch import Callback

    class EndsAt2(Callback):
        def on_train_batch_end(self, trainer, module, *_):
            trainer.should_stop = module.updates_done == 2
"""


@pytest.mark.parametrize(
    ("name", "lines", "told"),
    [
        ("metrics.csv", 0, "no row of update 1 and 1 more"),
        ("updates.csv", 0, "no row of update 1 and 1 more"),
        ("updates.csv", 2, "no row of update 2"),
        ("windows.csv", 1, "no row of update 2"),
    ],
)
def test_a_run_that_has_lost_its_history_is_not_gone_on_with(broken_off, capsys, name, lines, told):
    """Cut to so many lines, the first of which names the columns; not there at all for none."""
    path = broken_off / name
    kept = path.read_text().splitlines(keepends=True)[:lines]
    path.write_text("".join(kept)) if kept else path.unlink()
    before = {p: p.read_bytes() for p in broken_off.rglob("*") if p.is_file()}
    capsys.readouterr()
    assert main(["fit", "--resume=r"]) == 2
    assert capsys.readouterr().err == (
        f"rlvr-pl: --resume r: r/{name} has {told}, but the checkpoint is of update 2; put the file back, or begin "
        "another run: --config r/config.yaml --run NEW\n"
    )
    assert {p: p.read_bytes() for p in broken_off.rglob("*") if p.is_file()} == before


def test_rows_beyond_the_checkpoint_are_cut_and_lost_drift_is_made_again(broken_off, capsys):
    """A kill may leave more rows than the checkpoint has; drift.csv is what the checkpoint holds as well."""
    whole = (broken_off / "drift.csv").read_bytes()
    with (broken_off / "updates.csv").open("a") as f:
        f.write("3" + "," * (broken_off / "updates.csv").read_text().splitlines()[0].count(",") + "\n")
    (broken_off / "drift.csv").unlink()
    capsys.readouterr()
    assert main(["fit", "--resume=r"]) == 0
    assert "drift.csv: rows were missing; made again from the checkpoint" in capsys.readouterr().err
    assert (broken_off / "drift.csv").read_bytes().startswith(whole)
    assert [row["update"] for row in RunFolder(broken_off).table("updates.csv").rows()] == ["1", "2", "3"]


def test_start_begins_with_a_fresh_optimizer(tmp_path):
    assert fit("--run=a") == 0
    assert fit("--run=b", "--start=a/snapshots/final", "--data.updates=1") == 0
    last = sorted((tmp_path / "b" / "checkpoints").glob("*.ckpt"))[-1]
    state = torch.load(last, weights_only=True)["optimizer_states"][0]["state"]
    assert all(float(v["step"]) <= 1 for v in state.values())
    assert json.loads((tmp_path / "b" / "run.json").read_text())["start"] == "a/snapshots/final"


class Parsed(Exception):
    """Carries a parsed config out of the parser before anything is built."""


def parsed(argv):
    def stop(config, text):
        raise Parsed(config, text)

    with pytest.raises(Parsed) as caught:
        FitCLI(argv, stop)
    return caught.value.args


@pytest.mark.parametrize(
    "path", sorted(str(p.relative_to(FOLDER)) for p in FOLDER.rglob("*.yaml") if "studies" not in p.parts)
)
def test_every_shipped_config_parses_and_survives_a_round_trip(tmp_path, path):
    config, text = parsed(["--config", str(FOLDER / path)])
    (tmp_path / "again.yaml").write_text(text)
    again, _ = parsed(["--config", str(tmp_path / "again.yaml")])
    for key in ("objective", "model", "data", "optimizer", "precision", "policy", "seed"):
        assert again[key] == config[key], key


def test_validation_inside_fit_gives_the_items_of_evaluate(tmp_path):
    """The same weights, panel and batch size: the same answers, item for item."""
    words = ["--policy.name=embedded:start", "--data.validation=embedded:drift", "--data.updates=1"]
    assert fit("--run=r", *words, "--trainer.callbacks+=DriftMonitor") == 0
    assert main(["evaluate", "embedded:start", "--questions", "embedded:drift", "--out", "e.jsonl", "--json"]) == 0
    inside = (tmp_path / "r" / "items" / "val-000000.jsonl").read_text().splitlines()
    assert inside[1:] == (tmp_path / "e.jsonl").read_text().splitlines()[1:]


def test_another_class_begins_with_its_own_defaults(tmp_path):
    """quickstart.yaml names GRPO with token-sum and without masking; none of that may leak into a class named later."""
    quickstart = ["--config", str(FOLDER / "quickstart.yaml")]
    mask, _ = parsed([*quickstart, "--objective", "ORLMask"])
    assert mask.objective.init_args.mask_truncated is True
    mean, _ = parsed([*quickstart, "--objective=ORLSeqmean"])
    assert mean.objective.init_args.aggregation == "sequence-mean"
    (tmp_path / "arm.yaml").write_text("objective: {class_path: ORLMask}\n")
    arm, _ = parsed([*quickstart, "--config", str(tmp_path / "arm.yaml")])
    assert arm.objective.init_args.mask_truncated is True


@pytest.mark.parametrize("form", ["flag", "config"])
def test_a_class_in_place_of_the_default_begins_with_its_own_defaults(tmp_path, form):
    """The default objective is GRPO, whose aggregation is token-sum."""
    (tmp_path / "arm.yaml").write_text("objective: {class_path: BNPO}\n")
    config, _ = parsed(["--objective=BNPO"] if form == "flag" else ["--config", str(tmp_path / "arm.yaml")])
    assert config.objective.init_args.aggregation == "token-mean"


def test_the_same_class_keeps_what_the_config_says(tmp_path):
    (tmp_path / "arm.yaml").write_text("objective: {class_path: GRPO, init_args: {mask_truncated: true}}\n")
    words = ["--config", str(tmp_path / "arm.yaml"), "--objective", "GRPO", "--objective.scale", "none"]
    config, _ = parsed(words)
    assert (config.objective.init_args.mask_truncated, config.objective.init_args.scale) == (True, "none")


@pytest.mark.parametrize("name", ["simple", "pytorch"])
def test_a_profiler_shows_the_stages_of_an_update(tmp_path, name):
    words = [f"--profiler={name}", "--objective=SignedReinforce"]  # which learns from every update
    assert fit("--run=r", *words, "--data.updates=6") == 0
    (report,) = (tmp_path / "r").glob("fit-profile*.txt")
    text = report.read_text()
    stages = ("rlvr.sample", "rlvr.grade", "rlvr.weigh", "rlvr.gradient", "rlvr.optimizer", "RolloutRecorder")
    assert [stage for stage in stages if stage not in text] == []


def test_an_unknown_profiler_is_a_mistake(tmp_path, capsys):
    assert fit("--run=r", "--trainer.profiler=fast") == 2
    assert "choose one of simple, advanced, pytorch" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
