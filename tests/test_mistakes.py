"""Mistakes in one line: which setting or class, what is wrong, what would be right."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from rlvr_pl.cli import COMMANDS, main
from rlvr_pl.mistakes import worded
from rlvr_pl.module import RLVRModule
from rlvr_pl.nulls import may_be_null
from rlvr_pl.objectives import GRPO
from rlvr_pl.policy import load_policy

BASE = ["fit", "--policy.name=embedded:start", "--data.updates=1", "--model.group_size=2", "--data.validation=null"]


def test_errors_are_worded():
    message = "Parser key \"model.group_size\":\n  Expected a <class 'int'>. Got value: x"
    assert worded(message, {}) == "--model.group_size: expected an int. Got value: x"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--trainer.callbacks+=Nope"], ["--trainer.callbacks Nope: no callback of that name", "DamageStop,"]),
        (
            ["--trainer.callbacks+=DamageStop", "--trainer.callbacks.windw=3"],
            ["DamageStop has no setting 'windw'; it takes criterion, action"],
        ),
        (
            ["--trainer.callbacks+=DamageStop", "--trainer.callbacks.criterion.windw=3"],
            ["DamageStop has no setting 'criterion.windw'"],
        ),
        (
            ["--trainer.callbacks+=DamageStop", "--trainer.callbacks.criterion.window=-3"],
            ["window=-3: must be a whole number of updates, at least 1"],
        ),
        (["--objective=GRPO", "--objective.nope=3"], ["GRPO has no setting 'nope'; it takes ", "mask_truncated"]),
        (["--objective=Nope"], ["--objective Nope: no objective of that name", "ForkCredit"]),
        (["--objective.aggregation=x"], ["--objective.aggregation: GRPO: expected one of ['token-sum'"]),
        (["--optimizer.lr=nan"], ["--optimizer.lr: AdamW: Expected a float"]),
        (["--model.max_grad_norm=-1"], ["model.max_grad_norm is -1.0: it must be above 0"]),
        (["--model.max_new_tokens=0"], ["model.max_new_tokens is 0: it must be at least 1"]),
        (["--seed=-1"], ["--seed -1: must be at least 0"]),
        (["--trainer.fast_dev_run=true"], ["trainer.fast_dev_run: the length of a run is data.updates"]),
        (["--validation.every_n_updates=-1"], ["Validation: every_n_updates=-1: must be at least 1, or null"]),
        (["--validation.every_n_updates=0"], ["Validation: every_n_updates=0: must be at least 1, or null"]),
        (["--checkpoint.every_n_updates=0"], ["RunCheckpoint: every_n_updates and keep must be at least 1"]),
        (
            ["--trainer.callbacks+=Snapshots", "--trainer.callbacks.every_n_updates=-1"],
            ["Snapshots: every_n_updates=-1"],
        ),
        (["--progress.every_n_updates=-1"], ["RunProgress: every_n_updates=-1: must be at least 1"]),
        (["--tracker.every_n_updates=-1"], ["Tracker: every_n_updates=-1"]),
        (["--grader=Math", "--grader.cpu_limit=0"], ["cpu_limit=0.0, memory_limit_mb=512: all must be above 0"]),
        (
            ["--grader=Math", "--grader.cpu_limit=inf"],
            ["--grader.cpu_limit: MathGrader: Expected a float. Got value: inf"],
        ),
        (["--grader=Math", "--grader.workers=-1"], ["workers=-1"]),
        (["--nope=3"], ["unrecognized arguments: --nope=3; see rlvr-pl fit --help"]),
        (
            ["--config=none.yaml"],
            ["rlvr-pl: none.yaml: no such file of settings; shipped ones are expert_iteration.yaml"],
        ),
        (["--data.updates=x"], ["--data.updates: QuestionData: expected an int. Got value: x"]),
        (["--optimizer=null"], ["--optimizer null: a run needs one; name a class, or leave it out for AdamW"]),
        (["--objective=null"], ["--objective null: a run needs one; name a class, or leave it out for GRPO"]),
        (["--grader=null"], ["--grader null: a run needs one; name a class, or leave it out for MathGrader"]),
        (["--sampler=null"], ["--sampler null: a run needs one; name a class, or leave it out for TorchSampler"]),
        (["--data=null"], ["--data null: it needs a value"]),
        (["--data.updates=null"], ["--data.updates null: it needs a value; give one, or leave it out for the default"]),
        (["--data.train=null"], ["--data.train null: it needs a value"]),
        (["--optimizer.lr=null"], ["--optimizer.lr null: it needs a value"]),
        (["--policy.name=null"], ["--policy.name null: it needs a value"]),
        (["--optimizer=torch.optim.LBFGS"], ["--optimizer LBFGS: it computes the loss again and again", "AdamW, SGD"]),
        (["--optimizer=SparseAdam"], ["--optimizer SparseAdam: it takes sparse gradients", "choose AdamW"]),
        (
            ["--data.updates=99999999999999999999"],
            ["data.updates is 99999999999999999999: it must be at most 10,000,000"],
        ),
        (["--data.questions_per_update=9999999999"], ["data.questions_per_update is 9999999999: it must be at most"]),
        (["--model.group_size=9999999999"], ["model.group_size is 9999999999: it must be at most 100,000"]),
        (
            ["--trainer.callbacks+=DamageStop", "--trainer.callbacks+=DamageStop"],
            ["--trainer.callbacks: DamageStop is there twice; leave one of the two out"],
        ),
        (
            ["--trainer.callbacks+=RolloutRecorder"],
            ["RolloutRecorder: every run has one already (its settings are recorder.*); leave it out"],
        ),
        (["--trainer.callbacks+=rlvr_pl.callbacks.Validation"], ["Validation: every run has one already"]),
        (["--trainer.callbacks+=RunCheckpoint"], ["RunCheckpoint: every run has one already"]),
        (["--trainer.callbacks+=RunRecord"], ["RunRecord: every run has one already (it has no settings)"]),
        (
            ["--trainer.callbacks+=RichProgressBar"],
            ["trainer.callbacks RichProgressBar: the progress of a run is shown by RunProgress"],
        ),
        (["--trainer.logger=Nope"], ["--trainer.logger Nope: no logger of that name; there are CSVLogger, "]),
        (["--optimizer=Adamm"], ["--optimizer Adamm: no optimizer of that name; there are ", ", AdamW, "]),
        (["--lr_scheduler=Nope"], ["--lr_scheduler Nope: no lr_scheduler of that name", ", WarmupCosine, or give"]),
        (
            ["--trainer.logger=CSVLogger"],
            ["--trainer.logger CSVLogger: needs save_dir; add --trainer.logger.save_dir="],
        ),
        (["--grader=WeightedSum"], ["--grader WeightedSum: needs graders; add --grader.graders=..."]),
        (
            ["--sampler=VLLMServer"],
            ["--sampler VLLMServer: needs url, folder; add --sampler.url=... --sampler.folder=..."],
        ),
        (
            [
                "--trainer.strategy=rlvr_pl.sharded_strategy.ShardedStrategy",
                "--trainer.strategy.tensor_parallel_size=2",
            ],
            ["rlvr-pl: trainer.strategy: tensor_parallel_size is 2: matrix products are not divided"],
        ),
        (["--grader=Function", "--grader.path=here.jsonl:f"], ["here.jsonl is no Python file; write file.py:function"]),
        (
            ["--grader=Function", "--grader.path=here.py"],
            ["here.py: names a file and no function in it; write here.py:FUNCTION"],
        ),
        (["--objective.kl.coefficient=-1"], ["KLPenalty: coefficient=-1.0: must be at least 0"]),
        (["--model.logprob_temperature=0"], ["model.logprob_temperature is 0.0: it must be above 0"]),
        (["--optimizer={class_path: null}"], ["--optimizer: it names no class; name one"]),
        (["--policy=null"], ["--policy null: it needs a value; set --policy.NAME=..., or leave it out"]),
        (["--start="], ["--start '': name a policy, or leave it out"]),
    ],
)
def test_a_wrong_setting_is_one_short_line(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    for name in ("here.py", "here.jsonl"):
        (tmp_path / name).write_text("")
    run = tmp_path / "run"
    assert main([*BASE, f"--run={run}", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(text in line for text in told)
    assert not any(word in line for word in ("Union", "class_path", "Namespace", "Expected a str", "LBFGS, "))
    assert not run.exists()


def test_a_run_folder_without_a_name_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*BASE, "--run="]) == 2
    assert capsys.readouterr().err == "rlvr-pl: --run '': name a folder, or leave it out\n"
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("owner", "may", "may_not"),
    [
        (RLVRModule, ["max_new_tokens", "max_grad_norm"], ["group_size", "uniform_update", "temperature"]),
        (load_policy, ["dtype", "template", "peft"], ["name", "snapshots"]),
        (torch.optim.AdamW, ["foreach", "fused"], ["lr", "betas", "eps"]),
        (GRPO, ["kl", "entropy_bonus"], ["scale", "positive_weight"]),
    ],
)
def test_what_may_be_null_is_what_the_signature_says(owner, may, may_not):
    assert all(may_be_null(owner, name) for name in may)
    assert not any(may_be_null(owner, name) for name in may_not)


def rows(path, problem, answer, first, count):
    """A file of questions in the words of the embedded policies, under these column names."""
    asked = "How many tickets from 04:15 forward to 05:45 by 45min?"
    lines = ({"uid": f"{path.stem}{i}", problem: asked, answer: str(i)} for i in range(first, first + count))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_validation_that_asks_training_questions_is_said_once_and_may_have_columns_of_its_own(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    rows(tmp_path / "train.jsonl", "q", "a", 0, 4)
    rows(tmp_path / "held.jsonl", "prompt", "gold", 2, 3)
    words = ["fit", "--data.train=train.jsonl", "--data.validation=held.jsonl", "--data.updates=1"]
    words += ["--model.group_size=2", "--run=run", "--data.columns.problem=q", "--data.columns.answer=a"]
    assert main(words) == 2
    told = "held.jsonl:1: no column 'a'; there are 'uid', 'prompt', 'gold'; name yours with --data.validation_columns.a"
    assert capsys.readouterr().err == f"rlvr-pl: {told}nswer=NAME\n"
    assert not (tmp_path / "run").exists()
    words += ["--data.validation_columns.problem=prompt", "--data.validation_columns.answer=gold"]
    assert main(words) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "data.validation" in line]
    assert line.startswith("rlvr-pl: data.validation: 2 of its 3 questions are training questions too")


def test_evaluate_names_its_own_flag_for_a_column_of_another_name(tmp_path, capsys):
    rows(tmp_path / "held.jsonl", "q", "answer", 0, 2)
    words = ["evaluate", "embedded:start", "--questions", str(tmp_path / "held.jsonl")]
    assert main(words) == 2
    assert capsys.readouterr().err.endswith("; name yours with --columns problem=NAME\n")
    assert main([*words, "--columns", "problem=q"]) == 0


OBJECTIVE = """
from rlvr_pl.objectives import GRPO

