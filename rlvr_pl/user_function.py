"""Functions of the user's own, named by where they are."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlvr_pl.errors import UserError
from rlvr_pl.mistakes import last_frame


def load_function(path: str, what: str) -> Callable[..., Any]:
    """The function behind ``package.module:function``, ``package.module.function`` or ``folder/file.py:function``.

    `what` opens the error messages, for example "reward function". Raises UserError when there is no such function, or
    its file cannot be imported.
    """
    where, _, name = path.rpartition(":") if ":" in path else path.rpartition(".")
    if not where or not name:
        raise UserError(f"{what} {path!r}: write package.module:function or file.py:function")
    if Path(path).suffix == ".py" and Path(path).is_file():
        raise UserError(f"{what} {path}: names a file and no function in it; write {path}:FUNCTION")
    if not where.endswith(".py") and (os.sep in where or Path(where).is_file()):
        raise UserError(f"{what} {path}: {where} is no Python file; write file.py:function or package.module:function")
    try:
        if where.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(where).stem, where)
            if spec is None or spec.loader is None or not Path(where).is_file():
                raise UserError(f"{what} {path}: there is no file {where}")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(where)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        why = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{what} {path}: cannot import {where}: {' '.join(why.split())}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(f"{what} {path}: {where} has no function {name}")
    return function


def place(error: BaseException, function: Callable[..., Any]) -> str:
    """Where in the function's own file an error arose, as `` (file:line)``; empty when it is not known."""
    code = getattr(function, "__code__", None)
    frame = None if code is None else last_frame(error, code.co_filename)
    return "" if frame is None else f" ({frame.filename}:{frame.lineno})"
