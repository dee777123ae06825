"""A flipped bit in any file of a cache raises CacheError, or changes nothing that is read."""

import functools
import json
import random
import shutil

import numpy as np
import pytest

from niels_gpt.cache.formats import CacheError
from niels_gpt.cache.meta import listed_files, read_meta
from niels_gpt.cache.pretrain_dataset import PretrainTokenStreamDataset
from niels_gpt.cache.sft_dataset import SFTExampleDataset
from niels_gpt.cache.verify import stream_slice
from tests.cache import WideTokenizer, build_pretrain, build_sft, conversations

FLIPS = 100
TEXTS = [f"note {i}: " + "the quick brown fox " * (i % 5 + 1) for i in range(20)]


def read_pretrain(folder):
    """All that a run reads."""
    read = []
    for split in ("train", "val"):
        dataset = PretrainTokenStreamDataset(folder / split, T=8, device="cpu")
        tokens = np.empty(dataset.num_tokens, dtype=dataset.dtype)
        dataset.read(0, tokens)
        windows = [tensor.tolist() for tensor in dataset.gather(list(range(0, dataset.num_windows, 7)))]
        lengths = dataset.document_lengths().tolist()
        read.append((tokens.tolist(), windows, lengths, dataset.fingerprint()))
        read.append(stream_slice(folder, split, 3, 500).tolist())
    return read


def read_sft(folder):
    read = []
    for split in ("train", "val"):
        paths = folder / f"{split}_tokens.bin", folder / f"{split}_idx.npy"
        eot = read_meta(folder / "meta.json")["special_token_ids"]["eot"]
        dataset = SFTExampleDataset(*paths, T=16, device="cpu", eot_id=eot)
        examples = [dataset.example(i).tolist() for i in range(dataset.num_examples)]
        batch = [tensor.tolist() for tensor in dataset.gather(dataset.usable.tolist())]
        read.append((examples, batch, dataset.fingerprint()))
        read.append(stream_slice(folder, split, 3, 500).tolist())
    return read


BUILDS = {
    "pretrain": (functools.partial(build_pretrain, TEXTS, shard_bytes=600, max_val_tokens=400), read_pretrain),
    "sft": (functools.partial(build_sft, conversations(20), val_frac=0.2), read_sft),
}
BUILDS |= {
    f"{kind}, uint32": (functools.partial(build, tokenizer=WideTokenizer()), read)
    for kind, (build, read) in BUILDS.items()
}


def without_tables(folder):
    """Change a cache to one of an older version: no tables, no checksum of the meta."""
    meta = read_meta(folder / "meta.json")
    tables = [name for name in listed_files(meta, folder) if name.endswith("checksums.npy")]
    for name in tables:
        (folder / name).unlink()
        del meta["files"][name]
    (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")


@pytest.mark.parametrize("version", ["new", "old"])
@pytest.mark.parametrize("kind", BUILDS)
def test_no_flip_is_read_in_silence(tmp_path, kind, version):
    build, read = BUILDS[kind]
    folder = build(tmp_path / "cache")
    if version == "old":
        without_tables(folder)
    wanted = read(folder)
    draw = random.Random(7)
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if version == "old" and path.name == "meta.json":
            continue  # nothing covers it
        content = path.read_bytes()
        for at in draw.sample(range(8 * len(content)), min(FLIPS, 8 * len(content))):
            flipped = bytearray(content)
            flipped[at // 8] ^= 1 << at % 8
            path.write_bytes(flipped)
            try:
                assert read(folder) == wanted, f"bit {at} of {path.name}"
            except CacheError as err:
                found[path.name] = found.get(path.name, 0) + 1
                assert "\n" not in str(err) and str(folder) in str(err)
        path.write_bytes(content)
    assert read(folder) == wanted
    names = {path.name for path in folder.rglob("*.*")} - ({"meta.json"} if version == "old" else set())
    assert found.keys() == names and min(found.values()) >= 90
    shutil.rmtree(folder)
