"""The interface between the loop and a task. The batch of a step is a pure function of (seed, step)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from niels_gpt.data.note_selection import SelectedNotes
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.metrics import eval_name as eval_name
from niels_gpt.system.processes import ALL_ROWS, SINGLE_PROCESS, RankShare, World
from niels_gpt.tokenizer import AnyTokenizer


class Batch(NamedTuple):
    """The tensors of one training step."""

    x: torch.Tensor
    """(B, T) ids."""
    targets: torch.Tensor
    """(B, T) ids to predict; -100 where there is no target."""
    segments: torch.Tensor | None = None
    """(B, T): a position attends to earlier positions of its segment; None: to all earlier positions."""
    positions: torch.Tensor | None = None
    """(B, T): the position of each token; None: 0, 1, 2, ..."""

    def structure(self) -> dict[str, torch.Tensor]:
        """The model's keyword arguments beside the ids; empty for plain rows."""
        optional = {"segments": self.segments, "positions": self.positions}
        return {name: tensor for name, tensor in optional.items() if tensor is not None}

    def to(self, device: torch.device) -> Batch:
        """The batch on a device. Segments stay on the CPU, where the model reads them."""
        x, targets, segments, positions = self
        moved = (None if t is None else t.to(device, non_blocking=True) for t in (x, targets, positions))
        x, targets, positions = moved  # type: ignore[assignment]
        return Batch(x, targets, segments, positions)

    def pinned(self) -> Batch:
        """The batch in pinned memory, from which a GPU copies asynchronously."""
        x, targets, segments, positions = self
        return Batch(
            x.pin_memory(), targets.pin_memory(), segments, None if positions is None else positions.pin_memory()
        )

    def lengths(self) -> torch.Tensor:
        """(B,): the number of positions up to the last target of each row; the rest is padding."""
        columns = torch.arange(1, self.x.shape[1] + 1, device=self.targets.device)
        return ((self.targets != -100) * columns).amax(dim=1)

    def by_length(self, multiple: int = 16) -> list[Batch]:
        """The rows in groups of similar length, each without the columns after its last target.

        Positions attend only to earlier ones, so the summed loss is the same, and short conversations cost what they
        are long. Lengths are rounded up to a multiple.
        """
        if self.segments is not None or self.positions is not None:
            return [self]
        rounded = (-(-self.lengths().clamp(min=1) // multiple) * multiple).clamp(max=self.x.shape[1])
        groups = []
        for length in rounded.unique().tolist():
            rows = (rounded == length).nonzero().squeeze(1)
            groups.append(Batch(self.x[rows, :length], self.targets[rows, :length]))
        return groups

    def micro_batches(self, number: int) -> list[Batch]:
        """The batch split by rows into at most `number` micro-batches."""
        columns = [[None] * number if tensor is None else tensor.chunk(number) for tensor in self]
        return [Batch(*rows) for rows in zip(*columns, strict=False)]


@dataclass(frozen=True)
class RowOrigin:
    """The origin of a batch row."""

    row: int
    source: str
    document: str
    """A file, module, dialogue or dataset row."""
    offset: int
    """Offset of the row's first byte or token within the document."""
    stream_offset: int
    """Offset of the row's first byte or token within the source's stream."""
    text: str
    """The text of the row."""


class SourceRow(NamedTuple):
    """A line of the table of sources."""

    source: str
    share: float
    train: int
    held_out: int
    unit: str
    """The unit of `train` and `held_out`: bytes or tokens."""
    documents: int
    path: str


class Task(Protocol):
    """What the loop needs of a task."""

    tokenizer: AnyTokenizer
    """The tokenizer of the ids in its batches."""

    def batch(self, step: int, share: RankShare = ALL_ROWS) -> Batch:
        """The batch of a step, or a share of its rows, on the CPU; always the same for the same step."""

    def evaluate(self, model: GPT, device: str, world: World = SINGLE_PROCESS) -> tuple[dict[str, float], float]:
        """(loss per held-out set, the loss that chooses the best checkpoint).

        Each process evaluates its share; all get the result."""

    def fingerprint(self) -> dict[str, str]:
        """Hashes that identify the data: a run resumes only on the same data."""

    def sample_prompt(self) -> str | list[int]:
        """The prompt of the samples that are written during training."""


class DataTask(Task, Protocol):
    """A task over text, which also knows the origin of its rows."""

    def origins(self, step: int) -> list[RowOrigin]:
        """Source, document, offset and text of every row of a step."""

    def describe(self) -> list[SourceRow]:
        """Its sources, for the table that is printed when a run starts."""

    def notes(self) -> list[str]:
        """Notes that are printed when a run starts."""

    def selections(self) -> dict[str, SelectedNotes]:
        """Which files of its sources were read and skipped; recorded in the run's skipped.json."""
