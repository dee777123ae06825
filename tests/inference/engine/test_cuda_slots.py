"""The engine in graphs: on CUDA with its kernels, and on a CPU with a reference of them in plain torch."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from niels_gpt import GPT, ModelConfig
from niels_gpt.inference import decoding
from niels_gpt.inference.decoding import Decoder, EngineDecoder, decoder_for
from niels_gpt.inference.engine import cuda_slots
from niels_gpt.inference.engine.engine import Engine
from niels_gpt.inference.engine.slots import PlainSlots
from niels_gpt.inference.generation import generate, generate_batch, stream_text
from niels_gpt.inference.sampling import Sampling
from niels_gpt.kernels.decoding import step as decode_step
from tests.inference.engine import GREEDY, KINDS, SAMPLED, T, V, alone, finish, prompt_of
from tests.inference.engine.test_context_overflow import naive_half
from tests.inference.engine.test_logprobs_and_penalties import check_logprobs, naive
from tests.inference.models import check_engine_decoder, seeded
from tests.kernels.decoding.plain_kernels import Replay, kernels


def build(kind: str, device: str = "cpu", **changes: int) -> GPT:
    """Return a small model whose weights, those of the norms included, matter."""
    torch.manual_seed(0)
    model = GPT(
        ModelConfig(**{"V": V, "T": T, "C": 32, "L": 2, "H": 2, "dropout": 0.0, **KINDS[kind], **changes})
    ).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(8) if p.dim() > 1 else p.add_(0.3 * torch.randn_like(p))
    return model.to(device)


class DoneEvent:
    """A CUDA event that has completed already."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Graphs on CUDA, or a plain replay of their steps on a CPU."""
    if request.param == "cuda":
        return "cuda"
    monkeypatch.setattr(decode_step, "triton_kernels", lambda: kernels)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(decode_step, "_shared_memory", lambda _: 166912)
    monkeypatch.setattr(torch.cuda, "Event", DoneEvent)
    monkeypatch.setattr(cuda_slots, "usable", lambda model: True)
    monkeypatch.setattr(decode_step.DecodeRows, "compile", lambda self: None)
    monkeypatch.setattr(decode_step.DecodeRows, "capture", lambda self, steps: Replay(self, steps))
    monkeypatch.setattr(decode_step.WindowStep, "capture", decode_step.DecodeRows.capture)
    return "cpu"


def engine_of(model: GPT, **options: int) -> Engine:
    engine = Engine(model, **options)
    engine.wait_until_ready()
    return engine


@pytest.mark.parametrize(
    ("kind", "sampling"), [("v0", SAMPLED), ("v1", GREEDY), ("learned", Sampling(0.8, None, None, 0.1))]
)
def test_tokens_across_the_end_of_the_window(device, kind, sampling):
    model = build(kind, device)
    engine = engine_of(model, slots=3)
    lengths = [1, 2, 5, T - 1, T, T + 1, 2 * T]
    requests = [engine.submit(prompt_of(n, n), max_new_tokens=19, sampling=sampling, seed=n) for n in lengths]
    events = finish(engine)
    assert not isinstance(engine._slots, PlainSlots)
    for n, request in zip(lengths, requests, strict=True):
        assert request.tokens == alone(model, prompt_of(n, n), 19, sampling, n), n
        mine = [event for event in events if event.request is request]
        assert [token for event in mine for token in event.tokens] == request.tokens
        assert request.finished == "length"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=5)
