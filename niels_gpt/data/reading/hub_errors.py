"""What an error of the Hub, or of the libraries on the way to it, means: whether it may pass, and what it says."""

from __future__ import annotations

import contextlib
import errno
from socket import gaierror

_PASSING_ERRNO = {errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.ENETUNREACH, errno.EHOSTUNREACH,
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
_PASSING_NAMES = {"TransportError", "ConnectionError", "Timeout", "HTTPException", "ClientError", "ProtocolError",
                  "TimeoutError", "IncompleteRead", "ChunkedEncodingError", "ContentDecodingError"}  # fmt: skip
_FINAL_NAMES = {"OfflineModeIsEnabled", "DatasetNotFoundError", "DataFilesNotFoundError", "EmptyDatasetError",
                "GatedRepoError", "RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError",
                "SSLCertVerificationError", "LocalProtocolError", "UnsupportedProtocol"}  # fmt: skip


def is_transient(err: BaseException) -> bool:
    """Whether the failure may pass by itself: timeouts, broken connections, 429 and 5xx of the Hub."""
    causes = chain(err)
    names = [{cls.__name__ for cls in type(e).__mro__} for e in causes]
    # LocalEntryNotFoundError is how huggingface_hub says that the network is down and nothing is cached.
    if any(mro & _FINAL_NAMES and "LocalEntryNotFoundError" not in mro for mro in names):
        return False
    if "OfflineModeIsEnabled" in str(err) or (isinstance(err, ValueError) and not isinstance(err, OSError)):
        return False
    found = next(filter(None, map(status, causes)), None)
    if found is not None:
        return found in (408, 425, 429) or found >= 500
    for e in causes:
        if isinstance(e, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError):
            continue
        if isinstance(e, OSError) and (e.errno is None or e.errno in _PASSING_ERRNO or isinstance(e, gaierror)):
            return True
        for cls in type(e).__mro__:
            if cls.__name__ in _PASSING_NAMES and cls.__module__.partition(".")[0] in _HTTP_LIBRARIES:
                return True
    return False


def chain(err: BaseException) -> list[BaseException]:
    """The error and what it came from."""
    found: list[BaseException] = []
    current: BaseException | None = err
    while current is not None and current not in found:
        found.append(current)
        current = current.__cause__ or current.__context__
    return found


def status(err: BaseException) -> int | None:
    """The HTTP status that an error carries."""
    response = getattr(err, "response", None)
    for value in (getattr(response, "status_code", None), getattr(err, "status", None), getattr(err, "code", None)):
        if isinstance(value, int) and 100 <= value < 600:
            return value
    return None


def retry_after(err: BaseException) -> float:
    """The seconds that the Hub asks to wait for, if it does."""
    for e in chain(err):
        headers = getattr(getattr(e, "response", None), "headers", None) or {}
        with contextlib.suppress(KeyError, ValueError, TypeError):
            return float(headers["Retry-After"])
    return 0.0


def reason(err: BaseException) -> str:
    """What an error says, in one line."""
    lines = [text.splitlines()[0] for text in (str(e).strip() for e in chain(err)) if text]
    if len(lines) > 1 and type(err).__name__ == "DatasetGenerationError":  # says only that it happened
        lines = lines[1:]
    return lines[0] if lines else type(err).__name__
