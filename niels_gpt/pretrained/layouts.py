"""Where each tensor of a Hugging Face checkpoint belongs in ours, in both directions.

A family (`families.py`) lists its tensors as `MappedTensor`: the name and shape there, the tensor and rows here, and a
reordering between them. Import reads one tensor after the other and copies it into ours; export does the reverse.

Importing this module does not import torch: a config.json is refused before that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch


class Layout(Protocol):
    """A reordering of the elements of a tensor."""

    def to_ours(self, theirs: torch.Tensor) -> torch.Tensor:
        """The tensor as this project stores it."""

    def to_theirs(self, ours: torch.Tensor) -> torch.Tensor:
        """The inverse of `to_ours`."""


class Same:
    """The same order."""

    def to_ours(self, theirs: torch.Tensor) -> torch.Tensor:
        return theirs

    def to_theirs(self, ours: torch.Tensor) -> torch.Tensor:
        return ours


class Transposed:
    """GPT-2's matrices are (inputs, outputs)."""

    def to_ours(self, theirs: torch.Tensor) -> torch.Tensor:
        return theirs.t()

    def to_theirs(self, ours: torch.Tensor) -> torch.Tensor:
        return ours.t()


@dataclass(frozen=True)
class RopePairs:
    """Rows of queries or keys, heads of width D: RoPE pairs dimension i with i + D/2 there, 2i with 2i + 1 here."""

    D: int

    def to_ours(self, theirs: torch.Tensor) -> torch.Tensor:
        halves = theirs.reshape(-1, 2, self.D // 2, *theirs.shape[1:])
        return halves.transpose(1, 2).reshape(theirs.shape)

    def to_theirs(self, ours: torch.Tensor) -> torch.Tensor:
        pairs = ours.reshape(-1, self.D // 2, 2, *ours.shape[1:])
        return pairs.transpose(1, 2).reshape(ours.shape)


@dataclass(frozen=True)
class NeoXHeads:
    """GPT-NeoX stores queries, keys and values head by head: (H, 3, D) rows instead of (3, H, D)."""

    H: int
    D: int

    def to_ours(self, theirs: torch.Tensor) -> torch.Tensor:
        import torch

        q, k, v = theirs.reshape(self.H, 3, self.D, -1).unbind(1)
        pairs = RopePairs(self.D)
        parts = [pairs.to_ours(each.flatten(0, 1)) for each in (q, k)]
        return torch.cat((*parts, v.flatten(0, 1))).reshape(theirs.shape)

    def to_theirs(self, ours: torch.Tensor) -> torch.Tensor:
        import torch

        q, k, v = ours.reshape(3, self.H * self.D, -1).unbind(0)
        pairs = RopePairs(self.D)
        parts = [each.reshape(self.H, self.D, -1) for each in (pairs.to_theirs(q), pairs.to_theirs(k), v)]
        return torch.stack(parts, dim=1).reshape(ours.shape)


class MappedTensor(NamedTuple):
    """A tensor of theirs, and where it is in our state dict."""

    name: str
    shape: tuple[int, ...]
    ours: str | None
    """The name of our tensor; None: we have none, because its elements must be zero (a bias)."""
    rows: slice = slice(None)
    """The rows of our tensor."""
    layout: Layout = Same()
