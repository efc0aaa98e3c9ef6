"""Worker processes: limits, deaths, threads, copies."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlvr_pl.errors import RunFailure
from rlvr_pl.grading.pool import Reply, WorkerPool, _Worker

HANDLER = """
import os, sys, time

def handle(job):
    name, *args = job
    return globals()[name](*args)

def echo(x): return x
def pid(): return os.getpid()
def spin():
    while True: pass
def bignum(): return len(str(3 ** 200000000))
def sleep(seconds): time.sleep(seconds)
def hoard(): return len(bytearray(1 << 30))
def recurse(n): return recurse(n + 1)
def crash(): os._exit(7)
def die():
    import signal
    signal.raise_signal(9)
def noise():
    print("not a reply"); os.write(1, b"neither"); return "fine"
def write(path): open(path, "w").write("text")
def touch(path): os.close(os.open(path, os.O_CREAT))
def system(path): os.system("touch " + path)
def run(path):
    import subprocess
    subprocess.run(["touch", path])
"""


@pytest.fixture(scope="module")
def handlers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("handlers")
    (folder / "toy_handler.py").write_text(HANDLER)
    (folder / "broken_handler.py").write_text("import no_such_module")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield folder


@pytest.fixture(scope="module")
def pool(handlers: Path) -> Iterator[WorkerPool]:
    pool = WorkerPool("toy_handler", 2, cpu_limit=0.5, memory_limit_mb=256)
    yield pool
    pool.close()


def test_replies_come_in_order(pool: WorkerPool) -> None:
    assert [r.value for r in pool.map([("echo", i) for i in range(20)])] == list(range(20))
    assert pool.map([]) == []


def test_text_survives_the_pipe(pool: WorkerPool) -> None:
    text = "NUL \0, lone surrogate \ud800, newline \n, π " + "x" * 300_000
    assert pool.map([("echo", text)])[0].value == text


@pytest.mark.parametrize("job", ["spin", "bignum"])
def test_cpu_time_is_limited_and_neighbours_keep_their_verdicts(pool: WorkerPool, job: str) -> None:
    replies = pool.map([("echo", 1), (job,), ("echo", 2), (job,), (job,), ("echo", 3)])
    assert [r.status for r in replies] == ["ok", "timeout", "ok", "timeout", "timeout", "ok"]
    assert [r.seconds for r in replies if r.status == "timeout"] == [0.5] * 3
    assert pool.map([("echo", 4)])[0].value == 4


def test_sleep_is_not_cpu_time_but_the_wall_clock_ends_it_at_last(
    handlers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlvr_pl.grading.pool._WALL_EXTRA", 0.5)
    monkeypatch.setattr("rlvr_pl.grading.pool._WALL_FACTOR", 10.0)
    pool = WorkerPool("toy_handler", 1, cpu_limit=0.1, memory_limit_mb=256)  # a wall limit of 1.5 s
    assert pool.map([("sleep", 0.5)])[0].status == "ok"
    assert pool.map([("sleep", 60)])[0].status == "timeout"
    assert pool.map([("echo", 1)])[0].value == 1
    pool.close()


@pytest.mark.parametrize(("job", "reason"), [("hoard", "MemoryError"), ("recurse", "RecursionError")])
def test_memory_and_stack_are_limited(pool: WorkerPool, job: str, reason: str) -> None:
    reply = pool.map([(job, *([0] if job == "recurse" else []))])[0]
    assert (reply.status, reply.value) == ("error", reason)
    assert pool.map([("echo", 1)])[0].value == 1


def test_a_crash_is_an_error_of_its_own_job_only(pool: WorkerPool) -> None:
    replies = pool.map([("crash",), ("echo", 1), ("echo", 2)])
    assert [r.status for r in replies] == ["error", "ok", "ok"]
    assert replies[0].value == "the worker ended with status 7"


def test_a_worker_killed_from_outside_is_replaced(pool: WorkerPool) -> None:
    pids = {r.value for r in pool.map([("pid",)] * 8)}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    replies = pool.map([("pid",)] * 8)
    assert {r.status for r in replies} == {"ok"}
    assert not pids & {r.value for r in replies}


def test_a_worker_killed_from_outside_during_a_job_gets_a_second_try(handlers: Path) -> None:
    pool = WorkerPool("toy_handler", 1, 5.0, 256)
    pid = pool.map([("pid",)])[0].value
    killer = threading.Timer(0.2, os.kill, (pid, signal.SIGKILL))
    killer.start()
    assert pool.map([("sleep", 1.0)])[0].status == "ok"
    assert pool.map([("pid",)])[0].value != pid
    assert pool.map([("die",)])[0] == Reply("error", "the worker ended with status -9", 0.0)
    pool.close()


def test_prints_of_a_library_are_no_replies(pool: WorkerPool) -> None:
    assert pool.map([("noise",)])[0].value == "fine"


@pytest.mark.parametrize("way", ["write", "touch", "system", "run"])
def test_no_file_is_made_and_no_program_started(pool: WorkerPool, tmp_path: Path, way: str) -> None:
    path = tmp_path / "made"
    reply = pool.map([(way, str(path))])[0]
    assert (reply.status, reply.value) == ("error", "PermissionError")
    assert not path.exists()


def test_the_callers_alarm_is_left_alone(pool: WorkerPool) -> None:
    def handler(number: int, frame: object) -> None:
        raise AssertionError("the alarm rang")

    previous = signal.signal(signal.SIGALRM, handler)
    signal.alarm(1000)
    try:
        pool.map([("spin",)])
        assert signal.getsignal(signal.SIGALRM) is handler
        assert 0 < signal.alarm(0) <= 1000
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def test_several_threads_share_a_pool(pool: WorkerPool) -> None:
    found: dict[int, list[object]] = {}

    def work(k: int) -> None:
        found[k] = [r.value for r in pool.map([("echo", [k, i]) for i in range(10)])]

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {k: [[k, i] for i in range(10)] for k in range(4)}


def test_a_pickled_copy_has_workers_of_its_own(pool: WorkerPool) -> None:
    copy = pickle.loads(pickle.dumps(pool))
    assert copy.map([("pid",)])[0].value != pool.map([("pid",)])[0].value
    copy.close()


def test_a_fork_has_workers_of_its_own_and_leaves_the_parents_alone(handlers: Path) -> None:
    code = """
