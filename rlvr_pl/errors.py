"""The one exception that a user's mistake raises."""

from __future__ import annotations


class UserError(Exception):
    """Bad input: the message names the file, line or setting, the value and the remedy, in one line.

    The command line prints the message on stderr and exits with status 2; nothing has been written when it is raised.
    """
