"""Extraction: how likely a model continues a prompt with the text, and how far greedy decoding follows it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from niels_gpt.evaluation.scoring import CountRows, row_groups, score_rows
from niels_gpt.inference.decoding import Decoder
from niels_gpt.inference.sampling import Sampling
from niels_gpt.model.eval_mode import eval_mode
from niels_gpt.model.gpt import GPT

_GREEDY = Sampling(temperature=0.0)


def log_probabilities(
    model: GPT, ids: np.ndarray, starts: np.ndarray, *, window: int, prompt: int, batch: int = 0, offset: int = 0
) -> np.ndarray:
    """Return log P(z), float64, of the windows of a document that begin at `starts`.

    P(z) is the probability of tokens prompt..window-1 of the window after the tokens before them, at temperature 1
    over the full vocabulary. `batch` and `offset` are as in `score_rows`.
    """
    rows = [ids[start : start + window] for start in np.asarray(starts).tolist()]
    return score_rows(model, rows, np.full(len(rows), prompt), batch=batch, offset=offset)[0]


FIRST = 8
"""Suffix tokens that `scan_rows` scores first: enough to get below the floor in text that the model does not know."""
CHUNK = 256
"""Rows that `scan_rows` scores before it yields."""
MOST_SURVIVORS = 0.4
"""If a larger share of a chunk is not below the floor after FIRST tokens, the next chunk is scored in one pass."""


def scan_rows(
    model: GPT, rows: Sequence[np.ndarray], prompts: np.ndarray, *, floor: float | None = None, batch: int = 0
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield (indices, log P(z)) of the rows, chunk by chunk, the longest rows first.

    `prompts[i]` tokens of row i are given, as in `score_rows`. With a `floor`, a log P(z) below it may be an upper
    bound: log-probabilities are never positive, so a row whose first suffix tokens are below the floor stays there, and
    its other tokens are not scored. A log P(z) of at least the floor is exact.

    With learned positions it is the largest log P(z) over all offsets in the frame: a model may know a passage at one
    offset and not at the next.
    """
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    learned = model.config.positions == "learned"
    order = np.argsort(-lengths, kind="stable")
    survivors, at = 0.0, 0
    while at < len(order):
        chunk = order[at : at + CHUNK]
        if learned:  # rows of one length have the same offsets
            chunk = chunk[lengths[chunk] == lengths[chunk[0]]]
        at += len(chunk)
        # The last token of a row is only predicted: it has no position.
        offsets = range(model.config.T - int(lengths[chunk[0]]) + 2) if learned else range(1)
        best = np.full(len(chunk), -np.inf)
        for offset in offsets:
            if floor is None or survivors > MOST_SURVIVORS:
                left = np.arange(len(chunk))
            else:
                begun = [rows[i][: prompts[i] + FIRST] for i in chunk.tolist()]
                bounds = score_rows(model, begun, prompts[chunk], batch=batch, offset=offset)[0]
                ended = lengths[chunk] <= prompts[chunk] + FIRST
                left = np.flatnonzero((bounds >= floor) & ~ended)
                bounds[left] = -np.inf
                best = np.maximum(best, bounds)
            if len(left):
                some = [rows[i] for i in chunk[left].tolist()]
                log_p = score_rows(model, some, prompts[chunk[left]], batch=batch, offset=offset)[0]
                best[left] = np.maximum(best[left], log_p)
            if floor is not None:
                survivors = len(left) / len(chunk) if len(left) < len(chunk) else float((best >= floor).mean())
        yield chunk, best


def continue_greedily(
    model: GPT, prompts: Sequence[np.ndarray], new: int, *, batch: int = 0, count: CountRows | None = None
) -> np.ndarray:
    """Return (len(prompts), new) ids: the greedy continuation of each prompt, decoded with a KV cache.

    A prompt and its continuation must fit the model: len(prompt) + new - 1 <= T.
    """
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    continuations = np.zeros((len(prompts), new), dtype=np.int64)
    with eval_mode(model):
        for group in row_groups(model, np.maximum(lengths, new), batch):
            decoder = Decoder(model, [prompts[i].tolist() for i in group], max_new_tokens=new, sampling=_GREEDY)
            for _ in range(new):
                decoder.step()
            continuations[group] = [ids[-new:] for ids in decoder.ids]
            if count is not None:
                count(len(group))
    return continuations


def longest_run(
    model: GPT, ids: np.ndarray, starts: np.ndarray, runs: np.ndarray, ended: np.ndarray, *, prompt: int
) -> tuple[int, int]:
    """Return (tokens, index into starts) of the longest verbatim run: how far greedy decoding follows the text.

    `runs[i]` tokens after the prompt at `starts[i]` are known to be the greedy choice; where `ended[i]` the next one is
    not. A run ends with the document, or when the prompt and all of the run but its last token fill the model's T.

    While greedy decoding follows the text its context is the text, so one forward pass over the text shows how far it
    does. Starts are followed in growing windows, and only those that can still beat the longest run found so far.
    """
    limits = np.minimum(len(ids) - starts, model.config.T + 1) - prompt
    runs, ended = runs.copy(), ended | (runs >= limits)
    size = 4  # grows: in a memorized text the first few runs are already as long as possible
    while True:
        best = int(runs.max())
        left = np.flatnonzero(~ended & (limits > best))
        if not len(left):
            return best, int(runs.argmax())
        group = left[:: -(-len(left) // size)]  # spread over the document
        size *= 2
        while len(group):
            widths = np.minimum(prompt + np.maximum(2 * runs[group], best + 1), prompt + limits[group])
            rows = [ids[s : s + w] for s, w in zip(starts[group].tolist(), widths.tolist(), strict=True)]
            runs[group] += score_rows(model, rows, prompt + runs[group])[1]
            ended[group] = (prompt + runs[group] < widths) | (runs[group] >= limits[group])
            group = group[~ended[group]]
