"""Splice datasets: chosen documents at chosen positions. numpy only; `splice.tensors` converts frames to tensors."""

from niels_gpt.config.splice import SpliceMultiDocumentLMConfig, SpliceSingleDocumentLMConfig
from niels_gpt.splice.dataset import MultiSpliceDocumentDataset, SpliceDocumentDataset
from niels_gpt.splice.frames import Frames, SpanOrigin, Spans
from niels_gpt.splice.packing import PackedFrames

__all__ = [
    "Frames",
    "MultiSpliceDocumentDataset",
    "PackedFrames",
    "SpanOrigin",
    "Spans",
    "SpliceDocumentDataset",
    "SpliceMultiDocumentLMConfig",
    "SpliceSingleDocumentLMConfig",
]
