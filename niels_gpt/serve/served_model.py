"""The models that a server has loaded, each with its id, its tokenizer and its worker."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from niels_gpt import __version__
from niels_gpt.chat.format import ChatFormat
from niels_gpt.chat.formats import chat_format
from niels_gpt.inference.engine.engine import Engine
from niels_gpt.inference.engine.request import ContextOverflow
from niels_gpt.inference.generation import visible_bytes
from niels_gpt.inference.int8 import Int8GPT
from niels_gpt.model.digest import weights_digest
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.loading import LoadedRun, load_run
from niels_gpt.runs.pipeline import PipelineFolder
from niels_gpt.serve.limits import Admission, Limits
from niels_gpt.serve.model_worker import ModelWorker
from niels_gpt.system.files import sha256_bytes
from niels_gpt.tokenizer import AnyTokenizer, ByteTokenizer, ForeignTokenizer


@dataclass
class ServedModel:
    """A model under an id, with the thread that runs it."""

    id: str
    model: GPT
    tokenizer: AnyTokenizer
    worker: ModelWorker
    admission: Admission
    created: int = 0
    """When its checkpoint was written, in seconds since 1970."""
    step: int = 0
    """Training steps done."""
    task: str | None = None
    """What it was trained for, as in the config of its run: bytes, pretrain, sft or splice."""
    loaded: LoadedRun | None = field(default=None, repr=False)
    """The run that it was loaded from."""
    aliases: tuple[str, ...] = ()
    """Other names that requests may use."""

    @property
    def context(self) -> int:
        """T: the most tokens that the model sees at a time."""
        return self.model.config.T

    @property
    def vocabulary(self) -> int:
        """Number of ids that can be read and generated."""
        return self.model.sampled_ids or self.model.config.V

    @property
    def over_bytes(self) -> bool:
        """Whether tokens are bytes."""
        return isinstance(self.tokenizer, ByteTokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """What changes with the weights and with this version; `load_models` computes it."""
        return f"fp_{sha256_bytes(f'{weights_digest(self.model)} {__version__}'.encode())[:12]}"

    @cached_property
    def token_bytes(self) -> Sequence[bytes]:
        """The bytes of each id as text; none for special ids."""
        return visible_bytes(self.tokenizer)

    @cached_property
    def special_names(self) -> dict[int, str]:
        """The names of the special ids for a reader: <eot> and the roles."""
        special = self.tokenizer.special_token_ids()
        if isinstance(self.tokenizer, ForeignTokenizer):  # its names are strings such as <|im_end|>
            return {i: name for name, i in special.items() if name not in ("eot", "bos")}
        return {i: f"<{name}>" for name, i in special.items()}

    @property
    def format(self) -> ChatFormat:
        """The chat format of the tokenizer."""
        return chat_format(self.tokenizer)

    @cached_property
    def end_ids(self) -> list[int]:
        """The ids that end a continuation."""
        return list(self.format.end_ids)

    def describe(self) -> dict[str, object]:
        """The model in the list of models."""
        return {
            "id": self.id,
            "aliases": list(self.aliases),
            "object": "model",
            "created": self.created,
            "owned_by": "niels-gpt",
            "context_length": self.context,
            "tokens": "bytes" if self.over_bytes else "subwords",
            "vocabulary_size": self.vocabulary,
            "layers": self.model.config.L,
            "heads": self.model.config.H,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "training_steps": self.step,
            "task": self.task,
        }


def load_models(
    runs: Iterable[Path],
    limits: Limits,
    *,
    device: str = "auto",
    int8: bool = False,
    prefix_tokens: int | None = None,
    context_overflow: ContextOverflow = "half",
    threads: int = 1,
) -> list[ServedModel]:
    """Load the model of each run or checkpoint, and those of all trained phases of a pipeline, the last phase first.

    prefix_tokens, context_overflow: of the engine; None is the size of the KV cache of all slots.
    threads: most threads that compute a model on a CPU (see `thread_count`).
    Raises ValueError as `load_run` does.
    """
    loaded = [load_run(path, device=device, has_option=False) for run in runs for path in _phases(run)]
    ids = unique_ids([model_id(each) for each in loaded])
    served: list[ServedModel] = []
    taken = set(ids)
    for name, each in zip(ids, loaded, strict=True):
        model: GPT = Int8GPT.of(each.model) if int8 else each.model
        prefix = limits.slots * model.config.T if prefix_tokens is None else prefix_tokens
        engine = Engine(model, slots=limits.slots, prefix_tokens=prefix, context_overflow=context_overflow)
        engine.wait_until_ready()
        made = serve_run(each, name, engine, limits, threads=threads)
        _ = made.fingerprint  # hashed before the first request
        alias = pipeline_name(each)
        if alias is not None and alias not in taken:
            taken.add(alias)
            made.aliases = (alias,)
        served.append(made)
    return served


def _phases(path: Path) -> list[Path]:
    """Return the trained phases of a pipeline; of a run, a checkpoint, or a pipeline without any, the path itself."""
    pipeline = PipelineFolder(path)
    if RunFolder(path).exists or not pipeline.exists:
        return [path]
    return [run.path for run in pipeline.trained] or [path]


def serve_run(loaded: LoadedRun, name: str, engine: Engine, limits: Limits, *, threads: int = 1) -> ServedModel:
    """Return a loaded run with an engine of its model as a served model; its worker is not started."""
    return ServedModel(
        name,
        engine.model,
        loaded.tokenizer,
        ModelWorker(engine, name, threads=threads if engine.model.device.type == "cpu" else 1),
        Admission(limits),
        created=int(loaded.path.stat().st_mtime),
        step=loaded.step,
        task=loaded.config.task if loaded.run is not None and loaded.config is not None else None,
        loaded=loaded._replace(model=engine.model),
    )


def model_id(loaded: LoadedRun) -> str:
    """Return the id of a run: its name; of a phase of a pipeline PIPELINE-PHASE; of a checkpoint RUN-CHECKPOINT."""
    home = loaded.home
    if home is None:
        return loaded.path.stem
    path = home.path.resolve()
    name = f"{path.parent.name}-{path.name}" if PipelineFolder(path.parent).exists else path.name
    return name if loaded.run is not None else f"{name}-{loaded.path.stem}"


def pipeline_name(loaded: LoadedRun) -> str | None:
    """Return the name of a pipeline if the loaded run is the phase that commands use for it: sft once it is trained."""
    if loaded.run is None:
        return None
    path = loaded.run.path.resolve()
    pipeline = PipelineFolder(path.parent)
    return path.parent.name if pipeline.exists and pipeline.current.path == path else None


def unique_ids(names: Sequence[str]) -> list[str]:
    """Return the names, those that occur again with -2, -3, ... at their end."""
    ids: list[str] = []
    for name in names:
        candidates = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
        ids.append(next(candidate for candidate in candidates if candidate not in ids))
    return ids