@given(
    wanted=st.lists(
        st.tuples(
            st.integers(1, T + 4),  # prompt
            st.integers(1, 30),  # new tokens
            st.sampled_from([GREEDY, SAMPLED]),
            st.integers(0, 6),  # steps before it joins
            st.one_of(st.none(), st.integers(0, 6)),  # steps after which it is cancelled
            st.frozensets(st.integers(0, V - 1), max_size=2),
        ),
        min_size=1,
        max_size=6,
    ),
    slots=st.integers(1, 5),
    chunk=st.sampled_from([1, 4, 100]),
)
def test_requests_join_and_leave_at_random(device, wanted, slots, chunk):
    model = build("v1", device)
    engine = engine_of(model, slots=slots, chunk=chunk)
    made, ended = {}, {}
    for step in range(400):
        for i, (length, number, sampling, join, leave, stop) in enumerate(wanted):
            if join == step:
                made[i] = engine.submit(
                    prompt_of(length, i), max_new_tokens=number, sampling=sampling, seed=i, stop=stop
                )
            if leave is not None and join + leave == step and made[i].finished is None:
                engine.cancel(made[i])
                ended[i] = made[i].received
        engine.step()
        if len(made) == len(wanted) and not engine.busy:
            break
    assert not engine.busy
    for i, (length, number, sampling, _, _, stop) in enumerate(wanted):
        want = alone(model, prompt_of(length, i), number, sampling, i, stop)
        assert made[i].tokens == (want[: ended[i]] if i in ended else want), i


def test_more_draws_than_fit_on_the_device(device, monkeypatch):
    monkeypatch.setattr(decode_step, "STOCK", 16)
    monkeypatch.setattr(cuda_slots, "STOCK", 16)
    model = build("v0", device)
    engine = engine_of(model, slots=2)
    requests = [engine.submit([n], max_new_tokens=45, sampling=SAMPLED, seed=n) for n in (1, 2)]
    finish(engine)
    for n, request in zip((1, 2), requests, strict=True):
        assert request.tokens == alone(model, [n], 45, SAMPLED, n)


def test_switch_to_compiled_kernels_between_steps(device, monkeypatch):
    """A request continues where it was, at whichever token the switch happens."""
    gate = threading.Event()
    compile_ = decode_step.DecodeRows.compile
    monkeypatch.setattr(decode_step.DecodeRows, "compile", lambda self: (gate.wait(30), compile_(self)))
    model = build("v0", device)
    for early in (0, 1, 4, T + 2):
        gate.clear()
        cuda_slots._idle.clear()
        engine = Engine(model, slots=2)
        requests = [engine.submit(prompt_of(n, n), max_new_tokens=T + 8, sampling=SAMPLED, seed=n) for n in (1, 4)]
        for _ in range(early):
            engine.step()
        assert isinstance(engine._slots, PlainSlots)
        assert [request.received for request in requests] == [early] * 2
        gate.set()
        engine.wait_until_ready()
        finish(engine)
        assert not isinstance(engine._slots, PlainSlots)
        for n, request in zip((1, 4), requests, strict=True):
            assert request.tokens == alone(model, prompt_of(n, n), T + 8, SAMPLED, n)


def test_failed_compilation_gives_one_warning_and_all_tokens(device, monkeypatch):
    def fail(self):
        raise RuntimeError("no compiler\nat all")

    monkeypatch.setattr(decode_step.DecodeRows, "compile", fail)
    model = build("v0", device)
    engine = engine_of(model)
    request = engine.submit([1, 2], max_new_tokens=5, sampling=GREEDY)
    with pytest.warns(UserWarning, match="RuntimeError: no compiler$"):
        finish(engine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        finish(engine)
    assert request.tokens == alone(model, [1, 2], 5, GREEDY, 0)


def test_next_engine_reuses_graphs_and_sees_new_weights(device):
    model = build("v1", device)
    first = engine_of(model, slots=2)
    first.submit([1, 2, 3], max_new_tokens=5, sampling=GREEDY)
    finish(first)
    kept = first._slots
    first.close()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.flip(0))  # other weights in the same memory
    second = engine_of(model, slots=1)
    request = second.submit([1, 2, 3], max_new_tokens=5, sampling=GREEDY)
    finish(second)
    assert second._slots is kept
    assert request.tokens == alone(model, [1, 2, 3], 5, GREEDY, 0)
    second.close()
    model.load_state_dict({name: p.clone() for name, p in model.state_dict().items()}, assign=True)  # other memory
    third = engine_of(model, slots=1)
    request = third.submit([1, 2, 3], max_new_tokens=5, sampling=GREEDY)
    finish(third)
    assert third._slots is not kept and not isinstance(third._slots, PlainSlots)
    assert request.tokens == alone(model, [1, 2, 3], 5, GREEDY, 0)


