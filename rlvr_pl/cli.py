"""The command line: `rlvr-pl <command>`. Starts nothing that a command does not need."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from rlvr_pl import __version__
from rlvr_pl.analysis.command import check_out, emit
from rlvr_pl.errors import RunFailure, UserError
from rlvr_pl.mistakes import fault_of_file

# command -> its one line; the module is rlvr_pl.analysis.<command with underscores>
COMMANDS = {
    "evaluate": "answer questions greedily with a policy and write item records",
    "compare": "paired comparison of item records: gained, lost, interval, McNemar",
    "noise-floor": "how much equal policies disagree: discordance and null spread",
    "power": "power and sample size of a paired comparison",
    "passk": "unbiased pass@k of sample records",
    "coverage": "paired pass@k differences and never-solved overlap of two policies",
    "boxed": "how much of a gain is formatting",
    "weights-diff": "share of weights that differ between two checkpoints",
    "entropy-grad": "first-order effect of rollouts and objectives on the entropy",
    "drift": "entropy, KL and NLL of checkpoints on fixed contexts",
    "rollout-stats": "windows of a run: reward, truncation, loops, soup, signed mass",
    "plot": "draw a run: drift, validation, truncation, signed mass, gradient norm",
    "learning-curve": "draw a run's training reward and held-out accuracy",
    "search": "sample questions k times each and keep graded records",
    "distill": "train on verified solutions (expert iteration)",
    "rationalize": "bridge hinted rationales to solutions of questions never solved",
    "expert-iteration": "rounds of search, rationalization and distillation, with reports",
    "cost": "costs of runs side by side, and which of them are matched",
    "export": "make a folder with a model card from a run, and upload it if asked",
    "export-rollouts": "make the compact public records of a run's rollouts",
    "grade": "grade responses against golds",
    "splits": "cut a pool into validation, training order, panels and contexts",
    "objectives": "list every objective with its equation",
    "reasoning-gym": "list the tasks of reasoning-gym, or show one",
    "schema": "write the JSON Schema of fit's configs, for editors",
    "import-gguf": "convert a GGUF file into a policy folder",
    "import-supplied": "convert a .pth checkpoint of the supplied recipe into a policy folder",
    "make-default": "regenerate the embedded policies",
    "study": "train matched arms over seeds, judge them by a frozen rule, and report",
    "report": "one self-contained page of a run or a study, every number with its command",
    "quickstart": "train the embedded default and compare before and after",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0 done, 1 failure, 2 bad input, such as a place where nothing can be
    written."""
    words = list(sys.argv[1:] if argv is None else argv)
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # objectives, graders and rewards in the user's own files
    try:
        return _dispatch(words)
    except UserError as error:
        print(f"rlvr-pl: {error}", file=sys.stderr)
        return 2
    except RunFailure as error:
        print(f"rlvr-pl: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        raise
    except OSError as error:
        fault = fault_of_file(error)
        print(f"rlvr-pl: {fault or error.strerror or error}", file=sys.stderr)
        return 1 if fault is None else 2
    except SystemExit as stop:  # argparse: --help exits with 0, bad usage with 2
        return stop.code if isinstance(stop.code, int) else 1


def entry() -> None:
    """The console script."""
    # Waiting OpenMP threads spin by default, which on busy cores costs up to 15 times the work (read when torch loads).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has gone (`| head`), and with it whoever would read a message
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = 1
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["fit"]:
        from rlvr_pl.fit import fit

        return fit(words[1:])
    command = words[0] if words else None
    if command not in COMMANDS:
        if command is not None and not command.startswith("-"):
            near = difflib.get_close_matches(command, ["fit", *COMMANDS], 1)
            hint = f", did you mean {near[0]}? See" if near else "; see"
            raise UserError(f"{command}: no such command{hint} rlvr-pl --help")
        _overview().parse_args(words or ["--help"])
        return 0
    room = importlib.import_module(f"rlvr_pl.analysis.{command.replace('-', '_')}")
    parser = _Parser(
        prog=f"rlvr-pl {command}", description=room.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    room.add_arguments(parser)
    args = parser.parse_args(words[1:])
    check_out(args)
    emit(room.run(args), args)
    return 0


class _Parser(argparse.ArgumentParser):
    """A mistake is one line; how the command is called is what --help says."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")


def _overview() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines = [f"  {'fit':<{width}}  train a policy (see `rlvr-pl fit --help`)"]
    lines += [f"  {name:<{width}}  {line}" for name, line in COMMANDS.items()]
    parser = _Parser(
        prog="rlvr-pl",
        description="Matched, statistically honest RLVR experiments.",
        epilog="commands:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="rlvr-pl <command> [...]",
    )
    parser.add_argument("--version", action="version", version=f"rlvr-pl {__version__}")
    parser.add_argument("command", choices=["fit", *COMMANDS], metavar="<command>", help="one of the commands below")
    return parser
