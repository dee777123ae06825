"""Models, documents, tokenizers and measurements for the tests of memorization and of its reports."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from niels_gpt import GPT, ModelConfig
from niels_gpt.evaluation.exact import Score
from niels_gpt.memorization.law import LawPoint
from niels_gpt.memorization.measure import Document, ExtractionSettings, Measurement, measure
from niels_gpt.memorization.summary import build_report, curve_entry
from niels_gpt.runs.loading import LoadedRun
from niels_gpt.tokenizer import ByteTokenizer

SMALL = ExtractionSettings(window=12, prompt=5, stride=3, greedy=4)
GRID = [(epochs, tokens) for epochs in (1, 2, 5, 30) for tokens in (100, 1000, 40_000)]


@functools.cache
def some_model(V: int = 40, T: int = 48, positions: str = "rope") -> GPT:
    """Return a model with random weights, large enough that all context matters."""
    torch.manual_seed(0)
    model = GPT(ModelConfig(V=V, T=T, C=16, L=2, H=2, d_ff=32, dropout=0.5, positions=positions))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(1 + 0.3 * torch.randn(p.shape) if p.dim() == 1 else 1.2 * torch.randn(p.shape) / p.shape[1] ** 0.5)
    return model.eval()


@functools.cache
def chain_model(V: int = 40, T: int = 48, sharpness: float = 5.0) -> GPT:
    """Return a model that continues id i with i + 1 (the last with 0), almost surely, whatever the context."""
    torch.manual_seed(1)
    model = GPT(ModelConfig(V=V, T=T, C=64, L=1, H=1, d_ff=8, dropout=0.5))
    with torch.no_grad():
        for block in model.layers():
            block.attn.out.weight.zero_()
            block.mlp.down.weight.zero_()
        vectors = nn.functional.layer_norm(torch.randn(V, 64), (64,))
        model.tok_emb.weight.copy_(vectors)
        model.lm_head.weight = nn.Parameter(sharpness * vectors.roll(1, 0) / 8)
    return model.eval()


class BigramModel(GPT):
    """A model over bytes that continues each byte of a text of different bytes with the next one, with P = `p`.

    After other bytes all are equally probable.
    """

    def __init__(self, text: bytes, *, p: float = 0.9, T: int = 128, positions: str = "rope") -> None:
        super().__init__(ModelConfig(V=256, T=T, C=4, L=1, H=1, d_ff=4, positions=positions))
        assert len(set(text)) == len(text)
        self.table = torch.full((256, 256), math.log(1 / 256))
        for here, following in itertools.pairwise(text):
            self.table[here] = math.log((1 - p) / 255)
            self.table[here, following] = math.log(p)

    def hidden(self, x: torch.Tensor, **_: object) -> torch.Tensor:
        return nn.functional.one_hot(x, 256).float()

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        return h @ self.table


@functools.cache
def taught_model() -> tuple[GPT, np.ndarray]:
    """Return a model that has memorized a text of 120 ids below 20, and the text.

    Every id occurs six times, so the next one depends on more than one token.
    """
    text = np.concatenate([np.random.default_rng(i).permutation(20) for i in range(6)])
    torch.manual_seed(2)
    model = GPT(ModelConfig(V=40, T=48, C=32, L=2, H=2, d_ff=64, dropout=0.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(3)
    ids = torch.from_numpy(text)
    for _ in range(90):
        starts = torch.randint(0, 120 - 41, (16, 1), generator=draw)
        rows = ids[starts + torch.arange(41)]
        loss = nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), text


def some_ids(n: int, V: int = 40, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, n).astype(np.uint16)


class TableTokenizer:
    """A tokenizer of given subwords; the last id is EOT."""

    def __init__(self, subwords: Sequence[bytes]) -> None:
        self.token_bytes = [*subwords, b"<|end|>"]
        self.vocab_size = len(self.token_bytes)
        self.sha256 = None

    def special_token_ids(self) -> dict[str, int]:
        return {"eot": self.vocab_size - 1}


def letters(V: int = 40) -> TableTokenizer:
    """Return V ids: the letters, one byte each, then subwords of two bytes; the last id is EOT."""
    return TableTokenizer([bytes([97 + i]) if i < 26 else bytes([65 + i - 26, 46]) for i in range(V - 1)])


def measurement(ids: np.ndarray, starts: list[int], log_p: list[float], **changes) -> Measurement:
    """Return a measurement with these values."""
    chosen = changes.pop("settings", SMALL)
    starts, window, prompt = (
        np.array(starts),
        changes.pop("window", chosen.window),
        changes.pop("prompt", chosen.prompt),
    )
    values = {
        "document": Document(changes.pop("name", "a"), ids, control=changes.pop("control", False), source="notes"),
        "settings": chosen,
        "bytes": len(ids),
        "starts": starts,
        "cuts": starts + prompt,
        "ends": starts + window,
        "log_p": np.array(log_p),
        "score": Score(tokens=len(ids) - 1, nats_per_token=2.0, bytes=len(ids) - 1),
        "greedy_share": np.full(len(starts), np.nan),
        "greedy_run": np.zeros(len(starts), dtype=int),
        "longest": (0, 0),
    }
    return Measurement(**{**values, **changes})


@functools.cache
def measured() -> tuple[Measurement, ...]:
    """Measure a memorized text with EOT, one with errors, a control, and a short one."""
    model, text = taught_model()
    wrong = text.copy()
    wrong[[17, 43, 80]] = 30
    documents = [
        Document("known", np.append(text, 39), source="notes"),
        Document("with, errors", wrong, source="notes"),
        Document("control", some_ids(70, V=39), control=True, source="held out"),
        Document("short", text[:9]),
    ]
    return tuple(measure(model, documents, letters(), SMALL))


def run_of(model: GPT, tokenizer: TableTokenizer | ByteTokenizer | None = None) -> LoadedRun:
    """Return a model as if it were loaded from a checkpoint."""
    return LoadedRun(model, 60, Path("runs/x/step_60.pt"), None, tokenizer or letters())


@functools.cache
def full_report() -> dict:
    """Return the report of `measured`, with curves."""
    model, _ = taught_model()
    curves = [curve_entry(step, measured()) for step in (20, 10)]
    return build_report(run_of(model), measured(), title="a title", checkpoints=curves)


def points(c1, c2, c3, grid=GRID, noise=0.0, seed=0):
    """Return a point of the law with these coefficients for each (epochs, tokens) of the grid."""
    random = np.random.default_rng(seed)
    return [
        LawPoint(e, t, c1 * math.log(e) + c2 * math.log(t) + c3 + noise * random.standard_normal()) for e, t in grid
    ]
