"""What the benchmarks count and say; what they measure is theirs."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def in_the_folder(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_the_floor_is_counted_from_the_shape():
    """One layer, width 2, a head of 2, inner 3, five tokens. Blocks: 2 x 2 x (2 + 2) + 3 x 2 x 3 = 34, head 10, so 44
    weights of 4 bytes. Four prompts of 10 tokens, one completion of 3.

    Prompts: 4 x (2 (34 x 10 + 10) + 4 x 2 x 55 attended) = 4560. Two tokens are fed back: 2 x 2 x 44 + 4 x 2 x (11
    + 12) = 360. Each of the two steps reads the weights, a cache of 16 bytes a token (11, then 12) and 2 x 4 x 5 of
    logits. Gradient: three times 2 x 34 x 12 + 4 x 2 x 78 + 2 x 10 x 3 = 1500."""
    from floor import Counts

    shape = {"num_hidden_layers": 1, "hidden_size": 2, "num_attention_heads": 1, "num_key_value_heads": 1,
             "head_dim": 2, "intermediate_size": 3, "vocab_size": 5}  # fmt: skip
    counts = Counts(shape, lengths=[3], learned=[3])
    operations, traffic, _ = counts.generation()
    assert operations == 4560 + 360
    assert traffic == 176 + (176 + 16 * 11 + 40) + (176 + 16 * 12 + 40)
    assert counts.gradient()[0] == 3 * 1500
    assert counts.optimizer()[:2] == (0, 8 * 176)


def test_exponents_are_those_of_the_sizes(monkeypatch):
    """Costs of 2 s^1.5 have the exponent 1.5."""
    import scaling

    class Fake:
        def __init__(self, size):
            self.cost = 2 * size.length**1.5

        def run(self):
            return dict.fromkeys(scaling.STAGES, (self.cost, self.cost))

    monkeypatch.setattr(scaling, "Update", Fake)
    found = scaling.sweep("length", runs=1)
    assert found["sizes"] == [32, 64, 128, 256, 512]
    assert found["exponents"]["update"] == pytest.approx(1.5, abs=1e-9)
    assert scaling.markdown("length", found).count("| 1.50 |") >= 4


def test_without_a_gpu_nothing_is_claimed(monkeypatch, capsys):
    import gpu

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.main() == 0
    assert capsys.readouterr().out == "gpu: there is no GPU here, so nothing was measured\n"


SMALLEST = {
    "weights": "--rollouts 8 --tokens 1024",  # more tokens than the embedded policy can read
    "head": "--rows 16 --hidden 16 --vocabulary 5000 --runs 1",
    "sampler": "--rows 8 --max-new-tokens 8 --runs 1",
    "monitors": "--updates 6 --questions 2 --drift-every 3",
    "drift_memory": "--hidden 64 --tokens 64",
    "scaling": "--over length --runs 1",
    "hostile": "--answers 4 --limit 0.2",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_runs_to_its_figures(name, monkeypatch, capsys):
    """At its smallest, so that a documented command never meets a fault that only it would have shown."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *SMALLEST[name].split(), "--json"])
    assert not importlib.import_module(name).main()
    figures = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert any(isinstance(x, float) and x > 0 for x in _leaves(figures))


def _leaves(value):
    if isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _leaves(part)
    else:
        yield value


def test_the_peak_of_a_rank_is_said_after_every_update(capsys):
    from types import SimpleNamespace

    from shards_memory import Coin, Peak

    from rlvr_pl.grading.base import GradeRequest
    from rlvr_pl.types import Question

    peak, trainer = Peak(), SimpleNamespace(global_rank=1)
    peak.on_train_start(trainer, None)
    report = SimpleNamespace(stepped=True)
    peak.on_train_batch_end(trainer, SimpleNamespace(updates_done=2), {"update": report}, None, 0)
    line = capsys.readouterr().out
    assert line.startswith("rank 1, update 2 (stepped: True): at most ")
    most, before = (float(word.split()[-1]) for word in line.split(" GB")[:2])
    assert 0 < before <= most
    asked = [GradeRequest("", Question("q", "", "1"), token_ids=ids) for ids in ((1, 2), (2, 2))]
    assert [grade.reward for grade in Coin().grade(asked, require_box=True)] == [1.0, 0.0]
