"""Extraction: how likely a model is to continue a prompt with the text, and how far greedy decoding follows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from niels_gpt.evaluation.sampled import eval_mode
from niels_gpt.evaluation.scoring import Count, pad_rows, row_groups, score_rows
from niels_gpt.model.gpt import GPT
from niels_gpt.model.kv_cache import KVCache


def log_probabilities(
    model: GPT,
    ids: np.ndarray,
    starts: np.ndarray,
    *,
    window: int,
    prompt: int,
    batch: int = 0,
    offset: int = 0,
) -> np.ndarray:
    """log P(z), float64, of the windows of a document that begin at `starts`.

    That is the log-probability of tokens prompt..window-1 of the window after those before them, at temperature 1 over
    the full vocabulary. `batch` and `offset` are as in `score_rows`.
    """
    rows = [ids[start : start + window] for start in np.asarray(starts).tolist()]
    return score_rows(model, rows, np.full(len(rows), prompt), batch=batch, offset=offset)[0]


def continue_greedily(
    model: GPT, prompts: Sequence[np.ndarray], new: int, *, batch: int = 0, count: Count | None = None
) -> np.ndarray:
    """(len(prompts), new): the most likely next token after each prompt, and so on; real decoding, with a KV cache.

    A prompt and what follows must fit the model: len(prompt) + new - 1 <= T.
    """
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
    chosen = np.zeros((len(prompts), new), dtype=np.int64)
    weights = model.lm_head.weight
    with eval_mode(model):
        for group in row_groups(model, np.maximum(lengths, new), batch):
            ids = pad_rows([prompts[i] for i in group.tolist()])
            room = dataclasses.replace(model.config, T=ids.shape[1] + new - 1)  # a cache of T would be mostly empty
            cache = KVCache(room, len(group), device=weights.device, dtype=weights.dtype)
            h = model.hidden(torch.from_numpy(ids).to(weights.device), cache=cache)
            cache.lengths = lengths[group].tolist()
            last = torch.from_numpy(lengths[group] - 1).to(weights.device)
            h = h[torch.arange(len(group), device=weights.device), last]  # (B, C)
            tokens = [model.lm_head(h).argmax(dim=-1)]
            for _ in range(new - 1):
                h = model.hidden(tokens[-1][:, None], cache=cache)[:, 0]
                tokens.append(model.lm_head(h).argmax(dim=-1))
            chosen[group] = torch.stack(tokens, dim=1).cpu().numpy()
            if count is not None:
                count(len(group))
    return chosen


def longest_run(
    model: GPT, ids: np.ndarray, starts: np.ndarray, runs: np.ndarray, ended: np.ndarray, *, prompt: int
) -> tuple[int, int]:
    """(tokens, index into starts): from which start greedy decoding stays longest on the text, and how long.

    `runs[i]` tokens after the prompt at `starts[i]` are known to be the model's first choice; where `ended[i]` the next
    is not. A run ends with the document, or when the prompt and all of the run but its last token fill the model's T.

    While greedy decoding is on the text it sees the text, so one pass over the text shows how far it stays. Starts are
    followed in growing windows, and only those that can still beat the longest run found.
    """
    limits = np.minimum(len(ids) - starts, model.config.T + 1) - prompt
    runs, ended = runs.copy(), ended | (runs >= limits)
    size = 4  # more and more: where a text is known by heart, the first few runs are as long as they can be
    while True:
        best = int(runs.max())
        left = np.flatnonzero(~ended & (limits > best))
        if not len(left):
            return best, int(runs.argmax())
        group = left[:: -(-len(left) // size)]  # from all over the document
        size *= 2
        while len(group):
            widths = np.minimum(prompt + np.maximum(2 * runs[group], best + 1), prompt + limits[group])
            rows = [ids[s : s + w] for s, w in zip(starts[group].tolist(), widths.tolist(), strict=True)]
            runs[group] += score_rows(model, rows, prompt + runs[group])[1]
            ended[group] = (prompt + runs[group] < widths) | (runs[group] >= limits[group])
            group = group[~ended[group]]
