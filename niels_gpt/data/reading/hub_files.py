"""Check that the files of the Hub are read completely.

`huggingface_hub` returns whatever body a server or proxy sends. A body that is too short then ends a jsonl file early,
without an error, and the rest of its rows is lost.
"""

from __future__ import annotations

from typing import Any

import fsspec
from huggingface_hub import HfFileSystem
from huggingface_hub.hf_file_system import HfFileSystemFile

REQUESTS = 3
"""Requests for a range before an answer of the wrong size is an error."""


class WrongSize(ConnectionError):
    """An answer of the Hub has fewer or more bytes than were requested."""


class CheckedFile(HfFileSystemFile):
    """A file of the Hub. Raises WrongSize instead of returning a part of the requested bytes."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        data = b""
        for _ in range(REQUESTS):
            data = super()._fetch_range(start, end)
            if len(data) == end - start:
                return data
        raise WrongSize(f"the Hub sent {len(data):,} bytes for bytes {start:,} to {end:,} of {self.path}")

    def read(self, length: int = -1) -> bytes:
        start = self.loc
        data: bytes = super().read(length)
        if length in (None, -1) and self.size is not None and start + len(data) != self.size:
            raise WrongSize(f"the Hub sent {start + len(data):,} of the {self.size:,} bytes of {self.path}")
        return data


class CheckedFileSystem(HfFileSystem):
    """The files of the Hub, opened for reading as `CheckedFile`."""

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, *args: Any, **options: Any) -> Any:
        size = block_size if block_size is not None else getattr(self, "block_size", None)
        if mode != "rb" or size == 0 or args:  # 0: a stream without ranges, whose size CheckedFile.read checks
            return super()._open(path, mode, block_size, *args, **options)
        options |= {"mode": mode} | ({} if size is None else {"block_size": size})
        return CheckedFile(self, path, **options)


def check_files() -> None:
    """Let fsspec, and with it `datasets`, open hf:// paths as `CheckedFile`."""
    if fsspec.get_filesystem_class("hf") is not CheckedFileSystem:
        fsspec.register_implementation("hf", CheckedFileSystem, clobber=True)
