"""Find runs, and load their models with the tokenizers."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from niels_gpt.cache.writing.encoding import normalize_line_ends
from niels_gpt.config import RunConfig
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import build_model, read_checkpoint
from niels_gpt.runs.folder import RunFolder
from niels_gpt.system.device import resolve_device
from niels_gpt.tokenizer import AnyTokenizer, ByteTokenizer, load_tokenizer

RUNS = Path("runs")


class LoadedRun(NamedTuple):
    """A model in eval mode with its tokenizer, and the checkpoint it was loaded from."""

    model: GPT
    step: int
    """Training steps done."""
    path: Path
    """The checkpoint."""
    run: RunFolder | None
    """The run folder that was named; None if a checkpoint was."""
    tokenizer: AnyTokenizer = ByteTokenizer()
    data: Mapping[str, str] = MappingProxyType({})
    """Hashes that identify the training data."""

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text as in the training data: token caches hold `\\n` line ends only."""
        text = text if isinstance(self.tokenizer, ByteTokenizer) else normalize_line_ends(text)
        return np.array(self.tokenizer.encode(text), dtype=np.int64)

    @property
    def home(self) -> RunFolder | None:
        """The run folder that was named or that contains the checkpoint; None if there is none."""
        run = self.run or RunFolder(self.path.parent.parent)
        return run if run.exists else None

    @property
    def config(self) -> RunConfig | None:
        """The config of the run; None for a checkpoint outside a run folder (`model.config` always exists)."""
        return self.home.read_config() if self.home is not None else None


def new_run(name: str) -> RunFolder:
    """The first free run folder of runs/NAME, runs/NAME-2, ..."""
    names = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
    return next(run for run in (RunFolder(RUNS / n) for n in names) if not run.path.exists())


def find_run(path: Path | None) -> RunFolder:
    """The run at a path, or the newest run in runs/. Raises ValueError if there is none."""
    if path is not None:
        run = RunFolder(path)
        run.read_config()
        return run
    candidates = [RunFolder(p.parent) for p in (*RUNS.glob("*/config.yaml"), *RUNS.glob("*/*/config.yaml"))]
    if not candidates:
        raise ValueError(f"no run in {RUNS}/: train one first (niels-gpt demo), or name one with --run")
    newest = max(candidates, key=lambda run: run.config_path.stat().st_mtime_ns)
    print(f"using {newest.path}", file=sys.stderr)
    return newest


def is_run(path: Path) -> bool:
    """Whether a path is a run folder, not a checkpoint (a file, or the folder of a sharded checkpoint)."""
    return path.is_dir() and not (path / "checkpoint.json").is_file()


def load_run(
    path: str | Path | None = None,
    checkpoint: str | Path | None = None,
    device: str = "auto",
    tokenizer: str | Path | None = None,
) -> LoadedRun:
    """Load the model of a run (its best checkpoint) or of a checkpoint, with its tokenizer.

    path: a run folder or a checkpoint; None: the newest run in runs/.
    checkpoint: the checkpoint to load instead of the best one of the run.
    tokenizer: a tokenizer.model to use instead of the one beside the checkpoint.

    Raises ValueError or OSError if the model cannot be loaded or its tokenizer is not found.
    """
    device = resolve_device(device)
    if checkpoint is None and path is not None and not is_run(Path(path)):
        if not Path(path).exists():
            raise ValueError(f"{path} does not exist: name a run folder (it has a config.yaml), or a checkpoint")
        path, checkpoint = None, path
    if checkpoint is not None:
        run = RunFolder(path) if path is not None else None
        file = Path(checkpoint)
    else:
        run = find_run(None if path is None else Path(path))
        file = run.model_path()
    saved = read_checkpoint(file, device)
    model = build_model(saved["config"], saved["model"], where=str(file)).to(device).eval()
    data = saved["extra"].get("data", {})
    found = _find_tokenizer(model, file, run, None if tokenizer is None else Path(tokenizer))
    if found.sha256 is not None and data.get("tokenizer", found.sha256) != found.sha256:
        raise ValueError(f"{file} was trained with a different tokenizer: use tokenizer.model of its run")
    return LoadedRun(model, saved["step"], file, run, found, data)


def _find_tokenizer(model: GPT, checkpoint: Path, run: RunFolder | None, named: Path | None) -> AnyTokenizer:
    """The named tokenizer, else tokenizer.model of the run, beside the checkpoint or one folder up; else bytes.

    Raises ValueError if there is none, or if its vocabulary is not the model's.
    """
    nearby = [checkpoint.parent / "tokenizer.model", checkpoint.parent.parent / "tokenizer.model"]
    candidates = [named] if named is not None else [*([run.tokenizer_path] if run else []), *nearby]
    path = next((each for each in candidates if named is not None or each.is_file()), None)
    V = model.config.V
    if path is None:
        if V > 256:
            raise ValueError(
                f"{checkpoint} has a vocabulary of {V} tokens, but there is no tokenizer.model beside it: "
                "name it with --tokenizer"
            )
        return ByteTokenizer()
    tokenizer = load_tokenizer(path)
    if tokenizer.vocab_size != V:
        raise ValueError(
            f"{path} has {tokenizer.vocab_size} ids, but {checkpoint} has V={V}: this tokenizer does not belong to "
            "this model"
        )
    return tokenizer


def check_unchanged(fingerprint: Mapping[str, str], trained_on: Mapping[str, str], where: str) -> None:
    """Raise ValueError if the data differs from what a run or checkpoint was trained on."""
    changed = [name for name, sha in fingerprint.items() if trained_on.get(name, sha) != sha]
    if changed:
        raise ValueError(f"the data of {where} has changed since it was trained: {', '.join(changed)}; restore it")
