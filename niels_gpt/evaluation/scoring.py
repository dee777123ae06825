"""Score rows of tokens: log-probabilities and greedy hits, in batches of rows of similar length.

Rows are padded on the right, where causal attention does not look.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from niels_gpt.evaluation.sampled import eval_mode
from niels_gpt.model.gpt import GPT
from niels_gpt.system.device import bf16_autocast

Count = Callable[[int], None]
"""Is told how many rows were done since it was last called."""


def score_rows(
    model: GPT,
    rows: Sequence[np.ndarray],
    prompts: np.ndarray,
    *,
    batch: int = 0,
    offset: int = 0,
    count: Count | None = None,
    precision: str = "fp32",
) -> tuple[np.ndarray, np.ndarray]:
    """For each row of ids, of what follows its first `prompts[i]`: the log-probability (float64), and how many tokens
    are the model's first choice before the first that is not.

    One forward pass per batch of rows (0: as many as suit the device). The head sees only the positions that are
    scored. `offset` is the position of the first token, for models to which that makes a difference. `precision` bf16
    multiplies matrices in bfloat16, those of the head apart: what is scored is float32.
    """
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    if offset < 0 or offset + lengths.max(initial=0) - 1 > model.config.T:
        raise ValueError(
            f"{lengths.max(initial=0) - 1} positions from {offset} on do not fit a model of T={model.config.T}: "
            "take shorter windows, or an earlier place"
        )
    log_p = np.zeros(len(rows))
    led = np.zeros(len(rows), dtype=np.int64)
    with eval_mode(model):
        for group in row_groups(model, lengths - 1, batch):
            ids = pad_rows([rows[i] for i in group.tolist()])
            at = np.arange(ids.shape[1] - 1)  # position i predicts token i + 1
            scored = (at >= prompts[group, None] - 1) & (at < lengths[group, None] - 1)  # (B, n)
            x = torch.from_numpy(ids[:, :-1]).to(model.device)
            positions = torch.arange(offset, offset + x.shape[1], device=x.device).expand(x.shape) if offset else None
            targets = torch.from_numpy(np.where(scored, ids[:, 1:], -100))
            each, first = token_scores(model, x, targets, positions=positions, precision=precision)
            log_p[group] = _by_row(each.cpu().double().numpy(), scored).sum(axis=1)
            led[group] = np.logical_and.accumulate(_by_row(first.cpu().numpy(), scored), axis=1).sum(axis=1)
            if count is not None:
                count(len(group))
    if not np.isfinite(log_p).all():
        raise ValueError(
            f"the model gives no probabilities for {(~np.isfinite(log_p)).sum()} of {len(rows)} windows "
            "(nan or infinite logits): its weights are broken, take another checkpoint"
        )
    return log_p, led


def logits_budget(model: GPT) -> int:
    """Bytes of logits to hold at once. On a CPU what stays near the caches is fastest (a product of 256 rows costs no
    more per row than one of 1600)."""
    return 2**28 if model.device.type == "cuda" else 2**24


def _tokens(model: GPT) -> int:
    """Tokens per forward pass. On a CPU v1 takes as long per token with 1,600 as with 12,000."""
    return 2**15 if model.device.type == "cuda" else 2**12


def row_groups(model: GPT, widths: np.ndarray, batch: int) -> Iterator[np.ndarray]:
    """The indices of all rows, batch by batch, the widest first: if memory does not suffice, that shows at once."""
    order = np.argsort(-widths, kind="stable")
    i = 0
    while i < len(order):
        size = batch or max(1, _tokens(model) // max(1, int(widths[order[i]])))
        yield order[i : i + size]
        i += size


def pad_rows(rows: Sequence[np.ndarray]) -> np.ndarray:
    """(B, widest) int64, with zeros on the right."""
    width = max(map(len, rows))
    padded = np.zeros((len(rows), width), dtype=np.int64)
    for to, row in zip(padded, rows, strict=True):
        to[: len(row)] = row
    return padded


def _by_row(values: np.ndarray, places: np.ndarray) -> np.ndarray:
    """(B, most of a row): the values of the places that are True, left-aligned; zeros (False) fill the rows."""
    counts = places.sum(axis=1)
    table = np.zeros((len(places), counts.max(initial=0)), dtype=values.dtype)
    table[np.arange(table.shape[1]) < counts[:, None]] = values
    return table


def token_scores(
    model: GPT,
    x: torch.Tensor,
    targets: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    precision: str = "fp32",
) -> tuple[torch.Tensor, torch.Tensor]:
    """For ids (B, n) and what follows each (B, n, on the CPU; -100: not asked for), of those that are asked for, in
    order: the log-probabilities in float32, and whether they are the first choice.

    The head sees only the positions that are asked for. Logits are made in parts and used up in place: there is one
    such tensor at a time. `precision` is as in `score_rows`.
    """
    asked = targets.flatten() != -100
    places, wanted = asked.nonzero().squeeze(1).to(x.device), targets.flatten()[asked].to(x.device)
    with bf16_autocast(x.device.type, precision == "bf16"):
        h = model.hidden(x, positions=positions)
    h = h.flatten(0, 1)[places]
    h = h.float() if precision == "bf16" else h
    size = max(1, logits_budget(model) // (4 * model.config.V))
    log_p, first = [], []
    for part, ids in zip(h.split(size), wanted.split(size), strict=True):
        logits = model.logits(part)
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        top, choice = logits.max(dim=-1, keepdim=True)
        logits.sub_(top)
        gathered = logits.gather(-1, ids[:, None])
        log_p.append((gathered - logits.exp_().sum(dim=-1, keepdim=True).log_()).squeeze(1))
        first.append(choice.squeeze(1) == ids)
    return torch.cat(log_p), torch.cat(first)
