"""The two exceptions that end a command with one line: a user's mistake, and a run that cannot go on."""

from __future__ import annotations


class UserError(Exception):
    """Bad input: the message names the file, line or setting, the value and the remedy, in one line.

    The command line prints the message on stderr and exits with status 2. Nothing has been written when it is raised,
    but for what only shows in mid-run, such as an error in a class of the user's: that leaves a stopped run folder.

    >>> raise UserError("data.train: no such file")
    Traceback (most recent call last):
    rlvr_pl.errors.UserError: data.train: no such file
    """


class RunFailure(Exception):
    """A run that cannot go on although nothing was asked wrongly: its numbers are no longer finite, its memory is used
    up. The message says in one line what happened and where the last good state is.

    The command line prints the message on stderr and exits with status 1; what was recorded before stays as it is.
    """
