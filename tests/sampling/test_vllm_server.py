"""`VLLMServer` and the protocol, against a server that speaks as `vllm serve` does but computes nothing."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rlvr_pl.cli import main
from rlvr_pl.errors import RunFailure, UserError
from rlvr_pl.policy import load_policy
from rlvr_pl.policy_folder import EMBEDDED
from rlvr_pl.ranks import Ranks
from rlvr_pl.sampling import vllm_server as ours
from rlvr_pl.sampling.base import Decoding, NonFiniteLogits, SampleRequest, seed_of
from rlvr_pl.sampling.endpoint import EndpointError
from rlvr_pl.types import StopReason

SAMPLED = Decoding(0.8, 0.9, 4)
RELOAD, RESET, ANSWER = "/collective_rpc", "/reset_prefix_cache", "/v1/completions"


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"] or 0)
        self._answer(json.loads(self.rfile.read(length) or b"null"))

    def _answer(self, body) -> None:
        path = self.path.partition("?")[0]
        self.server.log.append((path, body))
        status, reply = self.server.reply(path, body)
        text = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_) -> None:
        pass


class Stub(ThreadingHTTPServer):
    """A server whose completions repeat the first id of the prompt up to the cap, each at log-prob -0.5.

    Attributes:
        log: path and body of every request.
        odd: path -> (status, answer) in place of the usual one, or a function of the body that gives both.
        model: what ``/server_info`` says of the model.
        loaded: for each reload, the folder and the tensors that lay in it then.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.log: list = []
        self.odd: dict = {}
        self.model = {
            "model": str(EMBEDDED / "start"),
            "dtype": "torch.bfloat16",
            "max_model_len": 512,
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
        }
        self.loaded: list = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def reply(self, path: str, body):
        if path in self.odd:
            odd = self.odd[path]
            return odd(body) if callable(odd) else odd
        if path == "/version":
            return 200, {"version": "0.0.7"}
        if path == "/server_info":
            return 200, {"vllm_config": {"model_config": self.model}}
        if path == RELOAD:
            assert body["method"] == "reload_weights"
            folder = Path(body["kwargs"]["weights_path"])
            self.loaded.append((folder, load_file(folder / "model.safetensors")))
            return 200, {"results": [None]}
        if path == RESET:
            return 200, {"success": True}
        if path == ANSWER:
            return 200, completion([body["prompt"][0]] * body["max_tokens"])
        return 404, {"detail": "Not Found"}

    def handle_error(self, request, client_address) -> None:
        """A client that does not wait for its answer is no fault here."""

    def paths(self) -> list[str]:
        return [path for path, _ in self.log]

    def bodies(self) -> list[dict]:
        return [body for path, body in self.log if path == ANSWER]

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


def completion(ids: list[int]) -> dict:
    return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}}]}


@pytest.fixture
def stubs():
    """``stubs(2)``: two servers."""
    with ExitStack() as stack:

        def start(count: int) -> list[Stub]:
            made = [Stub() for _ in range(count)]
            for stub in made:
                stack.callback(stub.stop)
            return made

        yield start


@pytest.fixture
def stub(stubs) -> Stub:
    return stubs(1)[0]


@pytest.fixture(scope="module")
def policy():
    return load_policy("embedded:start")


def requests(count: int) -> list[SampleRequest]:
    return [SampleRequest((10 + i, 5), ("key", i), 2 + i % 3) for i in range(count)]


# ---- what is sent --------------------------------------------------------------------------------------------------


def test_a_push_is_loaded_and_the_cache_dropped_before_the_next_request(stub, policy, tmp_path):
    sampler = ours.VLLMServer(stub.url, str(tmp_path))
    assert (sampler.engine, sampler.deterministic, sampler.own_weights) == ("vllm-server-0.0.7", False, True)
    other = policy.copy_frozen()
    with torch.no_grad():
        other.head.add_(1)
    for each in (policy, other):
        sampler.sync(each)
        sampler.generate(requests(1), SAMPLED)
    sampler.close()
    assert stub.paths() == ["/version", "/server_info", *[RELOAD, RESET, ANSWER] * 2]
    for each, (_, tensors) in zip((policy, other), stub.loaded):
        state = each.model.state_dict()
        assert tensors.keys() == state.keys()
        assert all(torch.equal(tensors[name], state[name]) for name in state)


