"""Text generation over the ids of a tokenizer: against naive loops, and with scripted models."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from niels_gpt import GPT, ModelConfig, generate
from niels_gpt.inference.generation import generate_batch, stream_text
from niels_gpt.inference.sampling import Sampling
from niels_gpt.tokenizer import ByteTokenizer
from tests.inference import models
from tests.inference.models import GREEDY, Scripted, scripted_tokens, text_of
from tests.token_caches import UNSEEN, special, tokenizer

T = 16
PROMPTS = ["the", "# note 3\n\nthe model", UNSEEN, "so then and again " * 12, "é", "\n"]


@functools.cache
def model() -> GPT:
    return models.token_model(T)


def naive_text(prompt: str, steps: int) -> str:
    return text_of(models.naive_greedy(model(), tokenizer().encode(prompt), steps, end=special("eot")))


def say(ids: Sequence[int], stop: object = None, *, limit: int | None = None) -> list[str]:
    """Return the pieces in which a reply of these ids is streamed."""
    limit = len(ids) if limit is None else limit
    scripted = scripted_tokens(ids)
    return list(stream_text(scripted, "?", max_new_tokens=limit, sampling=GREEDY, stop=stop, tokenizer=tokenizer()))


def plain_ids() -> st.SearchStrategy[list[int]]:
    """Ids of text: all but the special ones and <unk>."""
    skipped = {0, *(special(name) for name in ("sys", "usr", "asst", "eot"))}
    return st.lists(st.sampled_from([i for i in range(tokenizer().vocab_size) if i not in skipped]), max_size=20)


@pytest.mark.parametrize(("prompt", "use_cache"), [(PROMPTS[2], True), (PROMPTS[3], True), (PROMPTS[1], False)])
def test_greedy_equals_the_naive_loop(prompt: str, use_cache: bool) -> None:
    text = generate(model(), prompt, max_new_tokens=2 * T, temperature=0, use_cache=use_cache, tokenizer=tokenizer())
    assert text == prompt + naive_text(prompt, 2 * T)


def test_prompt_is_text_or_its_ids() -> None:
    ids = tokenizer().encode("the model é 🙂")
    for prompt in ("the model é 🙂", ids):
        scripted = scripted_tokens(tokenizer().encode("so"))
        pieces = list(stream_text(scripted, prompt, max_new_tokens=1, sampling=GREEDY, tokenizer=tokenizer()))
        assert scripted.prompts == [ids]
        assert pieces == [text_of(tokenizer().encode("so")[:1])]


def test_eot_ends_the_text() -> None:
    ids = tokenizer().encode("the model")
    scripted = scripted_tokens([*ids, special("eot"), *tokenizer().encode(" learns")])
    assert generate(scripted, "?", max_new_tokens=50, temperature=0, tokenizer=tokenizer()) == "?the model"
    assert scripted.calls == len(ids) + 1
    assert say([special("eot"), *ids]) == []


def test_eot_in_the_prompt_does_not_end_the_text() -> None:
    prompt = [*tokenizer().encode("one"), special("eot"), *tokenizer().encode("two")]
    reply = tokenizer().encode(" and")
    pieces = stream_text(
        scripted_tokens(reply), prompt, max_new_tokens=len(reply), sampling=GREEDY, tokenizer=tokenizer()
    )
    assert "".join(pieces) == " and"


def test_held_text_is_emitted_at_the_end() -> None:
    """The beginning of a stop that never completes, before EOT and before the limit."""
    ids = tokenizer().encode("the note")
    assert "".join(say([*ids, special("eot")], "notes", limit=50)) == "the note"
    assert "".join(say(ids, "notes")) == "the note"
    half = [*tokenizer().encode("a")[:1], *tokenizer().encode("🙂")[:1], special("eot")]
    assert "".join(say(half, limit=50)) == "a\ufffd"


@settings(max_examples=40)
@given(
    ids=plain_ids(),
    stops=st.lists(
        st.sampled_from(["e", " t", "a ", "the", "re", "🙂", "日", "n", "\n", "ab"]), min_size=1, max_size=3
    ),
)
def test_stop_sequences_across_tokens(ids: list[int], stops: list[str]) -> None:
    """The text ends before the stop that completes first, wherever the boundaries of tokens are."""
    data = b"".join(tokenizer().token_bytes[i] for i in ids)
    allowed = {data}
    for n in range(1, len(data) + 1):
        ends = [stop.encode() for stop in stops if data[:n].endswith(stop.encode())]
        if ends:
            allowed = {data[: n - len(end)] for end in ends}
            break
    assert "".join(say(ids, stops)) in {part.decode("utf-8", errors="replace") for part in allowed}


def test_rows_end_at_different_steps() -> None:
    prompts = ["the", "so then and again", "note again never small large and so then"]
    lengths = [len(tokenizer().encode(prompt)) for prompt in prompts]
    the, ends = tokenizer().encode(" the")[0], {lengths[0] + 1, lengths[1] + 3}

    class ByLength(Scripted):
        """EOT where a row has one of these lengths, else one word again and again."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tokens = torch.tensor([special("eot") if n in ends else the for n in range(1, x.shape[1] + 1)])
            return 50.0 * nn.functional.one_hot(tokens, self.config.V).float().expand(len(x), -1, -1)

    amounts = [next((n for n in range(6) if length + n in ends), 6) for length in lengths]
    assert len(set(amounts)) == 3
    scripted = ByLength(V=tokenizer().vocab_size)
    texts = generate_batch(scripted, prompts, max_new_tokens=6, sampling=GREEDY, tokenizer=tokenizer())
    assert texts == [prompt + text_of([the] * n) for prompt, n in zip(prompts, amounts, strict=True)]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.5, top_k=None, top_p=0.9)])
def test_a_batch_gives_the_text_of_each_prompt_alone(sampling: Sampling) -> None:
    options = {"max_new_tokens": 2 * T, "sampling": sampling, "stop": ["so", "日"], "tokenizer": tokenizer()}
    alone = [
        prompt + "".join(stream_text(model(), prompt, **options, generator=models.seeded(i), use_cache=False))
        for i, prompt in enumerate(PROMPTS)
    ]
    generators = [models.seeded(i) for i in range(len(PROMPTS))]
    assert generate_batch(model(), PROMPTS, **options, generator=generators) == alone


def test_tokenizer_of_another_size() -> None:
    for V in (403, 405):
        with pytest.raises(ValueError, match=rf"404.*{V}"):
            generate(GPT(ModelConfig(V=V, T=8, C=8, L=1, H=1)), "the", max_new_tokens=1, tokenizer=tokenizer())
    for wrong in (None, ByteTokenizer()):
        with pytest.raises(ValueError, match="404"):
            generate(model(), "the", max_new_tokens=1, tokenizer=wrong)


def test_byte_tokenizer_is_the_default() -> None:
    torch.manual_seed(0)
    for V in (256, 250):
        small = GPT(ModelConfig(V=V, T=16, C=16, L=1, H=2)).double().eval()
        plain = generate(small, "the é", max_new_tokens=12, temperature=0)
        assert generate(small, "the é", max_new_tokens=12, temperature=0, tokenizer=ByteTokenizer()) == plain
