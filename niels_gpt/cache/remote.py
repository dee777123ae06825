"""Caches at URLs: a local copy that grows as files are read, bounded in size, and publishing of finished caches.

`local_folder` copies what is small (meta.json and the tokenizer) and returns a local folder that all readers can open.
Its other files are fetched when they are first read; each is compared with the sha256 in meta.json on arrival. When the
copies exceed `size_limit`, those that were not used for the longest time are removed, and fetched again if needed.

A published cache has the files of a local one. Its meta.json is removed before anything else is written, and written
last: what has no meta.json is not a finished cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.cache.meta import CacheError, listed_files, read_meta
from niels_gpt.system import files
from niels_gpt.system.console import short_number
from niels_gpt.system.executors import ThreadExecutor
from niels_gpt.system.program import command
from niels_gpt.system.urls import is_url, join, make_folder, open_url, split_name, url_errors
from niels_gpt.system.user_cache import BUILDS, REMOTE, mark_used, private_folder
from niels_gpt.tokenizer.foreign import FILES

log = logging.getLogger("niels_gpt.cache")

ORIGIN = "origin.json"
"""File in a local copy: the URL that its cache is at."""
VARIABLE = "NIELS_GPT_REMOTE_GB"
DEFAULT_GB = 100.0
CHUNK_BYTES = 4 << 20
UPLOADS = 4
"""Files that are uploaded at once."""
PROBE = ".niels-gpt-write-test"


def size_limit() -> int:
    """Most bytes of local copies of remote caches. Raises ValueError for an invalid NIELS_GPT_REMOTE_GB."""
    text = os.environ.get(VARIABLE, "")
    try:
        limit = float(text or DEFAULT_GB) * 1e9
        if not 0 < limit < 1e18:
            raise ValueError
    except ValueError:
        raise ValueError(f"{VARIABLE} is {text!r}: set it to a number of GB above 0, or unset it") from None
    return int(limit)


# --- reading -----------------------------------------------------------------------------------------


def local_folder(location: str | Path, *, fresh: bool = False) -> Path:
    """The local folder of a cache or of a folder of caches: a path as it is, for a URL its local copy.

    fresh: remove the files that were copied before, so that all of them are fetched again.
    Raises CacheError if there is nothing at the URL, OSError if it cannot be read.
    """
    if not is_url(location):
        return files.expand_home(location)
    url = str(location).rstrip("/")
    filesystem, root = open_url(url)
    small: dict[str, bytes] = {}
    for name in _small_files(filesystem, root, url):
        with contextlib.suppress(FileNotFoundError), url_errors(join(url, name), "read"):
            small[name] = filesystem.cat_file(join(root, name))
    if not small:
        raise CacheError(f"no cache at {url}: it has no meta.json, and no caches in pretrain/ or sft/")
    content = hashlib.sha256()
    for name, data in sorted(small.items()):
        content.update(f"{name} {files.sha256_bytes(data)}\n".encode())
    key = f"{files.sha256_bytes(url.encode())[:16]}-{content.hexdigest()[:16]}"  # a rebuilt cache gets another folder
    folder = private_folder(REMOTE) / key
    for name, data in small.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("meta.json") and not name.startswith("tokenizer/"):
            cache = path.parent
            for split in ("train", "val", "test"):
                if f'"{split}/'.encode() in data:
                    (cache / split).mkdir(exist_ok=True)
            files.write_text(cache / ORIGIN, json.dumps({"url": join(url, name).removesuffix("/meta.json")}))
            for copied in (*cache.glob("*.bin"), *cache.glob("*.npy"), *cache.glob("*/*.*")) if fresh else ():
                copied.unlink(missing_ok=True)
        if not path.exists() or path.read_bytes() != data:
            files.write_bytes(path, data)
    mark_used(folder)
    return folder


def local_file(location: str | Path) -> Path:
    """The path of a file of a cache: a path as it is, for a URL that in the local copy of its cache."""
    if not is_url(location):
        return Path(location)
    cache, name = split_name(str(location))
    return local_folder(cache) / name


def _small_files(filesystem: Any, root: str, url: str) -> list[str]:
    """Names that may exist below a URL: the tokenizer and the meta.json of each cache."""
    names = ["meta.json", *(f"tokenizer/{name}" for name in ("meta.json", "spm.model", *FILES))]
    for kind in ("pretrain", "sft"):
        with contextlib.suppress(FileNotFoundError), url_errors(join(url, kind), "list"):
            found = filesystem.ls(join(root, kind), detail=False)
            names += [f"{kind}/{path.rstrip('/').rpartition('/')[2]}/meta.json" for path in sorted(found)]
    return [name for name in names if "/." not in name]


def origin_of(cache: Path) -> str | None:
    """The URL of a cache of which this folder is a local copy; None for any other folder."""
    try:
        return str(json.loads((cache / ORIGIN).read_bytes())["url"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


class RemoteFile(NamedTuple):
    """A file of a remote cache, and its local copy."""

    url: str
    path: Path
    bytes: int
    sha256: str

    def fetch(self) -> None:
        """Copy the file unless there is a copy, and mark it as used now.

        Raises CacheError if its content differs from meta.json, OSError if it cannot be read or stored.
        """
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_size == self.bytes:
                os.utime(self.path)
                return
        self.fetch_again(lambda copy: copy.st_size != self.bytes)

    def fetch_again(self, is_damaged: Callable[[os.stat_result], bool] = lambda copy: True) -> None:
        """Replace a copy that is missing or damaged. Raises as `fetch` does."""
        with files.lock(self.path.with_name(f".{self.path.name}.lock")):
            with contextlib.suppress(FileNotFoundError):
                if not is_damaged(self.path.stat()):  # another process has replaced it
                    return
                self.path.unlink()
            self._copy()

    def _copy(self) -> None:
        temporary = self.path.with_name(f".{self.path.name}.part")
        with _reserved(self.bytes, self.path), temporary.open("wb") as file:
            file.truncate(self.bytes)  # counts as used from now on
        try:
            for attempt in range(2):
                if self._download(temporary) == self.sha256:
                    temporary.replace(self.path)
                    return
                log.debug("%s differs from its sha256 in meta.json (attempt %d of 2)", self.url, attempt + 1)
        finally:
            temporary.unlink(missing_ok=True)
        raise CacheError(
            f"{self.url} differs from its sha256 in meta.json: it is damaged, or was rebuilt since this process opened "
            f"it; start again, and if that does not help, {self.remedy()}"
        )

    def remedy(self) -> str:
        """How to replace a published file that is damaged."""
        match = re.fullmatch(r"(.*)/(?:pretrain|sft)/([^/]+)/(?:(?:train|val|test)/)?[^/]+", self.url)
        if match is None:
            return "build the cache again (--force)"
        return f"build it again: {command('cache', 'build', match[2], '--cache-dir', match[1], '--force')}"

    def _download(self, path: Path) -> str:
        """Write the content to a file; its sha256."""
        digest = hashlib.sha256()
        filesystem, remote = open_url(self.url)
        try:
            with url_errors(self.url, "read"), filesystem.open(remote, "rb") as source, path.open("r+b") as file:
                while data := source.read(CHUNK_BYTES):
                    digest.update(data)
                    file.write(data)
                file.truncate()
        except FileNotFoundError:
            raise CacheError(f"{self.url} is missing, but meta.json lists it: {self.remedy()}") from None
        return digest.hexdigest()


def remote_file(path: Path, listed: Mapping[str, Any] | None) -> RemoteFile | None:
    """The remote file of a path in a local copy; None for a file of a local cache."""
    if listed is None:
        return None
    for cache in (path.parent, path.parent.parent):
        url = origin_of(cache)
        if url is not None:
            return RemoteFile(join(url, path.relative_to(cache).as_posix()), path, listed["bytes"], listed["sha256"])
    return None


def ensure(path: Path, listed: Mapping[str, Any] | None) -> None:
    """Fetch a file that is missing, or has another size, in a local copy of a remote cache; ignore other files."""
    try:
        if listed is None or path.stat().st_size == listed["bytes"]:
            return
    except FileNotFoundError:
        pass
    except OSError:  # whoever reads the file reports it
        return
    remote = remote_file(path, listed)
    if remote is not None:
        remote.fetch()


def fetch_again(path: Path, listed: Mapping[str, Any] | None) -> bool:
    """Replace a local copy that is damaged; False for a file of a local cache. Raises as `RemoteFile.fetch` does."""
    remote = remote_file(path, listed)
    if remote is None:
        return False
    remote.fetch_again()
    return True


def url_of(folder: Path) -> Path | str:
    """What to call a cache folder: the URL that it is a copy of, or its path."""
    return origin_of(folder) or folder


@contextlib.contextmanager
def named_as(location: str | Path, folder: Path) -> Iterator[None]:
    """Name a cache in errors as the user did: by its URL, not by the folder of its local copy."""
    try:
        yield
    except CacheError as err:
        if not is_url(location):
            raise
        raise CacheError(str(err).replace(str(folder), str(location))) from err


def check_fits(url: str, sizes: Mapping[str, int]) -> None:
    """Warn that the token files of a remote split do not fit the local copies together.

    Raises CacheError if one of them (name -> bytes) does not fit alone.
    """
    limit, size = size_limit(), sum(sizes.values())
    largest = max(sizes, key=lambda name: sizes[name], default="")
    if largest:
        _check_fits_alone(f"{url}/{largest}", sizes[largest])
    if size > limit:
        log.warning(
            "%s has %sB, but local copies of remote caches may have %sB: files will be fetched more than once; set "
            "%s to more GB",
            url, short_number(size), short_number(limit), VARIABLE,
        )  # fmt: skip


@contextlib.contextmanager
def _reserved(size: int, path: Path) -> Iterator[None]:
    """Make space for a file among the local copies, by removing those that were not used for the longest time.

    The block creates the file; other processes wait. Raises CacheError for a file that exceeds the limit alone.
    """
    limit = size_limit()
    _check_fits_alone(path.name, size)
    root = private_folder(REMOTE)
    with files.lock(root / ".lock"):
        used, candidates = 0, []
        for file in root.glob("*/**/*"):
            with contextlib.suppress(OSError):
                status = file.stat()
                if file.is_file():
                    used += status.st_size
                    if file.suffix in (".bin", ".npy") or file.name.endswith(".part"):
                        candidates.append((status.st_mtime_ns, status.st_size, file))
        candidates.sort()
        removed = False
        for _, freed, file in candidates:
            if used + size <= limit:
                break
            if file.name.endswith(".part") and not _is_abandoned(file):
                continue
            with contextlib.suppress(OSError):
                file.unlink()
                used, removed = used - freed, True
        if removed:
            from niels_gpt.cache.mmap import unmap_removed  # which imports this module

            unmap_removed()
        yield


def _check_fits_alone(name: str, size: int) -> None:
    limit = size_limit()
    if size > limit:
        raise CacheError(
            f"{name} has {size:,} bytes, but local copies of remote caches may have {limit:,}: set {VARIABLE} to more "
            f"GB (it is {os.environ.get(VARIABLE) or DEFAULT_GB})"
        )


def _is_abandoned(part: Path) -> bool:
    """Whether no process downloads this file now: a killed one left it."""
    try:
        with files.lock(part.with_suffix(".lock"), wait=False):
            return True
    except BlockingIOError:
        return False


# --- publishing --------------------------------------------------------------------------------------


def staging_folder(url: str) -> Path:
    """The local folder in which the caches of a URL are built; kept between commands, so that a build can resume."""
    return private_folder(BUILDS, files.sha256_bytes(url.encode())[:16])


def check_writable(url: str) -> None:
    """Write and remove a small file. Raises OSError if that fails, before any work is done."""
    filesystem, path = open_url(url)
    with url_errors(url, "write"):
        make_folder(filesystem, path)
        filesystem.pipe_file(join(path, PROBE), b"")
        filesystem.rm_file(join(path, PROBE))


def fetch_tokenizer(url: str, folder: Path) -> None:
    """Copy the tokenizer of a remote folder of caches to a local one; remove the local one if there is none."""
    filesystem, path = open_url(url)
    for name in ("meta.json", "spm.model", *FILES):
        target = folder / "tokenizer" / name
        try:
            with url_errors(join(url, "tokenizer", name), "read"):
                data = filesystem.cat_file(join(path, "tokenizer", name))
        except FileNotFoundError:
            target.unlink(missing_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            files.write_bytes(target, data)


def publish_tokenizer(folder: Path, url: str) -> None:
    """Copy the tokenizer of a local folder of caches to a URL, the model last.

    Raises CacheError if another tokenizer is there: one that another machine wrote meanwhile.
    """
    filesystem, path = open_url(url)
    possible = ("meta.json", *reversed(FILES), "spm.model")
    names = [name for name in possible if (folder / "tokenizer" / name).is_file()]
    for name in names:
        data = (folder / "tokenizer" / name).read_bytes()
        target = join(url, "tokenizer", name)
        with url_errors(target, "write"):
            make_folder(filesystem, join(path, "tokenizer"))
            model, last = join(path, "tokenizer", names[-1]), folder / "tokenizer" / names[-1]
            if filesystem.exists(model) and filesystem.cat_file(model) != last.read_bytes():
                raise CacheError(
                    f"{url} has another tokenizer now, which another build wrote meanwhile: run the same command again"
                )
            filesystem.pipe_file(join(path, "tokenizer", name), data)


def published_meta(url: str) -> dict[str, Any] | None:
    """The meta of a finished cache at a URL, all of whose files have the listed sizes; None otherwise."""
    filesystem, path = open_url(url)
    folder = private_folder(BUILDS)
    local = folder / f"meta-{os.getpid()}.json"
    try:
        with url_errors(url, "read"):
            local.write_bytes(filesystem.cat_file(join(path, "meta.json")))
            found = filesystem.find(path, detail=True)
        meta = read_meta(local)
        sizes = {name.removeprefix(filesystem._strip_protocol(path)).strip("/"): e["size"] for name, e in found.items()}
        whole = all(sizes.get(name) == entry["bytes"] for name, entry in listed_files(meta, Path(url)).items())
        return meta if whole else None
    except (FileNotFoundError, CacheError):
        return None
    finally:
        local.unlink(missing_ok=True)


def publish_cache(folder: Path, url: str) -> None:
    """Copy a finished local cache to a URL: meta.json last, after the old one was removed. Raises OSError.

    Files of an older cache that are not part of this one are removed. If the copy is interrupted, there is no cache at
    the URL until it is repeated.
    """
    meta = read_meta(folder / "meta.json")
    names = [*listed_files(meta, folder)]
    filesystem, path = open_url(url)
    with url_errors(url, "write"):
        with contextlib.suppress(FileNotFoundError):
            filesystem.rm_file(join(path, "meta.json"))
        filesystem.invalidate_cache()
        base = filesystem._strip_protocol(path)
        old = [] if not filesystem.exists(path) else filesystem.find(path)
        for name in sorted({file.removeprefix(base).strip("/") for file in old} - {*names}):
            filesystem.rm_file(join(path, name))
        for parent in {join(path, name).rpartition("/")[0] for name in names}:
            make_folder(filesystem, parent)

    def upload(name: str) -> None:
        with url_errors(join(url, name), "write"):
            filesystem.put_file(str(folder / name), join(path, name))

    for name, _ in ThreadExecutor(UPLOADS).in_order(names, upload):
        log.info("uploaded %s", join(url, name))
    with url_errors(url, "write"):
        make_folder(filesystem, path)
        filesystem.invalidate_cache()
        for name, entry in listed_files(meta, folder).items():
            size = filesystem.info(join(path, name))["size"]
            if size != entry["bytes"]:
                raise OSError(f"{join(url, name)} has {size:,} bytes after the upload, expected {entry['bytes']:,}")
        filesystem.pipe_file(join(path, "meta.json"), (folder / "meta.json").read_bytes())


def remove_staged(folder: Path) -> None:
    """Remove the local files of a cache that was published."""
    shutil.rmtree(folder, ignore_errors=True)
