"""Text generation against naive loops; streaming and stop sequences against whole byte strings."""

from __future__ import annotations

import functools
import inspect

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from niels_gpt import GPT, ModelConfig, generate
from niels_gpt.inference.generation import generate_batch, stream_text
from niels_gpt.inference.sampling import Sampling

T = 16
GREEDY = Sampling(temperature=0.0)


@functools.cache
def model() -> GPT:
    """Random weights, spread logits, float64: no near-ties, so ids can be compared."""
    torch.manual_seed(2)
    made = GPT(ModelConfig(V=256, T=T, C=32, L=2, H=2, d_ff=64, dropout=0.3))
    with torch.no_grad():
        for name, p in made.named_parameters():
            noise = torch.randn(p.shape)
            gain = 4 if name.endswith(("out.weight", "down.weight")) else 2
            p.copy_(1 + 0.3 * noise if p.dim() == 1 else gain * noise / p.shape[1] ** 0.5)
        made.tok_emb.weight.copy_(0.3 * torch.randn(256, 32))
        made.norm.weight.mul_(2)
    return made.double().eval()


class Scripted(nn.Module):
    """Says the same bytes whatever it reads: after i + 1 tokens comes script[i + 1]."""

    def __init__(self, script: bytes) -> None:
        super().__init__()
        self.config = ModelConfig(V=256, T=4096, C=2, L=1, H=1)
        self.tok_emb = nn.Embedding(256, 2)
        self.script = torch.tensor([*script, 0])
        self.calls = 0
        self.modes: list[bool] = []

    @property
    def device(self) -> torch.device:
        return self.tok_emb.weight.device

    def forward(self, x: torch.Tensor, *, cache: object = None) -> torch.Tensor:
        assert cache is None  # these tests pass use_cache=False
        self.calls += 1
        self.modes.append(self.training)
        positions = torch.arange(x.shape[1]).clamp(max=len(self.script) - 2)
        return 50.0 * nn.functional.one_hot(self.script[positions + 1], 256).float().expand(len(x), -1, -1)


def say(data: bytes, stop: object = None, *, prompt: str = "?") -> list[str]:
    """The pieces in which a model that says `data` is streamed."""
    scripted = Scripted(prompt.encode() + data)
    return list(stream_text(scripted, prompt, max_new_tokens=len(data), sampling=GREEDY, stop=stop, use_cache=False))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- generate --------------------------------------------------------------------------------------


@torch.no_grad()
def naive_greedy(prompt: str, steps: int) -> str:
    ids = list(prompt.encode("utf-8"))
    for _ in range(steps):
        ids.append(model()(torch.tensor([ids[-T:]]))[0, -1].argmax().item())
    return bytes(ids).decode("utf-8", errors="replace")


PROMPTS = ["a", "hello, world", "é", "日本語 and more than sixteen bytes of it", "x" * 50, "sixteen bytes ok"]


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_is_the_naive_loop(prompt: str, use_cache: bool) -> None:
    text = generate(model(), prompt, max_new_tokens=2 * T, temperature=0, use_cache=use_cache)
    assert text == naive_greedy(prompt, 2 * T)
    assert text.startswith(prompt)


def test_the_signature_of_the_spec() -> None:
    parameters = inspect.signature(generate).parameters
    assert list(parameters)[:2] == ["model", "prompt_text"]
    for name, default in (("max_new_tokens", inspect.Parameter.empty), ("temperature", 0.9), ("top_k", 50)):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default == default
    for name in ("generator", "top_p", "min_p", "stop"):
        assert parameters[name].default is None


@pytest.mark.parametrize("options", [{}, {"top_k": None, "top_p": 0.9}, {"temperature": 1.5, "min_p": 0.02}])
def test_cached_uncached_and_batched_texts_are_equal(options: dict[str, float]) -> None:
    texts = [
        generate(model(), prompt, max_new_tokens=2 * T, generator=seeded(i), use_cache=False, **options)
        for i, prompt in enumerate(PROMPTS)
    ]
    assert texts == [
        generate(model(), prompt, max_new_tokens=2 * T, generator=seeded(i), **options)
        for i, prompt in enumerate(PROMPTS)
    ]
    for use_cache in (True, False):
        assert texts == generate_batch(
            model(),
            PROMPTS,
            max_new_tokens=2 * T,
            sampling=Sampling(**{"temperature": 0.9, "top_k": 50, **options}),
            generators=[seeded(i) for i in range(len(PROMPTS))],
            use_cache=use_cache,
        )


