import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from niels_gpt.cache.mixture import MixedPlan, Mixture
from niels_gpt.cache.pretrain_dataset import PretrainTokenStreamDataset
from niels_gpt.cache.sft_dataset import SFTExampleDataset
from tests.cache import EOT, ByteTokenizer, build_pretrain, build_sft, chat_ids, conversations, masked_row, read_tokens

T = 8
WEIGHTS = {"notes": 0.5, "books": 0.2, "web": 0.3}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def texts_of(name):
    """Unique texts for each cache, of different number and length."""
    number = {"notes": 12, "books": 3, "web": 7}[name]
    return [f"{name} {i} " + name[0] * (3 + 5 * i) for i in range(number)]


@pytest.fixture(scope="module")
def pretrain(tmp_path_factory):
    """{name: dataset} of caches of several shards."""
    root = tmp_path_factory.mktemp("pretrain")
    for name in WEIGHTS:
        build_pretrain(texts_of(name), root / name, shard_bytes=100)
    return {name: PretrainTokenStreamDataset(root / name / "train", T=T, device="cpu") for name in WEIGHTS}


@pytest.fixture(scope="module")
def sft(tmp_path_factory):
    root = tmp_path_factory.mktemp("sft")
    for name, number in (("ask", 9), ("tell", 20)):
        build_sft(conversations(number, name), root / name, val_frac=0.0)
    return {
        name: SFTExampleDataset(
            root / name / "train_tokens.bin", root / name / "train_idx.npy", T=16, device="cpu", eot_id=EOT
        )
        for name in ("ask", "tell")
    }


def windows_of(dataset):
    """All windows of T + 1 tokens, shard by shard, from the files."""
    windows = []
    for path in sorted(dataset.folder.glob("shard_*.bin")):
        tokens = read_tokens(path)
        windows += [tokens[at : at + T + 1] for at in range(len(tokens) - T)]
    return windows


def reference_plan(sizes, weights, B, seed):
    """(cache, row) of each row, drawn in a loop: first the caches, then their rows."""
    rng = generator(seed)
    names = [name for name, weight in weights.items() if weight > 0]
    drawn = torch.multinomial(torch.tensor([weights[name] for name in names]), B, replacement=True, generator=rng)
    rows = {}
    for i, name in enumerate(names):
        number = sum(1 for choice in drawn if choice == i)
        if number:
            rows[name] = torch.randint(sizes[name], (number,), generator=rng).tolist()
    return [(names[choice], rows[names[choice]].pop(0)) for choice in drawn.tolist()]


class Counting:
    """A dataset of `size` rows; row i is (tag, i) and (-tag, i, i)."""

    dtype, meta = np.dtype("<u2"), None

    def __init__(self, size, tag=1):
        self.size, self.tag, self.asked = size, tag, []

    def plan(self, B, generator):
        assert B > 0
        self.asked.append(B)
        return torch.randint(self.size, (B,), generator=generator).tolist()

    def gather(self, rows, /):
        assert rows
        return (
            torch.tensor([[self.tag, row] for row in rows]),
            torch.tensor([[-self.tag, row, row] for row in rows], dtype=torch.int32),
        )


# --- plans -------------------------------------------------------------------------------------------


@given(
    sizes=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 50), min_size=1),
    shares=st.lists(st.integers(0, 4), min_size=6, max_size=6),
    B=st.integers(1, 40),
    seed=st.integers(0, 2**40),
)
def test_any_plan_and_gather_equal_the_loop(sizes, shares, B, seed):
    total = sum(share for _, share in zip(sizes, shares, strict=False))
    if not total:
        return
    weights = {name: share / total for name, share in zip(sizes, shares, strict=False)}
    datasets = {name: Counting(size, tag) for tag, (name, size) in enumerate(sizes.items(), 1)}
    mixture = Mixture(datasets, weights)
    plan = mixture.plan(B, generator(seed))
    wanted = reference_plan(sizes, weights, B, seed)
    assert list(zip(plan.source, plan.row, strict=True)) == wanted
    pairs, triples = mixture.gather(plan)
    tags = {name: dataset.tag for name, dataset in datasets.items()}
    assert pairs.tolist() == [[tags[name], row] for name, row in wanted]
    assert triples.tolist() == [[-tags[name], row, row] for name, row in wanted]
    assert (pairs.dtype, triples.dtype) == (torch.int64, torch.int32)


def test_cache_without_rows_is_not_called():
    datasets = {name: Counting(5) for name in "ab"}
    mixture = Mixture(datasets, {"a": 1 - 1e-7, "b": 1e-7})
    mixture.plan(4, generator())
    assert (datasets["a"].asked, datasets["b"].asked) == ([4], [])


