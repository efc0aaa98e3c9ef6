"""Every command in README and docs is one that the program takes: its options exist, and settings of `fit` parse."""

from __future__ import annotations

import argparse
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlvr_pl.cli import COMMANDS
from rlvr_pl.quiet import quiet_lightning
from rlvr_pl.settings import FitCLI

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Stand for what a reader puts there.
PLACES = {"C": "configs/quickstart.yaml", "...": "configs/quickstart.yaml", "RUN": "runs/some"}


def commands(page: Path) -> Iterator[list[str]]:
    """The words after `rlvr-pl` of every command on a page, in blocks of code and within lines."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.M | re.S)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    blocks += re.findall(r"^    .*(?:\n    .*)*", prose, re.M) + re.findall(r"`([^`]+)`", prose)
    for block in blocks:
        for line in block.replace("\\\n", " ").splitlines():
            found = re.search(r"(?:^|\s|/)(?<!pip install )rlvr-pl ([a-z].*)", line.replace("[", "").replace("]", ""))
            if found:
                yield shlex.split(found.group(1), comments=True)


DOCUMENTED = [(page.name, words) for page in PAGES for words in commands(page)]
OTHERS = [x for x in DOCUMENTED if x[1][0] != "fit"]
# What begins a new run; a reader's own classes and files are not here.
OWN = ("my_", "trl.yaml")
FITS = [x for x in DOCUMENTED if x[1][0] == "fit" and "--config" in x[1] and not any(o in w for w in x[1] for o in OWN)]


class _Parsed(Exception):
    pass


def _stop(config: Any, text: str) -> Any:
    raise _Parsed


def test_the_pages_document_most_commands():
    """Or the pages are not read as they are written, and nothing below is tested."""
    assert set(COMMANDS) - {words[0] for _, words in OTHERS} <= {"make-default"}
    assert len(FITS) >= 15


@pytest.mark.parametrize(("page", "words"), OTHERS, ids=[f"{page}-{' '.join(words)[:60]}" for page, words in OTHERS])
def test_options_exist(page, words):
    name, *rest = words
    assert name in COMMANDS, f"{page}: rlvr-pl {name}"
    parser = argparse.ArgumentParser()
    importlib.import_module(f"rlvr_pl.analysis.{name.replace('-', '_')}").add_arguments(parser)
    known = set(parser._option_string_actions)
    assert not {w.split("=")[0] for w in rest if w.startswith("--")} - known, f"{page}: rlvr-pl {shlex.join(words)}"


@pytest.mark.parametrize(("page", "words"), FITS, ids=[f"{page}-{' '.join(words)[:60]}" for page, words in FITS])
def test_settings_parse(page, words, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(_Parsed), quiet_lightning():
        FitCLI([PLACES.get(word, word) for word in words[1:]], _stop)
