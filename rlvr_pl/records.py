"""The run folder: tables, records and JSON files that survive a kill and never hold a row twice.

Small files are replaced whole (temporary file, fsync, rename). Tables grow by whole lines; on resume their owner cuts
them back to the update that the checkpoint holds, so that the continued run writes each later row exactly once.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlvr_pl.errors import UserError


def atomic_write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by `data` so that a crash leaves either the old file or the new one, never a half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
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
    _sync_folder(path.parent)


def atomic_write_text(path: Path, text: str) -> None:
    """`atomic_write_bytes` of UTF-8 text."""
    atomic_write_bytes(path, text.encode("utf-8"))


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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


class JsonlFile:
    """Append-only JSON lines, each row carrying an `update`; a torn last line is set aside, with a message."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows as one write and force them to disk."""
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())

    def rows(self) -> list[dict[str, Any]]:
        """All complete rows; a torn last line is skipped."""
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")
        return [json.loads(line) for line in lines[:-1]]

    def truncate_after(self, update: int) -> None:
        """Drop rows of updates later than `update`, and a torn last line (kept in FILE.torn)."""
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        whole, _, torn = data.rpartition(b"\n")
        if torn:
            aside = self.path.with_name(self.path.name + ".torn")
            with aside.open("ab") as f:
                f.write(torn + b"\n")
            print(f"rlvr-pl: {self.path}: the last line was cut off; set aside in {aside.name}", file=sys.stderr)
        lines = whole.split(b"\n") if whole else []
        kept = [line for line in lines if json.loads(line)["update"] <= update]
        if torn or len(kept) < len(lines):
            atomic_write_bytes(self.path, b"".join(line + b"\n" for line in kept))


class CsvTable:
    """A CSV file with one row an update (or window), keyed by its `update` column."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: list[str] | None = None

    def append(self, row: Mapping[str, Any]) -> None:
        """Append one row. A row with new columns rewrites the file with the wider header."""
        if self._columns is None:
            self._columns = self._read_header()
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
        """All complete rows, values as text; a torn last line is skipped."""
        if not self.path.exists():
            return []
        text = self.path.read_text(encoding="utf-8")
        return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))

    def truncate_after(self, update: int) -> None:
        """Drop rows of updates later than `update` (and a torn last line)."""
        if not self.path.exists():
            return
        kept = [row for row in self.rows() if int(row["update"]) <= update]
        self._columns = self._read_header()
        self._rewrite(kept)

    def _read_header(self) -> list[str]:
        if not self.path.exists():
            return []
        with self.path.open(encoding="utf-8", newline="") as f:
            return next(csv.reader(f), [])

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


class RunFolder:
    """``config.yaml metrics.csv rollouts/ items/ windows.csv drift.csv criterion.json verdict.json cost.json
    checkpoints/ snapshots/`` under one path."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

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

    def table(self, name: str) -> CsvTable:
        """The CSV table of that name, for example ``windows.csv``."""
        return CsvTable(self.path / name)

    def write_json(self, name: str, obj: Any) -> None:
        """Replace the JSON file `name` whole."""
        atomic_write_text(self.path / name, json.dumps(obj, indent=2, ensure_ascii=False) + "\n")

    def read_json(self, name: str) -> Any:
        """The content of the JSON file `name`, or None where there is none. A damaged file is a `UserError`."""
        path = self.path / name
        if not path.exists():
            return None
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path}: not valid JSON ({error})") from None