# --- rows --------------------------------------------------------------------------------------------


def test_plan_by_hand(pretrain):
    """Any order, a repeated row, not all caches."""
    rows = [("web", 4), ("notes", 0), ("web", 4), ("web", 0), ("notes", 31)]
    plan = MixedPlan([name for name, _ in rows], [row for _, row in rows])
    x, _ = Mixture(pretrain, WEIGHTS).gather(plan)
    windows = {name: windows_of(dataset) for name, dataset in pretrain.items()}
    assert x.tolist() == [windows[name][row][:-1] for name, row in rows]


@pytest.mark.parametrize("weights", [{"books": 1.0}, {"web": 0.0, "books": 1, "notes": 0}])
def test_single_cache(pretrain, weights):
    """The multinomial is drawn even for a single cache."""
    mixture = Mixture(pretrain, weights)
    plan = mixture.plan(20, generator(4))
    assert plan.source == ["books"] * 20
    rng = generator(4)
    torch.multinomial(torch.ones(1), 20, replacement=True, generator=rng)
    assert plan.row == pretrain["books"].plan(20, rng)
    x, y = mixture.get_batch(B=20, generator=generator(4))
    wanted = pretrain["books"].gather(plan.row)
    assert torch.equal(x, wanted[0]) and torch.equal(y, wanted[1])


def test_none_is_the_default_generator(pretrain):
    mixture = Mixture(pretrain, WEIGHTS)
    torch.manual_seed(77)
    batch = mixture.get_batch(B=16, generator=None)
    expected = mixture.get_batch(B=16, generator=generator(77))
    assert [rows.tolist() for rows in batch] == [rows.tolist() for rows in expected]


def test_conversations(sft):
    weights = {"tell": 0.35, "ask": 0.65}
    examples = {name: [chat_ids(e, ByteTokenizer()) for e in conversations(n, name) if e] for name, n in
                (("ask", 9), ("tell", 20))}  # fmt: skip
    mixture = Mixture(sft, weights)
    plan = mixture.plan(200, generator(2))
    assert set(plan.source) == {"ask", "tell"}
    batch = mixture.get_batch(B=200, generator=generator(2))
    assert len(batch) == 3
    assert all(tensor.shape == (200, 16) and tensor.dtype == torch.int64 for tensor in batch)
    for i, (name, row) in enumerate(zip(plan.source, plan.row, strict=True)):
        wanted = masked_row(examples[name][row], 16)
        assert tuple(tensor[i].tolist() for tensor in batch) == wanted
        assert any(target != -100 for target in wanted[2])


# --- shares ------------------------------------------------------------------------------------------


def test_share_of_zero_equals_no_share(pretrain):
    with_zero = {"web": 0.25, "nowhere": 0.0, "books": 0, "notes": 0.75}
    mixture = Mixture(pretrain, with_zero)
    assert list(mixture.weights) == ["web", "notes"] and list(mixture.datasets) == ["web", "notes"]
    without = Mixture(pretrain, {"web": 0.25, "notes": 0.75})
    assert mixture.plan(64, generator(8)) == without.plan(64, generator(8))
    assert "books" not in mixture.plan(2000, generator(1)).source


def test_unknown_names_raise(pretrain):
    with pytest.raises(ValueError, match=r"radio, tv.*notes, books, web"):
        Mixture(pretrain, {"radio": 0.2, "notes": 0.5, "tv": 0.3})
    with pytest.raises(ValueError, match=r"radio.*none"):
        Mixture({}, {"radio": 1.0})


@pytest.mark.parametrize(
    ("weights", "named"),
    [
        ({}, "empty"),
        ({"notes": 0.5, "web": 0.4}, "0.9"),
        ({"notes": 1.0, "web": 1e-5}, "1.0000"),
        ({"notes": 0.0, "web": 0.0}, "0"),
        ({"notes": 1.5, "web": -0.5}, "'web'"),
        ({"notes": math.nan, "web": 1.0}, "'notes'"),
        ({"notes": math.inf}, "'notes'"),
        ({"notes": "1.0"}, "'notes'"),
    ],
)
def test_invalid_shares_raise(pretrain, weights, named):
    with pytest.raises(ValueError, match=f"weights.*{named}"):
        Mixture(pretrain, weights)


def test_shares_may_differ_from_one_by_rounding(pretrain):
    assert Mixture(pretrain, {"notes": 1 / 3, "web": 1 / 3, "books": 1 / 3 + 5e-7}).plan(3, generator())
    for B in (0, -1):
        with pytest.raises(ValueError, match=f"B .*1.*{B}"):
            Mixture(pretrain, WEIGHTS).get_batch(B=B, generator=generator())