def test_two_engines_of_one_model(device):
    model = build("v0", device)
    engines = [engine_of(model, slots=1) for _ in range(2)]
    requests = [engine.submit([n + 1], max_new_tokens=9, sampling=SAMPLED, seed=n) for n, engine in enumerate(engines)]
    while any(engine.busy for engine in engines):
        for engine in engines:
            engine.step()
    for n, request in enumerate(requests):
        assert request.tokens == alone(model, [n + 1], 9, SAMPLED, n)


def test_close_ends_all_requests(device):
    engine = engine_of(build("v0", device), slots=1)
    requests = [engine.submit([1], max_new_tokens=50, sampling=GREEDY) for _ in range(2)]
    engine.step()
    engine.close()
    assert [request.finished for request in requests] == ["cancelled", "cancelled"]


@pytest.mark.parametrize("rows", [1, 5])
def test_engine_decoder_gives_the_tokens_of_decoder(device, rows, monkeypatch):
    monkeypatch.setattr(decoding, "MAX_ROWS", 2)
    model = build("v0", device)
    prompts = [prompt_of(1 + 2 * n, n) for n in range(rows)]
    options = {"max_new_tokens": T + 3, "sampling": SAMPLED}
    decoder = decoder_for(model, prompts, **options, generator=seeded(4))
    assert isinstance(decoder, EngineDecoder)
    check_engine_decoder(decoder, Decoder(model, prompts, **options, generator=seeded(4)))


def test_text_is_the_same_with_and_without_graphs(device):
    model = build("v0", device, V=128)
    for text in ("a", "hello wor"):
        options = {"max_new_tokens": 40, "temperature": 1.0, "top_k": 20}
        for seed in (0, 1):
            plain = generate(model, text, **options, generator=seeded(seed), use_cache=False)
            assert generate(model, text, **options, generator=seeded(seed)) == plain
    greedy = generate_batch(model, ["ab", "c"], max_new_tokens=30, sampling=GREEDY, use_cache=False)
    stop = greedy[0][12:14]
    for use_cache in (True, False):
        texts = generate_batch(model, ["ab", "c"], max_new_tokens=30, sampling=GREEDY, stop=stop, use_cache=use_cache)
        assert texts[0] == greedy[0][: greedy[0].index(stop, 2)]
    stream = stream_text(model, "ab", max_new_tokens=30, sampling=GREEDY)
    next(stream)
    stream.close()  # the next stream is not affected
    assert generate(model, "ab", max_new_tokens=30, temperature=0.0) == greedy[0]


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 17, 40])
@pytest.mark.parametrize("kind", list(KINDS))
def test_ragged_batches_give_the_ids_of_the_cpu(batch, kind):
    sizes = {"V": 300, "T": 160, "C": 96, "H": 3, "d_ff": 200}
    plain, model = build(kind, **sizes), build(kind, "cuda", **sizes)
    engine = engine_of(model, slots=batch)
    prompts = [[(7 * row + j) % 300 for j in range(1 + 5 * row % 90)] for row in range(batch)]
    requests = [engine.submit(p, max_new_tokens=75, sampling=SAMPLED, seed=n) for n, p in enumerate(prompts)]
    finish(engine, 5000)
    generators = [seeded(n) for n in range(batch)]
    decoder = Decoder(plain, prompts, max_new_tokens=75, sampling=SAMPLED, generator=generators)
    for _ in decoder.tokens():
        pass
    for request, ids in zip(requests, decoder.ids, strict=True):
        assert request.ids == ids


def test_first_steps_are_decoded_without_compiling(device, monkeypatch):
    """Steps count over all engines of a model; then kernels are compiled, and the next engine uses them at once."""
    monkeypatch.setattr(cuda_slots, "PLAIN_STEPS", 10)
    model = build("v0", device)
    for plain in (True, False):
        engine = Engine(model, slots=2)
        request = engine.submit([1, 2], max_new_tokens=7, sampling=SAMPLED, seed=1)
        while engine.busy:
            engine.step()
            if engine._graphs is not None:
                engine.wait_until_ready()
        assert request.tokens == alone(model, [1, 2], 7, SAMPLED, 1)
        assert isinstance(engine._slots, PlainSlots) is plain
        engine.close()
    assert not isinstance(Engine(model, slots=2)._slots, PlainSlots)