def test_a_request_carries_its_key_as_a_seed_and_all_of_the_decoding(stub, policy, tmp_path):
    sampler = ours.VLLMServer(stub.url, str(tmp_path))
    sampler.sync(policy)
    sampler.generate(requests(1), SAMPLED)
    sampler.generate(requests(1), SAMPLED.greedy())
    drawn, greedy = stub.bodies()
    common = {"prompt": [10, 5], "max_tokens": 2, "logprobs": 0, "stop_token_ids": list(policy.eos_ids)}
    common |= {"return_token_ids": True, "skip_special_tokens": False}
    assert drawn == {**common, "temperature": 0.8, "top_p": 0.9, "seed": seed_of(("key", 0))}
    assert greedy == {**common, "temperature": 0.0, "top_p": 1.0, "seed": None}


def test_a_cache_that_is_still_held_is_asked_for_again(stub, policy, tmp_path):
    answers = iter([False, False, True])
    stub.odd[RESET] = lambda _: (200, {"success": next(answers)})
    ours.VLLMServer(stub.url, str(tmp_path)).sync(policy)
    assert stub.paths()[2:] == [RELOAD, RESET, RESET, RESET]


def test_a_cache_that_stays_held_is_an_error(stub, policy, tmp_path, monkeypatch):
    monkeypatch.setattr(ours, "PATIENCE", 0.0)
    stub.odd[RESET] = (200, {"success": False})
    with pytest.raises(RunFailure, match="keeps keys and values of the old weights"):
        ours.VLLMServer(stub.url, str(tmp_path)).sync(policy)


# ---- several servers, several ranks --------------------------------------------------------------------------------


def test_requests_are_dealt_evenly_and_answered_in_order(stubs, policy, tmp_path):
    """Of 7 the first server has 3 and the second 4; the first of each waits until the others are answered."""
    both = stubs(2)
    for stub, count in zip(both, (3, 4)):
        rest, lock = [count - 1], threading.Lock()
        answered = threading.Event()

        def late(body, first=10 if count == 3 else 13, rest=rest, lock=lock, answered=answered):
            if body["prompt"][0] == first:
                answered.wait(30)
            else:
                with lock:
                    rest[0] -= 1
                    if rest[0] == 0:
                        answered.set()
            return 200, completion([body["prompt"][0]] * body["max_tokens"])

        stub.odd[ANSWER] = late
    sampler = ours.VLLMServer([stub.url for stub in both], str(tmp_path))
    sampler.sync(policy)
    told: list[int] = []
    found = sampler.generate(requests(7), SAMPLED, told.append)
    assert [c.token_ids for c in found] == [(10 + i,) * (2 + i % 3) for i in range(7)]
    assert told == [1, 2, 3, 4, 5, 6, 7]
    assert [sorted(body["prompt"][0] for body in stub.bodies()) for stub in both] == [[10, 11, 12], [13, 14, 15, 16]]
    assert [len(stub.loaded) for stub in both] == [1, 1]
    assert both[0].loaded[0][0] == both[1].loaded[0][0]


def test_only_rank_0_pushes(stub, policy, tmp_path, monkeypatch):
    class Second(Ranks):
        def together(self, compute):
            return list(compute())

    sampler = ours.VLLMServer(stub.url, str(tmp_path))
    monkeypatch.setattr(Ranks, "here", lambda: Second(1, 2))
    sampler.sync(policy)
    assert len(sampler.generate(requests(2), SAMPLED)) == 2
    assert RELOAD not in stub.paths() and not list(tmp_path.iterdir())


def test_one_server_that_fails_ends_the_waiting_for_the_others(stubs, policy, tmp_path):
    bad, slow = stubs(2)
    waiting, over = threading.Event(), threading.Event()
    patience_ran_out = []

    def hang(body):
        waiting.set()
        if not over.wait(60):
            patience_ran_out.append(body)
        return 200, completion([1])

    def fail(_):
        waiting.wait(60)
        return 500, {"error": {"message": "EngineCore encountered an issue"}}

    bad.odd[ANSWER], slow.odd[ANSWER] = fail, hang
    sampler = ours.VLLMServer([bad.url, slow.url], str(tmp_path))
    sampler.sync(policy)
    with pytest.raises(RunFailure, match="500: EngineCore encountered an issue"):
        sampler.generate(requests(2), SAMPLED)
    over.set()
    assert not patience_ran_out


