"""Compiled kernels on disk: stored with their sha256, and loaded from memory after one read has been checked.

A stored file is a shared library followed by its sha256 (the dynamic linker ignores what follows the sections), so
that one rename stores both. A file is opened once: owner, mode and hash are those of the open file, and exactly the
bytes that were hashed are loaded. Whatever happens to the file later cannot reach the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import stat
import tempfile
from pathlib import Path

from niels_gpt.system import files

_DIGEST = hashlib.sha256().digest_size
_MOST = 64 << 20
"""Bytes of the largest file that is read; a kernel has about 70 kB."""
_held: list[int] = []
"""Descriptors of loaded libraries. The linker knows a library by its name, /proc/self/fd/N: N is never reused."""


def store(path: Path, library: bytes) -> None:
    """Write a library and its sha256, atomically; replace a link, not the file that it names. Raises OSError."""
    if path.is_symlink():
        path.unlink()
    files.write_bytes(path, library + hashlib.sha256(library).digest(), mode=0o600)


def read_checked(path: Path) -> bytes | None:
    """The stored library; None if it cannot be read, fails its sha256, or another user owns or can write it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
                return None
            content = file.read(_MOST)
    except OSError:
        return None
    library, digest = content[:-_DIGEST], content[-_DIGEST:]
    return library if library and hashlib.sha256(library).digest() == digest else None


def load(name: str, library: bytes, symbols: tuple[str, ...]) -> ctypes.CDLL:
    """Load a library from its bytes. Raises OSError if it is none, AttributeError if it lacks a symbol."""
    loaded = _load_from_memory(name, library) or _load_from_private_copy(name, library)
    for symbol in symbols:
        getattr(loaded, symbol)
    return loaded


def _load_from_memory(name: str, library: bytes) -> ctypes.CDLL | None:
    """Load from an anonymous file; None if the system has none, or lets nothing in one be executed."""
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    except (OSError, AttributeError):
        return None
    try:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(library)
        loaded = ctypes.CDLL(f"/proc/self/fd/{descriptor}")
    except OSError:
        os.close(descriptor)
        return None
    _held.append(descriptor)
    return loaded


def _load_from_private_copy(name: str, library: bytes) -> ctypes.CDLL:
    """Load from a file in a new folder that only this user can read, which is removed again."""
    with tempfile.TemporaryDirectory(prefix="niels-gpt-") as folder:  # mode 0700
        path = Path(folder, f"{name}.so")
        path.write_bytes(library)
        with contextlib.suppress(OSError):
            path.chmod(0o700)
        return ctypes.CDLL(str(path))
