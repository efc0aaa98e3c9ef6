"""Nothing is executed that was not asked for: no pickles, no evaluated text, no class outside of its slot, no path
outside of the run."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("rlvr_pl", "objectives", "callbacks", "configs")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PICKLERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
EVALUATORS = {"eval", "exec", "compile", "__import__", "sympify", "parse_expr", "S"}
SHELLS = {"os.system", "os.popen", "pty.spawn", "subprocess.getoutput", "subprocess.getstatusoutput"}
ALLOWED = {
    "rlvr_pl/cli.py": "imports by name",  # a command of its own list
    "rlvr_pl/report/content.py": "imports by name",  # likewise
    "rlvr_pl/user_function.py": "imports by name",  # the user's own reward function or row filter
    "rlvr_pl/__init__.py": "imports by name",  # the rooms of the public names, a fixed table
    "rlvr_pl/mistakes.py": "imports by name",  # a class that the parser has already imported
    "rlvr_pl/analysis/schema.py": "imports by name",  # likewise
    "rlvr_pl/sampling/vllm.py": "imports by name",  # vllm alone
    "rlvr_pl/grading/worker.py": "imports by name",  # the grader's room
    "rlvr_pl/grading/supplied_worker.py": "calls sympy_parser.parse_expr",  # disarmed, and in a worker
    **{f"{folder}/__init__.py": "imports by name" for folder in ("objectives", "callbacks", "rlvr_pl/grading")},
}
"""What a file may do of this all the same, and why."""


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of a name or attribute; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (head := dotted(node.value)):
        return f"{head}.{node.attr}"
    return ""


def keyword(call: ast.Call, name: str) -> object:
    """The constant given for a keyword; None where it is absent or no constant."""
    return next((k.value.value for k in call.keywords if k.arg == name and isinstance(k.value, ast.Constant)), None)


def faults(tree: ast.AST) -> list[str]:
    """What in a file could run code that nobody wrote here."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [f"imports {a.name}" for a in node.names if a.name.split(".")[0] in PICKLERS]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PICKLERS:
            found.append(f"imports {node.module}")
        elif isinstance(node, ast.Call):
            called = dotted(node.func)
            last = called.rsplit(".", 1)[-1]
            if called in EVALUATORS or last in ("sympify", "parse_expr", "read_pickle") or called in SHELLS:
                found.append(f"calls {called}")
            if called in ("torch.load", "torch.serialization.load") and keyword(node, "weights_only") is not True:
                found.append("torch.load without weights_only=True")
            if called in ("np.load", "numpy.load") and keyword(node, "allow_pickle") is True:
                found.append("np.load with allow_pickle")
            if called in ("yaml.unsafe_load", "yaml.full_load", "yaml.load_all"):
                found.append(f"calls {called}")
            if called == "yaml.load" and not (len(node.args) == 2 and dotted(node.args[1]) in ("_Loader", "Loader")):
                found.append("yaml.load without a loader of plain data")
            if keyword(node, "shell") is True:
                found.append(f"{called} with a shell")
            if keyword(node, "trust_remote_code") is True or keyword(node, "weights_only") is False:
                found.append(f"{called} trusts what it loads")
            if last == "import_module":
                found.append("imports by name")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_source_can_run_what_it_reads(path):
    name = path.relative_to(ROOT).as_posix()
    assert set(faults(ast.parse(path.read_text(encoding="utf-8")))) <= {ALLOWED.get(name)}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from dill import loads", "eval(x)", "exec(x)", "torch.load(p)",
        "torch.load(p, weights_only=w)",
        "torch.load(p, weights_only=False)", "np.load(p, allow_pickle=True)", "yaml.load(text)",
        "yaml.load(text, yaml.Loader)", "yaml.unsafe_load(text)", "sympy.sympify(answer)", "os.system(c)",
        "subprocess.run(c, shell=True)", "AutoModel.from_pretrained(p, trust_remote_code=True)", "pd.read_pickle(p)",
        "importlib.import_module(name)",
    ],
)  # fmt: skip
def test_the_check_itself_finds(line):
    assert faults(ast.parse(line))


def test_every_yaml_loader_of_ours_is_a_safe_one():
    import yaml

    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name in ("_Loader", "Loader"):
                assert all("SafeLoader" in ast.unparse(base) for base in node.bases), path
    assert issubclass(yaml.CSafeLoader, yaml.constructor.SafeConstructor)


def test_remote_code_is_off_unless_asked_for():
    from rlvr_pl import policy

    found = 0
    for _, function in inspect.getmembers(policy, inspect.isfunction):
        parameter = inspect.signature(function).parameters.get("trust_remote_code")
        if parameter is not None and parameter.default is not inspect.Parameter.empty:
            found += 1
            assert parameter.default is False, function
    assert found >= 3


# ---- settings ------------------------------------------------------------------------------------------------------

