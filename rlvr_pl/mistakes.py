"""A mistake in settings, or in a class that the user wrote, in one line that says where it is."""

from __future__ import annotations

import importlib
import inspect
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rlvr_pl.errors import UserError

OURS = ("rlvr_pl", "lightning", "torch", "builtins")
# of a config file, on the command line the parser calls it unrecognized
_UNKNOWN = re.compile(r"(?:Group '(?P<group>[\w.]+)' does not accept option|Option) '(?P<name>[^']+)'")
_REFUSAL = re.compile(r"[a-z_]+(?:\.[a-z_]+)+: ")
NOISE = (
    "Does not validate", "Subtypes:", "Subclass types expect", "Errors:", "Expected a <class 'NoneType'>",
    "Given value", "Parser key", "Not a valid subclass", "a class path (str)", "a dict with", "a dict without",
    "Problem with given class_path 'lightning.Callback'",
)  # fmt: skip


def known_classes(base: type) -> dict[str, type]:
    """The concrete subclasses of `base` by name, the package's own and the user's imported ones."""
    found: dict[str, type] = {}
    todo = list(base.__subclasses__())
    while todo:
        cls = todo.pop()
        todo += cls.__subclasses__()
        if not getattr(cls, "__abstractmethods__", None):
            found[cls.__name__] = cls
    return dict(sorted(found.items()))


