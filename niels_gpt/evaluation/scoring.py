"""Score rows of tokens: log-probabilities and greedy hits, in batches of rows of similar length.

Rows are padded on the right, which causal attention does not see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F

from niels_gpt.model.backend import halves
from niels_gpt.model.eval_mode import eval_mode
from niels_gpt.model.gpt import GPT
from niels_gpt.system.device import bf16_autocast

LOGITS_BYTES, FEWEST_ROWS = 2**24, 256
"""Logits are computed for as many rows at a time as take LOGITS_BYTES on a CPU, and for FEWEST_ROWS at least."""
CountRows = Callable[[int], None]
"""Called with the number of rows done since the last call."""


def score_rows(
    model: GPT,
    rows: Sequence[np.ndarray],
    prompts: np.ndarray,
    *,
    batch: int = 0,
    offset: int = 0,
    count: CountRows | None = None,
    precision: str = "fp32",
    tokens: dict[int, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Score the tokens of each row after its first `prompts[i]`: return (log_p, hits).

    `log_p` is their log-probability in float64; `hits` is how many of them in a row, from the first on, are the
    model's greedy choice. There is one forward pass per batch of rows (0: a size that suits the device), and the head
    sees only scored positions. `offset` is the position of the first token, which matters for learned positions.
    `precision` "bf16" computes all matmuls but the head's in bfloat16. `tokens` gets the log-probabilities of the
    scored tokens, by row.
    Raises ValueError for rows that do not fit the model's T, and for nan or infinite logits.
    """
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    longest = lengths.max(initial=0) - 1
    if offset < 0 or offset + longest > model.config.T:
        raise ValueError(
            f"{longest} positions from offset {offset} do not fit a model of T={model.config.T}: "
            "use shorter windows or a smaller offset"
        )
    log_p = np.zeros(len(rows))
    hits = np.zeros(len(rows), dtype=np.int64)
    with eval_mode(model):
        for group in row_groups(model, lengths - 1, batch):
            ids = _pad_right([rows[i] for i in group.tolist()])
            at = np.arange(ids.shape[1] - 1)  # position i predicts token i + 1
            scored = (at >= prompts[group, None] - 1) & (at < lengths[group, None] - 1)  # (B, n)
            x = torch.from_numpy(ids[:, :-1]).to(model.device)
            positions = torch.arange(offset, offset + x.shape[1], device=x.device).expand(x.shape) if offset else None
            targets = torch.from_numpy(np.where(scored, ids[:, 1:], -100))
            token_log_p, greedy = token_scores(model, x, targets, positions=positions, precision=precision)
            by_row = _by_row(token_log_p.cpu().double().numpy(), scored)
            log_p[group] = by_row.sum(axis=1)
            if tokens is not None:
                numbers = scored.sum(axis=1).tolist()
                tokens |= {i: row[:n] for i, row, n in zip(group.tolist(), by_row, numbers, strict=True)}
            hits[group] = np.logical_and.accumulate(_by_row(greedy.cpu().numpy(), scored), axis=1).sum(axis=1)
            if count is not None:
                count(len(group))
    if not np.isfinite(log_p).all():
        raise ValueError(
            f"{(~np.isfinite(log_p)).sum()} of {len(rows)} windows have nan or infinite logits: the weights are "
            "broken, use another checkpoint"
        )
    return log_p, hits


