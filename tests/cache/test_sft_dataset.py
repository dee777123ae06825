import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.cache import mmap, sft_dataset
from niels_gpt.cache.formats import CacheError
from niels_gpt.cache.sft_dataset import SFTExampleDataset
from tests.cache import (
    ASST,
    EOT,
    ByteTokenizer,
    build_sft,
    chat_ids,
    conversations,
    masked_row,
    memory_growth,
    quick_folder,
    real_tokenizer,
    resident,
    split_rule,
    write_tokens,
)

USR = 257
T = 8


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def write(folder, examples, split="train"):
    """Write token and offset files without a meta."""
    starts, stream = [], []
    for example in examples:
        starts.append(len(stream))
        stream += example
    write_tokens(folder / f"{split}_tokens.bin", stream)
    np.save(folder / f"{split}_idx.npy", np.array(starts, dtype="<i8"))
    return folder


def open_bare(folder, split="train", **changes):
    options = {"T": T, "device": "cpu", "eot_id": EOT, "asst_id": ASST, **changes}
    return SFTExampleDataset(str(folder / f"{split}_tokens.bin"), str(folder / f"{split}_idx.npy"), **options)


SAYS = [ASST, 1, 2, EOT]


# --- masks -------------------------------------------------------------------------------------------

TOKENS = st.sampled_from([ASST, ASST, EOT, EOT, USR, 1, 2, 3])


@settings(max_examples=100)
@given(
    examples=st.lists(st.lists(TOKENS, min_size=1, max_size=14), min_size=1, max_size=8),
    T=st.integers(1, 12),
    scan=st.integers(1, 30) | st.just(1 << 22),
)
def test_masks_equal_a_loop_over_tokens(examples, T, scan):
    rows = [masked_row(example, T) for example in examples]
    usable = [i for i, (_, _, masked) in enumerate(rows) if any(target != -100 for target in masked)]
    with quick_folder() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft_dataset, "_SCAN_TOKENS", scan)
        write(folder, examples)
        if not usable:
            with pytest.raises(CacheError, match=rf"{len(examples)} examples .*T \+ 1 = {T + 1}"):
                open_bare(folder, T=T)
            return
        dataset = open_bare(folder, T=T)
        assert dataset.num_examples == len(examples)
        assert dataset.num_excluded == len(examples) - len(usable)
        assert dataset.usable.tolist() == usable
        x, y, masked = dataset.gather(list(range(len(examples))))
        assert x.tolist() == [row[0] for row in rows]
        assert y.tolist() == [row[1] for row in rows]
        assert masked.tolist() == [row[2] for row in rows]
        x, y, masked = dataset.get_batch(B=20, generator=generator())
        drawn = {
            (tuple(a), tuple(b), tuple(c)) for a, b, c in zip(x.tolist(), y.tolist(), masked.tolist(), strict=True)
        }
        assert drawn <= {tuple(map(tuple, rows[i])) for i in usable}


@pytest.mark.parametrize(
    ("example", "targets"),
    [
        ([ASST, 1, 2, EOT], [1, 2, EOT]),
        ([USR, 1, EOT, ASST, 2, EOT], [2, EOT]),
        ([ASST, 1, EOT, USR, 2, EOT, ASST, 3, EOT], [1, EOT, 3, EOT]),
        ([USR, 1, EOT, ASST, 2, 3, 4, 5, 6, 7, EOT], [2, 3, 4, 5, 6]),  # truncated before its EOT
        ([ASST, EOT, USR, 1], [EOT]),  # an empty reply still has its EOT
        ([ASST, 1], [1]),  # no EOT: up to the end; padding is not a target
        ([ASST, ASST, 1, EOT], [ASST, 1, EOT]),  # a sentinel within a span is a token
        ([ASST, 1, USR, 2, EOT, 3], [1, USR, 2, EOT]),
        ([EOT, EOT, ASST, 1, EOT, EOT, EOT], [1, EOT]),  # only the closing EOT is a target
    ],
)
def test_targets_by_hand(tmp_path, example, targets):
    _, y, masked = open_bare(write(tmp_path, [example])).gather([0])
    assert masked[masked != -100].tolist() == targets
    assert torch.equal(masked[masked != -100], y[masked != -100])


