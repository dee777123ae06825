"""Finding runs, and the models in them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from niels_gpt.cache.writing.encoding import normalize_line_ends
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import build_model, read_checkpoint
from niels_gpt.runs.folder import RunFolder
from niels_gpt.system.device import resolve_device
from niels_gpt.tokenizer import AnyTokenizer, ByteTokenizer, load_tokenizer

RUNS = Path("runs")


class LoadedRun(NamedTuple):
    """A model ready for use, and where it comes from."""

    model: GPT
    step: int
    path: Path
    run: RunFolder | None
    tokenizer: AnyTokenizer = ByteTokenizer()
    data: Mapping[str, str] = MappingProxyType({})
    """What identifies the data of its training."""

    def encode(self, text: str) -> np.ndarray:
        """A text as the model's training data had it: where that is tokens, line ends are `\\n`."""
        text = text if isinstance(self.tokenizer, ByteTokenizer) else normalize_line_ends(text)
        return np.array(self.tokenizer.encode(text), dtype=np.int64)

    @property
    def home(self) -> RunFolder | None:
        """The run that was named, or that the checkpoint lies in; None where it lies in none."""
        run = self.run or RunFolder(self.path.parent.parent)
        return run if run.exists else None


def new_run(name: str) -> RunFolder:
    """A run folder that is not taken: runs/name, runs/name-2, ..."""
    names = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
    return next(run for run in (RunFolder(RUNS / n) for n in names) if not run.path.exists())


def find_run(path: Path | None) -> RunFolder:
    """The run at a path, or the newest in runs/. Raises ValueError where there is none."""
    if path is not None:
        run = RunFolder(path)
        run.read_config()
        return run
    found = [RunFolder(p.parent) for p in (*RUNS.glob("*/config.yaml"), *RUNS.glob("*/*/config.yaml"))]
    if not found:
        raise ValueError(f"no run in {RUNS}/: train one first (niels-gpt demo), or name one with --run")
    newest = max(found, key=lambda run: run.config_path.stat().st_mtime_ns)
    print(f"using {newest.path}", file=sys.stderr)
    return newest


def is_run(path: Path) -> bool:
    """Whether a path given for either is that of a run, not of a checkpoint: a file, or a sharded one's folder."""
    return path.is_dir() and not (path / "checkpoint.json").is_file()


def load_run(run: Path | None, checkpoint: Path | None, device: str, tokenizer: Path | None = None) -> LoadedRun:
    """The model of a checkpoint, or the best one of a run, with its tokenizer.

    Raises ValueError or OSError where it cannot be loaded, or its tokenizer is not to be found.
    """
    device = resolve_device(device)
    if checkpoint is not None:
        folder = RunFolder(run) if run is not None else None
        path = checkpoint
    else:
        folder = find_run(run)
        path = folder.model_path()
    saved = read_checkpoint(path, device)
    model = build_model(saved["config"], saved["model"], where=str(path)).to(device).eval()
    data = saved["extra"].get("data", {})
    found = _tokenizer_of(model, path, folder, tokenizer)
    if found.sha256 is not None and data.get("tokenizer", found.sha256) != found.sha256:
        raise ValueError(
            f"{path} was trained with another tokenizer than the one given: use tokenizer.model of its run"
        )
    return LoadedRun(model, saved["step"], path, folder, found, data)


def _tokenizer_of(model: GPT, path: Path, run: RunFolder | None, given: Path | None) -> AnyTokenizer:
    """The one given, else tokenizer.model of the run, beside the checkpoint or in the folder above; else bytes."""
    near = [path.parent / "tokenizer.model", path.parent.parent / "tokenizer.model"]
    places = [given] if given is not None else [*([run.tokenizer_path] if run else []), *near]
    found = next((place for place in places if given is not None or place.is_file()), None)
    if found is None:
        if model.config.V > 256:
            raise ValueError(
                f"{path} has a vocabulary of {model.config.V} tokens, but there is no tokenizer.model beside it: "
                "name it with --tokenizer"
            )
        return ByteTokenizer()
    tokenizer = load_tokenizer(found)
    if tokenizer.vocab_size != model.config.V:
        raise ValueError(f"{found} has {tokenizer.vocab_size} ids, but {path} has V={model.config.V}: it is another's")
    return tokenizer


def check_unchanged(fingerprint: Mapping[str, str], trained_on: Mapping[str, str], where: str) -> None:
    """Raise ValueError where the data is not what a run or checkpoint was trained on: it would tell of other rows."""
    changed = [name for name, sha in fingerprint.items() if trained_on.get(name, sha) != sha]
    if changed:
        raise ValueError(f"the data of {where} has changed since it was trained: {', '.join(changed)}; restore it")