class Broken(GRPO):
    def token_weights(self, batch):
        if batch.update > {good}:
            return batch.no_such_field
        return super().token_weights(batch)
"""


def test_an_error_in_the_users_objective_names_its_line_before_anything_is_sampled(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_at_once.py").write_text(OBJECTIVE.format(good=0))
    run = tmp_path / "run"
    assert main([*BASE, f"--run={run}", "--objective=broken_at_once.Broken"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"Broken ({tmp_path}/broken_at_once.py:7, in token_weights): AttributeError: " in line
    assert "no_such_field" in line
    assert not run.exists()


PROBED = """
from rlvr_pl.data.pools import load_questions
from rlvr_pl.objectives import Objective

class ByQuestion(Objective):
    known = {q.uid: 1.0 for q in load_questions("embedded:train")}

    def token_weights(self, batch):
        return batch.mask * sum(self.known[uid] for uid in batch.uids)

class Unfilled(ByQuestion):
    known = {}

    def prepare(self, batch):
        if batch.seed:
            type(self).known = dict.fromkeys(batch.uids, 1.0)
        return {}

class ByLength(Objective):
    def token_weights(self, batch):
        lengths = batch.lengths.double().view(-1, batch.group_size)
        spread = (lengths - lengths.mean(1, keepdim=True)) / lengths.std(1, keepdim=True)
        assert spread.isfinite().all() or batch.seed
        return batch.mask * spread.nan_to_num().view(-1, 1)