LOOSE = """
from typing import Any
from lightning.pytorch import Callback

class Loose(Callback):
    def __init__(self, typed: Any = None, untyped=None, many: dict[str, Any] | None = None):
        pass
"""
TOUCH = {"class_path": "subprocess.Popen", "init_args": {"args": ["touch", "executed"]}}
SLOTS = (
    "objective", "sampler", "grader", "data", "optimizer", "lr_scheduler", "trainer.strategy", "trainer.profiler",
    "trainer.logger", "trainer.accelerator", "trainer.plugins", "policy", "policy.template", "precision", "checkpoint",
    "validation", "recorder", "rollout_stats", "progress", "time_limit", "trainer", "model", "seed",
)  # fmt: skip


@pytest.fixture
def fit(tmp_path, monkeypatch):
    """``fit(*words)`` in a fresh folder gives the status; whatever ran would have left the file ``executed``."""
    from rlvr_pl.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "loose.py").write_text(LOOSE)
    return lambda *words: main(["fit", "--run=r", "--data.updates=1", "--model.max_new_tokens=4", *words])


@pytest.mark.parametrize("slot", SLOTS)
def test_no_slot_takes_a_class_outside_of_its_base(fit, tmp_path, capsys, slot):
    assert fit(f"--{slot}={json.dumps(TOUCH)}") == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err and err.count("\n") == 1
    assert not (tmp_path / "executed").exists() and not (tmp_path / "r").exists()


NESTED = {
    "a list of callbacks": {"trainer": {"callbacks": [TOUCH]}},
    "graders of a sum": {"grader": {"class_path": "WeightedSum", "init_args": {"graders": [TOUCH]}}},
    "a criterion": {"trainer": {"callbacks": [{"class_path": "DamageStop", "init_args": {"criterion": TOUCH}}]}},
    "an objective's own part": {"objective": {"class_path": "GRPO", "init_args": {"correction": TOUCH}}},
    "a function": {
        "trainer": {
            "callbacks": [
                {"class_path": "lightning.pytorch.callbacks.LambdaCallback", "init_args": {"setup": "os.system"}}
            ]
        }
    },
    "a filter": {"data": {"class_path": "SolutionData", "init_args": {"solutions": [], "filter": TOUCH}}},
}


@pytest.mark.parametrize("where", NESTED)
def test_no_nested_slot_does_either(fit, tmp_path, capsys, where):
    (tmp_path / "c.yaml").write_text(json.dumps(NESTED[where]))
    assert fit("--config=c.yaml") == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err and err.count("\n") == 1
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["typed", "untyped"])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x], lambda x: {"a": x}])
def test_a_setting_without_a_type_is_data(fit, tmp_path, name, wrap):
    """Whether the run then goes on is the callback's own affair; nothing in its setting was called."""
    spec = {"class_path": "loose.Loose", "init_args": {name: wrap(TOUCH)}}
    (tmp_path / "c.yaml").write_text(json.dumps({"trainer": {"callbacks": [spec]}}))
    assert fit("--config=c.yaml", "--model.group_size=1") == 2  # refused after all classes were made
    assert not (tmp_path / "executed").exists()


def test_settings_are_plain_data(fit, tmp_path, capsys):
    (tmp_path / "c.yaml").write_text('seed: !!python/object/apply:os.system ["touch executed"]\n')
    assert fit("--config=c.yaml") == 2
    assert "could not determine a constructor" in capsys.readouterr().err
    assert not (tmp_path / "executed").exists()


# ---- model output, checkpoints, paths ------------------------------------------------------------------------------


def test_uids_and_answers_name_no_path(fit, tmp_path):
    """Questions may be called anything; files are named after updates only."""
    rows = [{"uid": uid, "problem": "from half past ten to noon by 30min ?", "answer": "../../x", "subject": "/etc/x"}
            for uid in ("../../escaped", "/tmp/escaped", "a\\u0020b", "..")]  # fmt: skip
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--data.train=q.jsonl", "--data.validation=q.jsonl", "--recorder.texts=true"]
    assert fit(*words, "--data.updates=2", "--trainer.callbacks+=DamageStop") == 0
    assert {p.name for p in tmp_path.iterdir()} - {"__pycache__"} == {"loose.py", "q.jsonl", "r"}
    run = tmp_path / "r"
    assert all(p.resolve().is_relative_to(run) for p in run.rglob("*"))
    assert not list(run.rglob("*escaped*"))


def test_a_checkpoint_with_code_in_it_is_not_loaded(fit, tmp_path, capsys):
    """A pickle that would run a program is refused even where its hash is right."""
    import pickle

    import torch

    from rlvr_pl.records import sha256_file

    class Bomb:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    words = ["--data.validation=null", "--data.updates=2", "--checkpoint.every_n_updates=1"]
    assert fit(*words) == 0
    run = tmp_path / "r"
    state = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**state, "state": "running"}))
    newest = run / "checkpoints" / "update-000002.ckpt"
    for write in (lambda: newest.write_bytes(pickle.dumps({"state_dict": Bomb()})), lambda: torch.save(Bomb(), newest)):
        write()
        newest.with_suffix(".json").write_text(json.dumps({"update": 2, "sha256": sha256_file(newest)}))
        capsys.readouterr()
        assert fit(*words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "update-000002.ckpt: not a checkpoint of a run (" in line
    assert "Weights only load failed" in line
    assert not (tmp_path / "executed").exists()
