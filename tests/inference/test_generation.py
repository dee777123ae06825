"""Text generation over bytes against naive loops; streaming and stop sequences against whole byte strings."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from niels_gpt import GPT, ModelConfig, generate
from niels_gpt.inference import generation
from niels_gpt.inference.generation import generate_batch, stream_text
from niels_gpt.inference.sampling import Sampling
from tests.inference import models
from tests.inference.models import GREEDY, Scripted, seeded

T = 16


@functools.cache
def model() -> GPT:
    return models.spread_model()


def naive_greedy(prompt: str, steps: int) -> str:
    ids = list(prompt.encode("utf-8"))
    return bytes([*ids, *models.naive_greedy(model(), ids, steps)]).decode("utf-8", errors="replace")


def say(data: bytes, stop: object = None) -> list[str]:
    """Return the pieces in which the reply `data` is streamed."""
    return list(stream_text(Scripted(data), "?", max_new_tokens=len(data), sampling=GREEDY, stop=stop))


PROMPTS = ["a", "hello, world", "é", "日本語 and more than sixteen bytes of it", "x" * 50, "sixteen bytes ok"]


@pytest.mark.parametrize(("prompt", "use_cache"), [*((prompt, True) for prompt in PROMPTS[1:5]), (PROMPTS[1], False)])
def test_greedy_equals_the_naive_loop(prompt: str, use_cache: bool) -> None:
    text = generate(model(), prompt, max_new_tokens=2 * T, temperature=0, use_cache=use_cache)
    assert text == naive_greedy(prompt, 2 * T)


def test_signature_of_the_spec_and_one_convention() -> None:
    parameters = inspect.signature(generate).parameters
    assert list(parameters)[:2] == ["model", "prompt_text"]
    for name, default in (("max_new_tokens", inspect.Parameter.empty), ("temperature", 0.9), ("top_k", 50)):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default == default
    for name in ("generator", "top_p", "min_p", "stop"):
        assert parameters[name].default is None
    for function in (stream_text, generate_batch):
        others = inspect.signature(function).parameters
        shared = ["max_new_tokens", "sampling", "generator", "stop", "use_cache", "tokenizer"]
        assert list(others)[2:] == shared
        assert all(others[name].kind is inspect.Parameter.KEYWORD_ONLY for name in shared)


@pytest.mark.parametrize("options", [{}, {"top_k": None, "top_p": 0.9}, {"temperature": 1.5, "min_p": 0.02}])
def test_cached_uncached_and_batched_texts_are_equal(options: dict[str, float]) -> None:
    texts = [
        generate(model(), prompt, max_new_tokens=2 * T, generator=seeded(i), **options)
        for i, prompt in enumerate(PROMPTS)
    ]
    first = generate(model(), PROMPTS[0], max_new_tokens=2 * T, generator=seeded(0), use_cache=False, **options)
    assert texts[0] == first
    assert texts == generate_batch(
        model(),
        PROMPTS,
        max_new_tokens=2 * T,
        sampling=Sampling(**{"temperature": 0.9, "top_k": 50, **options}),
        generator=[seeded(i) for i in range(len(PROMPTS))],
    )
    if not options:  # the defaults of `Sampling` are those of `generate`
        streamed = stream_text(model(), PROMPTS[0], max_new_tokens=2 * T, generator=seeded(0))
        assert PROMPTS[0] + "".join(streamed) == first


def test_no_new_tokens_and_no_prompts() -> None:
    assert generate(model(), "prompt é", max_new_tokens=0) == "prompt é"
    assert generate_batch(model(), ["a", "b"], max_new_tokens=0) == ["a", "b"]
    assert generate_batch(model(), [], max_new_tokens=3) == []


@pytest.mark.parametrize(
    "wrong", [{"prompt_text": "\ud800"}, {"max_new_tokens": -1}, {"temperature": -1.0}, {"stop": ["a", ""]}], ids=str
)
def test_errors_leave_the_mode(wrong: dict[str, object]) -> None:
    model().train()
    try:
        with pytest.raises(ValueError):
            generate(model(), **{"prompt_text": "a", "max_new_tokens": 3, **wrong})
        assert model().training
    finally:
        model().eval()


def test_errors_name_the_prompt_and_the_vocabulary() -> None:
    with pytest.raises(ValueError, match="prompt 1"):
        generate_batch(model(), ["a", ""], max_new_tokens=2)
    with pytest.raises(ValueError, match="V=257"):
        generate(GPT(ModelConfig(V=257, T=8, C=8, L=1, H=1)), "a", max_new_tokens=1)
    small = GPT(ModelConfig(V=128, T=8, C=8, L=1, H=1))  # a model over fewer bytes
    assert len(generate(small, "a", max_new_tokens=3)) == 4


@pytest.mark.parametrize("training", [True, False])
def test_mode_is_restored(training: bool) -> None:
    """And the text comes from eval mode: dropout would change it."""
    expected = naive_greedy("mode", 12)
    model().train(training)
    try:
        assert generate(model(), "mode", max_new_tokens=12, temperature=0) == expected
        assert all(module.training is training for module in model().modules())
        stream = stream_text(model(), "mode", max_new_tokens=12, sampling=GREEDY)
        next(stream)
        stream.close()  # before its end
        assert model().training is training
    finally:
        model().eval()


def test_mode_of_each_module_is_restored_after_an_error() -> None:
    class Broken(Scripted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("out of memory")

    broken = Broken().train()
    broken.tok_emb.eval()
    with pytest.raises(RuntimeError, match="out of memory"):
        generate(broken, "?", max_new_tokens=2)
    assert broken.training and not broken.tok_emb.training


@pytest.mark.parametrize("training", [True, False])
def test_graphs_are_kept_unless_the_model_is_in_training(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    monkeypatch.setattr("niels_gpt.inference.decoding.Decoder.close", lambda self, *, keep: kept.append(keep))
    generate(Scripted(b"ab").train(training), "?", max_new_tokens=2, temperature=0)
    assert kept == [not training]


def test_no_gradients_are_recorded() -> None:
    scripted, seen = Scripted(b"abc"), []
    scripted.register_forward_hook(lambda module, args, output: seen.append(torch.is_grad_enabled()))
    generate(scripted, "?", max_new_tokens=3, temperature=0)
    assert seen == [False] * 3


def test_forward_of_the_instance_is_used() -> None:
    model, logits = GPT(ModelConfig(T=16, C=16, L=1, H=2)), torch.zeros(256)
    logits[ord("q")] = 9
    model.forward = lambda x: logits.expand(*x.shape, 256)  # type: ignore[method-assign]
    assert generate(model, "ab", max_new_tokens=4, temperature=0.0).endswith("qqqq")


@settings(max_examples=30)
@given(data=st.binary(max_size=20))
@example(data="é日🙂".encode())
@example(data=b"\xe6\x97")
@example(data=b"a\xe6\x97b\xff")
def test_joined_pieces_are_the_text(data: bytes) -> None:
    pieces = say(data)
    assert "".join(pieces) == data.decode("utf-8", errors="replace")
    assert all(pieces)


@pytest.mark.parametrize("text", ["aé日🙂\n", "", "🙂🙂", "\ufffd"])
def test_a_character_is_emitted_with_its_last_byte(text: str) -> None:
    data, seen, expected = text.encode("utf-8"), [], []
    scripted = Scripted(data)
    for piece in stream_text(scripted, "?", max_new_tokens=len(data), sampling=GREEDY):
        seen.append((scripted.calls, piece))
    for i, character in enumerate(text):
        expected.append((len(text[: i + 1].encode("utf-8")), character))
    assert seen == expected


def test_nothing_is_computed_before_the_first_piece_is_requested() -> None:
    scripted = Scripted(b"abc")
    stream = stream_text(scripted, "?", max_new_tokens=3, sampling=GREEDY)
    assert scripted.calls == 0
    assert next(stream) == "a" and scripted.calls == 1


def naive_stop(data: bytes, stops: list[bytes]) -> set[bytes]:
    """Return what may remain: the bytes before the stop that is completed first (any of those that are)."""
    for n in range(1, len(data) + 1):
        ends = [stop for stop in stops if data[:n].endswith(stop)]
        if ends:
            return {data[: n - len(stop)] for stop in ends}
    return {data}


@settings(max_examples=60)
@given(
    text=st.text("ab\n", max_size=16), stops=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3)
)
@example(text="aab", stops=["ab"])  # overlapping prefixes: the second a may begin the stop
@example(text="aaab", stops=["aab"])
@example(text="ababb", stops=["abb"])
@example(text="abab", stops=["abb", "ba"])
@example(text="ab", stops=["abc"])  # a stop that never completes: the held text is emitted at the end
@example(text="abcab", stops=["abd", "bcd"])
def test_stop_sequences_hold_back_only_possible_stops(text: str, stops: list[str]) -> None:
    """The text ends before the first completed stop, and after n bytes all is emitted but a possible stop."""
    data = text.encode()
    scripted = Scripted(data)
    out, emitted = "", {0: ""}
    for piece in stream_text(scripted, "?", max_new_tokens=len(data), sampling=GREEDY, stop=stops):
        assert piece
        out += piece
        emitted[scripted.calls] = out
    assert out.encode() in naive_stop(data, [stop.encode() for stop in stops])
    assert all(stop not in out for stop in stops)
    for n in range(1, scripted.calls):  # at the last call the rest is emitted, too
        so_far = text[:n]
        held = max(
            (k for k in range(n + 1) for stop in stops if k < len(stop) and so_far.endswith(stop[:k])), default=0
        )
        assert emitted[max(call for call in emitted if call <= n)] == so_far[: n - held]


def test_longest_stop_first() -> None:
    """Of two stops that end at the same byte the longer one is removed."""
    assert generation.encode_stops(["b", "cab", "ab"]) == [b"cab", b"ab", b"b"]
    assert "".join(say(b"xab", ["b", "ab"])) == "x"


def test_kinds_of_stops() -> None:
    scripted = Scripted(b"hello\nuser: more and more")
    assert generate(scripted, "?", max_new_tokens=20, temperature=0, stop="\nuser: ") == "?hello"
    assert scripted.calls == len("hello\nuser: ")
    assert "".join(say(b"xbaab", "ab")) == "xba"  # a string is one stop
    assert "".join(say(b"xbaab", ["a", "b"])) == "x"
    assert "".join(say(b"xbaab", ())) == "xbaab"
    assert "".join(say("naïve é日本🙂!".encode(), "日本")) == "naïve é"
    assert "".join(say("日月日本".encode(), "日本")) == "日月"  # shares its first bytes with another character
    assert "".join(say(b"\xe6\x97" + "é".encode(), "é")) == "\ufffd"
    assert say(b"ENDabc", "END") == []
    assert generate(Scripted(b"abc END"), "END ", max_new_tokens=7, temperature=0, stop="END") == "END abc "


def test_rows_that_stop_early() -> None:
    """Stops that the model does emit: rows end early, some past T, each as it does alone."""
    continuations = [naive_greedy(prompt, 2 * T) for prompt in PROMPTS]
    spoken = {character for text in continuations for character in text if character.isascii() and character > " "}
    stops = sorted(spoken)[::3]
    expected = []
    for prompt, text in zip(PROMPTS, continuations, strict=True):
        rest = text[len(prompt) :]
        end = min((rest.find(stop) for stop in stops if stop in rest), default=len(rest))
        expected.append(prompt + rest[:end])
    assert len({len(text) - len(prompt) for prompt, text in zip(PROMPTS, expected, strict=True)}) > 2
    assert generate_batch(model(), PROMPTS, max_new_tokens=2 * T, sampling=GREEDY, stop=stops) == expected
    assert generate(model(), PROMPTS[1], max_new_tokens=2 * T, temperature=0, stop=stops) == expected[1]
