"""The run folder: tables, records and JSON files that survive a kill and never hold a row twice.

Small files are replaced whole (temporary file, fsync, rename). Tables grow by whole lines; on resume their owner cuts
them back to the update that the checkpoint holds, so that the continued run writes each later row exactly once.
"""

from __future__ import annotations

import csv
import fcntl
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from rlvr_pl.errors import UserError
from rlvr_pl.text_file import read_json

PARTIAL = ".partial"
"""Ending of the hidden files and folders that are renamed once they are whole; a kill may leave some behind."""


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by `data` so that a crash leaves either the old file or the new one, never a half. An OSError
    names `path`, whatever it was that failed."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, data)
        _sync_folder(path.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def _replace(path: Path, data: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=PARTIAL)
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def atomic_write_text(path: Path, text: str) -> None:
    """`atomic_write_bytes` of UTF-8 text."""
    atomic_write_bytes(path, text.encode("utf-8"))


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_place(path: Path, flag: str) -> None:
    """UserError where nothing can be made at `path`, which `flag` names: what lies above it is a file, or a folder that
    takes no new files. Makes nothing."""
    above = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    if not above.is_dir():
        raise UserError(f"{flag} {path}: {above} is a file, not a folder; choose another place")
    if not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"{flag} {path}: cannot write into {above}; make it writable or choose another place")


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def canonical_json(obj: Any) -> str:
    """JSON with sorted keys and no spaces: what a hash is taken of."""
    return json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _set_aside(path: Path, lines: Iterable[bytes]) -> None:
    """Keep damaged lines in FILE.torn, and say so."""
    aside = path.with_name(path.name + ".torn")
    with aside.open("ab") as f:
        f.write(b"".join(line + b"\n" for line in lines))
    print(f"rlvr-pl: {path}: held a line cut off or damaged; set aside in {aside.name}", file=sys.stderr)


_ENCODER = json.JSONEncoder(ensure_ascii=False)


class JsonlFile:
    """Append-only JSON lines, each row carrying an `update`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows as one write and force them to disk."""
        text = "".join(_ENCODER.encode(row) + "\n" for row in rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())

    def truncate_after(self, update: int) -> None:
        """Drop rows of updates later than `update`; a torn last line and damaged ones are set aside, with a message."""
        if not self.path.exists():
            return
        *lines, torn = self.path.read_bytes().split(b"\n")
        updates = {line: _update_of(line) for line in lines}
        kept = [line for line in lines if (number := updates[line]) is not None and number <= update]
        damaged = [line for line in lines if line and updates[line] is None] + ([torn] if torn else [])
        if damaged:
            _set_aside(self.path, damaged)
        if damaged or len(kept) < len(lines):
            atomic_write_bytes(self.path, b"".join(line + b"\n" for line in kept))


