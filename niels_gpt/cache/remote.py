"""Caches at URLs: opened as a local folder that grows as files are read, and published when they are finished.

`local_folder` copies what is small (meta.json and the tokenizer) and returns a local folder that all readers can open;
`copies.py` fetches its other files.

A published cache has the files of a local one. Its meta.json is removed before anything else is written, and written
last: what has no meta.json is not a finished cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from niels_gpt.cache.copies import ORIGIN
from niels_gpt.cache.formats import CacheError
from niels_gpt.cache.meta import listed_files, read_meta
from niels_gpt.system import files
from niels_gpt.system.executors import ThreadExecutor
from niels_gpt.system.urls import is_url, join, make_folder, open_url, split_name, url_errors
from niels_gpt.system.user_cache import BUILDS, REMOTE, mark_used, private_folder
from niels_gpt.tokenizer.foreign import FILES

log = logging.getLogger("niels_gpt.cache")

UPLOADS = 4
"""Files that are uploaded at once."""
PROBE = ".niels-gpt-write-test"


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


@contextlib.contextmanager
def named_as(location: str | Path, folder: Path) -> Iterator[None]:
    """Name a cache in errors as the user did: by its URL, not by the folder of its local copy."""
    try:
        yield
    except CacheError as err:
        if not is_url(location):
            raise
        raise CacheError(str(err).replace(str(folder), str(location))) from err


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
