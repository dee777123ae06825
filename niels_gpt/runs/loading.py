"""Find runs, also those that a run continues, and load their models with the tokenizers.

Importing this module does not import torch: a wrong path is reported before that.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from niels_gpt.cache.writing.encoding import normalize_line_ends
from niels_gpt.config import RunConfig
from niels_gpt.config.public_model import folder_or_id, is_public
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.pipeline import PipelineFolder
from niels_gpt.system import files
from niels_gpt.system.program import command
from niels_gpt.tokenizer import AnyTokenizer, ByteTokenizer, ForeignTokenizer, fits, has_tokenizer, load_tokenizer

if TYPE_CHECKING:
    from niels_gpt.model.gpt import GPT

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
    data_changed: int = 0
    """Steps that were done before the run was first resumed with other data; 0: it never was."""

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text as in the training data: token caches hold `\\n` line ends only."""
        text = text if isinstance(self.tokenizer, ByteTokenizer) else normalize_line_ends(text)
        if isinstance(self.tokenizer, ForeignTokenizer):
            return self.tokenizer.encode_documents([text])[0].astype(np.int64)
        return np.array(self.tokenizer.encode(text), dtype=np.int64)

    @property
    def home(self) -> RunFolder | None:
        """The run folder that was named or that contains the checkpoint; None if there is none."""
        run = self.run or RunFolder(self.path.parent.parent)
        return run if run.exists else None

    @property
    def name(self) -> str:
        """The name of the run, or of the pipeline that it is a phase of; of a checkpoint outside a run, its own."""
        if self.home is None:
            return self.path.stem
        path = self.home.path.resolve()
        return path.parent.name if PipelineFolder(path.parent).exists else path.name

    @property
    def config(self) -> RunConfig | None:
        """The config that the model was trained with; None if it was not trained in a run folder: an imported model, or
        a checkpoint from elsewhere. `model.config` always exists."""
        return self.home.read_config() if self.home is not None and not self.home.imported else None


def new_run(name: str) -> RunFolder:
    """The first free run folder of runs/NAME, runs/NAME-2, ..."""
    names = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
    return next(run for run in (RunFolder(RUNS / n) for n in names) if not run.path.exists())


@contextlib.contextmanager
def claimed_run(name: str) -> Iterator[RunFolder]:
    """A `new_run` whose folder exists from now on, so that no other process chooses it; removed if it stays empty."""
    with contextlib.ExitStack() as unused:
        run = new_run(name)
        while True:
            try:
                with contextlib.suppress(FileExistsError):
                    run.path.parent.mkdir()
                    unused.callback(_remove_empty, run.path.parent)
                run.path.mkdir()
            except (FileExistsError, FileNotFoundError):  # another process took the name, or removed an empty runs/
                run = new_run(name)
                continue
            except OSError:  # whoever writes into the folder reports it
                break
            unused.callback(_remove_empty, run.path)
            break
        yield run


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def list_runs(root: Path = RUNS) -> list[RunFolder]:
    """The runs in a folder, newest first; those of pipelines and studies, one folder deeper, too."""
    runs = [RunFolder(p.parent) for p in (*root.glob("*/config.yaml"), *root.glob("*/*/config.yaml"))]
    return sorted(runs, key=lambda run: run.config_path.stat().st_mtime_ns, reverse=True)


def find_newest(*, imported: bool = True) -> Path:
    """The path of the newest run in runs/, or of the pipeline that it is a phase of. Raises ValueError for none.

    imported: whether it may be an imported model.
    """
    newest = next((run for run in list_runs() if imported or not run.imported), None)
    if newest is None:
        train = f"{command('notes', 'FOLDER')}, or {command('demo')}"
        raise ValueError(f"no run in {RUNS}/: train one first ({train}), or name one (RUN)")
    pipeline = PipelineFolder(newest.path.parent)
    return pipeline.path if pipeline.exists else newest.path


