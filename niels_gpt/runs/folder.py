"""The folder of a run: config.yaml, metrics.jsonl, checkpoints/, samples/, loss.png, environment.json.

Importing this module does not import torch: a wrong path is reported before that.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from niels_gpt.config import ModelConfig, RunConfig
from niels_gpt.data import note_record
from niels_gpt.data.note_selection import SelectedNotes, write_skipped
from niels_gpt.runs import environment, source
from niels_gpt.runs.metrics import encode_line, read_metrics, warn_of_damage
from niels_gpt.runs.stored_config import copy_path, read_stored_config, write_stored_config
from niels_gpt.system import files
from niels_gpt.system.program import command
from niels_gpt.tokenizer import AnyTokenizer, ForeignTokenizer, Tokenizer, remove_foreign, write_foreign

if TYPE_CHECKING:
    import torch

    from niels_gpt.model.gpt import GPT
    from niels_gpt.system.processes import World


class RunFolder:
    """The paths and files of one run. All of them can be read without this package."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.samples = self.path / "samples"
        self.plot_path = self.path / "loss.png"
        self.tokenizer_path = self.path / "tokenizer.model"
        self.foreign_tokenizer = self.path / "tokenizer"
        self.skipped_path = self.path / "skipped.json"
        self.notes_path = self.path / note_record.FILE
        self.environment_path = self.path / environment.FILE
        self.source_path = self.path / source.FILE
        self.base_source_path = self.path / source.BASE_FILE

    @property
    def exists(self) -> bool:
        """Whether the folder holds a run: it has a config.yaml."""
        return self.config_path.exists()

    @property
    def imported(self) -> bool:
        """Whether the run is an imported model, which has no steps: other runs start from it (`init_from`)."""
        return source.is_imported(self.path)

    @property
    def no_data(self) -> str:
        """Why the run has no data; empty if it has. That of an imported model is not known."""
        return f"{self.path} is an imported model, which has no data" if self.imported else ""

    def check_data(self, remedy: str = "") -> None:
        """Raise ValueError if the run has no data. remedy: what to type instead."""
        if self.no_data:
            raise ValueError(f"{self.no_data}: {remedy}" if remedy else self.no_data)

    @property
    def resume_command(self) -> str:
        """What to type to resume the run."""
        return command("train", self.path, "--resume")

    @property
    def extend_command(self) -> str:
        """What to type to train the run for more steps."""
        return command("train", self.path, "--resume", "--steps", "N")

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is a model to load: the best or the latest checkpoint."""
        return self.best.exists() or self.latest.exists()

    @property
    def steps_saved(self) -> int:
        """The step of the newest numbered checkpoint; 0 if there is none."""
        return next((int(path.stem.removeprefix("step_")) for path in self.step_files()), 0)

    def orphan(self) -> Path | None:
        """A checkpoint or the metrics of a run that lost its config.yaml: a new run would mix with it."""
        if self.exists:
            return None
        checkpoints = files.matching(self.checkpoints, "[!.]*")
        return checkpoints[0] if checkpoints else self.metrics_path if self.metrics() else None

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the run for writing. Raises ValueError if another process is training into it.

        A run that has not begun by the end of the block (it has no config.yaml) leaves the disk as it was.
        """
        lock = self.path / "run.lock"
        created = [path for path in (self.checkpoints, self.samples, lock, self.path) if not path.exists()]
        created += [path for path in self.path.parents if not path.exists()]
        try:
            with files.lock(lock, wait=files.LOCK_SECONDS):
                for folder in (self.checkpoints, self.samples):
                    folder.mkdir(parents=True, exist_ok=True)
                    files.remove_temporaries(folder, ours=True)
                try:
                    yield
                finally:
                    if not self.exists:
                        _remove_unused(created)
        except BlockingIOError:
            raise ValueError(
                f"another process is training into {self.path}: wait for it, or choose another folder"
            ) from None

    def write_config(self, config: RunConfig) -> None:
        """Write config.yaml, with absolute paths: commands on the run work from any folder."""
        write_stored_config(self.config_path, config)

    def write_imported_config(self, model: ModelConfig) -> None:
        """Write config.yaml of an imported model: the model alone."""
        write_stored_config(self.config_path, RunConfig(model=model), sections=source.SECTIONS)

    def write_tokenizer(self, tokenizer: AnyTokenizer) -> None:
        """Write a copy of the tokenizer, so that the run is self-contained; bytes need none."""
        if isinstance(tokenizer, Tokenizer):
            files.write_bytes(self.tokenizer_path, tokenizer.model)
        elif isinstance(tokenizer, ForeignTokenizer):
            write_foreign(tokenizer, self.foreign_tokenizer)

    def write_skipped(self, selections: Mapping[str, SelectedNotes]) -> None:
        """Record which files of the sources were not read, and why; no file if no source was selected from."""
        if selections:
            write_skipped(self.skipped_path, selections)
        else:
            self.skipped_path.unlink(missing_ok=True)

    def release(self) -> None:
        """Delete the files of a run that did no step, so that the folder can be used again."""
        config = (self.config_path, copy_path(self.config_path))
        files_of_run = self.tokenizer_path, self.metrics_path, self.skipped_path, self.environment_path, self.notes_path
        base = self.base_source_path, self.base, self.base.with_name("config.json")
        for path in (*config, *files_of_run, *base):
            path.unlink(missing_ok=True)
        if self.foreign_tokenizer.is_dir():
            remove_foreign(self.foreign_tokenizer)

    def read_config(self) -> RunConfig:
        """The config of the run; warns if it has changed since the run wrote it. Raises ValueError for no run."""
        if not self.exists:
            raise ValueError(f"{self.path} is not a run: it has no config.yaml")
        return read_stored_config(self.config_path)

    # --- metrics ---------------------------------------------------------------------------------

    def metrics(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl. Damaged ones (by a kill, for example) are skipped with a warning."""
        found = read_metrics(self.metrics_path)
        warn_of_damage(self.metrics_path, found)
        return found.lines

    def keep_metrics_before(self, step: int) -> None:
        """Drop the lines of steps that will run again."""
        earlier = [m for m in self.metrics() if m["step"] < step]
        files.write_bytes(self.metrics_path, b"".join(map(encode_line, earlier)))

    # --- checkpoints -----------------------------------------------------------------------------

    def step_path(self, step: int) -> Path:
        """The path of the numbered checkpoint of a step."""
        return self.checkpoints / f"step_{step:08d}.pt"

    def sample_path(self, step: int) -> Path:
        """The path of the sample text of a step."""
        return self.samples / f"step_{step:08d}.txt"

    def sample_steps(self) -> list[int]:
        """The steps that have a sample text; links are not followed."""
        found = files.matching(self.samples, "step_*.txt")
        digits = {path.stem.removeprefix("step_"): path for path in found if not path.is_symlink() and path.is_file()}
        return sorted(int(d) for d in digits if d.isdecimal() and self.sample_path(int(d)) == digits[d])

    def read_sample(self, step: int, *, most: int) -> tuple[str, bool]:
        """(the first `most` bytes of the sample of a step as text, whether that is all of it)."""
        with self.sample_path(step).open("rb") as file:
            data = file.read(most + 1)
        return data[:most].decode("utf-8", errors="replace"), len(data) <= most

    def has_outputs_of(self, step: int) -> bool:
        """Whether latest checkpoint and sample of a step exist, loss.png is up to date, and the end is recorded.

        They are written after the numbered checkpoint, so a kill or a full disk can prevent them.
        """
        needed = (self.latest, self.sample_path(step), self.plot_path, self.metrics_path)
        if not all(path.exists() for path in needed):
            return False
        if self.plot_path.stat().st_mtime_ns < self.metrics_path.stat().st_mtime_ns:
            return False
        recorded = environment.read_environment(self.path)
        return recorded is not None and bool(recorded.sessions) and recorded.sessions[-1].ended is not None

    @property
    def latest(self) -> Path:
        """The newest checkpoint: latest.pt, or `latest` if it is a sharded checkpoint (a folder)."""
        return next(iter(self._pointers()), self.checkpoints / "latest.pt")

    def _pointers(self) -> list[Path]:
        """latest.pt and `latest`, if they exist. A kill can leave both; then the newer one comes first."""
        existing = [p for p in (self.checkpoints / "latest.pt", self.checkpoints / "latest") if p.exists()]
        return sorted(existing, key=lambda path: path.stat().st_mtime_ns, reverse=True)

    @property
    def best(self) -> Path:
        """The path of the checkpoint with the lowest validation loss."""
        return self.checkpoints / "best.pt"

    @property
    def base(self) -> Path:
        """The path of the frozen weights of a LoRA run."""
        from niels_gpt.runs.checkpoint import BASE

        return self.checkpoints / BASE

    def step_files(self) -> list[Path]:
        """The numbered checkpoints, newest first: files, or folders of sharded checkpoints."""
        return sorted(files.matching(self.checkpoints, "step_*"), key=lambda path: path.stem, reverse=True)

    def save(
        self,
        model: GPT,
        optimizer: torch.optim.Optimizer | None,
        step: int,
        extra: dict[str, Any],
        *,
        numbered: bool,
        best: bool,
        keep: int,
    ) -> None:
        """Write the checkpoint of a step as a numbered one, as the best one, or both.

        `latest` changes last: after a kill in between, a resumed run starts from the previous checkpoint. Only the
        newest `keep` numbered checkpoints are kept.
        """
        from niels_gpt.runs.checkpoint import save_checkpoint

        path = self.step_path(step) if numbered else self.best
        if numbered or best:
            save_checkpoint(path, model, optimizer, step, model.config, extra=extra)
        if numbered:
            if best:
                files.link_or_copy(path, self.best)
            self._point_to(path)
            self.retain(keep)

    def save_sharded(
        self, tensors: Mapping[str, torch.Tensor], head: dict[str, Any], world: World, *, keep: int
    ) -> None:
        """Write the numbered checkpoint of a step as a folder. A collective call.

        The guarantees are those of `save`: the complete folder gets its name, then `latest` changes, then old
        checkpoints are deleted.
        """
        from niels_gpt.runs.sharded_checkpoint import write_head, write_shards

        folder = self.step_path(head["step"]).with_suffix("")
        temporary = folder.with_name(f".{folder.name}.tmp")
        with world.fail_together():
            if world.is_main:
                _remove(temporary)
                temporary.mkdir()
        written = world.all_gather(write_shards(temporary, tensors, rank=world.rank, group=world.control))
        with world.fail_together():
            if world.is_main:
                write_head(temporary, head, written)
                _remove(folder)  # a damaged one, which the run could not resume from
                temporary.rename(folder)
                files.fsync_folder(self.checkpoints)
                self._point_to(folder)
                self.retain(keep)

    def _point_to(self, path: Path) -> None:
        """Point `latest` to a checkpoint, a file or a folder."""
        if path.is_dir():
            pointer = self.checkpoints / ".latest.tmp"
            pointer.unlink(missing_ok=True)
            pointer.symlink_to(path.name)
            pointer.replace(self.checkpoints / "latest")
            files.fsync_folder(self.checkpoints)
            (self.checkpoints / "latest.pt").unlink(missing_ok=True)  # left from before the run was sharded
        else:
            files.link_or_copy(path, self.checkpoints / "latest.pt")
            (self.checkpoints / "latest").unlink(missing_ok=True)  # left from when the run was sharded

    def restore_links(self, path: Path, step: int, best: Mapping[str, Any] | None) -> None:
        """Make the links to the checkpoint `path` of a step that a kill during its `save` prevented.

        best: which step is the best one, according to the checkpoint.
        """
        if path not in self.step_files() or step == 0:
            return
        if path.is_file() and best is not None and best["step"] == step and not self.best.exists():
            files.link_or_copy(path, self.best)
        if not self.latest.exists():
            self._point_to(path)

    def retain(self, keep: int, *, up_to: int | None = None) -> None:
        """Delete all but the newest `keep` numbered checkpoints.

        up_to: count only those up to this step, from which the run resumes: newer ones may be damaged.
        """
        existing = self.step_files()
        if up_to is not None:
            existing = [path for path in existing if path.stem <= self.step_path(up_to).stem]
        for old in existing[keep:]:
            _remove(old)

    def discard_from(self, step: int) -> Path | None:
        """Rename the checkpoints from a step on, which diverged, to `diverged_*`, and point `latest` before them.

        Returns the newest remaining checkpoint, or None if there is none."""
        good: Path | None = None
        for path in self.step_files():
            if self.step_path(step).stem > path.stem:
                good = path
                break
            _remove(path.with_name(f"diverged_{path.name}"))
            path.rename(path.with_name(f"diverged_{path.name}"))
        for pointer in self._pointers():
            pointer.unlink()
        if good is not None:
            self._point_to(good)
        return good

    def read(
        self, path: Path, device: str, *, tensors: bool = True, verify: bool = True, merge: bool = True
    ) -> dict[str, Any]:
        """The content of a checkpoint; with tensors=False that of a sharded one without its tensors.

        merge: as for `read_checkpoint`. Raises CheckpointError if it is damaged."""
        if not tensors and path.is_dir():
            from niels_gpt.runs.sharded_checkpoint import read_head

            return read_head(path, verify=verify)
        from niels_gpt.runs.checkpoint import read_checkpoint

        return read_checkpoint(path, device, merge=merge)

    def newest_checkpoint(
        self, device: str, *, tensors: bool = True, merge: bool = True
    ) -> tuple[Path | None, dict[str, Any], list[str]]:
        """(path, content, warnings) of the newest readable checkpoint; (None, {}, []) if there is none.

        Damaged checkpoints are skipped and named in the warnings. Raises CheckpointError if all are damaged. `tensors`
        and `merge` are as for `read`.
        """
        from niels_gpt.runs.checkpoint import CheckpointError

        candidates = [p for p in (*self._pointers(), *self.step_files()) if p.exists()]
        damaged: list[str] = []
        for path in candidates:
            try:
                return path, self.read(path, device, tensors=tensors, merge=merge), damaged
            except (CheckpointError, FileNotFoundError) as err:
                damaged.append(str(err))
        if damaged:
            remedy = f"start a new run from other weights ({command('train', '--set', 'init_from=FILE')})"
            raise CheckpointError(f"no checkpoint of {self.path} can be read: {damaged[0]}; {remedy}")
        return None, {}, []

    def model_path(self) -> Path:
        """The checkpoint to use: the best, else the latest. Raises ValueError if there is none."""
        for path in (self.best, self.latest):
            if path.exists():
                return path
        raise ValueError(f"{self.path} has no checkpoint yet: train first ({self.resume_command})")


def _remove_unused(paths: Iterable[Path]) -> None:
    """Remove lock files and empty folders in this order, up to the first folder that is not empty."""
    with contextlib.suppress(OSError):
        for path in paths:
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)


def _remove(path: Path) -> None:
    """Delete a file or a folder. A folder is renamed first, so that a partly deleted one never has its name."""
    if path.is_dir():
        hidden = path if path.name.startswith(".") else path.with_name(f".{path.name}.gone.tmp")
        path.rename(hidden)
        shutil.rmtree(hidden)
    else:
        path.unlink(missing_ok=True)


class MetricsLog:
    """Appends lines to metrics.jsonl without buffering.

    Raises OSError with the path of the file and how to resume.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._describing_errors():
            self._file = path.open("ab", buffering=0)

    def write(self, line: dict[str, Any]) -> None:
        self._open_again_if_replaced()
        rest = encode_line(line)
        with self._describing_errors():
            while rest:  # a full disk may accept only a part
                rest = rest[self._file.write(rest) :]

    def _open_again_if_replaced(self) -> None:
        """Open the file at the path if it is not the open one. Raises OSError if the whole run is gone."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                return
        folder = self._path.parent
        if not RunFolder(folder).exists:
            problem = f"{folder} was deleted or moved while the run was training, so nothing more can be saved"
            raise OSError(errno.ENOENT, f"{problem}: restore it and resume the run, or start again")
        self.close()
        with self._describing_errors():
            self._file = self._path.open("ab", buffering=0)

    def sync(self) -> None:
        """Flush all lines to disk; called with every checkpoint."""
        with self._describing_errors():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    @contextlib.contextmanager
    def _describing_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as err:
            remedy = ""
            if err.errno in files.NO_SPACE:
                resume = RunFolder(self._path.parent).resume_command
                remedy = f"; saved checkpoints are intact: free some space, and resume with {resume}"
            raise OSError(err.errno, f"cannot write {self._path}: {err.strerror}{remedy}") from err