@pytest.mark.parametrize(("asst", "eot"), [(0, 1), (65_535, 65_534), (7, 0)])
def test_any_ids_can_be_sentinels(tmp_path, asst, eot):
    write(tmp_path, [[2, asst, 3, eot, 3]])
    x, y, masked = open_bare(tmp_path, T=6, eot_id=eot, asst_id=asst).get_batch(B=1, generator=generator())
    assert x.tolist() == [[2, asst, 3, eot, 3, eot]]
    assert y.tolist() == [[asst, 3, eot, 3, eot, eot]]
    assert masked.tolist() == [[-100, 3, eot, -100, -100, -100]]


# --- sampling ----------------------------------------------------------------------------------------


def test_shapes_dtypes_and_memory(tmp_path):
    dataset = open_bare(write(tmp_path, [SAYS, [USR, 1, EOT, *SAYS], [ASST, *range(20), EOT]]))
    for B in (1, 2, 31):
        batch = dataset.get_batch(B=B, generator=generator())
        for tensor in batch:
            assert tensor.shape == (B, 8)
            assert tensor.dtype == torch.int64
            assert tensor.device == torch.device("cpu")
            assert tensor.is_contiguous()
        x, y, masked = batch
        assert (y[:, :-1] == x[:, 1:]).all()
        assert ((masked == y) | (masked == -100)).all()
        assert (masked != -100).any(dim=1).all()
        before = y.clone(), masked.clone()
        x.fill_(-1)
        assert torch.equal(y, before[0])
        y.fill_(-2)
        assert torch.equal(masked, before[1])


def test_device_is_used(tmp_path):
    batch = open_bare(write(tmp_path, [SAYS]), device="meta").get_batch(B=2, generator=generator())
    assert [tensor.device.type for tensor in batch] == ["meta"] * 3


def test_generator_state_determines_the_batch(tmp_path):
    write(tmp_path, [[ASST, i, EOT] for i in range(200)])
    first, second, one, other = open_bare(tmp_path), open_bare(tmp_path), generator(5), generator(5)
    for _ in range(5):
        for a, b in zip(first.get_batch(B=8, generator=one), second.get_batch(B=8, generator=other), strict=True):
            assert torch.equal(a, b)
    assert not torch.equal(
        first.get_batch(B=8, generator=generator(5))[0], first.get_batch(B=8, generator=generator(6))[0]
    )


def test_usable_examples_are_drawn_uniformly(tmp_path):
    """Forty examples; every fourth has no target within its first nine tokens."""
    examples = [[USR] * 8 * (i % 4 == 0) + [ASST, i, EOT] for i in range(40)]
    dataset = open_bare(write(tmp_path, examples))
    assert dataset.num_excluded == 10
    _, y, _ = dataset.get_batch(B=30_000, generator=generator(4))
    seen = Counter(y[:, 0].tolist())
    assert sorted(seen) == [i for i in range(40) if i % 4]
    chi_square = sum((count - 1000) ** 2 / 1000 for count in seen.values())
    assert chi_square < 58.3  # 29 degrees of freedom: one in a thousand
    assert chi_square > 11.0


@pytest.mark.parametrize("examples", [[], [[USR, 1, EOT]], [[USR] * 8 + SAYS], [[1, ASST]]])
def test_no_targets_raise(tmp_path, examples):
    with pytest.raises(CacheError, match=f"{len(examples)} examples"):
        open_bare(write(tmp_path, examples))


