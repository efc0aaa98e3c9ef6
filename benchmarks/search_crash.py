"""Kill search and rationalization at random moments, go on, and compare with records that were never interrupted.

Each kill is SIGKILL to a process that runs the real command; the parts are small, so that most of its life is spent
between writes. A run that gets to its end between two kills is compared, and begins anew until all kills are spent.

    python benchmarks/search_crash.py --kills 20 --json

JSON keys: search and rationalize {kills, killed_with_records (the file had some, not all), finished (runs compared),
identical (of these, byte for byte)}.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rlvr_pl.cli import main

SEARCH = ["--checkpoint", "embedded:start", "--n-questions", "40", "--k", "2", "--seed", "1", "--batch-tokens", "400"]
BRIDGE = ["--checkpoint", "embedded:start", "--seed", "1", "--batch-tokens", "400"]


def crash(name: str, words: list[str], out: Path, kills: int, rng: random.Random) -> dict[str, int]:
    """Spend `kills` on one command; see the module's JSON keys."""
    words = [name, *words, "--json"]
    reference = out.with_name("whole.jsonl")
    seconds = _run([*words, "--out", str(reference)])
    whole = reference.read_bytes()
    counts = {"kills": 0, "killed_with_records": 0, "finished": 0, "identical": 0}
    while counts["kills"] < kills or out.exists():
        delay = rng.uniform(0, seconds) if counts["kills"] < kills else None
        if _run([*words, "--out", str(out)], delay) is not None:
            counts["finished"] += 1
            counts["identical"] += out.read_bytes() == whole
            out.unlink()
            continue
        counts["kills"] += 1
        size = out.stat().st_size if out.exists() else 0
        counts["killed_with_records"] += whole.index(b"\n") + 1 < size < len(whole)
    return counts


def _run(words: list[str], kill_after: float | None = None) -> float | None:
    """Run a command in a process of its own; its seconds, or None when it was killed before it ended."""
    begin = time.monotonic()
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os._exit(main(words))
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGKILL:
        return None
    if status:
        raise SystemExit(f"{' '.join(words)}: ended with status {status}")
    return time.monotonic() - begin


def run(kills: int, seed: int) -> dict[str, dict[str, int]]:
    """Both commands."""
    from rlvr_pl.policy import load_policy

    load_policy("embedded:start")  # imports what takes seconds to import, once, before processes are forked
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rng = random.Random(seed)
        found = {"search": crash("search", SEARCH, folder / "search.jsonl", kills, rng)}
        samples = str((folder / "whole.jsonl").rename(folder / "samples.jsonl"))
        found["rationalize"] = crash("rationalize", [samples, *BRIDGE], folder / "bridges.jsonl", kills, rng)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each command (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = run(args.kills, args.seed)
    print(json.dumps(result) if args.json else "\n".join(f"{name}: {counts}" for name, counts in result.items()))
    sys.exit(any(counts["identical"] < counts["finished"] for counts in result.values()))
