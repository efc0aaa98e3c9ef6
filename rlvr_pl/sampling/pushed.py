"""Where a sampler puts the weights that other processes, on other machines, are to load."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from rlvr_pl.errors import UserError
from rlvr_pl.sampling.vllm import save_weights

if TYPE_CHECKING:
    from rlvr_pl.policy import Policy


class PushedWeights:
    """A folder of this process's own inside a shared one, with one folder a push: ``rlvr-pl-XXXXXXXX/000012``.

    Its name is new whoever else writes there, and nothing outside it is touched. A push appears complete or not at all.

    Args:
        shared: an existing folder that this process may write and the servers can read, at the same path.
    """

    def __init__(self, shared: str | Path) -> None:
        self.shared = Path(shared).expanduser().absolute()
        if not self.shared.is_dir() or not os.access(self.shared, os.W_OK | os.X_OK):
            raise UserError(
                f"sampler.folder is {shared}: no folder that can be written; name one that the servers see under the "
                "same path"
            )
        self._own: Path | None = None
        self._count = 0

    def write(self, policy: Policy) -> Path:
        """Write the policy's weights as the next push."""
        if self._own is None:
            self._own = Path(tempfile.mkdtemp(prefix="rlvr-pl-", dir=self.shared))
            self._own.chmod(0o755)  # the servers may be another user's
        self._count += 1
        folder = self._own / f"{self._count:06d}"
        save_weights(policy, folder)
        return folder

    def keep(self, newest: Path) -> None:
        """Remove the pushes before `newest`."""
        for folder in newest.parent.iterdir():
            if folder != newest:
                shutil.rmtree(folder, ignore_errors=True)

    def remove(self) -> None:
        """Remove all pushes."""
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None
