"""What a task hands to the loop, and what a task is. The batch of a step is a pure function of (seed, step)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from niels_gpt.model.gpt import GPT
from niels_gpt.system.processes import (
    ALL_ROWS,
    SINGLE_PROCESS,
    RankShare,
    World,
)
from niels_gpt.tokenizer import AnyTokenizer


class Batch(NamedTuple):
    """What one update learns from."""

    x: torch.Tensor
    """(B, T) ids."""
    targets: torch.Tensor
    """(B, T) ids to predict; -100 where none is."""
    segments: torch.Tensor | None = None
    """(B, T): a position attends to earlier ones of its own segment; None: to all."""
    positions: torch.Tensor | None = None
    """(B, T): the position of each token; None: 0, 1, 2, ..."""

    def structure(self) -> dict[str, torch.Tensor]:
        """What the model is told beside the ids: nothing, for plain rows."""
        given = {"segments": self.segments, "positions": self.positions}
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    def to(self, device: torch.device) -> Batch:
        """On a device. Segments stay: the model reads them on the CPU."""
        x, targets, segments, positions = self
        moved = (None if t is None else t.to(device, non_blocking=True) for t in (x, targets, positions))
        x, targets, positions = moved  # type: ignore[assignment]
        return Batch(x, targets, segments, positions)

    def pinned(self) -> Batch:
        """In memory from which a GPU copies without the processor."""
        x, targets, segments, positions = self
        return Batch(
            x.pin_memory(), targets.pin_memory(), segments, None if positions is None else positions.pin_memory()
        )

    def parts(self, number: int) -> list[Batch]:
        """The batch cut into at most so many parts, by rows."""
        columns = [[None] * number if part is None else part.chunk(number) for part in self]
        return [Batch(*rows) for rows in zip(*columns, strict=False)]


@dataclass(frozen=True)
class RowOrigin:
    """Where a row of a batch comes from."""

    row: int
    source: str
    document: str
    """File, module, dialogue or row."""
    offset: int
    """Of the row's first byte or token within the document."""
    stream_offset: int
    """Of the row's first byte or token within the source's stream."""
    text: str
    """What the model reads there."""


class Task(Protocol):
    """What the loop needs to know of a task."""

    tokenizer: AnyTokenizer
    """What the ids of its batches mean."""

    def batch(self, step: int, device: str, share: RankShare = ALL_ROWS) -> Batch:
        """The rows of an update, or a share of them; the same for the same step, always."""

    def evaluate(self, model: GPT, device: str, world: World = SINGLE_PROCESS) -> tuple[dict[str, float], float]:
        """(loss per held-out set, the one number that chooses the best checkpoint); each process measures its share,
        and all get the result."""

    def fingerprint(self) -> dict[str, str]:
        """What identifies the data: a run goes on only on the same."""

    def sample_prompt(self) -> str | list[int]:
        """What the samples written during training continue."""


class DataTask(Task, Protocol):
    """A task over text, which can tell where its rows come from."""

    def origins(self, step: int) -> list[RowOrigin]:
        """Source, document, offset and text of every row of a step."""

    def describe(self) -> list[SourceRow]:
        """Its sources, for the table at the beginning of a run."""

    def notes(self) -> list[str]:
        """What else a person should know before it begins."""


class SourceRow(NamedTuple):
    """A line of the table of sources."""

    source: str
    share: float
    train: int
    held_out: int
    unit: str
    """Of the two: bytes or tokens."""
    documents: int
    place: str
