"""Jobs in processes: chains, failures, what is skipped, interruption. A stand-in takes the place of `rlvr-pl`."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest

from rlvr_pl.errors import UserError
from rlvr_pl.records import RunFolder
from rlvr_pl.study import runner
from rlvr_pl.study.runner import Job, locked, run_jobs

# The words are: name, run folder, and what to do. It notes its name, and "fit" behaves as a run does.
STAND_IN = """
import json, os, signal, sys, time
name, run, what = sys.argv[1:4]
os.makedirs(run, exist_ok=True)
with open(os.path.join(os.path.dirname(run), "calls"), "a") as f:
    f.write(name + "\\n")
def write(state, updates):
    for file, content in (("run.json", {"state": state}), ("cost.json", {"updates": updates})):
        with open(os.path.join(run, file + ".new"), "w") as f:
            json.dump(content, f)
        os.replace(os.path.join(run, file + ".new"), os.path.join(run, file))
if what == "fail":
    print("a long account", file=sys.stderr)
    print("rlvr-pl: no such thing", file=sys.stderr)
    sys.exit(2)
if what in ("slow", "deaf"):
    asked = []
    signal.signal(signal.SIGTERM, lambda *a: asked.append(1) if what == "slow" else None)
    write("running", 1)
    while not asked:
        time.sleep(0.01)
    write("stopped", 2)
if what == "fit":
    write("finished", 4)
"""


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(runner, "ENTRY", STAND_IN)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.02)


@pytest.fixture
def job(tmp_path):
    """``job(name, *whats)``: a job whose commands do these things."""

    def make(name: str, *whats: str) -> Job:
        folder = tmp_path / "study" / name
        return Job(name, 1, RunFolder(folder), [[f"{name}-{w}", str(folder), w] for w in whats], 4)

    return make


def conduct(tmp_path, jobs, at_once=2, watch=lambda: None, **how):
    with locked(tmp_path / "study") as lock:
        run_jobs(jobs, at_once, lock, watch=watch, **how)


def calls(tmp_path):
    return (tmp_path / "study" / "calls").read_text().split()


def test_a_failure_stops_no_other_and_says_why(tmp_path, job):
    jobs = [job("a", "fail"), job("b", "fit"), job("c", "fit")]
    conduct(tmp_path, jobs)
    assert [j.state for j in jobs] == ["failed", "finished", "finished"]
    assert jobs[0].reason == "rlvr-pl: no such thing"
    assert "a long account" in jobs[0].log.read_text()
    assert [j.done for j in jobs] == [0, 4, 4]


def test_a_chain_runs_in_order_and_ends_at_a_failure(tmp_path, job):
    jobs = [job("a", "other", "fit"), job("b", "fail", "fit")]
    conduct(tmp_path, jobs, at_once=1)
    assert calls(tmp_path) == ["a-other", "a-fit", "b-fail"]
    assert [j.state for j in jobs] == ["finished", "failed"]


def test_what_is_finished_is_not_run_again(tmp_path, job):
    conduct(tmp_path, [job("a", "fit"), job("b", "fail")])
    again = [job("a", "fit"), job("b", "fit")]
    assert again[0].state == "finished"
    conduct(tmp_path, again)
    assert sorted(calls(tmp_path)) == ["a-fit", "b-fail", "b-fit"]
    assert [j.state for j in again] == ["finished", "finished"]


def test_no_more_than_asked_run_at_once(tmp_path, job):
    jobs = [job(name, "fit") for name in "abcd"]
    most = []
    conduct(tmp_path, jobs, watch=lambda: most.append(sum(j.state == "running" for j in jobs)))
    assert max(most) == 2
    assert all(j.state == "finished" for j in jobs)


def test_at_the_time_limit_runs_save_and_nothing_new_begins(tmp_path, job):
    jobs = [job("a", "slow"), job("b", "fit")]
    conduct(tmp_path, jobs, at_once=1, seconds=1.0)
    assert [j.state for j in jobs] == ["stopped", "waiting"]
    assert json.loads((tmp_path / "study" / "a" / "run.json").read_text())["state"] == "stopped"
    assert calls(tmp_path) == ["a-slow"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_study_stops_its_runs_in_order(tmp_path, job, number):
    jobs = [job("a", "slow", "fit"), job("b", "fit")]

    def interrupt():
        while not (tmp_path / "study" / "a" / "cost.json").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    conduct(tmp_path, jobs, at_once=1)
    thread.join()
    assert [j.state for j in jobs] == ["stopped", "waiting"]
    assert jobs[0].done == 2  # it was given the time to finish and save
    assert calls(tmp_path) == ["a-slow"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_second_interrupt_ends_the_runs_at_once(tmp_path, job):
    jobs = [job("a", "deaf")]
    ready = tmp_path / "study" / "a" / "cost.json"
    asked = []

    def watch():
        if ready.exists() and len(asked) < 2:
            asked.append(None)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        conduct(tmp_path, jobs, watch=watch)
    assert [j.state for j in jobs] == ["stopped"]


def test_a_study_folder_serves_one_call_at_a_time(tmp_path):
    with locked(tmp_path / "study"), pytest.raises(UserError, match="still at work"), locked(tmp_path / "study"):
        pass
    with locked(tmp_path / "study"):
        pass


def test_a_run_that_outlives_its_study_keeps_the_lock(tmp_path, job):
    one = job("a", "slow")
    with locked(tmp_path / "study") as lock:
        one.start(lock)
        while not (tmp_path / "study" / "a" / "cost.json").exists():
            time.sleep(0.01)
    try:
        with pytest.raises(UserError, match="a run of it, is still at work"), locked(tmp_path / "study"):
            pass
    finally:
        one.signal(signal.SIGTERM)
        while one.state == "running":
            one.poll(lock)
    assert one.state == "stopped"
