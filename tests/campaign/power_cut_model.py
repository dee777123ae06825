"""What a power cut may leave, computed from the log of the shim.

The model is that of a journaling file system (ext4, xfs, btrfs, APFS): changes of names survive in their order up to
some point, at least up to the last fsync of a folder; the content of a file is certain only as of its last fsync. What
was written later may be there, be missing, be cut off, or be zeros.
"""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import NamedTuple


class Event(NamedTuple):
    """A line of the log."""

    number: int
    operation: str
    inode: int
    path: str
    second: str


def read_events(log: Path) -> list[Event]:
    """Return the events of a log, in order."""
    events = []
    for line in (log / "events").read_text(encoding="utf-8").splitlines():
        number, operation, inode, path, second = line.split("\t")
        events.append(Event(int(number), operation, int(inode), path, second))
    return sorted(events)


def apply_power_cut(folder: Path, before: Path, log: Path, rng: random.Random) -> str:
    """Replace the folder, as the killed command left it, by what may be on the disk. Returns what was lost, in words.

    before: a copy of the folder as it was (durable) when the command began.
    """
    events = read_events(log)
    names: dict[str, object] = {}
    durable: dict[object, bytes] = {}
    files: dict[int, object] = {}
    """File identity of each inode number; numbers are used again after an unlink."""
    for path in sorted(before.rglob("*")):
        name = str(folder / path.relative_to(before))
        if path.is_dir():
            names[name] = None
        else:
            names[name] = identity = ("before", name)
            durable[identity] = path.read_bytes()
    barrier = max((i for i, event in enumerate(events) if event.operation == "sync_folder"), default=-1)
    survive = rng.randint(barrier + 1, len(events))
    current: dict[str, object] = dict(names)
    """Names as the running system saw them."""
    for i, event in enumerate(events):
        if event.operation == "create":
            files[event.inode] = ("created", event.number)
        elif event.operation in ("write", "truncate", "sync") and event.inode not in files:
            files[event.inode] = current.get(event.path, ("unknown", event.path))
        if event.operation == "sync":
            durable[files[event.inode]] = (log / str(event.number)).read_bytes()
        _apply(current, event, files)
        if i < survive:
            _apply(names, event, files)
    latest = {
        identity: Path(path).read_bytes()
        for path, identity in current.items()
        if identity is not None and Path(path).is_file()
    }
    lost = [f"{len(events) - survive} of {len(events)} name changes"] if survive < len(events) else []
    contents = {}
    for identity in {identity for identity in names.values() if identity is not None}:
        old, new = durable.get(identity, b""), latest.get(identity)
        contents[identity], how = _content(old, new, rng)
        if how:
            lost.append(f"{next(Path(p).name for p, i in names.items() if i == identity)} {how}")
    _write(folder, names, contents)
    for path, identity in names.items():  # times of files that were not touched: stream metas record them
        if identity == ("before", path) and contents[identity] == durable[identity]:
            shutil.copystat(before / Path(path).relative_to(folder), path)
    return ", ".join(lost) or "nothing lost"


def _content(old: bytes, new: bytes | None, rng: random.Random) -> tuple[bytes, str]:
    """Return a possible content of a file with `old` synced and `new` written, and what was lost."""
    if new is None or new == old:
        return old, ""
    choice = rng.choice(("all", "none", "cut", "zeros"))
    start = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    if choice == "none":
        return old, "as of its last sync"
    if choice == "cut" and len(new) > start:
        end = rng.randint(start, len(new) - 1)
        return new[:end], f"cut to {end} of {len(new)} bytes"
    if choice == "zeros" and len(new) > start:
        end = rng.randint(start, len(new) - 1)
        return new[:end] + bytes(len(new) - end), f"zeros from byte {end}"
    return new, ""


def _apply(names: dict[str, object], event: Event, files: dict[int, object]) -> None:
    """Apply a change of names."""
    path, second = event.path, event.second
    if event.operation == "create":
        names[path] = files[event.inode]
    elif event.operation == "mkdir":
        names[path] = None
    elif event.operation in ("unlink", "rmdir"):
        names.pop(path, None)
    elif event.operation == "link" and path in names:
        names[second] = names[path]
    elif event.operation == "rename":
        moved = {name: names.pop(name) for name in list(names) if name == path or name.startswith(path + "/")}
        for name in [name for name in names if moved and (name == second or name.startswith(second + "/"))]:
            del names[name]
        names.update({second + name[len(path) :]: identity for name, identity in moved.items()})
    elif event.operation == "exchange":
        first = {name: names.pop(name) for name in list(names) if name == path or name.startswith(path + "/")}
        other = {name: names.pop(name) for name in list(names) if name == second or name.startswith(second + "/")}
        names.update({second + name[len(path) :]: identity for name, identity in first.items()})
        names.update({path + name[len(second) :]: identity for name, identity in other.items()})


def _write(folder: Path, names: dict[str, object], contents: dict[object, bytes]) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    written: dict[object, Path] = {}
    for name in sorted(names):
        path, identity = Path(name), names[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        if identity is None:
            path.mkdir(exist_ok=True)
        elif identity in written:
            os.link(written[identity], path)
        else:
            path.write_bytes(contents[identity])
            written[identity] = path
