"""How long commands take to start: wall and CPU seconds of whole processes, medians of interleaved runs.

python benchmarks/startup.py [--runs 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

# command -> the wall seconds within which it should be there
COMMANDS = {
    "power --n 350 --pd 0.2 --delta 0.05": 1.5,
    "compare --help": 1.5,
    "fit --help": 8.0,
    "evaluate --help": 8.0,
}


def timed(words: list[str]) -> tuple[float, float]:
    """Wall and CPU seconds of one process."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    code = "from rlvr_pl.cli import entry; entry()"
    subprocess.run([sys.executable, "-c", code, *words], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    seconds: dict[str, list[tuple[float, float]]] = {command: [] for command in COMMANDS}
    for _ in range(args.runs):
        for command, found in seconds.items():
            found.append(timed(command.split()))
    report = {
        command: {
            "wall_s": statistics.median(wall for wall, _ in found),
            "cpu_s": statistics.median(cpu for _, cpu in found),
            "bar_s": COMMANDS[command],
        }
        for command, found in seconds.items()
    }
    if args.json:
        print(json.dumps(report))
    else:
        print("| command | wall s | CPU s | bar |\n|---|---:|---:|---:|")
        for command, x in report.items():
            print(f"| `rlvr-pl {command}` | {x['wall_s']:.2f} | {x['cpu_s']:.2f} | {x['bar_s']:g} |")
    return 0 if all(x["wall_s"] < x["bar_s"] for x in report.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