class Padded(Objective):
    def token_weights(self, batch):
        return batch.rewards[:, None].expand(batch.mask.shape)
"""


@pytest.fixture
def probed(tmp_path, monkeypatch):
    """The user's file of objectives, in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "probed.py").write_text(PROBED)
    yield tmp_path
    sys.modules.pop("probed", None)


@pytest.mark.parametrize("name", ["ByQuestion", "Unfilled", "ByLength"])
def test_an_objective_that_looks_at_questions_or_lengths_is_let_in(probed, name):
    assert main([*BASE, "--run=run", "--seed=1", f"--objective=probed.{name}"]) == 0


def test_a_weight_on_padding_is_refused_before_anything_is_sampled(probed, capsys):
    assert main([*BASE, "--run=run", "--objective=probed.Padded"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("rlvr-pl: Padded.token_weights returned a weight on padding (1.0) for rollout question ")
    assert not (probed / "run").exists()


def test_an_error_in_a_later_update_leaves_a_stopped_run_that_goes_on_once_mended(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "broken_later.py"
    file.write_text(OBJECTIVE.format(good=1))
    run = tmp_path / "run"
    words = [*BASE, f"--run={run}", "--data.updates=3", "--checkpoint.every_n_updates=1"]
    assert main([*words, "--objective=broken_later.Broken"]) == 2
    assert "Broken (" in capsys.readouterr().err.splitlines()[-1]
    assert '"state": "stopped"' in (run / "run.json").read_text() and '"updates": 1' in (run / "run.json").read_text()

    import broken_later

    monkeypatch.setattr(broken_later.Broken, "token_weights", broken_later.GRPO.token_weights)
    assert main(["fit", "--resume", str(run)]) == 0
    assert "finished after 3 of 3 updates" in capsys.readouterr().err


def test_a_silent_run_shows_no_progress_and_says_how_it_ended(tmp_path, capsys):
    run = tmp_path / "run"
    assert main([*BASE, f"--run={run}", "--trainer.enable_progress_bar=false"]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if "LitLogger" not in line]
    assert lines[-1] == f"rlvr-pl: finished after 1 of 1 updates; policy in {run}/snapshots/final"
    assert not any(line.startswith("update ") for line in lines)


def test_a_run_folder_is_no_policy_but_has_some(tmp_path, capsys):
    run = tmp_path / "run"
    assert main([*BASE, f"--run={run}"]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(run), "--out", str(tmp_path / "items.jsonl")]) == 2
    assert f"a run folder; name one of its policies: {run}/snapshots/final" in capsys.readouterr().err


# ---- classes and functions of the user's -----------------------------------------------------------------------------

FAULTY = """
import asyncio, sys
from lightning.pytorch import Callback
from rlvr_pl.callbacks import DamageStop
from rlvr_pl.grading import ExactGrader
from rlvr_pl.objectives import GRPO


class Choosy(GRPO):
    def __init__(self, taste: str = "sour"):
        raise ValueError(f"taste={taste!r}: must be sweet")

class Clumsy(GRPO):
    def __init__(self):
        super().__init__()
        {}["nothing"]

class Leaves(GRPO):
    def token_weights(self, batch):
        sys.exit("done here")

class LeavesAtOnce(GRPO):
    def __init__(self):
        sys.exit(3)

class Headless(DamageStop):
    def __init__(self):
        self.limit = 3

    def damage(self, window):
        return None

class Quits(Callback):
    def on_train_batch_end(self, trainer, module, *_):
        sys.exit("enough")

def leaves(completions):
    sys.exit(3)

def silent(completions):
    return [None] * len(completions)

def interrupts(completions):
    raise KeyboardInterrupt

async def gives_up(completions):
    raise asyncio.CancelledError("enough")

class Interrupts(Callback):
    def on_train_batch_end(self, *_):
        raise KeyboardInterrupt

class InterruptsGrading(ExactGrader):
    def grade(self, requests, *, require_box):
        raise KeyboardInterrupt
"""


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """The user's file, in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "faulty.py").write_text(FAULTY)
    (tmp_path / "left.py").write_text("import sys\n\nsys.exit(4)\n")
    yield tmp_path
    sys.modules.pop("faulty", None)


def test_a_module_that_ends_the_program_is_named_whoever_wraps_the_exit(faulty, capsys, monkeypatch):
    monkeypatch.setattr(sys, "exit", lambda code, leave=sys.exit: leave(code))  # as experiment trackers do
    assert main([*BASE, "--objective=left.Objective"]) == 2
    told = f"rlvr-pl: {faulty}/left.py:3: ended with SystemExit when it was imported\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--objective=faulty.Choosy"], "Choosy ({file}:11, in __init__): ValueError: taste='sour': must be sweet"),
        (["--objective=faulty.Clumsy"], "Clumsy ({file}:16, in __init__): KeyError: 'nothing'"),
        (["--objective=faulty.Leaves"], "Leaves ({file}:20, in token_weights): SystemExit: done here"),
        (["--objective=faulty.LeavesAtOnce"], "LeavesAtOnce ({file}:24, in __init__): SystemExit: 3"),
        (["--objective=left.Objective"], "{folder}/left.py:3: ended with SystemExit when it was imported"),
        (
            ["--grader=Function", "--grader.path=left.py:f"],
            "reward function left.py:f: cannot import left.py: SystemExit: 4",
        ),
        (
            ["--data.prepare=faulty.py:leaves"],
            "data.prepare faulty.py:leaves: embedded:train: row 1 raised SystemExit: 3 ({file}:38)",
        ),
    ],
)
def test_a_fault_in_the_users_class_is_told_with_its_place_and_nothing_is_written(faulty, capsys, words, told):
    assert main([*BASE, "--run=run", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "rlvr-pl: " + told.format(file=faulty / "faulty.py", folder=faulty)
    assert not (faulty / "run").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["--grader=Function", "--grader.path=faulty.py:leaves"],
            "reward function faulty.py:leaves: raised SystemExit: 3 ({file}:38)",
        ),
        (["--trainer.callbacks+=faulty.Quits"], "Quits ({file}:35, in on_train_batch_end): SystemExit: enough"),
        (
            ["--grader=Function", "--grader.path=faulty.py:interrupts"],
            "reward function faulty.py:interrupts: raised KeyboardInterrupt ({file}:44)",
        ),
        (
            ["--grader=Function", "--grader.path=faulty.py:gives_up"],
            "reward function faulty.py:gives_up: raised CancelledError: enough ({file}:47)",
        ),
        (
            ["--trainer.callbacks+=faulty.Interrupts"],
            "Interrupts ({file}:51, in on_train_batch_end): KeyboardInterrupt",
        ),
        (["--grader=faulty.InterruptsGrading"], "InterruptsGrading ({file}:55, in grade): KeyboardInterrupt"),
    ],
)
def test_a_fault_that_shows_in_the_run_is_one_line_too(faulty, capsys, words, told):
    assert main([*BASE, "--run=run", *words]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("update ")]
    assert lines == ["rlvr-pl: " + told.format(file=faulty / "faulty.py")]
    assert '"state": "stopped"' in (faulty / "run" / "run.json").read_text()


RULES = """
from rlvr_pl.callbacks import DamageStop, UpdateCallback

def helper():
    return 1 / 0

class Calm(DamageStop):
    def damage(self, window):
        return None

class Count(UpdateCallback):
    def after_update(self, trainer, module, report):
        helper()

class Raises(Calm):
    def damage(self, window):
        raise ValueError("no")

class Headless(DamageStop):
    def __init__(self):
        self.limit = 3

    def damage(self, window):
        return None

class Headed(DamageStop):
    def __init__(self):
        super().__init__()
        self.limit = 3

class Counts(DamageStop):
    seen = 0
    stop_at = None

    def __init__(self):
        super().__init__()
        self.seen = 0

    def damage(self, window):
        self.seen += 1
        return "enough" if self.seen == self.stop_at else None

    def state_dict(self):
        return {**super().state_dict(), "seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]
        super().load_state_dict(state)

class Holds(DamageStop):
    def __init__(self):
        super().__init__()
        self.judge = lambda rows: None

class Collects(DamageStop):
    def __init__(self):
        super().__init__()
        self.names = {"a"}

class Lambda(UpdateCallback):
    def state_dict(self):
        return {"f": lambda: None}

class Thing(UpdateCallback):
    def state_dict(self):
        return {"thing": Calm}

class Three(DamageStop):
    def damage(self, window):
        return 3

class Yes(DamageStop):
    def damage(self, window):
        return True
"""


LOGGER = """
from lightning.pytorch.loggers import CSVLogger

class Keyless(CSVLogger):
    @property
    def experiment(self):
        raise RuntimeError("no key;\\nlog in")
"""


@pytest.fixture
def rules(tmp_path, monkeypatch):
    """The user's file of rules and callbacks, in the working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rules.py").write_text(RULES)
    yield tmp_path
    sys.modules.pop("rules", None)


def forget(*modules: str) -> None:
    """Have files of the user's read anew, as another process does."""
    for name in modules:
        sys.modules.pop(name, None)


def told_by(capsys) -> str:
    """The one line that is not progress."""
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("update ")]
    return line


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Count", "Count ({file}:5, in helper): ZeroDivisionError: division by zero"),
        ("Raises", "Raises ({file}:17, in damage): ValueError: no"),
        ("Three", "Three.damage returned 3; it must return one line of text, or None"),
        ("Yes", "Yes.damage returned True; it must return one line of text, or None"),
    ],
)
def test_of_several_classes_in_a_file_the_one_at_fault_is_named(rules, capsys, name, told):
    assert main([*BASE, "--run=run", "--trainer.callbacks+=rules.Calm", f"--trainer.callbacks+=rules.{name}"]) == 2
    assert told_by(capsys) == "rlvr-pl: " + told.format(file=rules / "rules.py")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("rules.Headless", "Headless ({file}): has no '_verdict'; call super().__init__() first"),
        ("rules.Holds", "Holds.judge is a function and cannot be written down as part of the rule"),
        ("rules.Collects", "Collects.names is a set and cannot be written down as part of the rule"),
        ("EntropyRatioStop", "EntropyRatioStop needs a DriftMonitor in the same run; add one to trainer.callbacks"),
    ],
)
def test_a_rule_that_cannot_be_kept_is_refused_before_anything_is_written(rules, capsys, name, told):
    assert main([*BASE, "--run=run", f"--trainer.callbacks+={name}"]) == 2
    assert told_by(capsys).startswith("rlvr-pl: " + told.format(file=rules / "rules.py"))
    assert not (rules / "run").exists()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Lambda", "Can't pickle local object 'Lambda.state_dict.<locals>.<lambda>'"),
        ("Thing", "rules.Calm is no plain"),
    ],
)
def test_a_state_that_no_checkpoint_can_keep_is_one_line(rules, capsys, name, what):
    assert main([*BASE, "--run=run", f"--trainer.callbacks+=rules.{name}"]) == 2
    told = told_by(capsys)
    assert told.startswith(f"rlvr-pl: {name}.state_dict holds what a checkpoint cannot keep (") and what in told
    assert not list((rules / "run" / "checkpoints").glob("*"))


