"""Classify errors of the Hub and of its client libraries: transient or final, status, message."""

from __future__ import annotations

import contextlib
import errno
from socket import gaierror

_TRANSIENT_ERRNO = {errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.ENETUNREACH, errno.EHOSTUNREACH,
                  errno.ETIMEDOUT, errno.EPIPE, errno.EAGAIN, errno.EIO}  # fmt: skip
_HTTP_LIBRARIES = {
    "httpx",
    "httpx2",
    "httpcore",
    "httpcore2",
    "requests",
    "urllib3",
    "aiohttp",
    "http",
    "huggingface_hub",
}
_TRANSIENT_NAMES = {"TransportError", "ConnectionError", "Timeout", "HTTPException", "ClientError", "ProtocolError",
                  "TimeoutError", "IncompleteRead", "ChunkedEncodingError", "ContentDecodingError"}  # fmt: skip
_FINAL_NAMES = {"OfflineModeIsEnabled", "DatasetNotFoundError", "DataFilesNotFoundError", "EmptyDatasetError",
                "GatedRepoError", "RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError",
                "SSLCertVerificationError", "LocalProtocolError", "UnsupportedProtocol"}  # fmt: skip


def is_transient(err: BaseException) -> bool:
    """Whether a retry may succeed: timeouts, broken connections, HTTP 429 and 5xx."""
    causes = chain(err)
    names = [{cls.__name__ for cls in type(e).__mro__} for e in causes]
    # huggingface_hub raises LocalEntryNotFoundError if the network is down and nothing is cached.
    if any(mro & _FINAL_NAMES and "LocalEntryNotFoundError" not in mro for mro in names):
        return False
    if "OfflineModeIsEnabled" in str(err) or (isinstance(err, ValueError) and not isinstance(err, OSError)):
        return False
    code = next(filter(None, map(status, causes)), None)
    if code is not None:
        return code in (408, 425, 429) or code >= 500
    for e in causes:
        if isinstance(e, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError):
            continue
        if isinstance(e, OSError) and (e.errno is None or e.errno in _TRANSIENT_ERRNO or isinstance(e, gaierror)):
            return True
        for cls in type(e).__mro__:
            if cls.__name__ in _TRANSIENT_NAMES and cls.__module__.partition(".")[0] in _HTTP_LIBRARIES:
                return True
    return False


def chain(err: BaseException) -> list[BaseException]:
    """Return the error, its cause, the cause of that, and so on."""
    errors: list[BaseException] = []
    current: BaseException | None = err
    while current is not None and current not in errors:
        errors.append(current)
        current = current.__cause__ or current.__context__
    return errors


def status(err: BaseException) -> int | None:
    """Return the HTTP status of an error, or None."""
    response = getattr(err, "response", None)
    for value in (getattr(response, "status_code", None), getattr(err, "status", None), getattr(err, "code", None)):
        if isinstance(value, int) and 100 <= value < 600:
            return value
    return None


def retry_after(err: BaseException) -> float:
    """Return the seconds of a Retry-After header; 0 without one."""
    for e in chain(err):
        headers = getattr(getattr(e, "response", None), "headers", None) or {}
        with contextlib.suppress(KeyError, ValueError, TypeError):
            return float(headers["Retry-After"])
    return 0.0


def reason(err: BaseException) -> str:
    """Return the message of an error in one line."""
    lines = [text.splitlines()[0] for text in (str(e).strip() for e in chain(err)) if text]
    if len(lines) > 1 and (type(err).__name__ == "DatasetGenerationError" or lines[0] == "Server Disconnected"):
        lines = lines[1:]  # the message of the cause has the details
    return lines[0].rstrip(".") if lines else type(err).__name__
