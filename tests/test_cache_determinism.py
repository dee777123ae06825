"""Acceptance: the same input and seed give the same bytes."""

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cache import (
    ByteTokenizer,
    build_pretrain,
    build_sft,
    conversations,
    digests,
    documents,
    no_waiting,
    real_tokenizer,
    small_steps,
)

ROOT = Path(__file__).parents[1]
TEXTS, EXAMPLES = documents(80), conversations(50)


@pytest.fixture(autouse=True)
def quick():
    with no_waiting():
        yield


def pretrain(out_dir, texts=TEXTS, **changes):
    options = {"max_train_tokens": 1000, "max_val_tokens": 200, "shard_bytes": 150, "shuffle_buffer": 16}
    return digests(build_pretrain(texts, out_dir, **{**options, "dataset_name": "small", **changes}))


def sft(out_dir, examples=EXAMPLES, **changes):
    return digests(build_sft(examples, out_dir, **{"val_frac": 0.2, "dataset_name": "small", **changes}))


def test_bytes_of_uint16_caches_stay_as_they_are(tmp_path):
    """Golden: caches that exist must equal those that are built now, and build-all must leave them alone."""
    files = {"pretrain": pretrain(tmp_path / "a"), "sft": sft(tmp_path / "b")}
    data = json.dumps(files, sort_keys=True).encode()
    assert hashlib.sha256(data).hexdigest() == "c82814bca2edf42d456ef623f3eb696981364e4ca8487d9e9cc99a3b1942ee73"


BUILDERS = {"pretrain": (pretrain, TEXTS), "sft": (sft, EXAMPLES)}
builders = pytest.mark.parametrize(("build", "items"), BUILDERS.values(), ids=BUILDERS)


@builders
def test_bytes_depend_on_nothing_but_input_and_options(tmp_path, monkeypatch, random_states, build, items):
    """Not on an older cache, the kind of iterable, the folder, global generators, the time or the environment."""
    before = random_states()
    first = build(tmp_path / "a")
    assert random_states() == before
    assert len(set(first.values())) == len(first) >= 5
    assert build(tmp_path / "a") == first  # replaces the old one
    assert build(tmp_path / "b", iter(items)) == first
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(1)
    monkeypatch.setattr("time.time", lambda: 0.0)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("USER", "somebody")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert build(Path("deep") / "other name é") == first


@builders
@pytest.mark.parametrize("tokenizer", [ByteTokenizer, real_tokenizer])
def test_bytes_do_not_depend_on_workers_or_batch_size(tmp_path, build, items, tokenizer):
    found = set()
    for workers, batch_items in ((1, 3), (2, 1024), (4, 1)):
        with small_steps(batch_items=batch_items, sft_step_bytes=100 * batch_items):
            built = build(tmp_path / f"{workers} {batch_items}", workers=workers, tokenizer=tokenizer())
        found.add(json.dumps(built))
    assert len(found) == 1


IN_ANOTHER_PROCESS = """
import json
from tests.test_cache_determinism import pretrain, sft
print(json.dumps({"pretrain": pretrain("p"), "sft": sft("s")}))
"""


@pytest.mark.slow
def test_bytes_do_not_depend_on_the_process(tmp_path):
    """Another hash seed, number of threads and locale."""
    here = {"pretrain": pretrain(tmp_path / "p"), "sft": sft(tmp_path / "s")}
    environment = {
        "PYTHONPATH": str(ROOT),
        "PYTHONHASHSEED": "12345",
        "OMP_NUM_THREADS": "2",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
    }
    (tmp_path / "other").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS],
        cwd=tmp_path / "other",
        env=os.environ | environment,
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == here


def test_another_seed_changes_order_and_split(tmp_path):
    """With the same documents and examples."""
    one, other = pretrain(tmp_path / "p"), pretrain(tmp_path / "q", seed=43)
    assert any(one[name] != other[name] for name in one if name.endswith(".bin"))
    one, other = sft(tmp_path / "s"), sft(tmp_path / "t", seed=43)
    assert one["train_tokens.bin"] != other["train_tokens.bin"]
    one, other = (pretrain(tmp_path / str(seed), shuffle_buffer=None, seed=seed) for seed in (42, 43))
    assert [name for name in one if one[name] != other[name]] == ["meta.json"]  # nothing is drawn


@builders
def test_another_input_changes_the_bytes(tmp_path, build, items):
    assert build(tmp_path / "a", items[::-1]) != build(tmp_path / "b")
    assert build(tmp_path / "c", items[1:]) != build(tmp_path / "b")


class Plain:
    """The repr of an instance contains its address."""


@builders
def test_dropped_items_do_not_add_their_address(tmp_path, build, items):
    """Two iterations of one input create two objects with different reprs."""
    one, other = Plain(), Plain()
    assert repr(one) != repr(other)
    assert build(tmp_path / "a", [one, *items]) == build(tmp_path / "b", [other, *items])