def test_the_seed_decides() -> None:
    first = generate(model(), "seed", max_new_tokens=20, temperature=1.5, generator=seeded(1))
    assert generate(model(), "seed", max_new_tokens=20, temperature=1.5, generator=seeded(1)) == first
    assert generate(model(), "seed", max_new_tokens=20, temperature=1.5, generator=seeded(2)) != first


def test_none_is_the_default_generator() -> None:
    torch.manual_seed(3)
    first = generate(model(), "seed", max_new_tokens=20, temperature=1.5)
    assert generate(model(), "seed", max_new_tokens=20, temperature=1.5) != first
    torch.manual_seed(3)
    assert generate(model(), "seed", max_new_tokens=20, temperature=1.5) == first
    state = torch.get_rng_state()
    generate(model(), "seed", max_new_tokens=20, temperature=1.5, generator=seeded(1))
    assert torch.equal(torch.get_rng_state(), state)


def test_top_k_one_is_greedy() -> None:
    greedy = generate(model(), "one", max_new_tokens=30, temperature=0)
    assert generate(model(), "one", max_new_tokens=30, temperature=1.7, top_k=1) == greedy
    assert generate(model(), "one", max_new_tokens=30, temperature=1.7, top_k=None, top_p=1e-6) == greedy
    assert generate(model(), "one", max_new_tokens=30, temperature=1.7, top_k=None, min_p=1.0) == greedy


def test_no_new_tokens_is_the_prompt() -> None:
    assert generate(model(), "prompt é", max_new_tokens=0) == "prompt é"
    assert generate_batch(model(), ["a", "b"], max_new_tokens=0) == ["a", "b"]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()])
def test_no_prompts_give_no_texts(sampling: Sampling) -> None:
    assert generate_batch(model(), [], max_new_tokens=3, sampling=sampling) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt_text": ""},
        {"prompt_text": "\ud800"},
        {"max_new_tokens": -1},
        {"temperature": -1.0},
        {"top_k": 0},
        {"top_p": 0.0},
        {"min_p": 2.0},
        {"stop": ""},
        {"stop": ["a", ""]},
    ],
    ids=str,
)
@pytest.mark.parametrize("training", [True, False])
def test_errors(wrong: dict[str, object], training: bool) -> None:
    model().train(training)
    try:
        with pytest.raises(ValueError):
            generate(model(), **{"prompt_text": "a", "max_new_tokens": 3, **wrong})
        assert model().training is training
    finally:
        model().eval()


def test_an_empty_prompt_in_a_batch() -> None:
    with pytest.raises(ValueError, match="1"):
        generate_batch(model(), ["a", ""], max_new_tokens=2)


def test_a_model_over_other_tokens_is_refused() -> None:
    other = GPT(ModelConfig(V=300, T=8, C=8, L=1, H=1))
    with pytest.raises(ValueError, match="300"):
        generate(other, "a", max_new_tokens=1)


# --- train and eval --------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_left_as_found(training: bool) -> None:
    """And the text comes from eval mode: with dropout it would be another."""
    expected = naive_greedy("mode", 20)
    model().train(training)
    try:
        assert generate(model(), "mode", max_new_tokens=20, temperature=0) == expected
        assert all(module.training is training for module in model().modules())
        assert generate_batch(model(), ["mode"], max_new_tokens=20, sampling=GREEDY) == [expected]
        assert model().training is training
        stream = stream_text(model(), "mode", max_new_tokens=20, sampling=GREEDY)
        next(stream)
        stream.close()  # abandoned half-way
        assert model().training is training
    finally:
        model().eval()


def test_the_mode_is_restored_when_the_model_fails() -> None:
    class Broken(Scripted):
        def forward(self, x: torch.Tensor, *, cache: object = None) -> torch.Tensor:
            raise RuntimeError("out of memory")

    broken = Broken(b"?").train()
    with pytest.raises(RuntimeError, match="out of memory"):
        generate(broken, "?", max_new_tokens=2, use_cache=False)
    assert broken.training