def named_class(path: str) -> Any:
    """The class of an import path that the parser has found, ``package.module.Name``."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def worded(message: str, slots: Mapping[str, type], fit: Callable[[type], bool] = lambda cls: True) -> str:
    """The parser's account of a mistake in one line: the key, what is wrong, and what would be right.

    Args:
        message: what the parser raised.
        slots: key -> base class of the settings that name a class.
        fit: whether a run can use a class; others are not listed.
    """
    if absent := re.fullmatch(r"the following arguments are required: ([\w.]+)", message):
        return f"--{absent[1]} null: it needs a value; give one, or leave it out for the default"
    key = key_of(message)
    if "{'class_path': None" in message:
        return f"--{key}: it names no class; name one, or leave it out for the default"
    if "Unable to load config 'null'" in message:
        return f"--{key} null: it needs a value; set --{key}.NAME=..., or leave it out for the default"
    slot = next((name for name in slots if key == name or key.startswith(f"{name}.")), None)
    return (
        _no_such_class(message, slot, slots, fit)
        or _no_such_setting(message)
        or _setting_missing(message, key)
        or _plain(message, key)
    )


def key_of(message: str) -> str:
    """The dotted name of the setting that the parser complains of; empty when it names none."""
    keys = re.findall(r'Parser key "([^"]+)"', message)
    if not keys and (unknown := _UNKNOWN.match(message)):
        keys = [name for name in unknown.groups() if name]
    return ".".join(dict.fromkeys(part for k in keys for part in k.split(".")))


def _no_such_class(
    message: str, slot: str | None, slots: Mapping[str, type], fit: Callable[[type], bool]
) -> str | None:
    unknown = re.search(r"Expected a dot import path string: (.*)", message)
    if slot is None or unknown is None or "Problem with given class_path" in message:
        return None
    base = slots[slot]
    known = [(name, cls) for name, cls in known_classes(base).items() if not name.startswith("_") and fit(cls)]
    own = base.__name__ == "Callback"  # of Lightning's own callbacks a run takes few
    names = ", ".join(name for name, cls in known if not (own and cls.__module__.startswith("lightning.")))
    what = slot.rpartition(".")[2].removesuffix("s")
    return f"--{slot} {unknown[1]}: no {what} of that name; there are {names}, or give an import path"


def _no_such_setting(message: str) -> str | None:
    """A setting that the class named before it does not have, and those that it has."""
    match = re.search(
        r"Problem with given class_path '([\w.]+)':\s+"
        r"(?:Option '([^']+)' is not accepted|unrecognized arguments: --([\w.]+))",
        message,
    )
    if match is None:
        unknown = _UNKNOWN.match(message)
        if unknown is None:
            return None
        return f"{unknown['group'] or 'a run'} has no setting {unknown['name']!r}; see rlvr-pl fit --help"
    name = match[1].rpartition(".")[2]
    wrong = match[2] or match[3]
    text = f"{name} has no setting {wrong!r}"
    try:
        takes = _settings(named_class(match[1]))
    except (ImportError, AttributeError, ValueError):
        return text
    return f"{text}; it takes {', '.join(takes) or 'none'}"


def _setting_missing(message: str, key: str) -> str | None:
    """What a class that was named needs to be told, and how."""
    match = re.search(
        r"Problem with given class_path '(?:\w+\.)*(\w+)':\s+the following arguments are required: ([\w, ]+)", message
    )
    if match is None or not key:
        return None
    names = match[2].strip().split(", ")
    return f"--{key} {match[1]}: needs {', '.join(names)}; add {' '.join(f'--{key}.{name}=...' for name in names)}"


def _settings(cls: type) -> list[str]:
    """The arguments of a class, those that it hands on to its bases by ``**kwargs`` included."""
    names: dict[str, None] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base):
            continue
        parameters = list(inspect.signature(base.__init__).parameters.values())[1:]
        names |= dict.fromkeys(p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return list(names)


def _plain(message: str, key: str) -> str:
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    told = [x for x in lines if x and not x.startswith(NOISE) and "either not accessible or invalid" not in x]
    if any(x.startswith("Expected a ") and "import path" not in x for x in told):
        told = [x for x in told if "import path" not in x]
    if own := [x for x in told if _REFUSAL.match(x)]:  # a class's own, among the complaints of the other types
        told = [x.removeprefix(f"{key}: ") for x in own]
    text = " ".join(dict.fromkeys(told)) or " ".join(x for x in lines if x)
    text = re.sub(r"Problem with given class_path '(?:\w+\.)*(\w+)':", r"\1:", text)
    text = re.sub(r"typing\.Literal(\[[^]]*\])", r"one of \1", text).replace("<class '", "").replace("'>", "")
    text = re.sub(r"Expected a (?=int\b|one of)", lambda m: "expected " + "an " * (text[m.end()] == "i"), text)
    given = re.findall(r"Given value: (.*)", message)
    if key and given and "Got value" not in text and "NestedArg" not in given[-1]:
        text += f" (given: {given[-1][:200]})"
    return f"--{key}: {text}" if key else text


def last_frame(error: BaseException, *files: str) -> traceback.FrameSummary | None:
    """The innermost frame of an error that lies in one of these files; None if it passed through none of them."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return frames[-1] if frames else None


def accuse(error: BaseException, parts: Sequence[Any]) -> None:
    """Raise a UserError that names the user's own class among `parts` in which an error arose, with its place. Does
    nothing for our own classes, for an error that passed through none of the user's, and for a UserError, which says
    itself what is wrong.

    Of several classes in one file it is the one whose method ran innermost; a function of the file that no method
    called is told under the first of them.
    """
    if isinstance(error, UserError):
        return
    own = [(part, files) for part in parts if (files := _own_files(type(part)))]
    running = [held for held in reversed(_holders(error)) if any(held is part for part, _ in own)]
    for part, files in [*(x for held in running for x in own if x[0] is held), *own]:
        frame = last_frame(error, *files)
        if frame is not None:
            raise UserError(_accusation(error, type(part), frame)) from error
    for part, files in own:
        if isinstance(error, AttributeError) and error.obj is part:
            name = type(part).__name__
            raise UserError(f"{name} ({files[0]}): has no {error.name!r}; call super().__init__() first") from error