def find_run(path: Path | None, *, imported: bool = True) -> RunFolder:
    """The run at a path, or the newest one (see `find_newest`); of a pipeline, its last phase with a checkpoint.

    Raises ValueError if there is none.
    """
    if path is None:
        path = find_newest(imported=imported)
        pipeline = PipelineFolder(path)
        return pipeline.current if pipeline.exists else RunFolder(path)
    run, pipeline = RunFolder(path), PipelineFolder(path)
    if not run.exists and pipeline.exists:
        run = pipeline.current
    run.read_config()
    return run


def find_unfinished_run() -> RunFolder:
    """The newest run in runs/ that has steps left; phases of pipelines do not count. Raises ValueError for none."""
    runs = [run for run in list_runs() if not PipelineFolder(run.path.parent).exists and not run.imported]
    for run in runs:
        if run.steps_saved < run.read_config().train.total_steps:
            return run
    if runs:
        raise ValueError(f"every run in {RUNS}/ is finished: name one, with more steps ({runs[0].extend_command})")
    raise ValueError(f"no run in {RUNS}/: name the run to resume ({command('train', 'RUN', '--resume')})")


def find_unfinished_pipeline() -> PipelineFolder:
    """The newest pipeline in runs/ whose second phase has steps left. Raises ValueError if there is none."""
    folders = [PipelineFolder(path.parent) for path in RUNS.glob("*/pretrain.yaml")]
    folders.sort(key=lambda folder: (folder.path / "pretrain.yaml").stat().st_mtime_ns, reverse=True)
    for folder in folders:
        if folder.runs["sft"].steps_saved < folder.read_configs()["sft"].train.total_steps:
            return folder
    resume = command("pipeline", "RUN", "--resume")
    raise ValueError(f"no unfinished pipeline in {RUNS}/: name the one to resume ({resume})")


def names_run(word: str) -> bool:
    """Whether a word is the path of a run, a pipeline or a checkpoint."""
    try:
        path = Path(word)
        named = RunFolder(path).exists or PipelineFolder(path).exists
        return named or (path / "checkpoint.json").is_file() or (path.suffix == ".pt" and path.is_file())
    except (OSError, ValueError):  # too long for a path, or with a NUL
        return False


def is_run(path: Path) -> bool:
    """Whether a path is a run folder, not a checkpoint (a file, or the folder of a sharded checkpoint)."""
    return path.is_dir() and not (path / "checkpoint.json").is_file()


def check_model_path(path: Path) -> None:
    """Raise ValueError if a path names no run, pipeline or checkpoint, as far as the names of files tell."""
    if not path.exists():
        raise ValueError(f"{path} does not exist: name a run folder (it has a config.yaml), or a checkpoint")
    if is_run(path) and not RunFolder(path).exists and not PipelineFolder(path).exists:
        raise ValueError(f"{path} is not a run: it has no config.yaml")


