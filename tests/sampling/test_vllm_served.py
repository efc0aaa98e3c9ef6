"""`VLLMServer` with real servers on a CPU: one in FP32 for parity, one in BF16 for runs. Both start together, once."""

from __future__ import annotations

import csv
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rlvr_pl.callbacks.sampler_canary import logprob_gaps
from rlvr_pl.cli import main
from rlvr_pl.configs import find_config
from rlvr_pl.data.pools import load_questions
from rlvr_pl.policy import load_policy
from rlvr_pl.policy_folder import EMBEDDED
from rlvr_pl.sampling import vllm_server as ours
from rlvr_pl.sampling.base import Decoding, NonFiniteLogits, SampleRequest
from rlvr_pl.sampling.endpoint import Endpoint, EndpointError

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-vllm` has an environment with it")

SAMPLED = Decoding(0.8, 0.9, 40)
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
}


class Server:
    """A server in a process group of its own. (`vllm serve` itself asks for a distribution called vllm, which the build
    for CPUs is not; it would start this module.)"""

    def __init__(self, model: Path, dtype: str, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", log
        words = ["--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
        words += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--enforce-eager"]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, "--max-num-seqs", "64"],
                env={**os.environ, **ENVIRONMENT},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def wait(self) -> None:
        endpoint = Endpoint(self.url, 10.0)
        while True:
            try:
                endpoint.ask("GET", "/health")
                return
            except EndpointError:
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                time.sleep(0.2)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """A policy in FP32, its server, and one in BF16."""
    folder = tmp_path_factory.mktemp("served")
    made = [Server(EMBEDDED / "start", dtype, folder / f"{dtype}.log") for dtype in ("float32", "bfloat16")]
    try:
        for server in made:
            server.wait()
        yield load_policy("embedded:start", dtype="float32"), *made
    finally:
        for server in made:
            server.kill()


@pytest.fixture
def sampler(servers, tmp_path):
    made = ours.VLLMServer(servers[1].url, str(tmp_path))
    yield made
    made.close()


@pytest.fixture(scope="module")
def prompts(servers):
    return [servers[0].prompt_ids(q) for q in load_questions("embedded:val350")[:12]]


def test_greedy_parity_after_every_push(servers, sampler, prompts, agree, moved):
    """Of weights before and after, of short prompts and of one longer than a block of vLLM's cache."""
    policy, long = servers[0], (sum(prompts, ()) * 3)[:300]
    answers = []
    for each in (policy, moved(policy, 1), moved(policy, 2)):
        sampler.sync(each)
        answers.append(agree(sampler, each, [long, *prompts]))
    assert sum(a != b for a, b in zip(answers[0], answers[1])) > 6


def test_sampling_log_probs_are_those_of_the_nucleus_and_keys_name_draws(servers, sampler, prompts):
    policy = servers[0]
    sampler.sync(policy)
    requests = [SampleRequest(p, ("draw", i)) for i, p in enumerate(prompts)]
    found = sampler.generate(requests, SAMPLED)
    assert max(logprob_gaps(policy, list(zip(requests, found)), SAMPLED)) < 1e-4
    assert sampler.generate(requests, SAMPLED) == found
    assert sampler.generate([SampleRequest(r.prompt_ids, ("other", *r.key)) for r in requests], SAMPLED) != found


def test_weights_that_are_not_finite_are_told_as_such(servers, sampler, prompts, moved):
    broken = moved(servers[0])
    with torch.no_grad():
        broken.model.model.norm.weight.fill_(torch.nan)
    sampler.sync(broken)
    with pytest.raises(NonFiniteLogits):
        sampler.generate([SampleRequest(prompts[0], ("draw",))], SAMPLED)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pushes").mkdir()
    return tmp_path


def fit_words(server: Server, updates: int, *words: str) -> list[str]:
    common = ["fit", "--config", str(find_config("quickstart.yaml")), "--run=r", f"--data.updates={updates}"]
    common += ["--data.questions_per_update=4", "--data.validation=null", *words]
    return [*common, "--sampler", "VLLMServer", f"--sampler.url={server.url}", "--sampler.folder=pushes"]


def rows() -> list[dict[str, str]]:
    with Path("r/metrics.csv").open() as f:
        return list(csv.DictReader(f))


def test_a_run_trains_through_a_server(here, servers):
    """In BF16 a few hundredths of a nat a token are rounding; the weights move at this rate."""
    assert main(fit_words(servers[2], 3)) == 0
    assert len(rows()) == 3 and max(float(row["canary/gap"]) for row in rows()) < 0.05
    state = json.loads((here / "r" / "run.json").read_text())
    assert state["engine"].startswith("vllm-server-0.") and state["state"] == "finished"
    assert not list((here / "pushes").iterdir())


def test_evaluate_pushes_the_policy_that_it_names(here, servers, moved):
    """One question at a time, so that no other rounding can decide a near-tie."""
    moved(load_policy("embedded:start")).save(here / "moved")
    words = ["--limit=12", "--batch-size=1", "--out=items.jsonl", "--overwrite", "--sampler=vllm-server"]
    words += ["--server", servers[2].url, "--server-folder", "pushes"]

    def answers(policy: str) -> list[str]:
        assert main(["evaluate", policy, *words]) == 0
        return (here / "items.jsonl").read_text().splitlines()[1:]

    first, other = answers("embedded:start"), answers("moved")
    assert answers("embedded:start") == first != other


def test_a_skipped_push_ends_the_run(here, servers, monkeypatch, capsys):
    load, count = ours._load, [0]

    def once(server, folder):
        count[0] += 1
        if count[0] == 1:
            load(server, folder)

    monkeypatch.setattr(ours, "_load", once)
    assert main(fit_words(servers[2], 20, "--optimizer.init_args.lr=3e-3")) == 1
    assert "the sampler holds stale weights" in capsys.readouterr().err
    assert 1 <= len(rows()) < 20 and count[0] > 1


def test_two_ranks_share_a_server(here, servers):
    (here / "command.py").write_text("import sys; from rlvr_pl.cli import entry; entry()\n")
    two = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=ddp"]
    command = [sys.executable, "command.py", *fit_words(servers[2], 2, *two)]
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env={**os.environ, **path}, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(rows()) == 2 and max(float(row["canary/gap"]) for row in rows()) < 0.05
    assert not list((here / "pushes").iterdir())


KILLING = """
import os, signal
from lightning.pytorch import Callback

class Killing(Callback):
    def __init__(self, group: int):
        self.group = group

    def on_train_batch_end(self, trainer, module, *_):
        if module.updates_done == 2:
            os.killpg(self.group, signal.SIGKILL)
"""


def test_a_server_that_is_killed_ends_the_run_in_one_line(here, servers, capsys):
    """The last test: the server is gone. The run keeps what it has, and is refused, not damaged, until one serves."""
    (here / "killing.py").write_text(KILLING)
    group = servers[2].process.pid
    words = ["--trainer.callbacks+=killing.Killing", f"--trainer.callbacks.group={group}"]
    assert main(fit_words(servers[2], 4, *words, "--checkpoint.every_n_updates=1")) == 1
    told = [line for line in capsys.readouterr().err.splitlines() if "Traceback" in line or "VLLMServer" in line]
    (line,) = told
    assert f"{servers[2].url} does not answer" in line and "VLLM_SERVER_DEV_MODE=1 vllm serve" in line
    state = json.loads((here / "r" / "run.json").read_text())
    assert (state["state"], state["updates"], len(rows())) == ("stopped", 2, 2)
    assert main(["fit", "--resume=r"]) == 2
    assert "does not answer" in capsys.readouterr().err
    assert json.loads((here / "r" / "run.json").read_text()) == state