# ---- the folder ----------------------------------------------------------------------------------------------------


def test_the_folder_keeps_one_push_of_each_run_and_everything_of_others(stub, policy, tmp_path):
    (tmp_path / "000001").mkdir()
    (tmp_path / "000001" / "model.safetensors").write_text("another's")
    one, two = (ours.VLLMServer(stub.url, str(tmp_path)) for _ in range(2))
    for sampler in (one, two, one):
        sampler.sync(policy)
    pushes = sorted(path.relative_to(tmp_path) for path in tmp_path.glob("rlvr-pl-*/*"))
    assert sorted(path.name for path in pushes) == ["000001", "000002"]
    assert len({path.parent for path in pushes}) == 2
    assert stub.loaded[-1][0].name == "000002"
    one.close()
    (left,) = tmp_path.glob("rlvr-pl-*/*")
    assert left.name == "000001" and (left / "model.safetensors").is_file()
    two.close()
    assert [path.name for path in tmp_path.iterdir()] == ["000001"]
    assert (tmp_path / "000001" / "model.safetensors").read_text() == "another's"


def test_a_folder_is_made_by_nobody_but_the_user(stub, tmp_path):
    with pytest.raises(UserError, match="no folder that can be written"):
        ours.VLLMServer(stub.url, str(tmp_path / "absent"))


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://h:1", "h:8000", "http://", "http://h:x", "http://u:p@h:1", "http://h/?a=1", ""]
)
def test_no_other_url(url, tmp_path):
    with pytest.raises(UserError, match="must be http://HOST:PORT or https://HOST:PORT"):
        ours.VLLMServer(url, str(tmp_path))


def test_a_redirection_is_not_followed(stubs, tmp_path):
    one, two = stubs(2)
    one.odd["/version"] = (307, {"detail": two.url})
    with pytest.raises(UserError, match="answers 307"):
        ours.VLLMServer(one.url, str(tmp_path))
    assert not two.log


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"url": []}, "name each server once"),
        ({"url": ["http://a:1", "http://a:1"]}, "name each server once"),
        ({"concurrency": 0}, "sampler.concurrency is 0"),
        ({"timeout": -1.0}, "sampler.timeout is -1.0"),
    ],
)
def test_settings_out_of_range(settings, message, tmp_path):
    with pytest.raises(UserError, match=message):
        ours.VLLMServer(**{"url": "http://127.0.0.1:1", "folder": str(tmp_path), **settings})


COMMAND = "VLLM_SERVER_DEV_MODE=1 vllm serve"


@pytest.mark.parametrize(
    ("path", "reply", "message"),
    [
        ("/server_info", (404, {"detail": "Not Found"}), f"development mode is off; start it with `{COMMAND}"),
        ("/version", (500, b"oh"), "/version answers 500: oh"),
        ("/version", (200, b"<html>"), "is no JSON: <html>"),
        ("/server_info", (200, {"vllm_config": {}}), "no server of vLLM"),
        ("/version", (200, [1]), "no server of vLLM"),
    ],
)
def test_a_server_that_is_no_vllm_in_development_mode(stub, tmp_path, path, reply, message):
    stub.odd[path] = reply
    with pytest.raises(UserError) as caught:
        ours.VLLMServer(stub.url, str(tmp_path))
    assert message in str(caught.value) and stub.url in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["logprobs_mode", "generation_config"])
def test_a_server_started_with_other_settings(stub, tmp_path, name):
    stub.model[name] = "auto"
    with pytest.raises(UserError, match=rf"its {name} is auto, .*--logprobs-mode processed_logprobs"):
        ours.VLLMServer(stub.url, str(tmp_path))


def test_servers_of_two_versions(stubs, tmp_path):
    one, two = stubs(2)
    two.odd["/version"] = (200, {"version": "0.0.8"})
    with pytest.raises(UserError, match=r"have vLLM 0\.0\.7, 0\.0\.8"):
        ours.VLLMServer([one.url, two.url], str(tmp_path))


