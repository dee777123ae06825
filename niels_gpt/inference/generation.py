"""Text in, text out: at once, as a stream, or for many prompts. Over bytes, or the tokens of a tokenizer."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence

import torch

from niels_gpt.inference.decoding import Generators, decoder_for
from niels_gpt.inference.sampling import Sampling
from niels_gpt.model.eval_mode import evaluating
from niels_gpt.model.gpt import GPT
from niels_gpt.tokenizer import AnyTokenizer, ByteTokenizer


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
    stop: str | Sequence[str] | None = None,
    use_cache: bool = True,
    tokenizer: AnyTokenizer | None = None,
) -> str:
    """The prompt and its continuation by up to max_new_tokens tokens, ending before a stop sequence.

    Tokens are bytes, or those of the tokenizer; its EOT ends the text. temperature 0 is greedy. A prompt longer than T
    is continued from its last T tokens. generator None is torch's default one. Invalid utf-8 shows as U+FFFD.
    Raises ValueError for an empty prompt, numbers out of range, and a tokenizer that is not the model's.
    """
    pieces = stream_text(
        model,
        prompt_text,
        max_new_tokens=max_new_tokens,
        sampling=Sampling(temperature, top_k, top_p, min_p),
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
    sampling: Sampling,
    generator: torch.Generator | None = None,
    stop: str | Sequence[str] | None = None,
    use_cache: bool = True,
    tokenizer: AnyTokenizer | None = None,
) -> Iterator[str]:
    """The continuation of a text (or of ids) alone, piece by piece, as soon as it is certain.

    Held back is only what may yet turn out to be a stop sequence, or half of a character.
    """
    rows = _rows(model, [prompt], max_new_tokens, sampling, generator, _stops(stop), use_cache, tokenizer)
    return (piece for _, piece in rows)


def generate_batch(
    model: GPT,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    generators: Generators = None,
    stop: str | Sequence[str] | None = None,
    use_cache: bool = True,
    tokenizer: AnyTokenizer | None = None,
) -> list[str]:
    """Prompt plus continuation for every prompt, decoded together; each as it would be alone."""
    stops = _stops(stop)
    texts = list(prompts)
    rows = _rows(model, prompts, max_new_tokens, sampling or Sampling(), generators, stops, use_cache, tokenizer)
    for row, piece in rows:
        texts[row] += piece
    return texts


def _rows(
    model: GPT,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    generators: Generators,
    stops: list[bytes],
    use_cache: bool,
    tokenizer: AnyTokenizer | None,
) -> Iterator[tuple[int, str]]:
    """(row, piece of text) as they become certain; the model's train/eval mode is as before at the end."""
    if tokenizer is None:
        if model.config.V > 256:
            raise ValueError(f"this model has V={model.config.V} tokens, not bytes: it needs its tokenizer")
        tokenizer = ByteTokenizer()
    elif isinstance(tokenizer, ByteTokenizer) and model.config.V <= 256:
        pass  # a model over fewer bytes emits those
    elif tokenizer.vocab_size != model.config.V:
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size} ids, the model V={model.config.V}: it is another's")
    special = tokenizer.special_token_ids()
    pieces, end = tokenizer.token_bytes, special.get("eot")
    if special:  # a turn that the model begins amid its reply is no text
        pieces = [b"" if i in special.values() else piece for i, piece in enumerate(pieces)]
    decoder = decoder_for(
        model,
        [tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts],
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        generators=generators,
        use_cache=use_cache,
    )
    outputs = [_Output(stops) for _ in prompts]
    was_training = model.training
    try:
        with evaluating(model):
            for row, tokens in decoder.tokens():
                ended = end is not None and end in tokens
                if end is not None and ended:
                    tokens = tokens[: tokens.index(end)]
                piece = outputs[row].add(b"".join([pieces[token] for token in tokens]))
                if piece:
                    yield row, piece
                if ended or outputs[row].stopped:
                    decoder.finish(row)
    finally:
        decoder.close(keep=not was_training)  # a model that is trained needs its memory
    for row, output in enumerate(outputs):
        piece = output.rest()
        if piece:
            yield row, piece


class _Output:
    """The bytes of one row on their way to text: stop sequences are found, characters are kept whole."""

    def __init__(self, stops: list[bytes]) -> None:
        self.stopped = False
        self._stops = stops
        self._pending = b""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, data: bytes) -> str:
        """Take the bytes of tokens; the text that is certain now. After a stop sequence nothing is taken."""
        if not self._stops:
            return self._decoder.decode(data)
        for i in range(len(data)):
            self._pending += data[i : i + 1]
            for stop in self._stops:
                if self._pending.endswith(stop):
                    self.stopped = True
                    self._pending = self._pending[: -len(stop)]
                    return ""
        held = max((_overlap(self._pending, stop) for stop in self._stops), default=0)
        sure = len(self._pending) - held
        piece, self._pending = self._pending[:sure], self._pending[sure:]
        return self._decoder.decode(piece)

    def rest(self) -> str:
        """What was held back, at the end."""
        return self._decoder.decode(self._pending, final=True)


def _overlap(data: bytes, stop: bytes) -> int:
    """The length of the longest end of data that is a beginning of stop."""
    return next((n for n in range(min(len(data), len(stop) - 1), 0, -1) if stop.startswith(data[-n:])), 0)


def _stops(stop: str | Sequence[str] | None) -> list[bytes]:
    texts = [stop] if isinstance(stop, str) else list(stop or ())
    if not all(texts):
        raise ValueError("a stop sequence is empty: give at least one character")
    return sorted((text.encode("utf-8") for text in texts), key=len, reverse=True)  # "ab" before its end "b"