@contextmanager
def accusing(parts: Sequence[Any]) -> Iterator[None]:
    """`accuse` what goes wrong inside: where it arises, because frames do not travel to another process. What a file
    or a disk has to say stays as it is."""
    try:
        yield
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if not (isinstance(error, OSError) or is_ctrl_c(error)):
            accuse(error, parts)
        raise


def is_ctrl_c(error: BaseException) -> bool:
    """Whether an error is Ctrl-C, and not a KeyboardInterrupt that somebody's code raised: it cannot be Ctrl-C while a
    run has a handler of its own for the signal."""
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def accuse_library(error: BaseException, loggers: Sequence[Any], checkpoint: Any) -> None:
    """Raise a UserError for an error of a logger (no key, no server), or of what a checkpoint was to be put into."""
    what = told(error)
    for held in _holders(error):
        if any(held is logger for logger in loggers):
            raise UserError(f"trainer.logger {type(held).__name__}: {what}") from error
    if any("restore" in frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)):
        raise UserError(
            f"{checkpoint}: does not fit this run ({what[:300]}); move it away to go on from the one before"
        ) from error


def _holders(error: BaseException) -> list[Any]:
    """The objects whose methods an error passed through, outermost first."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [frame.f_locals["self"] for frame in frames if "self" in frame.f_locals]


def mistake_in(error: BaseException) -> UserError | None:
    """The `UserError` for an error that arose while classes were made from settings, which names the class; None for
    what is no mistake of the user's."""
    chain = [error]
    while chain[-1].__cause__ is not None:  # the parser wraps what a class raises when the class may also be absent
        chain.append(chain[-1].__cause__)
    found = next((cause for cause in chain if isinstance(cause, UserError)), None)
    if found is not None:
        return found
    refusal = isinstance(error, (TypeError, ValueError)) or type(error).__name__ == "MisconfigurationException"
    cls = _made(chain[-1])
    if cls is not None and (file := _own_file(cls)) is not None:
        frame = last_frame(chain[-1], file)
        if frame is not None:
            return UserError(_accusation(chain[-1], cls, frame))
    if not refusal:
        return None
    text = worded(str(error), {})
    return UserError(text if cls is None or text.startswith(cls.__name__) else f"{cls.__name__}: {text}")


def fault_of_file(error: OSError) -> str | None:
    """What to say of a file or folder that could not be written or read (a full disk, a folder that became read-only, a
    limit on the size of files); None for an error that names none, such as that of a connection."""
    name = error.filename2 or error.filename
    if name is None:
        return None
    return f"{name}: {error.strerror}; mend that or name another place, and give the command again"


def _made(error: BaseException) -> type | None:
    """The class of the object that was being made when an error arose (what its own constructor makes is a part of it);
    None when none was."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name in ("__init__", "__post_init__") and "self" in frame.f_locals:
            cls = type(frame.f_locals["self"])
            if cls.__module__.split(".")[0] not in ("jsonargparse", "argparse"):
                return cls
    return None


def is_ours(cls: type) -> bool:
    """Whether a class is this package's, or of the libraries that it is made of."""
    return cls.__module__.split(".")[0] in OURS


def _own_file(cls: type) -> str | None:
    """The file of a class of the user's; None for other classes, and for one that was made in a notebook."""
    if is_ours(cls):
        return None
    return getattr(sys.modules.get(cls.__module__), "__file__", None)


def _own_files(cls: type) -> list[str]:
    """The file of a class of the user's, and those of its bases that are the user's too."""
    bases = [base for base in cls.__mro__ if base.__module__.split(".")[0] not in sys.stdlib_module_names]
    return [] if _own_file(cls) is None else [file for base in bases if (file := _own_file(base)) is not None]


def _accusation(error: BaseException, cls: type, frame: traceback.FrameSummary) -> str:
    return f"{cls.__name__} ({frame.filename}:{frame.lineno}, in {frame.name}): {told(error)}"


def told(error: BaseException) -> str:
    """The kind of an error and its words, in one line."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
