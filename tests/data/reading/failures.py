"""Errors of the Hub and of its client libraries, as they are raised in practice."""

import errno
import http.client
import socket
import ssl
import sys
import urllib.error
from types import SimpleNamespace

import datasets
import huggingface_hub.errors
from huggingface_hub.utils import hf_raise_for_status

httpx = sys.modules[huggingface_hub.errors.HTTPError.__module__.partition(".")[0]]  # the client of huggingface_hub
NAME = "someone/some-texts"


def reset():
    return ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")


class Refused(Exception):
    """An error with a response, as HTTP libraries raise it."""

    def __init__(self, status, headers=None):
        super().__init__(f"HTTP {status}")
        self.response = SimpleNamespace(status_code=status, headers=headers or {})


def hub_error(status, headers=None, url=f"https://huggingface.co/api/datasets/{NAME}"):
    """Return the error that huggingface_hub raises for a response."""
    response = httpx.Response(status, headers=headers, request=httpx.Request("GET", url))
    try:
        hf_raise_for_status(response)
    except huggingface_hub.errors.HfHubHTTPError as err:
        return err
    raise AssertionError(f"{status} is not an error")


def caused(error, cause):
    """Return `error`, raised from `cause`."""
    try:
        try:
            raise cause
        except type(cause) as err:
            raise error from err
    except type(error) as err:
        return err


TRANSIENT = {
    "ConnectionError": ConnectionError("Couldn't reach the Hub"),
    "reset": reset(),
    "refused": ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
    "broken pipe": BrokenPipeError(errno.EPIPE, "Broken pipe"),
    "unreachable": OSError(errno.ENETUNREACH, "Network is unreachable"),
    "TimeoutError": TimeoutError("timed out"),
    "timeout with errno": TimeoutError(errno.ETIMEDOUT, "Connection timed out"),
    "no name server": socket.gaierror(-3, "Temporary failure in name resolution"),
    "OSError": OSError(),
    "URLError": urllib.error.URLError("no route"),
    "IncompleteRead": http.client.IncompleteRead(b"half"),
    "RemoteDisconnected": http.client.RemoteDisconnected("bye"),
    "cause": caused(RuntimeError("while reading"), reset()),
    "generating": caused(datasets.exceptions.DatasetGenerationError("An error occurred while generating"), reset()),
    **{f"status {status}": Refused(status) for status in (408, 429, 500, 502, 503, 504)},
    **{f"hub status {status}": hub_error(status) for status in (429, 500, 502, 503, 504)},
    "wrapped 503": caused(RuntimeError("while reading"), hub_error(503)),
    **{
        name: getattr(httpx, name)("the network")
        for name in ("ReadTimeout", "ConnectTimeout", "PoolTimeout", "ConnectError", "ReadError", "RemoteProtocolError")
    },
    "network down, nothing cached": caused(
        huggingface_hub.errors.LocalEntryNotFoundError("not in the cache, and the Hub is out of reach"),
        httpx.ConnectError("no route"),
    ),
    "as datasets reports it": caused(
        ConnectionError(f"Couldn't reach '{NAME}' on the Hub (LocalEntryNotFoundError)"),
        caused(huggingface_hub.errors.LocalEntryNotFoundError("not cached"), httpx.ConnectTimeout("slow")),
    ),
}


GATED = {"X-Error-Code": "GatedRepo"}


MISSING = {"X-Error-Code": "RepoNotFound"}


FINAL = {
    **{f"status {status}": Refused(status) for status in (400, 401, 403, 404, 410, 451)},
    **{f"hub status {status}": hub_error(status) for status in (400, 401, 403, 404)},
    "missing repo": hub_error(404, MISSING),
    "missing or private repo": hub_error(401, MISSING),
    "gated repo": hub_error(403, GATED),
    "missing file": hub_error(404, {"X-Error-Code": "EntryNotFound"}),
    "missing revision": hub_error(404, {"X-Error-Code": "RevisionNotFound"}),
    "DatasetNotFoundError": datasets.exceptions.DatasetNotFoundError(f"Dataset '{NAME}' doesn't exist on the Hub"),
    "DataFilesNotFoundError": datasets.exceptions.DataFilesNotFoundError("No (supported) data files found"),
    "gated": caused(
        datasets.exceptions.DatasetNotFoundError(f"Dataset '{NAME}' is a gated dataset"), hub_error(403, GATED)
    ),
    "unknown split": ValueError("Unknown split \"nosuch\". Should be one of ['train', 'test']."),
    "bad split": ValueError("Bad split: nosuch. Available splits: ['train', 'test']"),
    "bad config": ValueError("BuilderConfig 'nosuch' not found. Available: ['one', 'two']"),
    "offline": huggingface_hub.errors.OfflineModeIsEnabled("Cannot reach the Hub: offline mode is enabled"),
    "offline, as datasets reports it": ConnectionError(f"Couldn't reach '{NAME}' on the Hub (OfflineModeIsEnabled)"),
    "FileNotFoundError": FileNotFoundError(errno.ENOENT, "No such file or directory", "x"),
    "PermissionError": PermissionError(errno.EACCES, "Permission denied", "cache"),
    "disk full": OSError(errno.ENOSPC, "No space left on device"),
    "certificate": caused(httpx.ConnectError("TLS"), ssl.SSLCertVerificationError("self-signed certificate")),
    "unsupported protocol": httpx.UnsupportedProtocol("ftp"),
    "KeyError": KeyError("train"),
    "TypeError": TypeError("a bug"),
    "MemoryError": MemoryError(),
}