def row_groups(model: GPT, widths: np.ndarray, batch: int) -> Iterator[np.ndarray]:
    """Yield the indices of all rows, batch by batch, the widest first: too little memory fails at the start."""
    order = np.argsort(-widths, kind="stable")
    i = 0
    while i < len(order):
        size = batch or max(1, _tokens_per_pass(model) // max(1, int(widths[order[i]])))
        yield order[i : i + size]
        i += size


def token_scores(
    model: GPT,
    x: torch.Tensor,
    targets: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    precision: str = "fp32",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (log-probabilities, whether the target is the greedy choice) of the scored targets, in order.

    x (B, n) are ids, targets (B, n) the next ids on the CPU, -100 where nothing is scored. The head sees only scored
    positions. Logits are computed in chunks and overwritten in place, so only one such tensor exists at a time.
    `precision` is as in `score_rows`; the log-probabilities are float32 (float64 for a float64 model).
    """
    with bf16_autocast(x.device.type, precision == "bf16"):
        h, wanted = _hidden_of_targets(model, x, targets, positions=positions)
    h = h.float() if precision == "bf16" else h
    log_p, greedy = _results(h), torch.empty(len(h), dtype=torch.bool, device=h.device)
    for rows in _chunks(model, len(h)):
        logits, ids = _logits(model, h[rows]), wanted[rows]
        top, choice = logits.max(dim=-1, keepdim=True)
        logits.sub_(top)
        gathered = logits.gather(-1, ids[:, None])
        log_p[rows] = (gathered - logits.exp_().sum(dim=-1, keepdim=True).log_()).squeeze(1)
        greedy[rows] = choice.squeeze(1) == ids
    return log_p, greedy


def token_nats(
    model: GPT,
    x: torch.Tensor,
    targets: torch.Tensor,
    *,
    positions: torch.Tensor | None = None,
    segments: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the cross-entropies of the scored targets, in order, in the precision of the surrounding block.

    x, targets and memory are as for `token_scores`, which takes a fifth longer.
    """
    h, wanted = _hidden_of_targets(model, x, targets, positions=positions, segments=segments)
    nats = _results(h)
    for rows in _chunks(model, len(h)):
        nats[rows] = F.cross_entropy(_logits(model, h[rows]), wanted[rows], reduction="none")
    return nats


def _hidden_of_targets(
    model: GPT,
    x: torch.Tensor,
    targets: torch.Tensor,
    *,
    positions: torch.Tensor | None,
    segments: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the inputs of the head at the scored positions (N, C), their targets (N,))."""
    scored = targets.flatten() != -100
    h = halves(model)[0](x, positions=positions, segments=segments).flatten(0, 1)
    return h[scored.nonzero().squeeze(1).to(x.device)], targets.flatten()[scored].to(x.device)


def _results(h: torch.Tensor) -> torch.Tensor:
    """Return the place of a result for each row of h, made before there are logits.

    Small tensors in the gaps between large ones keep the C library from using a gap again (see `keep_freed_memory`):
    then all logits would be in memory after all.
    """
    return torch.empty(len(h), dtype=torch.promote_types(h.dtype, torch.float32), device=h.device)


def _logits(model: GPT, h: torch.Tensor) -> torch.Tensor:
    """Return the logits of rows, at least in float32."""
    logits = halves(model)[1](h)
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def _chunks(model: GPT, number: int) -> list[slice]:
    """Return parts of `number` rows, whose logits are computed at a time.

    A CPU is fastest if they fit its caches: a matmul of 256 rows costs no more per row than one of 1600, but one of 27
    costs twice as much, because it reads the whole matrix.
    """
    most = 16 * LOGITS_BYTES if model.device.type == "cuda" else LOGITS_BYTES
    size = max(FEWEST_ROWS, most // (4 * model.config.V))
    return [slice(start, start + size) for start in range(0, number, size)]


def _tokens_per_pass(model: GPT) -> int:
    """Return the tokens per forward pass. On a CPU v1 takes as long per token with 1,600 as with 12,000."""
    return 2**15 if model.device.type == "cuda" else 2**12


def _pad_right(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Return (B, longest) int64, padded with zeros on the right."""
    padded = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


def _by_row(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Distribute the values of the True positions over their rows, left-aligned and padded with zeros."""
    counts = mask.sum(axis=1)
    table = np.zeros((len(mask), counts.max()), dtype=values.dtype)
    table[np.arange(table.shape[1]) < counts[:, None]] = values
    return table
