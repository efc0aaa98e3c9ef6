"""Real trackers: what arrives in TensorBoard, CSV, W&B (offline) and MLflow (file store)."""

from __future__ import annotations

import csv
import json

import pytest

from rlvr_pl.callbacks.tracker import markdown
from rlvr_pl.cli import main

WORDS = [
    "fit",
    "--run=r",
    "--policy.name=embedded:base",
    "--data.updates=2",
    "--data.validation=embedded:drift",
    "--model.group_size=4",
    "--model.max_new_tokens=12",
    "--tracker.rollouts=3",
]
DAMAGE = ["--trainer.callbacks+=DamageStop", "--trainer.callbacks.criterion.window=20"]


@pytest.fixture(autouse=True)
def in_a_fresh_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start_sha256(run):
    return json.loads((run / "run.json").read_text())["start_sha256"]


def test_tensorboard_gets_figures_settings_and_tables(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert main([*WORDS, *DAMAGE]) == 0
    run = tmp_path / "r"
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward")] == [0, 1]
    tables = events.Tags()["tensors"]
    assert {"completions/text_summary", "windows/text_summary"} <= set(tables)
    (event,) = events.Tensors("completions/text_summary")
    assert event.tensor_proto.string_val[0].decode().count("\n") == 1 + 3  # a header, its rule, three rollouts
    hparams = (run / "tensorboard" / "hparams.yaml").read_text()
    assert start_sha256(run) in hparams and "group_size: 4" in hparams
    assert json.loads((run / "criterion.json").read_text())["sha256"] in hparams


def test_csv(tmp_path):
    assert main([*WORDS, "--trainer.logger=CSVLogger", "--trainer.logger.save_dir=."]) == 0
    (path,) = (tmp_path / "r").glob("lightning_logs/*/metrics.csv")
    rewards = [row["reward"] for row in csv.DictReader(path.open()) if row["reward"]]
    recorded = [row["reward"] for row in csv.DictReader((tmp_path / "r" / "metrics.csv").open())]
    assert [float(x) for x in rewards] == pytest.approx([float(x) for x in recorded])
    assert {p.name for p in tmp_path.iterdir()} == {"r"}


def test_wandb_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="the package wandb is not installed")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logged, settings = [], []
    log, update = wandb.Run.log, wandb.Config.update
    monkeypatch.setattr(
        wandb.Run, "log", lambda self, data, *a, **k: (logged.append(data), log(self, data, *a, **k))[1]
    )
    monkeypatch.setattr(
        wandb.Config, "update", lambda self, data, *a, **k: (settings.append(data), update(self, data, *a, **k))[1]
    )
    assert main([*WORDS, "--trainer.logger=WandbLogger", "--trainer.logger.offline=true"]) == 0
    wandb.finish()
    tables = {name: value for row in logged for name, value in row.items() if isinstance(value, wandb.Table)}
    assert len(tables["completions"].data) == 3 and tables["completions"].columns[:2] == ["update", "uid"]
    assert len(tables["windows"].data) == 1
    assert sum("reward" in row for row in logged) == 2
    ours = [row for row in settings if "model/group_size" in row or "model" in row]
    assert len(ours) == 1 and start_sha256(tmp_path / "r") in str(ours)
    assert list((tmp_path / "r" / "wandb").glob("offline-run-*/*.wandb"))
    assert {p.name for p in tmp_path.iterdir()} == {"r"}


def test_mlflow_file_store(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="the package mlflow is not installed")
    pytest.importorskip("pandas", reason="MLflow's tables need pandas")
    assert main([*WORDS, "--trainer.logger=MLFlowLogger"]) == 0
    store = tmp_path / "r" / "mlruns"
    client = mlflow.tracking.MlflowClient(f"file:{store}")
    (experiment,) = client.search_experiments(filter_string="name = 'lightning_logs'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["model/group_size"] == "4"
    assert run.data.params["run/start_sha256"] == start_sha256(tmp_path / "r")
    assert len(client.get_metric_history(run.info.run_id, "reward")) == 2
    (path,) = store.rglob("completions/update-000001.json")
    table = json.loads(path.read_text())
    assert table["columns"][0] == "update" and len(table["data"]) == 3
    assert list(store.rglob("windows/update-000002.json"))
    assert {p.name for p in tmp_path.iterdir()} == {"r"}


def test_a_resumed_run_logs_its_settings_once(tmp_path, monkeypatch):
    from lightning.pytorch.loggers import TensorBoardLogger

    from rlvr_pl.module import RLVRModule

    logged = []
    monkeypatch.setattr(TensorBoardLogger, "log_hyperparams", lambda self, params, **_: logged.append(params))
    step = RLVRModule.training_step

    def breaks(self, batch, batch_idx):
        if self.updates_done == 1:
            raise RuntimeError("crash")
        return step(self, batch, batch_idx)

    monkeypatch.setattr(RLVRModule, "training_step", breaks)
    with pytest.raises(RuntimeError, match="crash"):
        main([*WORDS, "--checkpoint.every_n_updates=1"])
    monkeypatch.setattr(RLVRModule, "training_step", step)
    assert main(["fit", "--resume=r"]) == 0
    assert [params["model"]["group_size"] for params in logged] == [4]


def test_a_table_stays_one_whatever_stands_in_it():
    text = markdown(("a", "b"), [["x|y\nz", 1 / 3], [None, 2]])
    assert text.split("\n") == ["|a|b|", "|---|---|", "|x\\|y z|0.3333|", "||2|"]
