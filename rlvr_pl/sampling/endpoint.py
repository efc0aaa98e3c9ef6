"""JSON over HTTP to one server, by the standard library."""

from __future__ import annotations

import contextlib
import json
import socket
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from rlvr_pl.errors import RunFailure, UserError


class EndpointError(RunFailure):
    """A server that does not answer, or answers with an error. The message names it.

    `status` is the HTTP status, None where there was no answer; `reason` what the server or the system said.
    """

    def __init__(self, message: str, status: int | None = None, reason: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class Endpoint:
    """One server. Each request has a connection of its own, so that any number of threads may ask at once; redirections
    and proxies are not followed.

    Args:
        url: ``http://HOST:PORT`` or ``https://...``, with or without a path before that of the requests.
        timeout: seconds without a byte after which a request is given up.

    Raises:
        UserError: the URL is another.
    """

    def __init__(self, url: str, timeout: float) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:  # a port that is no number
            parts, port = urlsplit(""), None
        kinds = {"http": HTTPConnection, "https": HTTPSConnection}
        if parts.scheme not in kinds or not parts.hostname or parts.query or parts.fragment or "@" in parts.netloc:
            raise UserError(f"sampler.url is {url!r}: it must be http://HOST:PORT or https://HOST:PORT")
        self.url = url.rstrip("/")
        self._connection, self._path = kinds[parts.scheme], parts.path.rstrip("/")
        self._host, self._port, self._timeout = parts.hostname, port, timeout
        self._open: set[HTTPConnection] = set()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """What the server answers, read as JSON; None for an empty answer.

        Raises:
            EndpointError: no answer, a status other than 200, or no JSON.
        """
        connection = self._connection(self._host, self._port, timeout=self._timeout)
        self._open.add(connection)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, self._path + path, data, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            status, text = reply.status, reply.read()
        except (OSError, HTTPException) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise EndpointError(f"{self.url} does not answer ({reason})", None, reason) from error
        finally:
            self._open.discard(connection)
            connection.close()
        if status != 200:
            reason = _told(text)
            raise EndpointError(f"{self.url}{path} answers {status}: {reason}", status, reason)
        try:
            return json.loads(text) if text else None
        except ValueError as error:
            raise EndpointError(f"{self.url}{path} answers with what is no JSON: {_short(text)}", status) from error

    def abort(self) -> None:
        """End the requests that wait for an answer; a server that notices drops their work."""
        for connection in list(self._open):
            if (wire := connection.sock) is not None:
                with contextlib.suppress(OSError):
                    wire.shutdown(socket.SHUT_RDWR)


def _told(text: bytes) -> str:
    """The words of an error: vLLM puts them under ``error.message``, its web framework under ``detail``."""
    try:
        body = json.loads(text)
    except ValueError:
        return _short(text)
    error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
    return _short(str(error.get("message", error) if isinstance(error, dict) else error).encode())


def _short(text: bytes) -> str:
    return " ".join(text.decode(errors="replace").split())[:300] or "nothing"