def _update_of(line: bytes) -> int | None:
    """The update of a row; None for what is no row."""
    try:
        return int(json.loads(line)["update"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


class CsvTable:
    """A CSV file with one row an update (or window), keyed by its `update` column."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: list[str] | None = None

    def append(self, row: Mapping[str, Any]) -> None:
        """Append one row. A row with new columns rewrites the file with the wider header."""
        if self._columns is None:
            self._columns = self._read()[0]
        new = [name for name in row if name not in self._columns]
        if new:
            old = self.rows()
            self._columns = self._columns + new
            self._rewrite([*old, row])
            return
        with self.path.open("a", encoding="utf-8", newline="") as f:
            f.write(self._line(row))
            f.flush()
            os.fsync(f.fileno())

    def rows(self) -> list[dict[str, str]]:
        """All whole rows, values as text; a torn last line is skipped. A damaged line is a `UserError`."""
        _, rows, damaged, _ = self._read()
        if damaged:
            number = next(iter(damaged))
            raise UserError(f"{self.path}:{number}: not a row of this table (damaged?)")
        return rows

    def missing(self, updates: Iterable[int]) -> list[int]:
        """Those of `updates` that have no row; none while as many lines are damaged, of which nobody knows whose they
        are."""
        _, rows, damaged, _ = self._read()
        there = {int(row["update"]) for row in rows}
        missing = [update for update in updates if update not in there]
        return missing if len(missing) > len(damaged) else []

    def truncate_after(self, update: int) -> None:
        """Drop rows of updates later than `update`; a torn last line and damaged ones are set aside, with a message."""
        if not self.path.exists():
            return
        self._columns, rows, damaged, torn = self._read()
        kept = [row for row in rows if int(row["update"]) <= update]
        bad = [*damaged.values(), *([torn] if torn else [])]
        if bad:
            _set_aside(self.path, bad)
        if bad or len(kept) < len(rows):
            self._rewrite(kept)

    def _read(self) -> tuple[list[str], list[dict[str, str]], dict[int, bytes], bytes]:
        """Columns, whole rows, damaged lines by number, and what follows the last line break."""
        if not self.path.exists():
            return [], [], {}, b""
        *lines, torn = self.path.read_bytes().split(b"\n")
        columns = (_cells(lines[0]) or []) if lines else []
        rows: list[dict[str, str]] = []
        damaged: dict[int, bytes] = {}
        for number, line in enumerate(lines[1:], 2):
            cells = _cells(line)
            row = dict(zip(columns, cells)) if cells is not None and len(cells) == len(columns) else {}
            if row.get("update", "").isdecimal():
                rows.append(row)
            else:
                damaged[number] = line
        return columns, rows, damaged, torn

    def _line(self, row: Mapping[str, Any]) -> str:
        assert self._columns is not None
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(["" if row.get(c) is None else row[c] for c in self._columns])
        return text.getvalue()

    def _rewrite(self, rows: Iterable[Mapping[str, Any]]) -> None:
        assert self._columns is not None
        header = io.StringIO()
        csv.writer(header, lineterminator="\n").writerow(self._columns)
        atomic_write_text(self.path, header.getvalue() + "".join(self._line(row) for row in rows))


def _cells(line: bytes) -> list[str] | None:
    """The cells of a line of CSV; None for what is none."""
    try:
        return next(csv.reader([line.decode("utf-8")]), [])
    except (ValueError, csv.Error):
        return None


TABLES = ("metrics.csv", "validation.csv", "updates.csv", "windows.csv", "drift.csv")


class RunFolder:
    """``config.yaml metrics.csv rollouts/ items/ windows.csv drift.csv criterion.json verdict.json cost.json
    checkpoints/ snapshots/`` under one path."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock: IO[bytes] | None = None

    @classmethod
    def of(cls, trainer: Any) -> RunFolder:
        """The folder of a Lightning trainer: its `default_root_dir`."""
        return cls(trainer.default_root_dir)

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    @property
    def items(self) -> Path:
        return self.path / "items"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def snapshots(self) -> Path:
        return self.path / "snapshots"

    def inside(self, name: str | Path) -> Path:
        """The path `name` below this folder; UserError when it leads out of it (names may come from records)."""
        path = self.path / name
        if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(self.path)):
            raise UserError(f"{self.path}: {name} lies outside of the run folder")
        return path

    def table(self, name: str) -> CsvTable:
        """The CSV table of that name, for example ``windows.csv``."""
        return CsvTable(self.inside(name))

    def write_json(self, name: str, obj: Any) -> None:
        """Replace the JSON file `name` whole."""
        atomic_write_text(self.inside(name), json.dumps(obj, indent=2, ensure_ascii=False) + "\n")

    def read_json(self, name: str) -> Any:
        """The object in the JSON file `name`, or None where there is none. A damaged file is a `UserError`."""
        path = self.inside(name)
        if not os.path.lexists(path):
            return None
        content = read_json(path)
        if not isinstance(content, dict):
            raise UserError(f"{path}: not a JSON object")
        return content

    def strangers(self) -> list[str]:
        """What lies in the folder and is none of its run's: hidden names (``.git``, ``.env``), and folders that hold
        runs of their own."""
        hidden = [p for p in self.path.glob(".*") if p.name != ".lock" and not p.name.endswith(PARTIAL)]
        runs = [p.parent for p in self.path.glob("*/**/run.json")]
        return sorted(str(p.relative_to(self.path)) for p in {*hidden, *runs})

    def recorded(self) -> list[Path]:
        """The tables, rollouts and item records that a run has written here."""
        files = [path for name in TABLES if (path := self.path / name).is_file()]
        files += [path for path in self.rollouts.glob("*.jsonl") if path.stem.replace("-", "").isdecimal()]
        return [*files, *self.items.glob("val-*.jsonl"), *self.path.glob("tensorboard/events.out.tfevents.*")]

    def lock(self) -> None:
        """Claim the (existing) folder for this process; UserError while another one has it. A process that ends lets
        go, however it ends."""
        if self._lock is not None:
            return
        handle = (self.path / ".lock").open("ab")
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{self.path}: another process is writing this run; wait for it or end it") from None
        self._lock = handle

    def unlock(self) -> None:
        """Let go of the folder."""
        if self._lock is not None:
            self._lock.close()
        self._lock = None

    def sweep(self) -> None:
        """Remove what a killed process was still writing: hidden files and folders that end in ``.partial``."""
        for folder in (self.path, self.checkpoints, self.snapshots, self.items, self.rollouts):
            for left in folder.glob(f".*{PARTIAL}"):
                if left.is_dir():
                    shutil.rmtree(left)
                else:
                    left.unlink()