import os
from rlvr_pl.grading.pool import WorkerPool
pool = WorkerPool("toy_handler", 1, 5.0, 256)
before = pool.map([("pid",)])[0].value
child = os.fork()
if child == 0:
    fine = pool.map([("pid",)])[0].value != before
    pool.close()
    os._exit(0 if fine else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert pool.map([("pid",)])[0].value == before
"""
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": f"{handlers}{os.pathsep}{root}"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=120)


def test_workers_end_with_their_pool_and_with_their_parent(handlers: Path) -> None:
    code = """
from rlvr_pl.grading.pool import WorkerPool
pool = WorkerPool("toy_handler", 1, 5.0, 256)
print(pool.map([("pid",)])[0].value)
"""
    root = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": f"{handlers}{os.pathsep}{root}"}
    shown = subprocess.run(
        [sys.executable, "-c", code], check=True, env=env, timeout=120, capture_output=True, text=True
    )
    with pytest.raises(ProcessLookupError):
        os.kill(int(shown.stdout), 0)


def test_a_worker_that_cannot_start_says_why(handlers: Path) -> None:
    with pytest.raises(RunFailure, match=r"broken_handler.*ModuleNotFoundError: No module named 'no_such_module'"):
        WorkerPool("broken_handler", 1, 1.0, 256).map([("echo", 1)])


def ticks_of(pid: int) -> int:
    """CPU time of a process that runs or has just died, in clock ticks (each of its two parts is rounded down)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="CPU time of a process is read from /proc")
def test_hostile_jobs_cost_their_limits_and_no_more_on_all_workers_alike(handlers: Path, monkeypatch) -> None:
    """W = 4 workers, 24 jobs: 16 that never end, and 8 honest ones that keep their replies.

    Each job waits, before it begins, until W are under way at once: so there are 24 / W rounds, with W workers busy in
    each, and every worker has 24 / W jobs; what a round takes of the clock is one limit (and the start of a worker) on
    a machine with W idle cores. A job that never ends gets its limit of CPU time: the kernel looks at its timer once a
    tick, and both readings round the user's and the system's part down by less than a tick each, so at most 1 + 2 ticks
    more are read. Time that a hypervisor takes away counts for the timer and not for the reading, so that less is read
    on a busy machine; half of the limit tells the CPU's limit from the clock's all the same, which is far longer.
    """
    count, limit, tick = 4, 0.1, 1 / os.sysconf("SC_CLK_TCK")
    round_of_all = threading.Barrier(count)
    jobs_of: Counter[int] = Counter()
    used: list[float] = []
    attempt, exit_status = _Worker._attempt, _Worker._exit_status

    def watched_attempt(worker, job):
        round_of_all.wait(timeout=120)
        jobs_of[id(worker)] += 1
        worker.begun = ticks_of(worker._started().pid)
        return attempt(worker, job)

    def watched_exit(worker, process):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and still there to be read
        used.append(tick * (ticks_of(process.pid) - worker.begun))
        return exit_status(worker, process)

    monkeypatch.setattr(_Worker, "_attempt", watched_attempt)
    monkeypatch.setattr(_Worker, "_exit_status", watched_exit)
    pool = WorkerPool("toy_handler", count, limit, 256)
    replies = pool.map([("spin",), ("spin",), ("echo", 7)] * 8)
    pool.close()
    assert [(r.status, r.value) for r in replies] == [("timeout", None), ("timeout", None), ("ok", 7)] * 8
    assert list(jobs_of.values()) == [6] * count
    assert len(used) == 16
    assert limit / 2 <= min(used) and sum(used) <= 16 * (limit + 3 * tick)