@pytest.mark.parametrize(
    ("changes", "named"), [({"T": 0}, "T must be"), ({"eot_id": -1}, "eot_id"), ({"eot_id": 65_536}, "eot_id")]
)
def test_invalid_numbers_raise(tmp_path, changes, named):
    with pytest.raises(ValueError, match=named):
        open_bare(write(tmp_path, [SAYS]), **changes)
    with pytest.raises(ValueError, match="B must be"):
        open_bare(tmp_path).get_batch(B=0, generator=generator())


# --- files -------------------------------------------------------------------------------------------


def test_missing_files(tmp_path):
    write(tmp_path, [SAYS])
    (tmp_path / "train_idx.npy").rename(tmp_path / "x")
    with pytest.raises(CacheError, match=r"train_idx\.npy"):
        open_bare(tmp_path)
    (tmp_path / "train_tokens.bin").unlink()
    with pytest.raises(CacheError, match=r"train_tokens\.bin"):
        open_bare(tmp_path)


@pytest.mark.parametrize(
    "starts",
    [
        [0, 4, 4, 8],
        [0, 8, 4],
        [1, 4],
        [-4, 0, 4],
        [0, 4, 12],  # the last one is empty
        [],
    ],
)
def test_offsets_that_do_not_match_the_tokens(tmp_path, starts):
    write(tmp_path, [SAYS, SAYS, SAYS])
    np.save(tmp_path / "train_idx.npy", np.array(starts, dtype=np.int64))
    with pytest.raises(CacheError, match=r"train_idx\.npy"):
        open_bare(tmp_path)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("kind", ["array", "pickle"])
def test_offsets_never_run_code(tmp_path, monkeypatch, kind):
    import pickle

    monkeypatch.chdir(tmp_path)
    write(tmp_path, [SAYS])
    if kind == "array":
        np.save(tmp_path / "train_idx.npy", np.array([Bomb()], dtype=object), allow_pickle=True)
    else:
        (tmp_path / "train_idx.npy").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CacheError, match="damaged"):
        open_bare(tmp_path)
    assert not (tmp_path / "exploded").exists()


# --- caches ------------------------------------------------------------------------------------------

EXAMPLES = [example for example in conversations(40) if example]


@pytest.fixture
def cache(tmp_path):
    return build_sft(EXAMPLES, tmp_path / "c", seed=3)


@pytest.mark.parametrize(("split", "T"), [("train", 16), ("val", 22), ("train", 200)])
def test_built_cache(cache, split, T):
    examples = split_rule(EXAMPLES, 0.25, 3)[split]
    dataset = open_bare(cache, split, T=T, asst_id=None, verify=True)
    rows = [masked_row(chat_ids(example, ByteTokenizer()), T) for example in examples]
    assert dataset.asst_id == ASST
    assert dataset.num_examples == len(examples)
    assert dataset.num_excluded == sum(set(masked) == {-100} for _, _, masked in rows)
    _, _, masked = dataset.gather(list(range(len(examples))))
    assert masked.tolist() == [row[2] for row in rows]


@pytest.mark.parametrize(
    "offsets", [np.array([0, 4], dtype=np.int32), np.array([[0, 4]]), np.array([0.0, 4.0]), b"", b"text"], ids=str
)
def test_damaged_offsets(tmp_path, offsets):
    path = write(tmp_path, [SAYS, SAYS]) / "train_idx.npy"
    path.write_bytes(offsets) if isinstance(offsets, bytes) else np.save(path, offsets)
    with pytest.raises(CacheError, match=r"train_idx\.npy"):
        open_bare(tmp_path)


def test_given_assistant_id_is_used(tmp_path):
    write(tmp_path, [[1, 5, 2, EOT, ASST, 3, EOT]])
    (tmp_path / "meta.json").write_text(json.dumps({"special_token_ids": {"eot": EOT}}), encoding="utf-8")
    _, _, masked = open_bare(tmp_path, asst_id=5).gather([0])
    assert masked[masked != -100].tolist() == [2, EOT]
    with pytest.raises(CacheError, match="asst_id"):
        open_bare(tmp_path, asst_id=None)
    (tmp_path / "meta.json").write_text('{"special_token_ids": 5}', encoding="utf-8")
    with pytest.raises(CacheError, match="special_token_ids"):
        open_bare(tmp_path)
    (tmp_path / "meta.json").unlink()
    with pytest.raises(CacheError, match="asst_id"):
        open_bare(tmp_path, asst_id=None)