def test_a_logger_that_does_not_begin_is_one_line(rules, capsys):
    (rules / "loggers.py").write_text(LOGGER)
    assert main([*BASE, "--run=run", "--trainer.logger=loggers.Keyless", "--trainer.logger.save_dir=."]) == 2
    assert told_by(capsys) == "rlvr-pl: trainer.logger Keyless: RuntimeError: no key; log in"


def test_a_rule_may_change_until_an_update_is_done(rules, capsys):
    """Each of the two runs breaks off in update 1, the first before it is done, the second after."""
    words = [*BASE, "--data.updates=2", "--run=run", "--trainer.callbacks+=rules.Headed"]
    before, after = "on_train_batch_start", "on_train_batch_end"
    for when, status in ((before, 0), (after, 2)):
        (rules / "breaks.py").write_text(
            f"import lightning\n\nclass Breaks(lightning.Callback):\n    def {when}(self, *_):\n        1 / 0\n"
        )
        run = [*words, f"--run={when}", "--trainer.callbacks+=breaks.Breaks"]
        assert main(run) == 2
        forget("breaks", "rules")
        (rules / "breaks.py").write_text("import lightning\n\nclass Breaks(lightning.Callback):\n    pass\n")
        (rules / "rules.py").write_text(RULES.replace("self.limit = 3", "self.limit = 4"))
        capsys.readouterr()
        assert main(run) == status
        said = capsys.readouterr().err
        assert ("this run began under another rule" in said) == (status == 2)
        forget("breaks", "rules")
        (rules / "rules.py").write_text(RULES)


