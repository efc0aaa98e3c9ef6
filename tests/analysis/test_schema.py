"""The JSON Schema of configs: it takes what `fit` takes and points at what `fit` refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rlvr_pl.cli import main
from rlvr_pl.config_file import read_config
from rlvr_pl.configs import FOLDER

jsonschema = pytest.importorskip("jsonschema", reason="the package jsonschema is not installed")


@pytest.fixture(scope="module")
def schema(tmp_path_factory):
    """Made in a fresh process: Lightning makes optimizer classes while it trains, which have no import path."""
    out = tmp_path_factory.mktemp("schema") / "rlvr-pl.schema.json"
    code = "import sys; from rlvr_pl.cli import main; sys.exit(main(sys.argv[1:]))"
    subprocess.run([sys.executable, "-c", code, "schema", "--out", str(out)], check=True)
    found = json.loads(out.read_text())
    jsonschema.Draft202012Validator.check_schema(found)
    return found


@pytest.fixture
def faults(schema):
    return lambda config: list(jsonschema.Draft202012Validator(schema).iter_errors(config))


@pytest.mark.parametrize(
    "path", sorted(str(p.relative_to(FOLDER)) for p in FOLDER.rglob("*.yaml") if "studies" not in p.parts)
)
def test_every_shipped_config_is_valid(faults, path):
    assert faults(read_config(FOLDER / path)) == []


@pytest.mark.parametrize(
    "config",
    [
        {"modell": {"group_size": 4}},
        {"model": {"group_size": "four"}},
        {"model": {"uniform_update": "sometimes"}},
        {"objective": {"class_path": "GRPO", "init_args": {"scales": "std"}}},
        {"objective": {"class_path": "GRPO", "init_args": {"scale": "stdd"}}},
        {"trainer": {"callbacks": [{"class_path": "DriftMonitor", "init_args": {"every": 5}}]}},
        {"data": {"trains": "embedded:train"}},
    ],
)
def test_mistakes_are_seen(faults, config):
    assert faults(config)


@pytest.mark.parametrize(
    "config",
    [
        {"$schema": "rlvr-pl.schema.json", "seed": 3},
        {"objective": {"class_path": "rlvr_pl.objectives.GRPO", "init_args": {"scale": "none"}}},
        {"objective": {"class_path": "my_file.MyObjective", "init_args": {"anything": 1}}},
        {"objective": {"scale": "none"}},
        {"data": {"class_path": "QuestionData", "init_args": {"updates": 3}}},
        {"trainer": {"callbacks": [{"class_path": "lightning.pytorch.callbacks.LearningRateMonitor"}]}},
    ],
)
def test_other_ways_to_say_it_are_valid(faults, config):
    assert faults(config) == []


def test_settings_are_explained(schema):
    """An editor shows the text of the docstring beside the key."""
    group = schema["properties"]["model"]["properties"]["group_size"]
    assert group["default"] == 8
    assert "rollouts of each question" in group["description"]


def test_an_existing_file_is_kept(tmp_path, capsys):
    (tmp_path / "s.json").write_text("mine")
    assert main(["schema", "--out", str(tmp_path / "s.json")]) == 2
    assert "exists" in capsys.readouterr().err
    assert (tmp_path / "s.json").read_text() == "mine"
