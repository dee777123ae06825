"""Text in, text out: at once, as a stream, or for many prompts. Over bytes, or the tokens of a tokenizer."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence

import torch

from niels_gpt.chat.formats import chat_format
from niels_gpt.inference.decoding import Generators, decoder_for
from niels_gpt.inference.engine.prefix_cache import PrefixCache
from niels_gpt.inference.engine.request import ContextOverflow
from niels_gpt.inference.sampling import Sampling
from niels_gpt.model.eval_mode import evaluating
from niels_gpt.model.gpt import GPT
from niels_gpt.tokenizer import AnyTokenizer, ByteTokenizer, fits


def generate(
    model: GPT,
    prompt_text: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.9,
    top_k: int | None = 50,
    generator: torch.Generator | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: str | Sequence[str] | None = None,
    use_cache: bool = True,
    tokenizer: AnyTokenizer | None = None,
) -> str:
    """Return the prompt and its continuation by up to max_new_tokens tokens, cut before a stop sequence.

    Tokens are bytes, or those of the tokenizer; an id that ends a reply or a document ends the text. Temperature 0 is
    greedy. A prompt longer than T is continued from its last T tokens. Invalid utf-8 becomes U+FFFD.
    Raises ValueError for an empty prompt, settings out of range, and a tokenizer that does not belong to the model.
    """
    pieces = stream_text(
        model,
        prompt_text,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature, top_k, top_p, min_p, repetition_penalty),
        generator=generator,
        stop=stop,
        use_cache=use_cache,
        tokenizer=tokenizer,
    )
    return prompt_text + "".join(pieces)


def stream_text(
    model: GPT,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
    stop: str | Sequence[str] | None = None,
    use_cache: bool = True,
    tokenizer: AnyTokenizer | None = None,
) -> Iterator[str]:
    """Yield the continuation of a text (or of ids), without the prompt, piece by piece.

    Only an incomplete character and a possible beginning of a stop sequence are held back. Raises ValueError as
    `generate` does; all but an invalid stop only when the first piece is requested.
    """
    rows = _stream_rows(model, [prompt], max_new_tokens, sampling, generator, encode_stops(stop), use_cache, tokenizer)
    return (piece for _, piece in rows)


def stream_reply(
    model: GPT,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int,
    prefix_cache: PrefixCache,
    context_overflow: ContextOverflow,
    pinned: int,
    sampling: Sampling | None = None,
    generator: torch.Generator | None = None,
    stop: str | Sequence[str] | None = None,
    tokenizer: AnyTokenizer | None = None,
) -> Iterator[str]:
    """Do what `stream_text` does for a turn of a conversation, whose earlier turns are in the prefix cache.

    `context_overflow` is that of `Engine`, `pinned` that of `Engine.submit`.
    """
    stops = encode_stops(stop)
    rows = _stream_rows(
        model,
        [prompt],
        max_new_tokens,
        sampling,
        generator,
        stops,
        use_cache=True,
        tokenizer=tokenizer,
        context_overflow=context_overflow,
        prefix_cache=prefix_cache,
        pinned=pinned,
    )
    return (piece for _, piece in rows)


def generate_batch(
    model: GPT,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    generator: Generators = None,
    stop: str | Sequence[str] | None = None,
    use_cache: bool = True,
    tokenizer: AnyTokenizer | None = None,
) -> list[str]:
    """Return prompt plus continuation of every prompt, decoded together; each is what it would be alone.

    `generator` is one per prompt, or one for all. Raises ValueError as `generate` does.
    """
    texts = continue_batch(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        generator=generator,
        stop=stop,
        use_cache=use_cache,
        tokenizer=tokenizer,
    )
    return [prompt + text for prompt, text in zip(prompts, texts, strict=True)]


def continue_batch(
    model: GPT,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    generator: Generators = None,
    stop: str | Sequence[str] | None = None,
    use_cache: bool = True,
    tokenizer: AnyTokenizer | None = None,
) -> list[str]:
    """Return the continuation of every prompt (a text, or ids) without the prompt; see `generate_batch`."""
    texts, stops = [""] * len(prompts), encode_stops(stop)
    for row, piece in _stream_rows(model, prompts, max_new_tokens, sampling, generator, stops, use_cache, tokenizer):
        texts[row] += piece
    return texts


def _stream_rows(
    model: GPT,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | None,
    generator: Generators,
    stops: list[bytes],
    use_cache: bool,
    tokenizer: AnyTokenizer | None,
    context_overflow: ContextOverflow = "slide",
    prefix_cache: PrefixCache | None = None,
    pinned: int = 0,
) -> Iterator[tuple[int, str]]:
    """Yield (row, piece of its text); the model's train/eval mode is restored at the end."""
    if tokenizer is None:
        if model.config.V > 256:
            raise ValueError(f"this model has V={model.config.V} tokens, not bytes: pass its tokenizer")
        tokenizer = ByteTokenizer()
    elif not fits(tokenizer, model.config.V):
        raise ValueError(
            f"this tokenizer does not belong to this model: it has {tokenizer.vocab_size} ids, the model has "
            f"V={model.config.V}; pass the one that the model was trained with"
        )
    elif tokenizer.vocab_size < model.config.V:
        model.sampled_ids = tokenizer.vocab_size
    token_bytes, ends = visible_bytes(tokenizer), frozenset(chat_format(tokenizer).end_ids)
    ids = [text_prompt(tokenizer, prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    decoder = decoder_for(
        model,
        ids,
        max_new_tokens=max_new_tokens,
        sampling=sampling or Sampling(),
        generator=generator,
        use_cache=use_cache,
        context_overflow=context_overflow,
        prefix_cache=prefix_cache,
        pinned=pinned,
    )
    # A tokenizer that adds a space at the start of a text adds it to a text that begins here, too.
    begins = [tokenizer.adds_space and not any(token_bytes[i] for i in each if i < len(token_bytes)) for each in ids]
    outputs = [TextOutput(stops, skip_space=begin) for begin in begins]
    was_training = model.training
    try:
        with evaluating(model):
            for row, tokens in decoder.tokens():
                ended = not ends.isdisjoint(tokens)
                if ended:
                    tokens = tokens[: next(n for n, token in enumerate(tokens) if token in ends)]
                piece = outputs[row].add(b"".join([token_bytes[token] for token in tokens]))
                if piece:
                    yield row, piece
                if ended or outputs[row].stopped:
                    decoder.finish(row)
    finally:
        decoder.close(keep=not was_training)  # a model in training needs the memory of the graphs
    for row, output in enumerate(outputs):
        piece = output.flush()
        if piece:
            yield row, piece


def text_prompt(tokenizer: AnyTokenizer, text: str) -> list[int]:
    """Return the ids of a text to continue, with those that start a document. Raises ValueError as `encode` does."""
    ids, start = tokenizer.encode(text), list(tokenizer.document_start)
    return ids if not ids or ids[: len(start)] == start else [*start, *ids]


def visible_bytes(tokenizer: AnyTokenizer) -> Sequence[bytes]:
    """Return the bytes of each id as text for a reader: a role id that the model emits within its reply is not text."""
    special = set(tokenizer.special_token_ids().values())
    if not special:
        return tokenizer.token_bytes
    return [b"" if i in special else data for i, data in enumerate(tokenizer.token_bytes)]


class TextOutput:
    """Turns the bytes of one row into text: finds stop sequences and emits only complete characters."""

    def __init__(self, stops: list[bytes], *, skip_space: bool = False) -> None:
        """`skip_space`: the first byte is no part of the text if it is a space."""
        self.stopped = False
        self.certain = 0
        """Bytes that belong to the text for certain: not to a stop sequence, nor to a possible beginning of one."""
        self._stops = stops
        self._skip_space = skip_space
        self._pending = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, data: bytes) -> str:
        """Add the bytes of new tokens and return the text that is certain now. Bytes after a stop are ignored."""
        if self._skip_space and data:
            data, self._skip_space = data.removeprefix(b" "), False
        if not self._stops:
            self.certain += len(data)
            return self._decoder.decode(data)
        for i in range(len(data)):
            self._pending += data[i : i + 1]
            for stop in self._stops:
                if self._pending.endswith(stop):
                    self.stopped = True
                    self._pending = self._pending[: -len(stop)]
                    return ""
        held = max(_overlap(self._pending, stop) for stop in self._stops)
        end = len(self._pending) - held
        piece, self._pending = self._pending[:end], self._pending[end:]
        self.certain += end
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """Return the text that was held back; called once, at the end."""
        self.certain += len(self._pending)
        piece, self._pending = self._pending, b""
        return self._decoder.decode(piece, final=True)


def _overlap(data: bytes, stop: bytes) -> int:
    """Return the length of the longest suffix of data that is a proper prefix of stop."""
    return next((n for n in range(min(len(data), len(stop) - 1), 0, -1) if stop.startswith(data[-n:])), 0)


def encode_stops(stop: str | Sequence[str] | None) -> list[bytes]:
    """Return the stop sequences as bytes, longest first: "ab" is found before its suffix "b"."""
    texts = [stop] if isinstance(stop, str) else list(stop or ())
    if not all(texts):
        raise ValueError("a stop sequence is empty: give at least one character")
    return sorted((text.encode("utf-8") for text in texts), key=len, reverse=True)
