"""One update of rlvr-pl beside TRL's, the supplied recipe's and plain transformers', in turn on the same machine.

    make peers
    python benchmarks/peers.py --case tiny64-128 --runs 5 [--peers trl supplied plain] [--bf16] [--json]

Every implementation is a process of its own with one thread, asked for one update at a time (A B C A B C ...), with the
same weights, questions, group size, lengths, decoding and reward. First each peer learns from rollouts that ours drew:
rewards, loss and gradient norm must agree, or nothing is measured. Figures are medians of process CPU-seconds an
update. Memory is resident memory, on every side alike: "added" is the peak over all updates less what the process held
before its first (weights, libraries), so it has the two moments of AdamW and the gradient in it, three times the
weights; "over state" is the peak of one more update less what the process held before that one, moments included.

Cases: 4 questions x 8 completions at temperature 0.8, FP32 (with --bf16: TRL's autocast, our FP32 masters).
  tiny64-128    64 tokens of vocabulary, 4 layers of 128; 128 new tokens each, top-p 0.9
  tiny64-eos    the same, ended by EOS or the cap; all completions of every other question have the same reward
  bigvocab-32   151,936 tokens of vocabulary, 2 layers of 256; 32 new tokens each, top-p 0.9
  bigvocab-128  the same; 128 new tokens each, top-p 1
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CASES = ("tiny64-128", "tiny64-eos", "bigvocab-32", "bigvocab-128")
PACKAGES = {"trl": "trl", "supplied": "reasoning_from_scratch", "plain": "transformers"}
# The supplied recipe keeps all the logits of a group for its backward: there, 5 GB and many minutes an update.
LEFT_OUT = {"bigvocab-128": {"supplied"}}


class Implementation:
    """A worker process; each `update` is one command to it."""

    def __init__(self, name: str, args: argparse.Namespace, case: str) -> None:
        model = args.models / case.split("-")[0]
        self._log = (args.models / f"{case}-{name}.log").open("w+")
        self._process = subprocess.Popen(
            [args.python, HERE / f"peer_{name}.py", "--case", case, "--model", model, *["--bf16"] * args.bf16],
            env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        self.name = name
        self.version: str = self._answer()["version"]
        self.rounds: list[dict[str, Any]] = []
        self.over_state = math.nan

    def update(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            sys.exit(
                f"peers: {self.name} ended; the end of {self._log.name}:\n{Path(self._log.name).read_text()[-2000:]}"
            )
        return json.loads(line)


def check(ours: Implementation, peers: list[Implementation], fp32: bool) -> dict[str, dict[str, float]]:
    """Let every peer learn from our rollouts of two updates, and compare where the recipe is the peer's: the supplied
    one (sums of log-probs at temperature 1) in the first, TRL's (token mean, sampling temperature) in the second.

    Returns each peer's differences in loss and, relative, in gradient norm. FP32 sums of some 1e5 terms agree to 1e-5;
    under BF16 the two sides round at different places, and only rewards are held to each other.
    """
    recipes = ("supplied", "trl")
    expected = [ours.update(recipe=recipe) for recipe in recipes]
    found = {}
    for peer in peers:
        replayed = [peer.update(rollouts=e["rollouts"]) for e in expected]
        ours_, theirs = ((x[0] if peer.name == "supplied" else x[1]) for x in (expected, replayed))
        loss = abs(theirs["loss"] - ours_["loss"])
        norm = abs(theirs["grad_norm"] / ours_["grad_norm"] - 1)
        rewards = max(abs(a - b) for a, b in zip(ours_["rewards"], theirs["rewards"]))
        same = theirs["rollouts"] == ours_["rollouts"] and rewards < 1e-6
        close = loss <= 1e-5 * max(1, abs(ours_["loss"])) and norm <= 1e-4
        if not same or (fp32 and not close):
            sys.exit(
                f"peers: {peer.name} does not do the same work: loss {theirs['loss']} and {ours_['loss']}, gradient "
                f"norm {theirs['grad_norm']} and {ours_['grad_norm']}, rewards {rewards} apart"
            )
        found[peer.name] = {"loss": loss, "grad_norm": norm}
    return found


def figures(implementation: Implementation) -> dict[str, float]:
    """Medians of its rounds: CPU-seconds of an update, of its generation and of all the rest; memory, tokens."""
    rounds = implementation.rounds

    def median(value: Any) -> float:
        return statistics.median(map(value, rounds))

    parts = {stage: median(lambda r, s=stage: r["stages"][s]) for stage in rounds[0]["stages"] if stage != "generation"}
    if "forward" in parts:  # ours is one: the gradient of the head is known in its forward
        parts["gradient"] = median(lambda r: r["stages"]["forward"] + r["stages"]["backward"])
    return {
        "update": median(lambda r: r["cpu"]),
        "generation": median(lambda r: r["stages"]["generation"]),
        "learning": median(lambda r: r["cpu"] - r["stages"]["generation"]),
        "added_mib": max(r["added_mib"] for r in rounds),
        "over_state_mib": implementation.over_state,
        "tokens": statistics.mean(r["tokens"] for r in rounds),
    } | {f"of which {name}": value for name, value in parts.items()}


def measure(case: str, names: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Run one case. The first round after the check is not counted."""
    implementations = []
    try:
        for name in ("ours", *names):
            implementations.append(Implementation(name, args, case))
        ours, *peers = implementations
        agreement = check(ours, peers, not args.bf16)
        for run in range(args.runs + 1):
            for implementation in implementations:
                report = implementation.update()
                if run:
                    implementation.rounds.append(report)
            if sys.stderr.isatty():
                print(f"peers: {case}, round {run} of {args.runs}", file=sys.stderr)
        for implementation in implementations:
            implementation.over_state = implementation.update(again=True)["added_mib"]
    finally:
        for implementation in implementations:
            implementation.close()
    stages = {i.name: figures(i) for i in implementations}
    absent: dict[str, float | None] = {name: None for name in PACKAGES if name not in names and name != "plain"}
    seconds = {p.name: stages[p.name]["update"] for p in peers}
    return {
        "case": case,
        "dtype": "bf16" if args.bf16 else "fp32",
        "runs": args.runs,
        "versions": {i.name: i.version for i in implementations},
        "ours": stages["ours"]["update"],
        "peers": seconds | absent,
        "ratio": {name: stages["ours"]["update"] / x for name, x in seconds.items()} | absent,
        "memory_ratio": {
            kind: {p.name: stages["ours"][kind] / stages[p.name][kind] for p in peers}
            for kind in ("added_mib", "over_state_mib")
        },
        "stages": stages,
        "agreement": agreement,
    }