# --- prefixes, a full context, log-probabilities and penalties ------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=8)
@given(
    wanted=st.lists(
        st.tuples(
            st.integers(1, 2 * T),  # prompt
            st.integers(1, 40),  # new tokens
            st.integers(0, 5),  # steps before it joins
            st.sampled_from([{}, {}, {"logprobs": 2}, {"logit_bias": {3: 2.0}, "presence_penalty": 1.0}]),
            st.integers(0, T),  # pinned
        ),
        min_size=1,
        max_size=6,
    ),
    slots=st.integers(1, 4),
    prefix_tokens=st.sampled_from([0, 25, 300]),
    half=st.booleans(),
)
def test_prefixes_and_a_full_context_at_random(device, wanted, slots, prefix_tokens, half):
    """Simple requests in graphs and others beside them, whose prompts begin alike."""
    model = build("v1", device)
    overflow = "half" if half else "slide"
    engine = engine_of(model, slots=slots, prefix_tokens=prefix_tokens, context_overflow=overflow)
    made, events = {}, []
    for step in range(600):
        for i, (length, number, join, options, pinned) in enumerate(wanted):
            if join == step:
                prompt = prompt_of(length, i % 2)
                made[i] = engine.submit(prompt, max_new_tokens=number, sampling=GREEDY, pinned=pinned, **options)
        events += engine.step()
        if len(made) == len(wanted) and not engine.busy:
            break
    assert not engine.busy and engine._prefixes.size <= prefix_tokens
    for i, (length, number, _, options, pinned) in enumerate(wanted):
        prompt = prompt_of(length, i % 2)
        if half and "logit_bias" in options:
            continue  # no reference
        if half:
            want = naive_half(model, prompt, number, GREEDY, 0, pinned)
        else:
            penalties = {"presence": options.get("presence_penalty", 0.0), "bias": options.get("logit_bias")}
            want, logits = naive(model, prompt, number, GREEDY, 0, **penalties)
            if "logprobs" in options:
                shown = [each for event in events if event.request is made[i] for each in event.logprobs]
                for each, token, row in zip(shown, want, logits.cpu(), strict=True):
                    check_logprobs(each, token, row, 2)
        assert made[i].tokens == want
        assert [t for event in events if event.request is made[i] for t in event.tokens] == want


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_reads_only_what_is_new(device, kind):
    model = build(kind, device, T=200)
    engine, ids, kept = engine_of(model, slots=2, prefix_tokens=400), prompt_of(20, 1), 0
    for turn in range(4):
        request = engine.submit(ids, max_new_tokens=20, sampling=SAMPLED, seed=turn, stop=(1, 2))
        finish(engine)
        assert request.tokens == alone(model, ids, 20, SAMPLED, turn, frozenset((1, 2)))
        assert request.cached >= kept
        kept = len(ids)  # at least the prompt; of a reply that ended at its limit, the last launches are missing
        ids = [*request.ids, *prompt_of(5, turn + 5)]


def test_requests_with_logprobs_stay_when_graphs_take_over(device):
    model = build("v0", device, T=100)
    engine = Engine(model, slots=3)
    options = {"max_new_tokens": 60, "sampling": SAMPLED}
    simple = engine.submit(prompt_of(5, 1), **options, seed=1)
    shown = engine.submit(prompt_of(6, 2), **options, seed=2, logprobs=1)
    reading = engine.submit(prompt_of(7, 3), **options, seed=3, frequency_penalty=0.5)
    for _ in range(5):
        engine.step()
    assert isinstance(engine._slots, PlainSlots)
    engine.wait_until_ready()
    finish(engine)
    assert not isinstance(engine._slots, PlainSlots)
    assert simple.tokens == alone(model, prompt_of(5, 1), 60, SAMPLED, 1)
    assert shown.tokens == alone(model, prompt_of(6, 2), 60, SAMPLED, 2)
    assert len(reading.tokens) == 60
    engine.close()