def test_no_gradients_are_recorded() -> None:
    scripted = Scripted(b"?abc")
    scripted.register_forward_hook(lambda module, args, output: seen.append(torch.is_grad_enabled()))
    seen: list[bool] = []
    generate(scripted, "?", max_new_tokens=3, temperature=0, use_cache=False)
    assert seen == [False] * 3


# --- streaming -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(data=st.binary(max_size=40))
@example(data="é日🙂".encode())
@example(data=b"\xe6\x97")
@example(data=b"a\xe6\x97b\xff")
def test_pieces_joined_are_the_whole(data: bytes) -> None:
    pieces = say(data)
    assert "".join(pieces) == data.decode("utf-8", errors="replace")
    assert all(pieces)


@settings(deadline=None, max_examples=40)
@given(text=st.text(max_size=15))
def test_characters_come_whole_and_at_once(text: str) -> None:
    """One piece per character, as soon as its last byte is there."""
    data = text.encode("utf-8")
    scripted = Scripted(b"?" + data)
    seen = []
    for piece in stream_text(scripted, "?", max_new_tokens=len(data), sampling=GREEDY, use_cache=False):
        seen.append((scripted.calls, piece))
    expected, size = [], 0
    for character in text:
        size += len(character.encode("utf-8"))
        expected.append((size, character))
    assert seen == expected


def test_half_a_character_at_the_end() -> None:
    assert "".join(say("é".encode()[:1])) == "\ufffd"
    assert generate(Scripted(b"?ab\xe6\x97"), "?", max_new_tokens=4, temperature=0, use_cache=False) == "?ab\ufffd"


def test_nothing_happens_before_the_first_piece_is_asked_for() -> None:
    scripted = Scripted(b"?abc")
    stream = stream_text(scripted, "?", max_new_tokens=3, sampling=GREEDY, use_cache=False)
    assert scripted.calls == 0
    assert next(stream) == "a" and scripted.calls == 1


# --- stop sequences --------------------------------------------------------------------------------


def naive_stop(data: bytes, stops: list[bytes]) -> set[bytes]:
    """What may be left: all that comes before the first stop to be completed (any of those that are)."""
    for n in range(1, len(data) + 1):
        ends = [stop for stop in stops if data[:n].endswith(stop)]
        if ends:
            return {data[: n - len(stop)] for stop in ends}
    return {data}


@settings(deadline=None, max_examples=150)
@given(
    text=st.text("ab\n", max_size=25),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3),
)
@example(text="aab", stops=["ab"])  # overlapping prefixes: the second a may begin the stop
@example(text="aaab", stops=["aab"])
@example(text="ababb", stops=["abb"])
@example(text="abab", stops=["abb", "ba"])
@example(text="ab", stops=["abc"])  # a stop that never comes: what was held back is text after all
@example(text="abcab", stops=["abd", "bcd"])
def test_stop_sequences(text: str, stops: list[str]) -> None:
    data = text.encode()
    pieces = say(data, stops)
    joined = "".join(pieces)
    assert joined.encode() in naive_stop(data, [stop.encode() for stop in stops])
    assert all(stop not in joined for stop in stops)
    assert all(pieces)
    whole = generate(Scripted(b"?" + data), "?", max_new_tokens=len(data), temperature=0, stop=stops, use_cache=False)
    assert whole == "?" + joined