@pytest.mark.parametrize("name", ["vocab_size", "num_hidden_layers", "tie_word_embeddings", "rope_parameters"])
def test_another_model(stub, policy, tmp_path, name):
    """Another vocabulary, other shapes, or another function of the same weights: nothing is pushed."""
    config = json.loads((EMBEDDED / "start" / "config.json").read_text())
    new = {"vocab_size": 7, "num_hidden_layers": 1, "tie_word_embeddings": True}
    new["rope_parameters"] = {"rope_theta": 5.0, "rope_type": "default"}
    config |= {name: new[name], "layer_types": None}
    config.pop("rope_theta")
    served = tmp_path / "served"
    served.mkdir()
    (served / "config.json").write_text(json.dumps(config))
    stub.model["model"] = str(served)
    (tmp_path / "pushes").mkdir()
    sampler = ours.VLLMServer(stub.url, str(tmp_path / "pushes"))
    with pytest.raises(UserError, match=rf"not the policy's model \({name}|, {name} ") as caught:
        sampler.sync(policy)
    assert f"{COMMAND} {EMBEDDED / 'start'} " in str(caught.value)
    assert RELOAD not in stub.paths() and not list((tmp_path / "pushes").iterdir())


def test_a_model_that_cannot_be_read_here(stub, policy, tmp_path):
    stub.model["model"] = str(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"whose config\.json cannot be read here"):
        ours.VLLMServer(stub.url, str(tmp_path)).sync(policy)


def test_another_precision(stub, policy, tmp_path):
    stub.model["dtype"] = "torch.float32"
    with pytest.raises(UserError, match=r"in float32, but the policy is pushed in bfloat16; .* --dtype bfloat16"):
        ours.VLLMServer(stub.url, str(tmp_path)).sync(policy)


def test_a_push_of_other_names_than_before(stub, policy, tmp_path):
    sampler = ours.VLLMServer(stub.url, str(tmp_path))
    sampler.sync(policy)
    other = policy.copy_frozen()
    del other.model.model.norm.weight
    with pytest.raises(RunFailure, match=r"other weights .*model\.norm\.weight"):
        sampler.sync(other)


def test_the_servers_shorter_context_counts(stub, policy, tmp_path):
    stub.model["max_model_len"] = 20
    sampler = ours.VLLMServer(stub.url, str(tmp_path))
    sampler.sync(policy)
    with pytest.raises(UserError, match="exceeds the model's context of 20"):
        sampler.generate([SampleRequest((5,) * 18)], SAMPLED)


# ---- what goes wrong under way -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((200, completion([10])), "gave 1 tokens of 2 and no end"),
        ((200, completion([])), "without ids and their log-probs"),
        ((200, {"choices": []}), "without ids and their log-probs"),
        ((200, {"choices": [{"token_ids": [1, 2], "logprobs": {"token_logprobs": [-0.5]}}]}), "without ids"),
        ((200, {"choices": [{"token_ids": None, "logprobs": None}]}), "without ids"),
        ((200, b'{"choices": [{"tok'), "is no JSON"),
        ((404, {"detail": "Not Found"}), "answers 404: Not Found"),
        ((500, {"error": {"message": "two\nlines"}}), "answers 500: two lines"),
    ],
)
def test_an_answer_that_is_none(stub, policy, tmp_path, reply, message):
    sampler = ours.VLLMServer(stub.url, str(tmp_path))
    sampler.sync(policy)
    stub.odd[ANSWER] = reply
    with pytest.raises(EndpointError) as caught:
        sampler.generate(requests(1), SAMPLED)
    told = str(caught.value)
    assert message in told and stub.url in told and "\n" not in told
    assert f"{COMMAND} {stub.model['model']} " in told and "--resume" in told


def test_a_shorter_answer_that_ends_is_one(stub, policy, tmp_path):
    sampler = ours.VLLMServer(stub.url, str(tmp_path))
    sampler.sync(policy)
    stub.odd[ANSWER] = (200, completion([9, policy.eos_ids[0]]))
    (found,) = sampler.generate([SampleRequest((7,))], SAMPLED)
    assert (found.token_ids, found.stop_reason, found.logprobs) == ((9, 1), StopReason.EOS, (-0.5, -0.5))