def table(result: dict[str, Any]) -> str:
    """The case as a Markdown table: what each implementation took, and ours as a share of it."""
    stages = result["stages"]
    names = list(stages)
    versions = ", ".join(f"{name} {result['versions'][name]}" for name in names)
    rows = ["update", "generation", "learning", "added_mib", "over_state_mib", "tokens"]
    rows[3:3] = dict.fromkeys(row for name in names for row in stages[name] if row.startswith("of which"))
    lines = [
        f"{result['case']}, {result['dtype']}, medians of {result['runs']} interleaved updates ({versions})\n",
        "| CPU-s | " + " | ".join(names) + " | " + " | ".join(f"ours / {name}" for name in names[1:]) + " |",
        "|---|" + "---:|" * (2 * len(names) - 1),
    ]
    for row in rows:
        values = [stages[name].get(row, math.nan) for name in names]
        form = "{:.0f}" if row in ("added_mib", "over_state_mib", "tokens") else "{:.3f}"
        cells = ["" if math.isnan(x) else form.format(x) for x in values]
        ratios = ["" if math.isnan(values[0] / x) else f"{values[0] / x:.3f}" for x in values[1:]]
        title = row.replace("_mib", " MiB").replace("_", " ")
        lines.append(f"| {title} | " + " | ".join([*cells, *ratios]) + " |")
    return "\n".join(lines) + "\n"


def installed(python: Path) -> list[str]:
    """The peers that this interpreter can import."""
    if not python.exists():
        sys.exit(f"peers: {python} is missing; run `make peers`, or name an interpreter with --python")
    code = "import importlib.util as u, sys; print(*[n for n in sys.argv[1:] if u.find_spec(n)])"
    found = subprocess.check_output([python, "-c", code, *PACKAGES.values()], text=True).split()
    return [name for name, package in PACKAGES.items() if package in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=[*CASES, "all"], default="tiny64-128")
    parser.add_argument("--runs", type=int, default=5, help="updates of each implementation that count")
    parser.add_argument("--peers", nargs="+", choices=list(PACKAGES), default=["trl", "supplied"])
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", type=Path, default=HERE.parent / "models" / "benchmarks")
    parser.add_argument("--python", type=Path, default=HERE.parent / ".venv-peers" / "bin" / "python")
    args = parser.parse_args()
    usable = installed(args.python)
    if missing := set(args.peers) - set(usable):
        print(f"peers: not installed in {args.python}: {', '.join(sorted(missing))}", file=sys.stderr)
    args.models.mkdir(parents=True, exist_ok=True)
    results = []
    for case in CASES if args.case == "all" else (args.case,):
        model = args.models / case.split("-")[0]
        if not model.is_dir():
            subprocess.run(
                [args.python, HERE / "peer_task.py", model.name, model], check=True, stderr=subprocess.DEVNULL
            )
        names = [n for n in args.peers if n in usable and n not in LEFT_OUT.get(case, ())]
        results.append(measure(case, names, args))
        if not args.json:
            print(table(results[-1]), flush=True)
    if args.json:
        print(json.dumps(results[0] if len(results) == 1 else {r["case"]: r for r in results}))


if __name__ == "__main__":
    main()
