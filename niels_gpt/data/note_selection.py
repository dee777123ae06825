"""Which files of a folder are read as notes, which are skipped and why, and the text of a note.

`list_roam_paths` lists every `.md`; commands and run configs read what `select_notes` selects by `data.notes`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.config import NotesConfig
from niels_gpt.data import embedded
from niels_gpt.data.reading.utf8 import NOT_UTF8, read_text, utf8_problem
from niels_gpt.system import files
from niels_gpt.system.checked_json import FIELD, checksum
from niels_gpt.system.console import first_few
from niels_gpt.system.json_text import parse_json
from niels_gpt.system.private_files import keep_private
from niels_gpt.system.program import command

IGNORE_FILE = ".nielsignore"
"""Patterns in gitignore syntax; in the folder of notes and in its sub-folders."""
NAMED = 20
"""Files that an error names at most."""
TEXT_FORMATS = (".md", ".markdown", ".txt")
"""Suffixes of notes for `formats: text`, in any case; for `formats: md` it is exactly `.md`."""

HIDDEN, NODE_MODULES, TEMPLATE = "hidden", "node_modules", "template"
EXCLUDED, IGNORED, FRONT_MATTER = "excluded by --exclude", IGNORE_FILE, "front matter"
NOT_A_NOTE, EMPTY, LINKED = "not a note", "empty", "linked folder"
LINK = "link to another file here"
UNREADABLE = "cannot be read"

_TEMPLATES = re.compile(r"[\d\W_]*templates?", re.IGNORECASE)  # also `_templates` and `99 - Templates`


class Skipped(NamedTuple):
    """A file or folder that is not read."""

    path: str
    """Relative to the folder of notes; a folder ends with `/`."""
    reason: str
    """One of the reasons above, possibly followed by a detail: `not a note (.pdf)`."""
    files: int = 1
    """Number of files; of a folder, all files below it."""

    @property
    def kind(self) -> str:
        """The reason without its detail."""
        return re.split(r"[:(]", self.reason, maxsplit=1)[0].strip()


@dataclass(frozen=True)
class SelectedNotes:
    """The notes of a folder, and what is not read."""

    root: Path
    paths: list[str]
    """Absolute paths of the notes, sorted as strings."""
    skipped: list[Skipped]
    """Sorted by path."""
    unmatched: tuple[str, ...] = ()
    """Patterns of `exclude` that match no file: probably misspelled."""

    @property
    def is_embedded(self) -> bool:
        """Whether these are the notes shipped with the package."""
        return self.root == embedded.NOTES.absolute()

    @property
    def listed(self) -> list[str]:
        """The notes and the empty ones, sorted. They are split before empty ones are dropped: a note that becomes
        empty moves no other between train and val."""
        empty = [str(self.root / entry.path) for entry in self.skipped if entry.kind == EMPTY]
        return sorted([*self.paths, *empty])

    def without(self, reasons: Mapping[str, str]) -> SelectedNotes:
        """Return the selection without the files of `reasons`: path -> why it is skipped."""
        added = [Skipped(Path(path).relative_to(self.root).as_posix(), reason) for path, reason in reasons.items()]
        paths = [path for path in self.paths if path not in reasons]
        return SelectedNotes(self.root, paths, sorted([*self.skipped, *added]), self.unmatched)

    def names(self) -> list[str]:
        """The paths of the notes relative to the folder."""
        return [Path(path).relative_to(self.root).as_posix() for path in self.paths]

    def summary(self, unit: str = "note") -> str:
        """What is read and skipped, in one or two lines."""
        number = len(self.paths)
        text = f"{number:,} {unit if number == 1 else unit + 's'}"
        parts = list(_summary_parts(self.skipped))
        if parts:
            text += f"; skipped {', '.join(parts)}"
        for pattern in self.unmatched:
            text += f"\n--exclude {pattern} matches no file"
        return text

    def record(self) -> dict[str, Any]:
        """The selection for `skipped.json`."""
        return {
            "notes": len(self.paths),
            "summary": self.summary(),
            "skipped": [entry._asdict() for entry in self.skipped],
        }

    def check_found(self, wanted: str = ".md file") -> None:
        """Raise FileNotFoundError if there is nothing to read; the error says what was skipped."""
        if not self.paths:
            parts = ", ".join(_summary_parts(self.skipped))
            skipped = f" (skipped {parts})" if parts else ""
            raise FileNotFoundError(f"no {wanted} to read under {self.root}{skipped}")


def selection_lines(selections: Mapping[str, SelectedNotes]) -> list[str]:
    """Return one or two lines per source for the terminal."""
    return [
        f"{name}: {selected.summary('note' if name == 'roam' else 'file')}" for name, selected in selections.items()
    ]


def write_skipped(path: Path, selections: Mapping[str, SelectedNotes]) -> None:
    """Write what was skipped, by source, to a JSON file that only its owner can read: it names private files.

    The record of each source contains a checksum.
    """
    files.write_json(path, {name: _checked_record(name, selected) for name, selected in selections.items()}, mode=0o600)


def _checked_record(name: str, selected: SelectedNotes) -> dict[str, Any]:
    record = selected.record()
    return {**record, FIELD: checksum({**record, "source": name})}


def record_skipped(path: Path, selections: Mapping[str, SelectedNotes]) -> None:
    """Add sources to a file of `write_skipped`, or replace them in it, without those of which nothing is skipped.

    Damaged records of other sources are dropped.
    """
    try:
        known = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    known = known if isinstance(known, dict) else {}
    known = {name: record for name, record in known.items() if _is_intact(name, record)}
    known |= {name: _checked_record(name, selected) for name, selected in selections.items()}
    known = {name: record for name, record in known.items() if name not in selections or selections[name].skipped}
    if known:
        files.write_json(path, known, mode=0o600)
    else:
        path.unlink(missing_ok=True)


def _is_intact(name: str, record: Any) -> bool:
    return isinstance(record, dict) and (FIELD not in record or record[FIELD] == checksum({**record, "source": name}))


def check_notes_folder(root_dir: str | Path) -> Path:
    """Return the absolute path of a folder. Raises FileNotFoundError, or NotADirectoryError if it is a file."""
    root = files.expand_home(root_dir).absolute()
    if not root.exists():
        raise FileNotFoundError(f"no folder of notes at {root}")
    if not root.is_dir():
        raise NotADirectoryError(f"{root} is a file; give a folder of notes{_what_reads(root)}")
    return root


def _what_reads(file: Path) -> str:
    """Return what to type for a file that is no folder of notes."""
    quoted, name = shlex.quote(str(file)), file.name.lower()
    if name.endswith(".zip"):
        chats = f"the chats of an export are read by {command('train', '--primer', file)}"
        return f": unpack it first (unzip {quoted} -d NOTES); {chats}"
    if re.search(r"\.(tar|tar\.\w+|tgz)$", name):
        return f": unpack it first (mkdir NOTES && tar -xf {quoted} -C NOTES)"
    return f"; one file of text or rows is read by {command('train', '--source', f'NAME={file}')}"


def select_notes(root_dir: str | Path, notes: NotesConfig, *, errors: str = "strict") -> SelectedNotes:
    """Return which files of a folder are read as notes, and which are skipped and why.

    errors: `strict` raises ValueError that names all files that are not utf-8, `replace` selects them, `skip` skips
    them and files that cannot be read. Raises FileNotFoundError if the folder does not exist, NotADirectoryError if it
    is a file.
    """
    root = check_notes_folder(root_dir)
    return check_contents(select_files(root, notes, is_note=note_filter(notes)), notes, errors=errors)


def check_contents(
    found: SelectedNotes, notes: NotesConfig, *, errors: str, read: Callable[[Path], bytes] = Path.read_bytes
) -> SelectedNotes:
    """Read the selected files, and skip those that are empty, private or not utf-8, as `select_notes` does."""
    root = found.root
    paths, skipped, invalid = [], list(found.skipped), []
    for path in found.paths:
        name = Path(path).relative_to(root).as_posix()
        try:
            reason = _reason_to_skip(read(Path(path)), notes)
        except OSError as err:
            if errors != "skip":
                raise
            reason = f"{UNREADABLE}: {err.strerror or err}"
        if reason is not None and reason.startswith(NOT_UTF8):
            if errors == "strict":
                invalid.append((path, reason))
                continue
            if errors == "replace":
                reason = None
        if reason is None:
            paths.append(path)
        else:
            skipped.append(Skipped(name, reason))
    if invalid:
        raise ValueError(invalid_utf8_message(invalid, root))
    return SelectedNotes(root, paths, sorted(skipped), found.unmatched)


def note_filter(notes: NotesConfig) -> Callable[[str], bool]:
    """Whether a file name is that of a note."""
    if notes.formats == "md":
        return lambda name: name.endswith(".md")
    return lambda name: name.lower().endswith(TEXT_FORMATS)


def read_note(path: str | Path, notes: NotesConfig, errors: str = "strict") -> str:
    """Return the text of a note, with front matter and links as `notes` says.

    Raises ValueError if it is not utf-8; errors="replace" inserts U+FFFD instead.
    """
    return note_text(read_text(path, errors="replace" if errors == "replace" else "strict"), notes)


def note_text(text: str, notes: NotesConfig) -> str:
    """Apply `strip_front_matter` and `links` to the text of a note."""
    if notes.strip_front_matter:
        text = split_front_matter(text)[1]
    return links_to_text(text) if notes.links == "text" else text


# --- the text ----------------------------------------------------------------------------------------

_FRONT_MATTER = re.compile(r"\ufeff?---[ \t]*\r?\n(.*?)^(?:---|\.\.\.)[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)
_YAML_LINE = re.compile(r"\s|-|#|\{|\}|[^\s:][^:]*:(?:\s|$)")  # indented, list item, comment, braces, `key:`
_FALSE, _TRUE = ("false", "no", "off", "n", "0"), ("true", "yes", "on", "y", "1")
_PRIVATE_KEY = re.compile(r"""["'{]*(publish|private)["']?[ \t]*:[ \t]*["']?(\w+)""", re.IGNORECASE)


def split_front_matter(text: str) -> tuple[str, str]:
    """Return (YAML of the front matter, text after it); the first is empty if there is none.

    A note that begins with a horizontal rule has no front matter: all lines up to the next rule must look like YAML.
    """
    match = _FRONT_MATTER.match(text)
    if match is None or not all(_YAML_LINE.match(line) for line in match[1].splitlines() if line.strip()):
        return "", text
    return match[1], text[match.end() :]


def is_private(text: str) -> str | None:
    """Return the line of the front matter that keeps a note private (`publish: false`, `private: true`), or None."""
    for line in split_front_matter(text)[0].splitlines():
        match = _PRIVATE_KEY.match(line)
        if match:
            key, value = match[1].lower(), match[2].lower()
            if value in (_FALSE if key == "publish" else _TRUE):
                return f"{key}: {value}"
    return None


def private_notes_line(names: Sequence[str]) -> str:
    """Return the line that reports notes that are read although `is_private` is not None; names: their paths."""
    if len(names) == 1:
        counted = "1 note says private or publish: false in its front matter, and is read"
    else:
        counted = f"{len(names):,} notes say private or publish: false in their front matter, and are read"
    skips = f"--respect-front-matter skips {'it' if len(names) == 1 else 'them'}"
    return f"{counted}: {skips} ({first_few([_printable(name) for name in names], 3)})"


_LINK = re.compile(r"!?\[\[([^\[\]\n|]+?)(?:\\?\|([^\[\]\n]*))?\]\]")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_CODE_SPAN = re.compile(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)")


def links_to_text(text: str) -> str:
    """Replace [[target|label]] by the label and [[target]] by the target, except in code."""
    if "[[" not in text:
        return text
    lines, fence = [], ""
    for line in text.splitlines(keepends=True):
        match = _FENCE.match(line)
        if fence:
            if match and match[1].startswith(fence) and not line[match.end() :].strip():
                fence = ""
        elif match and not (match[1][0] == "`" and "`" in line[match.end() :]):
            fence = match[1]
        elif "[[" in line:
            line = _outside_code(line)
        lines.append(line)
    return "".join(lines)


def _outside_code(line: str) -> str:
    """Replace the links of a line outside its code spans."""
    parts, end = [], 0
    for span in _CODE_SPAN.finditer(line):
        parts += [_replace_links(line[end : span.start()]), span[0]]
        end = span.end()
    return "".join([*parts, _replace_links(line[end:])])


def _replace_links(text: str) -> str:
    return _LINK.sub(lambda link: (link[2] or "").strip() or link[1], text)


def invalid_utf8_message(invalid: Sequence[tuple[str, str]], root: Path) -> str:
    """Return the error for (path, problem) of the files that are not utf-8: at most 20 of them, and the remedies."""
    remedy = "or pass --encoding-errors skip or --encoding-errors replace"
    if len(invalid) == 1:
        path, problem = invalid[0]
        return f"{path} is {problem}; convert the file to utf-8, {remedy}"
    details = [(Path(path).relative_to(root), problem.removeprefix(f"{NOT_UTF8}: ")) for path, problem in invalid]
    listed = ", ".join(f"{name} ({problem})" for name, problem in details[:NAMED])
    more = f" and {len(invalid) - NAMED:,} more" if len(invalid) > NAMED else ""
    return f"{len(invalid):,} files under {root} are not utf-8: {listed}{more}; convert them to utf-8, {remedy}"


def _reason_to_skip(data: bytes, notes: NotesConfig) -> str | None:
    """Why the content of a file is skipped; None: it is read. Not utf-8 is always reported."""
    problem = utf8_problem(data)
    text = data.decode("utf-8", errors="replace")
    if notes.respect_front_matter:
        private = is_private(text)
        if private is not None:
            return f"{FRONT_MATTER} ({private})"
    if problem is None and not note_text(text, notes).strip():
        return EMPTY
    return problem


# --- the files ---------------------------------------------------------------------------------------


def select_files(root: Path, notes: NotesConfig, *, is_note: Callable[[str], bool]) -> SelectedNotes:
    """Return the files below a folder whose name `is_note` accepts, without hidden, excluded and ignored ones.

    Reads no file but `.nielsignore`. Folders that are symbolic links are not entered, as in `list_roam_paths`.
    Raises OSError for a folder that cannot be read, ValueError for an invalid pattern.
    """
    excludes = _Patterns.of_option(notes.exclude, root)
    paths: list[str] = []
    skipped: list[Skipped] = []

    def visit(folder: str, prefix: str, ignores: tuple[_Patterns, ...]) -> None:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
        if any(entry.name == IGNORE_FILE and _is_file(entry) for entry in found):
            ignores = (*ignores, _Patterns.of_file(Path(folder, IGNORE_FILE), prefix))
        for entry in found:
            name, is_folder = prefix + entry.name, _is_dir(entry)
            if entry.name == IGNORE_FILE and not is_folder:
                continue
            relative = f"{name}/" if is_folder else name
            reason = _name_reason(entry.name, notes, is_folder=is_folder)
            reason = reason or (EXCLUDED if excludes.decide(relative) else None)
            reason = reason or (IGNORED if _ignored(relative, ignores) else None)
            if is_folder and reason is None and not entry.is_symlink():
                visit(entry.path, relative, ignores)
            elif is_folder:
                linked = entry.is_symlink()
                number = 0 if linked else _count_files(entry.path)
                if number or linked:
                    skipped.append(Skipped(relative, LINKED if linked else reason or "", number))
            elif reason is None and is_note(entry.name) and _is_file(entry):
                paths.append(entry.path)
            else:
                skipped.append(Skipped(name, reason or _not_a_note(entry)))

    visit(str(root), "", ())
    paths, links = _without_links(root, paths, skipped)
    keep_private((root, *paths))
    return SelectedNotes(root, sorted(paths), sorted([*skipped, *links]), excludes.unmatched())


def _without_links(root: Path, paths: list[str], skipped: Sequence[Skipped]) -> tuple[list[str], list[Skipped]]:
    """Return (the files without links that lead to one of the others, or to one that is excluded, and those links).

    Of several links to one file outside, the first is kept.
    """
    linked = {path: Path(path).resolve() for path in sorted(paths) if Path(path).is_symlink()}
    if not linked:
        return paths, []
    real, links = Path(root).resolve(), list[Skipped]()
    excluded = {real / entry.path: entry.reason for entry in skipped if entry.kind in (EXCLUDED, IGNORED)}
    read = {real / Path(path).relative_to(root) for path in paths if path not in linked}
    for path, target in linked.items():
        reason = next((excluded[folder] for folder in (target, *target.parents) if folder in excluded), None)
        reason = reason or (LINK if target in read else None)
        if reason is not None:
            links.append(Skipped(Path(path).relative_to(root).as_posix(), reason))
        read.add(target)
    names = {str(root / link.path) for link in links}
    return [path for path in paths if path not in names], links


def _name_reason(name: str, notes: NotesConfig, *, is_folder: bool) -> str | None:
    if not notes.include_hidden:
        if name.startswith("."):
            return HIDDEN
        if name == "node_modules" and is_folder:
            return NODE_MODULES
    if is_folder and notes.skip_templates and _TEMPLATES.fullmatch(name):
        return TEMPLATE
    return None


def _is_dir(entry: os.DirEntry[str]) -> bool:
    return Path(entry).is_dir() if entry.is_symlink() else entry.is_dir()  # DirEntry.is_dir raises for a link loop


def _is_file(entry: os.DirEntry[str]) -> bool:
    return Path(entry).is_file() if entry.is_symlink() else entry.is_file()


def _not_a_note(entry: os.DirEntry[str]) -> str:
    if not _is_file(entry):
        return f"{NOT_A_NOTE} ({'broken link' if entry.is_symlink() else 'not a regular file'})"
    return f"{NOT_A_NOTE} ({Path(entry.name).suffix or 'no suffix'})"


def _count_files(folder: str) -> int:
    """Number of files below a folder; parts that cannot be read count nothing."""
    return sum(len(names) for _, _, names in os.walk(folder))


class _Patterns:
    """Patterns in gitignore syntax, relative to a folder."""

    def __init__(self, lines: Sequence[str], base: str, where: str) -> None:
        """`base` is the folder relative to the root (empty, or ending with `/`); `where` is named in errors."""
        self._base = base
        self._lines = [line for line in lines if line.strip() and not line.startswith("#")]
        self._single: list[Any] = []
        self._matched: set[int] = set()
        if not self._lines:
            return
        from pathspec import GitIgnoreSpec

        for line in self._lines:
            try:
                self._single.append(GitIgnoreSpec.from_lines([line]))
            except ValueError:
                raise ValueError(f"{where}: {line!r} is not a valid pattern in gitignore syntax") from None
        self._spec = GitIgnoreSpec.from_lines(self._lines)

    @classmethod
    def of_option(cls, patterns: Sequence[str], root: Path) -> _Patterns:
        """The patterns of `exclude`; paths such as ./drafts and /home/me/notes/drafts are understood too."""
        lines = []
        for pattern in patterns:
            if pattern.startswith("./"):
                pattern = pattern[1:]
            elif pattern.startswith(f"{root}/"):
                pattern = pattern[len(str(root)) :]
            lines.append(pattern)
        return cls(lines, "", "--exclude (data.notes.exclude)")

    @classmethod
    def of_file(cls, path: Path, base: str) -> _Patterns:
        """The patterns of a .nielsignore."""
        return cls(path.read_text(encoding="utf-8-sig", errors="surrogateescape").splitlines(), base, str(path))

    def decide(self, relative: str) -> bool | None:
        """Whether a path is ignored; None: no pattern matches. Folders end with `/`."""
        if not self._lines:
            return None
        path = relative[len(self._base) :]
        decision: bool | None = self._spec.check_file(path).include
        if decision is not None:
            left = [i for i in range(len(self._lines)) if i not in self._matched]
            self._matched.update(i for i in left if self._single[i].check_file(path).include is not None)
        return decision

    def unmatched(self) -> tuple[str, ...]:
        """The patterns that matched nothing so far."""
        return tuple(line for i, line in enumerate(self._lines) if i not in self._matched)


def _ignored(relative: str, ignores: Sequence[_Patterns]) -> bool:
    """Whether a path is ignored; the patterns of the nearest folder decide, as in git."""
    for patterns in reversed(ignores):
        decision = patterns.decide(relative)
        if decision is not None:
            return decision
    return False


# --- the summary -------------------------------------------------------------------------------------


def _summary_parts(skipped: Sequence[Skipped]) -> Iterator[str]:
    """What was skipped, grouped: `3 files in .trash (hidden)`, `2 files that are not notes (.pdf)`."""
    by_kind: dict[str, list[Skipped]] = {}
    for entry in skipped:
        by_kind.setdefault(entry.kind, []).append(entry)
    kinds = [kind for kind in by_kind if kind != NOT_A_NOTE] + [kind for kind in by_kind if kind == NOT_A_NOTE]
    for kind in kinds:
        entries = by_kind[kind]
        number = sum(entry.files for entry in entries)
        counted = f"{number:,} file{'' if number == 1 else 's'}"
        if kind == NOT_A_NOTE:
            suffixes = Counter(entry.reason.partition("(")[2].rstrip(")") for entry in entries)
            # First those that may be notes after all, such as .txt with `formats: md`.
            names = sorted(suffixes, key=lambda name: (name.lower() not in TEXT_FORMATS, -suffixes[name], name))
            yield f"{counted} not a note ({first_few(names, 3)})"
        elif kind == LINKED:
            yield f"{len(entries)} linked folder{'' if len(entries) == 1 else 's'} ({first_few(_names(entries), 3)})"
        elif kind == NODE_MODULES:
            yield f"{counted} in node_modules"
        elif all(entry.path.endswith("/") for entry in entries):
            yield f"{counted} in {first_few(_names(entries), 3)} ({kind})"
        else:
            yield f"{counted} ({kind}: {first_few(_names(entries), 3)})"


def _names(entries: Sequence[Skipped]) -> list[str]:
    return [_printable(entry.path.rstrip("/")) for entry in entries]


def _printable(path: str) -> str:
    return os.fsencode(path).decode("utf-8", errors="backslashreplace")