def test_log_probs_that_are_not_finite(stub, policy, tmp_path):
    """The server cannot put NaN into JSON, and says so."""
    sampler = ours.VLLMServer(stub.url, str(tmp_path))
    sampler.sync(policy)
    stub.odd[ANSWER] = lambda body: (
        (400, {"error": {"message": "Out of range float values are not JSON compliant"}})
        if body["prompt"][0] == 12
        else (200, completion([3] * body["max_tokens"]))
    )
    with pytest.raises(NonFiniteLogits, match="of request 2 are not finite"):
        sampler.generate(requests(4), SAMPLED)


def test_a_folder_that_the_server_cannot_load(stub, policy, tmp_path):
    stub.odd[RELOAD] = (500, {"error": {"message": "Worker failed"}})
    with pytest.raises(RunFailure, match=r"cannot load .*/000001 \(does it see it under this path\?\): Worker failed"):
        ours.VLLMServer(stub.url, str(tmp_path)).sync(policy)


def test_a_server_that_has_gone(stub, policy, tmp_path):
    sampler = ours.VLLMServer(stub.url, str(tmp_path))
    sampler.sync(policy)
    stub.stop()
    for act in (lambda: sampler.generate(requests(3), SAMPLED), lambda: sampler.sync(policy)):
        with pytest.raises(RunFailure, match=r"does not answer \(.*Connection refused\)"):
            act()


# ---- commands ------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pushes").mkdir()
    return tmp_path


def test_evaluate_pushes_the_policy_that_it_names(here, stub, capsys):
    stub.model["model"] = str(EMBEDDED / "start")  # of one shape with the base
    words = ["evaluate", "embedded:base", "--limit", "3", "--max-new-tokens", "4", "--out", "items.jsonl"]
    assert main([*words, "--sampler", "vllm-server", "--server", stub.url, "--server-folder", "pushes"]) == 0
    base = load_policy("embedded:base").model.state_dict()
    ((folder, tensors),) = stub.loaded
    assert folder.is_absolute() and all(torch.equal(tensors[name], base[name]) for name in base)
    assert json.loads((here / "items.jsonl").read_text().splitlines()[0])["engine"] == "vllm-server-0.0.7"
    assert len(stub.bodies()) == 3 and not list((here / "pushes").iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sampler", "vllm-server"], "--server URL"),
        (["--sampler", "vllm-server", "--server", "http://127.0.0.1:1"], "--server-folder FOLDER"),
        (["--server", "http://127.0.0.1:1"], "not with torch"),
    ],
)
def test_a_command_with_half_of_a_server(here, capsys, words, message):
    assert main(["evaluate", "embedded:start", "--out", "items.jsonl", *words]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def fit_words(url: str) -> list[str]:
    words = ["fit", "--run=r", "--data.updates=1", "--data.validation=null", "--model.max_new_tokens=8"]
    return [*words, "--sampler", "VLLMServer", f"--sampler.url={url}", "--sampler.folder=pushes"]


def test_fit_asks_the_server_before_anything_is_written(here, stub, capsys):
    stub.stop()
    assert main(fit_words(stub.url)) == 2
    err = capsys.readouterr().err
    assert "does not answer" in err and COMMAND in err and err.count("\n") == 1
    assert not (here / "r").exists()


def test_a_resumed_run_finds_its_servers_where_they_are_now(here, stubs, capsys):
    one, two, three = stubs(3)
    assert main(fit_words(one.url)) == 1
    capsys.readouterr()
    both = f"--sampler.url=['{two.url}', '{three.url}']"
    assert main(["fit", "--resume=r", both, "--sampler.folder=pushes"]) == 1
    assert "the sampler holds stale weights" in capsys.readouterr().err
    assert [len(stub.loaded) for stub in (one, two, three)] == [1, 1, 1]
    assert main(["fit", "--resume=r", both, "--seed=1"]) == 2
    assert "--resume takes every setting from the run folder" in capsys.readouterr().err


def test_fit_holds_the_servers_log_probs_to_the_policys(here, stub, capsys):
    """These are made up, so the canary that `fit` adds ends the run; its record names the server."""
    assert main(fit_words(stub.url)) == 1
    assert "the sampler holds stale weights or draws from another distribution" in capsys.readouterr().err
    state = json.loads((here / "r" / "run.json").read_text())
    assert (state["engine"], state["deterministic"], state["state"]) == ("vllm-server-0.0.7", False, "stopped")
    assert not list((here / "pushes").iterdir())
