"""Where a public model comes from: its name and licence, and those of the model that a run began with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from niels_gpt.config.public_model import folder_or_id
from niels_gpt.pretrained.families import read_json
from niels_gpt.pretrained.find_model import local_folder
from niels_gpt.pretrained.model_folder import ModelFolder
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.loading import history
from niels_gpt.runs.source import BASE_FILE, FILE, read_source
from niels_gpt.system import files
from niels_gpt.system.untrusted_files import read_untrusted

PRIVATE_TEXT = "niels_gpt_private_text"
"""Key of config.json of an export: true if the model was trained on private text and no audit has cleared it."""

MOST_CARD = 4 << 20
"""Bytes of a README.md whose licence is read."""


def public_name(name: str) -> str:
    """The name of a model for reports and model cards: its repository, or the last part of the path of its folder."""
    repository = folder_or_id(name)
    folder = files.expand_home(repository)
    return folder.resolve().name if folder.is_dir() else repository


def source_record(name: str, opened: ModelFolder) -> dict[str, Any]:
    """What source.json of an imported model records: where the model comes from, without a path."""
    return {
        **_record(_base_in(name, opened.path)),
        "model_type": opened.family.model_type,
        "dtype": str(opened.dtype).removeprefix("torch."),
        "context": opened.config.T,
    }


def record_base(run: RunFolder, init_from: str) -> None:
    """Record in a run the public model that it begins with (`hf:...`), whose folder may be gone later."""
    folder = local_folder(init_from)
    if folder is not None:
        files.write_json(run.base_source_path, _record(_base_in(init_from, folder)))


class PublicBase(NamedTuple):
    """The public model that a run began with."""

    name: str
    licence: str
    """Empty if it is not known."""
    private_text: bool = False
    """Whether it is an export of ours that was trained on private text and not cleared by an audit."""
    damaged: str = ""
    """The file of the run that should say all this and cannot be read: then the text counts as private."""


def public_base(run: RunFolder | None) -> PublicBase | None:
    """The public model that a run is, or began with (`init_from`); None if there is none, or a run between is gone."""
    for past in history(run):
        if past.run.imported:
            return _recorded(past.run, FILE)
        if past.from_public:
            if recorded := _recorded(past.run, BASE_FILE):
                return recorded
            return _base_in(past.config.init_from, local_folder(past.config.init_from))
    return None


def _base_in(name: str, folder: Path | None) -> PublicBase:
    """What the folder of a public model says of it; None: the folder is gone."""
    name = public_name(name)
    return PublicBase(name, "") if folder is None else PublicBase(name, _licence(folder), _says_private(folder))


def _record(base: PublicBase) -> dict[str, Any]:
    """What a run records of a model: the counterpart of `_recorded`."""
    return {"name": base.name, "licence": base.licence, "private_text": base.private_text}


def _recorded(run: RunFolder, file: str) -> PublicBase | None:
    """What a run records of a model of others; None if it does not."""
    source = read_source(run.path, file)
    if source is None:
        path = run.path / file
        return PublicBase("an unknown model", "", private_text=True, damaged=str(path)) if path.exists() else None
    return PublicBase(source["name"], source["licence"], bool(source.get("private_text")))


def _says_private(folder: Path) -> bool:
    """Whether config.json has PRIVATE_TEXT; one that cannot be read says nothing."""
    try:
        return bool(read_json(folder / "config.json", folder).get(PRIVATE_TEXT))
    except (OSError, ValueError):
        return False


def _licence(folder: Path) -> str:
    """The licence in the front matter of README.md; empty if there is none."""
    try:
        text = (read_untrusted(folder / "README.md", MOST_CARD) or b"").decode("utf-8").replace("\r\n", "\n")
    except (OSError, ValueError):
        return ""
    front = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    found = re.search(r"^licen[cs]e:\s*(\S.*)$", front[1], re.MULTILINE) if front else None
    return found[1].strip(" '\"") if found else ""
