"""The prefix cache: what it stores and forgets, and requests whose tokens do not depend on it."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt import GPT, ModelConfig
from niels_gpt.inference.engine import engine as engine_module
from niels_gpt.inference.engine.engine import Engine
from niels_gpt.inference.engine.prefix_cache import PrefixCache, common_length
from niels_gpt.inference.int8 import Int8GPT
from tests.inference.engine import GREEDY, KINDS, SAMPLED, T, V, alone, finish, model, prompt_of
from tests.inference.models import spread_model

LONG = 200


def kv_of(ids):
    """Keys and values that tell the tokens up to each position: a hash of the prefix."""
    values, state = [], 0.0
    for token in ids:
        state = (state * 31 + token + 1) % 10007
        values.append(state)
    table = torch.tensor(values, dtype=torch.float64).expand(1, 2, 1, -1)[..., None]
    return lambda start, end: table[:, :, :, start:end].clone()


def check(cache: PrefixCache, ids: list[int], found: int, parts: list[torch.Tensor]) -> None:
    """The keys and values are those of the first `found` tokens."""
    wanted = kv_of(ids)(0, found)
    got = torch.cat(parts, dim=3) if parts else wanted[:, :, :, :0]
    assert torch.equal(got, wanted)


def stored(cache: PrefixCache) -> list[list[int]]:
    """All prefixes that end at a leaf."""
    result, stack = [], [(cache._root, [])]
    while stack:
        node, path = stack.pop()
        path = [*path, *node.ids]
        stack += [(child, path) for child in node.children.values()]
        if not node.children:
            result.append(path)
    return result


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2), max_size=9)), max_size=30),
    st.integers(1, 25),
)
def test_against_a_list_of_texts(calls, limit):
    """Whatever is inserted: matches are the longest stored prefix with its own keys, and the size is bounded."""
    cache = PrefixCache(limit)
    for insert, ids in calls:
        if insert:
            cache.insert(ids, kv_of(ids))
        texts = stored(cache)
        wanted = max((common_length(text, ids) for text in texts), default=0)
        found, parts = cache.match(ids)
        assert found == wanted
        check(cache, ids, found, parts)
        if insert:
            assert found == min(len(ids), limit)
        distinct = {tuple(text[:n]) for text in texts for n in range(1, len(text) + 1)}
        assert cache.size == len(distinct) <= limit  # what texts share is stored once


class SearchingCache(PrefixCache):
    """Searches the whole tree for the least recently used leaf."""

    def _drop_oldest(self):
        leaves, stack = [], [self._root]
        while stack:
            node = stack.pop()
            stack += node.children.values()
            if not node.children:
                leaves.append(node)
        oldest = min(leaves, key=lambda node: node.used)
        del oldest.parent.children[oldest.ids[0]]
        self.size -= len(oldest.ids)


@given(
    st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 2), max_size=7)), max_size=60),
    st.integers(1, 25),
)
def test_what_is_dropped_is_what_a_search_finds(calls, limit):
    cache, reference = PrefixCache(limit), SearchingCache(limit)
    for insert, ids in calls:
        for each in (cache, reference):
            if insert:
                each.insert(ids, kv_of(ids))
            else:
                each.match(ids)
        assert sorted(stored(cache)) == sorted(stored(reference))


def test_a_long_prompt_after_thousands_of_short_ones():
    """Dropping a thousand leaves does not search the tree a thousand times: that would take seconds."""
    cache = PrefixCache(20_000)
    kv = torch.zeros(1, 2, 1, 1000, 1)
    for number in range(20_000):
        cache.insert([1, 2, 100 + number], lambda start, end: kv[:, :, :, start:end])
    began = time.thread_time()
    cache.insert([3] * 1000, lambda start, end: kv[:, :, :, start:end])
    assert time.thread_time() - began < 0.5  # of CPU time; 0.003 s
    assert cache.size == 20_000


def test_the_least_recently_used_goes_first():
    cache = PrefixCache(8)
    a, b, c = [1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]
    cache.insert(a, kv_of(a))
    cache.insert(b, kv_of(b))
    assert cache.match(a)[0] == 4
    cache.insert(c, kv_of(c))
    assert [cache.match(ids)[0] for ids in (a, b, c)] == [4, 0, 4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [3, None])
def test_tokens_do_not_depend_on_the_cache(kind, chunk):
    """A conversation of three turns, a second one that begins alike, and a repetition."""
    gpt = long_model(kind)
    engine = Engine(gpt, slots=2, chunk=chunk, prefix_tokens=1000)
    first = prompt_of(20, 1)
    prompts, expected = [first], [0]
    requests = [ask(engine, first)]
    for turn in (2, 3):
        known = requests[-1].ids
        prompts.append([*known, *prompt_of(7, turn)])
        expected.append(len(known) - 1)
        requests.append(ask(engine, prompts[-1]))
    prompts.append([*first[:13], (first[13] + 1) % V, *prompt_of(30, 4)])
    expected.append(13)
    requests.append(ask(engine, prompts[-1]))
    prompts.append(prompts[2])
    expected.append(len(prompts[2]) - 1)
    requests.append(ask(engine, prompts[2]))
    for prompt, cached, request in zip(prompts, expected, requests, strict=True):
        assert request.cached == cached
        assert request.tokens == alone(gpt, prompt, 9, SAMPLED, 5)


def long_model(kind: str) -> GPT:
    torch.manual_seed(0)
    gpt = GPT(ModelConfig(V=V, T=LONG, C=32, L=2, H=2, dropout=0.0, **KINDS[kind])).eval()
    with torch.no_grad():
        for p in gpt.parameters():
            if p.dim() > 1:
                p.mul_(8)
    return gpt


def ask(engine: Engine, prompt: list[int], number: int = 9, **options):
    request = engine.submit(prompt, max_new_tokens=number, sampling=SAMPLED, seed=5, **options)
    finish(engine)
    return request


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_without_the_cache(kind):
    gpt, prompt = long_model(kind), prompt_of(60, 1)
    engine = Engine(gpt, prefix_tokens=1000)
    ask(engine, prompt[:40])
    cached = engine.submit(prompt, max_new_tokens=5, sampling=GREEDY, logprobs=V)
    events = finish(engine)
    assert cached.cached == 40
    with torch.no_grad():
        logp = gpt(torch.tensor([cached.ids[:-1]]))[0, 59:].log_softmax(dim=-1)
    for event, row in zip(events, logp, strict=True):
        got = dict(event.logprobs[0].top)
        assert max(abs(got[i] - float(row[i])) for i in range(V)) < 1e-5


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 12), st.integers(0, 10), st.booleans()),
        min_size=2,
        max_size=8,
    ),
    st.integers(1, 4),
    st.integers(1, 40),
    st.sampled_from([20, 60, 1000]),
    st.integers(1, 8),
)
def test_requests_with_shared_prefixes_at_random(wanted, slots, chunk, prefix_tokens, worth):
    """Requests that begin alike join at any time and some are cancelled; the cache may be too small for them."""
    gpt = model("v1")
    engine = Engine(gpt, slots=slots, chunk=chunk, prefix_tokens=prefix_tokens)
    before, engine_module.WORTH_WAITING = engine_module.WORTH_WAITING, worth
    made = {}
    prompts = [prompt_of(4, family) + prompt_of(shared % (T - 4) + 1, 9) for family, shared, *_ in wanted]
    try:
        for step in range(400):
            for i, (_, _, number, join, _) in enumerate(wanted):
                if join == step:
                    made[i] = engine.submit(prompts[i], max_new_tokens=number, sampling=SAMPLED, seed=i)
                elif join + 3 == step and wanted[i][4]:
                    engine.cancel(made[i])
            engine.step()
            if len(made) == len(wanted) and not engine.busy:
                break
    finally:
        engine_module.WORTH_WAITING = before
    assert not engine.busy and engine._prefixes.size <= prefix_tokens
    for i, (_, _, number, _, cancelled) in enumerate(wanted):
        want = alone(gpt, prompts[i], number, SAMPLED, i)
        assert made[i].tokens == (want[: made[i].received] if cancelled else want)


def test_a_shared_prefix_is_read_once():
    """Requests that arrive together wait for the first of them, then read the rest together."""
    gpt, engine = long_model("v0"), Engine(long_model("v0"), slots=8, prefix_tokens=1000)
    shared, read = prompt_of(50, 1), []
    original = engine._slots.read

    def counting(requests, number):
        read.append((len(requests), number))
        original(requests, number)

    engine._slots.read = counting
    prompts = [shared + prompt_of(10, i) for i in range(2, 6)]
    requests = [engine.submit(prompt, max_new_tokens=3, sampling=GREEDY) for prompt in prompts]
    again = [engine.submit(prompts[0], max_new_tokens=3, sampling=GREEDY) for _ in range(2)]
    finish(engine)
    assert read == [(1, 59), (3, 9)]
    assert [request.cached for request in requests + again] == [0, 50, 50, 50, 59, 59]
    for prompt, request in zip([*prompts, prompts[0], prompts[0]], requests + again, strict=True):
        assert request.tokens == alone(gpt, prompt, 3, GREEDY, 0)


def test_without_prefix_tokens_nothing_is_kept():
    engine = Engine(model())
    for _ in range(2):
        assert ask(engine, prompt_of(6, 1), 3).cached == 0
    assert engine._prefixes.size == 0


def test_changed_weights_empty_the_cache():
    gpt = copy.deepcopy(model())
    engine = Engine(gpt, prefix_tokens=100)
    ask(engine, prompt_of(6, 1), 3)
    with torch.no_grad():
        gpt.tok_emb.weight.mul_(-1)
    request = ask(engine, prompt_of(6, 1), 3)
    assert request.cached == 0 and request.tokens == alone(gpt, prompt_of(6, 1), 3, SAMPLED, 5)


def test_a_cache_outlives_its_engine():
    cache = PrefixCache(50)
    for cached in (0, 5):
        engine = Engine(model(), slots=1, prefix_cache=cache)
        assert ask(engine, prompt_of(6, 1), 3).cached == cached
        engine.close()
    assert 0 < cache.size <= 50


def test_closing_and_cancelling_keep_what_was_computed():
    cache, prompt = PrefixCache(50), prompt_of(4, 1)
    engine = Engine(model(), slots=1, prefix_cache=cache)
    request = engine.submit(prompt, max_new_tokens=8, sampling=GREEDY)
    for _ in range(3):
        engine.step()
    engine.close()
    assert request.received == 3
    assert cache.match(request.ids)[0] == 6  # all but the last token, which was not decoded from


def test_decoded_tokens_of_an_int8_model_are_read_again():
    """Their keys come from activations in bfloat16; only what was read is stored."""
    gpt = Int8GPT.of(spread_model(T=64, dtype=torch.float32))
    engine = Engine(gpt, prefix_tokens=100)
    first = engine.submit(prompt_of(10, 1), max_new_tokens=9, sampling=GREEDY)
    finish(engine)
    second = engine.submit([*first.ids, 1, 2], max_new_tokens=4, sampling=GREEDY)
    finish(engine)
    assert second.cached == 9
    other = Engine(gpt)
    fresh = other.submit([*first.ids, 1, 2], max_new_tokens=4, sampling=GREEDY)
    finish(other)
    assert second.tokens == fresh.tokens


def test_bad_options():
    for options in ({"prefix_tokens": -1}, {"context_overflow": "crop"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            Engine(model(), **options)


def test_a_read_that_fails_is_repeated(monkeypatch):
    """Whether the prompt is new, begins with a stored prefix, or is in the middle."""
    gpt, prompt = long_model("v0"), prompt_of(60, 1)
    engine = Engine(gpt, slots=2, chunk=8, prefix_tokens=1000)
    original, fail = GPT.hidden, [False]

    def hidden(self, *args, **options):
        result = original(self, *args, **options)
        if fail[0]:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(GPT, "hidden", hidden)
    for ids in (prompt[:30], prompt):
        request = engine.submit(ids, max_new_tokens=3, sampling=GREEDY)
        for _ in range(3):
            fail[0] = True
            with pytest.raises(KeyboardInterrupt):
                engine.step()
            fail[0] = False
            engine.step()
        finish(engine)
        monkeypatch.setattr(GPT, "hidden", original)
        assert request.tokens == alone(gpt, ids, 3, GREEDY, 0)
        monkeypatch.setattr(GPT, "hidden", hidden)


def test_a_group_does_not_read_past_the_window():
    """One request has a long prefix and little to read, the next has much to read: padding must not pass T."""
    gpt = long_model("v0")
    engine = Engine(gpt, slots=3, prefix_tokens=1000)
    long, short = prompt_of(LONG - 5, 1), prompt_of(40, 2)
    ask(engine, long)
    prompts = [[*long, *prompt_of(4, 3)], short]
    requests = [engine.submit(prompt, max_new_tokens=1, sampling=GREEDY) for prompt in prompts]
    finish(engine)
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.tokens == alone(gpt, prompt, 1, GREEDY, 0)
