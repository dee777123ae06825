"""Look inside a model: what it saw of a text, attention weights, what each layer would predict, and an embedding.

All of them raise FloatingPointError if the model computes nan or infinity.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from niels_gpt.config.checks import check_int
from niels_gpt.inference.engine.request import ContextOverflow, check_prompt, dropped_at, most_pinned
from niels_gpt.inference.logprobs import TokenLogprobs, score_from
from niels_gpt.inference.sampling import check_finite
from niels_gpt.kernels import replaced
from niels_gpt.model.eval_mode import evaluating
from niels_gpt.model.gpt import GPT
from niels_gpt.model.rope import rotate


def visible_context(
    ids: Sequence[int], prompt_length: int, T: int, *, pinned: int = 0, context_overflow: ContextOverflow = "half"
) -> list[int]:
    """Return the ids that an engine decoded the next token from, if it continued ids[:prompt_length] by the rest.

    `context_overflow` is that of `Engine`, `pinned` that of `Engine.submit`. At most T ids.
    """
    if context_overflow == "slide":
        return list(ids[-T:])
    pinned = most_pinned(pinned, prompt_length, T)
    *_, (_, dropped) = _drops(prompt_length, len(ids), pinned, T)
    return [*ids[:pinned], *ids[pinned + dropped :]]


def reply_logprobs(
    model: GPT,
    ids: Sequence[int],
    prompt_length: int,
    *,
    top: int,
    pinned: int = 0,
    context_overflow: ContextOverflow = "half",
) -> list[TokenLogprobs | None]:
    """Return the `TokenLogprobs` of ids[prompt_length:] as an engine had them when it chose these ids.

    With "slide" every token past T has a separate context; those get None. Arguments as of `visible_context`.
    """
    T, end = model.config.T, len(ids)
    if end == prompt_length:
        return []
    if context_overflow == "slide":
        first = max(prompt_length - T, 0)
        scored = score_from(model, ids[first : first + T + 1], prompt_length - first, top)
        return [*scored, *[None] * (end - prompt_length - len(scored))]
    pinned = most_pinned(pinned, prompt_length, T)
    found: list[TokenLogprobs | None] = []
    drops = list(_drops(prompt_length, end - 1, pinned, T))
    for (start, dropped), (stop, _) in zip(drops, [*drops[1:], (end, 0)], strict=True):
        context = [*ids[:pinned], *ids[pinned + dropped : stop]]
        found += score_from(model, context, start - dropped, top)
    return found


def _drops(prompt_length: int, length: int, pinned: int, T: int) -> Iterator[tuple[int, int]]:
    """Yield (n, dropped): from n tokens on, so many after the pinned ones are dropped, until the next pair."""
    dropped = dropped_at(prompt_length, pinned, T) if prompt_length > T else 0
    yield prompt_length, dropped
    while (n := T + 1 + dropped) <= length:
        dropped = dropped_at(n, pinned, T)
        yield n, dropped


@torch.inference_mode()
def attention(model: GPT, ids: Sequence[int], layer: int, head: int) -> torch.Tensor:
    """Return the attention weights (n, n) of one head: row i says how much position i reads from each position.

    Rows sum to 1, and what follows a position has weight 0. float32 on the CPU. Layers and heads count from 0.
    Raises ValueError for no ids, more than T, an id outside the vocabulary, and a layer or head that does not exist.
    """
    config = model.config
    check_int("layer", layer, 0, config.L - 1)
    check_int("head", head, 0, config.H - 1)
    _check_code("Attention.forward", "attend", "rotate", "Block.attention_branch")
    ids = _check_ids(model, ids)
    x = _residual_stream(model, ids)[layer]  # (n, C), before the block
    block = model.layers()[layer]
    H, G, D = block.attn.heads
    qkv = block.weights().normalized_heads(block.attn.qkv(block.norm_attn(x))).view(len(ids), H + 2 * G, D)
    qk = qkv[:, [head, H + head * G // H]]  # H / G query heads read the keys of one group
    if model.pos_emb is None:
        qk = rotate(qk, model.sin[: len(ids)], model.cos[: len(ids)])
    q, k = qk.float().unbind(1)  # (n, D)
    future = torch.ones(len(ids), len(ids), dtype=torch.bool, device=q.device).triu(1)
    weights = (q @ k.t() / D**0.5).masked_fill(future, float("-inf")).softmax(dim=-1).cpu()
    check_finite(weights, "attention weights")
    return weights


@torch.inference_mode()
def logit_lens(model: GPT, ids: Sequence[int], position: int, top: int) -> list[list[tuple[int, float]]]:
    """Return, for each layer, the `top` tokens that it would predict after ids[position], as (id, probability).

    The residual stream after the layer goes through the model's final norm and head, so the last layer gives the
    model's own prediction. The most likely token comes first. Raises ValueError as `attention` does, for a position
    outside the ids, and for a top outside 1..V.
    """
    _check_code("GPT.hidden", "GPT.forward")
    ids = _check_ids(model, ids)
    check_int("position", position, 0, len(ids) - 1)
    check_int("top", top, 1, model.sampled_ids or model.config.V)
    streams = torch.stack([h[position] for h in _residual_stream(model, ids)[1:]])  # (L, C)
    p = model.logits(model.norm(streams))[..., : model.sampled_ids].float().softmax(dim=-1)
    check_finite(p)
    best = p.topk(top, dim=-1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [list(zip(tokens, values, strict=True)) for tokens, values in pairs]


@torch.inference_mode()
def embedding(model: GPT, ids: Sequence[int]) -> torch.Tensor:
    """Return the mean (C,) of the last hidden states, after the final norm; float32 on the CPU.

    More than T ids are read in windows of T. Raises ValueError for no ids and an id outside the vocabulary.
    """
    ids, T = check_prompt(ids, model.config.V, "the text"), model.config.T
    total = torch.zeros(model.config.C, dtype=torch.float64)
    with evaluating(model):
        for start in range(0, len(ids), T):
            h = model.hidden(torch.tensor([ids[start : start + T]], device=model.device))
            total += h[0].float().sum(dim=0).double().cpu()
    check_finite(total, "hidden states")
    return (total / len(ids)).float()


def _check_code(*names: str) -> None:
    """Raise ValueError if functions of the model that are computed here in parts were edited."""
    edited = replaced.changed(tuple(f"niels_gpt.model.gpt:{name}" for name in names))
    if edited:
        raise ValueError(f"{replaced.explain(edited)}, and this view would show what the code was before")


def _check_ids(model: GPT, ids: Sequence[int]) -> list[int]:
    T, checked = model.config.T, check_prompt(ids, model.config.V, "the text")
    if len(checked) > T:
        raise ValueError(f"the text has {len(checked)} tokens, but the model sees at most T={T}: shorten it")
    return checked


def _residual_stream(model: GPT, ids: Sequence[int]) -> list[torch.Tensor]:
    """Return the residual stream (n, C) before the first block and after each block: L + 1 tensors."""
    with evaluating(model):
        h, context = model.embed(torch.tensor([ids], device=model.device), None, None, None)
        streams = [h]
        for layer, block in enumerate(model.layers()):
            streams.append(block(streams[-1], layer, context))
    return [h[0] for h in streams]