def test_a_rule_that_counts_goes_on_and_is_one_rule_throughout(rules):
    words = [*BASE, "--data.updates=4", "--run=run", "--checkpoint.every_n_updates=1"]
    words += ["--trainer.callbacks+=rules.Counts", "--trainer.callbacks+=rules.Count"]
    assert main(words) == 2  # Count breaks off update 1, whose checkpoint is not written
    (rules / "rules.py").write_text(RULES.replace("        helper()", "        report.number == 3 and helper()"))
    sys.modules.pop("rules")
    assert main(words) == 2
    (rules / "rules.py").write_text(RULES.replace("        helper()", "        pass"))
    sys.modules.pop("rules")
    assert main(words) == 0
    criterion, verdict = (
        json.loads((rules / "run" / f"{x}-Counts.json").read_text()) for x in ("criterion", "verdict")
    )
    assert criterion["sha256"] == verdict["sha256"] and verdict["criterion"] == criterion["criterion"]
    assert criterion["criterion"]["seen"] == 0


def test_a_reward_of_nothing_but_null_is_said_once(faulty, capsys):
    assert main([*BASE, "--run=run", "--data.updates=2", "--grader=Function", "--grader.path=faulty.py:silent"]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "no rollout was graded" in line]
    assert line.startswith("rlvr-pl: update 1: no rollout was graded (every reward is null)")
    assert line.endswith("look at the grader (said once)")