@settings(deadline=None, max_examples=60)
@given(text=st.text("ab\n", max_size=20), stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_held_back_is_only_what_may_become_a_stop(text: str, stops: list[str]) -> None:
    """After n bytes everything is out but the longest end that begins a stop."""
    data = text.encode()
    scripted = Scripted(b"?" + data)
    out, emitted = "", {0: ""}
    for piece in stream_text(scripted, "?", max_new_tokens=len(data), sampling=GREEDY, stop=stops, use_cache=False):
        out += piece
        emitted.setdefault(scripted.calls, "")
        emitted[scripted.calls] = out
    last = scripted.calls
    for n in range(1, last):  # at `last` the rest comes out, too
        so_far = text[:n]
        held = max(
            (k for k in range(n + 1) for stop in stops if k < len(stop) and so_far.endswith(stop[:k])), default=0
        )
        assert emitted[max(call for call in emitted if call <= n)] == so_far[: n - held]


def test_generation_ends_at_the_stop() -> None:
    scripted = Scripted(b"?hello\nuser: more and more")
    text = generate(scripted, "?", max_new_tokens=20, temperature=0, stop="\nuser: ", use_cache=False)
    assert text == "?hello"
    assert scripted.calls == len("hello\nuser: ")


def test_a_string_is_one_stop() -> None:
    assert "".join(say(b"xbaab", "ab")) == "xba"
    assert "".join(say(b"xbaab", ["a", "b"])) == "x"
    assert "".join(say(b"xbaab", ())) == "xbaab"


def test_stops_of_several_bytes() -> None:
    assert "".join(say("naïve é日本🙂!".encode(), "日本")) == "naïve é"
    assert "".join(say("日月日本".encode(), "日本")) == "日月"  # shares its first bytes with another
    assert "".join(say(b"\xe6\x97" + "é".encode(), "é")) == "\ufffd"


def test_stops_in_the_prompt_do_not_count() -> None:
    text = generate(Scripted(b"END abc END"), "END ", max_new_tokens=7, temperature=0, stop="END", use_cache=False)
    assert text == "END abc "


def test_a_stop_at_once_gives_nothing() -> None:
    assert say(b"ENDabc", "END") == []
    assert generate(Scripted(b"?ENDabc"), "?", max_new_tokens=6, temperature=0, stop="END", use_cache=False) == "?"


def test_rows_that_stop_early() -> None:
    """Rows reach the stop at different steps, or never; each is as it would be alone."""
    script = b"0123456789ABCDEFGHIJKLMNOP"
    batch = ["0", "01234567", "0123456789ABCDE", "0123"]
    texts = generate_batch(Scripted(script), batch, max_new_tokens=8, sampling=GREEDY, stop="9A", use_cache=False)
    assert texts == ["012345678", "012345678", "0123456789ABCDEFGHIJKLM", "012345678"]


@pytest.mark.parametrize("use_cache", [True, False])
def test_stops_of_a_real_model(use_cache: bool) -> None:
    """Bytes that the model does say, as stops: rows end early, some past T, and as they do alone."""
    continuations = [naive_greedy(prompt, 2 * T) for prompt in PROMPTS]
    assert any("\ufffd" in text for text in continuations)  # so the reference works on bytes:
    spoken = {character for text in continuations for character in text if character.isascii() and character > " "}
    stops = sorted(spoken)[::3]
    assert stops
    alone = [
        generate(model(), prompt, max_new_tokens=2 * T, temperature=0, stop=stops, use_cache=use_cache)
        for prompt in PROMPTS
    ]
    expected = []
    for prompt, text in zip(PROMPTS, continuations, strict=True):
        rest = text[len(prompt) :]
        end = min((rest.find(stop) for stop in stops if stop in rest), default=len(rest))
        expected.append(prompt + rest[:end])
    assert alone == expected
    assert len({len(text) - len(prompt) for prompt, text in zip(PROMPTS, alone, strict=True)}) > 2
    together = generate_batch(model(), PROMPTS, max_new_tokens=2 * T, sampling=GREEDY, stop=stops, use_cache=use_cache)
    assert together == alone


def test_every_module_keeps_its_own_mode() -> None:
    model = GPT(ModelConfig(T=16, C=16, L=2, H=2)).train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    generate(model, "ab", max_new_tokens=3)
    assert [module.training for module in model.modules()] == modes


def test_a_forward_of_the_instance_is_used() -> None:
    model = GPT(ModelConfig(T=16, C=16, L=1, H=2))
    logits = torch.zeros(256)
    logits[ord("q")] = 9
    model.forward = lambda x: logits.expand(*x.shape, 256)  # type: ignore[method-assign]
    assert generate(model, "ab", max_new_tokens=4, temperature=0.0).endswith("qqqq")