@pytest.mark.parametrize("eot", [0, 258, 260])
def test_another_eot_raises(cache, eot):
    with pytest.raises(CacheError, match=rf"EOT.*259.*\b{eot}\b"):
        open_bare(cache, T=40, eot_id=eot)


def test_another_tokenizer_raises(tmp_path):
    tokenizer = real_tokenizer()
    build_sft(EXAMPLES, tmp_path / "c", tokenizer=tokenizer, val_frac=0, seed=3)
    eot = tokenizer.special_token_ids()["eot"]
    options = {"eot_id": eot, "asst_id": None, "T": 50}
    assert open_bare(tmp_path / "c", tokenizer_sha256=tokenizer.sha256, **options).num_excluded == 0
    with pytest.raises(CacheError, match=f"another tokenizer.*{tokenizer.sha256[:8]}"):
        open_bare(tmp_path / "c", tokenizer_sha256="ab" * 32, **options)
    (tmp_path / "c" / "meta.json").unlink()
    with pytest.raises(CacheError, match="tokenizer"):
        open_bare(tmp_path / "c", tokenizer_sha256=tokenizer.sha256, **options)


@pytest.mark.parametrize("name", ["train_tokens.bin", "train_idx.npy"])
def test_files_must_match_the_meta(cache, name):
    data = (cache / name).read_bytes()
    for wrong in (data[:-8], data + bytes(8), data[:-1]):
        (cache / name).write_bytes(wrong)
        with pytest.raises(CacheError, match=rf"{name} has [\d,]+ bytes.*meta\.json"):
            open_bare(cache, T=40)
    (cache / name).write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    with pytest.raises(CacheError, match=f"{name} is damaged"):
        open_bare(cache, T=40, verify=True)
    (cache / name).unlink()
    with pytest.raises(CacheError, match=f"{name} is missing"):
        open_bare(cache, T=40)
    open_bare(cache, "val", T=40)


def test_offsets_of_another_split_raise(cache):
    """They would split the tokens at wrong offsets."""
    with pytest.raises(CacheError, match="split"):
        SFTExampleDataset(cache / "train_tokens.bin", cache / "val_idx.npy", T=40, device="cpu", eot_id=EOT)


# --- memory ------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_large_file_is_sampled_in_little_memory(tmp_path, monkeypatch):
    """A sparse file of 256 MB with an example every 32,768 tokens."""
    monkeypatch.setattr(mmap, "KEEP_BYTES", 0)
    monkeypatch.setattr(mmap, "RELEASE_BYTES", 8 << 20)
    monkeypatch.setattr(sft_dataset, "_SCAN_TOKENS", 1 << 20)
    tokens = tmp_path / "train_tokens.bin"
    starts = np.arange(0, 128 << 20, 1 << 15, dtype=np.int64)
    with tokens.open("wb") as file:
        for start in starts.tolist():
            file.seek(2 * start)
            file.write(np.array([ASST, 1, EOT], dtype="<u2").tobytes())
        file.truncate(256 << 20)
    if tokens.stat().st_blocks * 512 > 128 << 20:
        pytest.skip("this file system has no sparse files")
    np.save(tmp_path / "train_idx.npy", starts)
    before = resident()
    dataset = open_bare(tmp_path, T=256)
    assert resident() - before < 64 << 20
    assert memory_growth(dataset) < 64 << 20
    _, _, masked = dataset.get_batch(B=8, generator=generator())
    assert masked[:, :3].tolist() == [[1, EOT, -100]] * 8