def test_of_a_notice_and_an_error_only_the_error_is_said(tmp_path, capsys):
    config = tmp_path / "c.yaml"
    config.write_text("objective:\n  class_path: GRPO\n  init_args:\n    mask_truncated: true\n")
    words = [*BASE, f"--run={tmp_path / 'run'}", f"--config={config}", "--objective=RLOO"]
    assert main([*words, "--model.max_grad_norm=-1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "model.max_grad_norm is -1.0" in line
    assert main(words) == 0
    assert "--objective: RLOO takes the place of GRPO; left out: mask_truncated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["power", "--nope"], "rlvr-pl power: unrecognized arguments: --nope; see rlvr-pl power --help"),
        (["compare"], "rlvr-pl compare: the following arguments are required: FILE; see rlvr-pl compare --help"),
        (
            ["passk", "x", "--json=3"],
            "rlvr-pl passk: argument --json: ignored explicit argument '3'; see rlvr-pl passk --help",
        ),
        (["comprae"], "rlvr-pl: comprae: no such command, did you mean compare? See rlvr-pl --help"),
        (["xyz"], "rlvr-pl: xyz: no such command; see rlvr-pl --help"),
        (["--nope"], "rlvr-pl: the following arguments are required: <command>; see rlvr-pl --help"),
    ],
)
def test_a_mistake_in_the_words_of_a_command_is_one_line(capsys, words, told):
    assert main(words) == 2
    assert capsys.readouterr().err == told + "\n"


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_tells_of_an_unknown_flag_in_one_line(capsys, command):
    assert main([command, "--no-such-flag"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rlvr-pl {command}: ") and line.endswith(f"; see rlvr-pl {command} --help")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seed: 1\nnope: 4\n", "c.yaml:2: a run has no setting 'nope'; see rlvr-pl fit --help"),
        ("model:\n  group_size: 2\n  nope: 4\n", "c.yaml:3: model has no setting 'nope'; see rlvr-pl fit --help"),
        (
            "objective:\n  class_path: GRPO\n  init_args:\n    nope: 3\n",
            "c.yaml:1: GRPO has no setting 'nope'; it takes",
        ),
        ("seed: 0\nobjective:\n  class_path: Nope\n", "c.yaml:2: objective Nope: no objective of that name; there are"),
        (
            "data:\n  class_path: QuestionData\n  init_args:\n    updates: x\n",
            "c.yaml:4: data.updates: QuestionData: expected",
        ),
        ("model: {group_size: null}\n", "c.yaml:1: model.group_size null: it needs a value"),
        (
            "seed: 1\ndata:\n  class_path: QuestionData\n  init_args:\n    updates:\n",
            "c.yaml:5: data.updates null: it needs a value",
        ),
        (
            "trainer:\n  callbacks:\n  - class_path: DriftMonitor\n  - class_path: DriftMonitor\n",
            "c.yaml:2: trainer.callbacks: DriftMonitor is there twice",
        ),
        ("# mine\noptimizer:\n", "c.yaml:2: optimizer: null; give it a value, or leave it out"),
        ("seed: 1\noptimizer:\n", "c.yaml:2: optimizer null: a run needs one"),
        ("seed: 1\nmodel:\n", "c.yaml:2: model: null; give it a value, or leave it out"),
        (
            "trainer:\n  callbacks:\n  - class_path: Nope\n",
            "c.yaml:2: trainer.callbacks Nope: no callback of that name",
        ),
    ],
)
def test_a_mistake_in_a_config_names_the_file_and_the_line(tmp_path, monkeypatch, capsys, text, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(text)
    assert main(["fit", "--config=c.yaml", "--run=run"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rlvr-pl: {told}")
    assert not (tmp_path / "run").exists()
