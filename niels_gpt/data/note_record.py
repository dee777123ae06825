"""Which notes were read, by path and content: a resumed run can tell that some are gone, and does not train on them in
silence.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.config import NotesConfig
from niels_gpt.data.note_selection import SelectedNotes, check_contents, select_files
from niels_gpt.system import files
from niels_gpt.system.checked_json import DamagedJSON, read_checked_json, write_checked_json
from niels_gpt.system.console import first_few, plural

FILE = "notes.json"
"""In a folder of token caches, or in a run over bytes: source -> root, data.notes, {path: sha256}, {kept path: why}."""


class NoteChanges(NamedTuple):
    """What has changed in a folder since its files were read."""

    removed: dict[str, str]
    """Path of a file that is not read any more -> why: deleted, or excluded."""
    edited: list[str]
    added: list[str]

    def lines(self) -> list[str]:
        """What to say of the edited and the added files: a resumed run does not read them again."""
        said = [(self.edited, "changed since it was read"), (self.added, "new, and not part of this run")]
        return [f"{plural(len(names), 'note')} {what}: {first_few(names, 3)}" for names, what in said if names]


def record_notes(folder: Path, selections: Mapping[str, SelectedNotes], notes: NotesConfig) -> None:
    """Record the files of sources in a folder; those of other sources stay. Only the owner can read the record."""
    found = {
        name: {
            "root": str(selected.root),
            "notes": dataclasses.asdict(notes),
            "files": dict(zip(selected.names(), map(files.sha256_file, selected.paths), strict=True)),
        }
        for name, selected in selections.items()
        if not selected.is_embedded
    }
    if found:
        write_checked_json(folder / FILE, {**_recorded(folder), **found}, mode=0o600)


def kept_notes(folder: Path) -> dict[str, str]:
    """Return the removed files that stay in the data of a run by the decision of its user: path -> why."""
    return {path: why for entry in _recorded(folder).values() for path, why in entry.get("kept", {}).items()}


def check_notes(folder: Path, *, start_over: str, keep: bool = False) -> list[str]:
    """Compare the files that are recorded in a folder with what would be read now; return lines to print.

    keep: record the removed ones as kept, instead of raising ValueError. start_over: what to type for a run without
    them. A folder of notes that is not on this machine is not compared.
    """
    recorded, lines, removed = _recorded(folder), list[str](), dict[str, str]()
    for name, entry in recorded.items():
        root = Path(entry["root"])
        if not root.is_dir():
            lines.append(f"{root} is not here: it is not known whether notes were removed since they were read")
            continue
        changes = _changes(root, entry)
        lines += changes.lines()
        recorded[name] = {**entry, "kept": {**entry.get("kept", {}), **changes.removed}}
        removed |= changes.removed
    if not removed:
        return lines
    listed = first_few([f"{path} ({why})" for path, why in removed.items()], 3)
    gone = f"{plural(len(removed), 'note')} of this run would not be read any more: {listed}"
    if not keep:
        raise ValueError(
            f"{gone}. Start over without them ({start_over}), or resume with --allow-data-change: what was read stays "
            f"in the run, which is recorded in {folder / FILE}"
        )
    write_checked_json(folder / FILE, recorded, mode=0o600)
    return [*lines, f"warning: {gone}; kept, as recorded in {folder / FILE}"]


def _changes(root: Path, entry: Mapping[str, Any]) -> NoteChanges:
    from niels_gpt.data.user_files import read_file  # slow to import

    notes = NotesConfig(**entry["notes"])
    endings = tuple({Path(name).suffix.lower() for name in entry["files"]})
    found = select_files(root, notes, is_note=lambda name: name.lower().endswith(endings))
    now = dict(zip(found.names(), found.paths, strict=True))
    edited = [name for name, sha in entry["files"].items() if name in now and files.sha256_file(now[name]) != sha]
    added = [name for name in now if name not in entry["files"]]
    reread = SelectedNotes(root, [now[name] for name in (*edited, *added)], [])
    skipped = {s.path: s.reason for s in check_contents(reread, notes, errors="skip", read=read_file).skipped}
    removed = {name: skipped[name] for name in edited if name in skipped}
    added = [name for name in added if name not in skipped]
    moved = {files.sha256_file(now[name]) for name in added}
    for name, sha in entry["files"].items():
        if name not in now and sha not in moved:
            reasons = (s.reason for s in found.skipped if f"{name}/".startswith(f"{s.path.rstrip('/')}/"))
            removed[name] = next(reasons, "deleted")
    new = {name: why for name, why in removed.items() if name not in entry.get("kept", {})}
    return NoteChanges(new, [name for name in edited if name not in removed], added)


def _recorded(folder: Path) -> dict[str, Any]:
    """The record of a folder; empty if there is none. Raises ValueError if it is damaged."""
    with contextlib.suppress(FileNotFoundError):
        try:
            return read_checked_json(folder / FILE)
        except DamagedJSON as err:
            raise ValueError(f"{folder / FILE} is damaged ({err}): restore it, or remove it to resume anyway") from None
    return {}
