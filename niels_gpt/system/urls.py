"""Files at URLs (s3://, gs://, hf://, file://, memory://), through fsspec. Errors are one line with the URL."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
_OBJECT_STORES = {*_PACKAGES, "hf"}
_NETWORK = ("EndpointConnectionError", "ConnectTimeoutError", "ReadTimeoutError", "ConnectionError", "TimeoutError",
            "ClientConnectorError", "ConnectionClosedError")  # fmt: skip
_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "RefreshError", "DefaultCredentialsError")


def is_url(location: str | Path) -> bool:
    """Whether a location is a URL, not a path."""
    return isinstance(location, str) and _URL.match(location) is not None


def location(text: str | Path) -> Path | str:
    """A path, or a URL as it is: a Path would lose one of its slashes. For options that take both."""
    return str(text).rstrip("/") if is_url(text) else Path(text)


def join(url: str, *parts: str) -> str:
    """The URL of a file below another."""
    return "/".join([url.rstrip("/"), *(part.strip("/") for part in parts)])


def split_name(url: str) -> tuple[str, str]:
    """(URL of the parent, last part)."""
    parent, _, name = url.rstrip("/").rpartition("/")
    return parent, name


def make_folder(filesystem: Any, path: str) -> None:
    """Create a folder where a file system has folders. An object store has none, and would create a bucket."""
    protocols = {filesystem.protocol} if isinstance(filesystem.protocol, str) else {*filesystem.protocol}
    if not protocols & _OBJECT_STORES:
        filesystem.makedirs(path, exist_ok=True)


def open_url(url: str) -> tuple[Any, str]:
    """(file system, path within it). Raises ValueError for an unknown protocol or a missing package."""
    import fsspec

    protocol = url.partition("://")[0].lower()
    try:
        with url_errors(url, "open"):
            filesystem, path = fsspec.core.url_to_fs(url)
    except ImportError as err:
        package = _PACKAGES.get(protocol)
        remedy = f"pip install {package}" if package else str(err)
        raise ValueError(f"cannot open {url}: {protocol}:// needs another package: {remedy}") from None
    except ValueError as err:
        raise ValueError(f"cannot open {url}: {_first_line(err)}") from None
    filesystem.invalidate_cache()  # listings of an earlier command in this process
    return filesystem, path


@contextlib.contextmanager
def url_errors(url: str, verb: str) -> Iterator[None]:
    """Raise the errors of client libraries as OSErrors of one line; FileNotFoundError and ImportError as they are."""
    try:
        yield
    except (ImportError, ValueError):
        raise
    except FileNotFoundError as err:
        raise FileNotFoundError(errno.ENOENT, f"cannot {verb} {url}: there is no such file or bucket") from err
    except PermissionError as err:
        raise PermissionError(
            errno.EACCES, f"no permission to {verb} {url} ({_first_line(err)}): check the credentials and their rights"
        ) from err
    except Exception as err:
        kinds = {cls.__name__ for cls in type(err).__mro__}
        module = type(err).__module__
        if not isinstance(err, OSError) and not module.startswith(
            ("botocore", "aiohttp", "aiobotocore", "gcsfs", "google")
        ):
            raise
        if kinds & {*_CREDENTIALS}:
            raise PermissionError(
                errno.EACCES, f"no permission to {verb} {url}: there are no credentials ({_first_line(err)})"
            ) from err
        remedy = ": check the address and the network" if kinds & {*_NETWORK} else ""
        number = err.errno if isinstance(err, OSError) and err.errno else errno.EIO
        raise OSError(number, f"cannot {verb} {url}: {_first_line(err)}{remedy}") from err


def _first_line(err: BaseException) -> str:
    return (str(err).strip().splitlines() or [type(err).__name__])[0].rstrip(". ")