def load_run(
    path: str | Path | None = None,
    checkpoint: str | Path | None = None,
    device: str = "auto",
    tokenizer: str | Path | None = None,
    *,
    has_option: bool = True,
) -> LoadedRun:
    """Load the model of a run (its best checkpoint) or of a checkpoint, with its tokenizer.

    path: a run, a pipeline or a checkpoint; None: the newest run in runs/.
    checkpoint: the checkpoint to load instead of the best one of the run.
    tokenizer: a tokenizer to use instead of the one beside the checkpoint.
    has_option: whether the command has the option --tokenizer, which the error about a missing one then advises.

    Raises ValueError or OSError if the model cannot be loaded or its tokenizer is not found.
    """
    if checkpoint is None and path is not None:
        check_model_path(Path(path))
    from niels_gpt.runs.checkpoint import build_model, read_checkpoint
    from niels_gpt.system.device import resolve_device

    device = resolve_device(device)
    if checkpoint is None and path is not None and not is_run(Path(path)):
        path, checkpoint = None, path
    if checkpoint is not None:
        run = find_run(Path(path)) if path is not None else None
        file = Path(checkpoint)
    else:
        run = find_run(None if path is None else Path(path))
        file = run.model_path()
    saved = read_checkpoint(file, device)
    model = build_model(saved["config"], saved["model"], where=str(file)).to(device).eval()
    data = saved["extra"].get("data", {})
    named = None if tokenizer is None else Path(tokenizer)
    found = find_tokenizer(model.config.V, file, run, named, has_option=has_option)
    if not isinstance(found, ByteTokenizer) and found.vocab_size < model.config.V:
        model.sampled_ids = found.vocab_size
    if found.sha256 is not None and data.get("tokenizer", found.sha256) != found.sha256:
        raise ValueError(
            f"{file} was trained with a different tokenizer, or tokenizer.model is damaged (its sha256 differs): use "
            "tokenizer.model of its run, or restore it from spm.model of the token cache; a tokenizer of others is the "
            "folder tokenizer/ of both"
        )
    return LoadedRun(model, saved["step"], file, run, found, data, saved["extra"].get("data_changed", 0))


def tokenizer_path(checkpoint: Path, run: RunFolder | None = None) -> Path | None:
    """The tokenizer of the run, beside the checkpoint or one folder up: tokenizer.model or tokenizer/; None: none."""
    folders = [*([run.path] if run else []), checkpoint.parent, checkpoint.parent.parent]
    candidates = [folder / name for folder in folders for name in ("tokenizer.model", "tokenizer")]
    return next((path for path in candidates if path.is_file() or (path.is_dir() and has_tokenizer(path))), None)


def find_tokenizer(
    V: int, checkpoint: Path, run: RunFolder | None, named: Path | None = None, *, has_option: bool = True
) -> AnyTokenizer:
    """The named tokenizer, else that of the run, beside the checkpoint or one folder up; else bytes.

    Ours is the file tokenizer.model, one of others the folder tokenizer/. V: ids of the model; it generates none of
    those that a tokenizer of others lacks. has_option: as for `load_run`. Raises ValueError if there is none, or if its
    vocabulary is not the model's.
    """
    path = named if named is not None else tokenizer_path(checkpoint, run)
    if path is None:
        if V > 256:
            copy = f"copy that of the model into {checkpoint.parent if run is None else run.path}"
            raise ValueError(
                f"{checkpoint} has a vocabulary of {V} tokens, but there is no tokenizer.model beside it (nor a folder "
                f"tokenizer/ with tokenizer.json): {'name it with --tokenizer' if has_option else copy}"
            )
        return ByteTokenizer()
    tokenizer = load_tokenizer(path)
    if not fits(tokenizer, V):
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


class PastRun(NamedTuple):
    """A run, and what its weights started from."""

    run: RunFolder
    config: RunConfig

    @property
    def start(self) -> Path | None:
        """The checkpoint that it started from, or the path of a public model; None: random weights."""
        return files.expand_home(folder_or_id(self.config.init_from)) if self.config.init_from else None

    @property
    def from_public(self) -> bool:
        """Whether it started from a public model that is not imported: `init_from: hf:...`."""
        return is_public(self.config.init_from)

    @property
    def earlier(self) -> RunFolder | None:
        """The folder of the run whose checkpoint it started from, which may be gone; None: it started from no run."""
        return None if self.start is None or self.from_public else RunFolder(self.start.parent.parent)


def history(run: RunFolder | None) -> Iterator[PastRun]:
    """Yield a run, then the run that its weights came from, and so on; ends where a folder is no run.

    A config.yaml that was edited can name a run twice: its second occurrence ends the history.
    """
    seen = set[Path]()
    while run is not None and run.exists and (path := run.path.resolve()) not in seen:
        seen.add(path)
        past = PastRun(run, run.read_config())
        yield past
        run = past.earlier
