"""Sources split by bytes: from `split` in the config to `train`, `eval --split test` and `batch show`."""

import gzip
import hashlib
import json
import math
import shutil
from pathlib import Path

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.config import SourceConfig
from niels_gpt.config.yaml_file import dump_config, load_config
from niels_gpt.evaluation.exact import score_stream
from niels_gpt.runs.checkpoint import load_model
from niels_gpt.streams import StreamBuildConfig, build_sources, load_streams
from niels_gpt.training.tasks.registry import open_task
from tests.cli import call, error_of
from tests.data import serve_in_turn
from tests.training import SMALL, sentence

T = 16
SHARED = Path(__file__).parents[2] / "shared" / "data"
"""Folder of the real data, if present."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NIELS_GPT_DEBUG", raising=False)
    monkeypatch.delenv("NIELS_GPT_DATA", raising=False)


def some_bytes(n, seed=0):
    """Random bytes: most sequences of them are not utf-8."""
    return bytes(torch.randint(256, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


def build_config(path, split, **options):
    source = SourceConfig(str(path), split=split, **options)
    return source_config(source)


def source_config(source, cache_dir="cache"):
    return StreamBuildConfig(
        user_sources={"mine": source}, enabled_sources=("mine",), required_sources=("mine",), cache_dir=cache_dir
    )


def streams(path, split=(0.8, 0.1, 0.1), **options):
    return load_streams(build_config(path, split, **options), T=T)["mine"]


def datas(found):
    return {split: stream.data for split, stream in found.items()}


# --- streams -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_splits_are_slices_of_the_file(packed):
    data = some_bytes(1003)
    Path("file").write_bytes(gzip.compress(data) if packed else data)
    path = Path("file").rename("file.gz") if packed else Path("file")
    assert datas(streams(path)) == {"train": data[:802], "val": data[802:902], "test": data[902:]}
    assert datas(streams(path, (0.9, 0.1))) == {"train": data[:902], "val": data[902:]}
    assert datas(streams(path, (700, 100))) == {"train": data[:700], "val": data[700:800]}
    train, val = build_sources(build_config(path, (0.9, 0.1)), T=T)
    assert (train, val) == ({"mine": data[:902]}, {"mine": data[902:]})
    found = streams(path, (900, 50, 53))
    assert {split: stream.sha256 for split, stream in found.items()} == {
        "train": hashlib.sha256(data[:900]).hexdigest(),
        "val": hashlib.sha256(data[900:950]).hexdigest(),
        "test": hashlib.sha256(data[950:]).hexdigest(),
    }


@settings(max_examples=12)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=6), shares=st.sampled_from([(0.5, 0.5), (0.4, 0.3, 0.3)])
)
def test_rows_files_and_one_file_give_the_same_bytes(tmp_path_factory, sizes, shares):
    """Document boundaries do not affect the split; no byte is lost."""
    folder = tmp_path_factory.mktemp("cut")
    texts = [sentence(i, size)[:size] for i, size in enumerate(sizes)]
    joined = "".join(texts).encode()
    (folder / "one").write_bytes(joined)
    (folder / "files").mkdir()
    for i, text in enumerate(texts):
        (folder / "files" / f"{i}.txt").write_bytes(text.encode())
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    contents = []
    for name in ("one", "files", "rows.jsonl"):
        cfg = source_config(SourceConfig(str(folder / name), split=shares), str(folder / f"cache {name}"))
        contents.append(datas(load_streams(cfg, T=-1)["mine"]))
    assert contents[0] == contents[1] == contents[2]
    assert b"".join(contents[0].values()) == joined


# --- provenance --------------------------------------------------------------------------------------


def test_offset_in_a_split_is_an_offset_in_the_file():
    data = some_bytes(1000)
    Path("big").write_bytes(data)
    found = streams("big", (700, 200, 100))
    for split, first in (("train", 0), ("val", 700), ("test", 900)):
        name, offset = found[split].locate(17)
        assert (name, offset) == ("big" if not first else f"big from byte {first}", 17)
        assert data[first + offset] == found[split].data[17]


def config(path, split, *overrides):
    source = json.dumps({"mine": {"path": str(path), "split": list(split)}})
    shares = [f"train.{key}={{mine: 1.0}}" for key in ("p_train", "p_val")]
    options = [*SMALL, f"data.sources={source}", *shares, "data.cache_dir=cache", *overrides]
    return load_config(None, overrides=options)


def test_origins_name_the_row_and_offset():
    texts = [sentence(i, 20) for i in range(30)]
    Path("rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    task = open_task(config("rows.jsonl", (0.8, 0.2)))
    joined = "".join(texts).encode()
    for step in range(10):
        for origin, ids in zip(task.origins(step), task.batch(step).x, strict=True):
            row = int(origin.document.removeprefix("row "))
            at = len("".join(texts[:row]).encode()) + origin.offset
            assert origin.stream_offset == at
            assert bytes(ids.tolist()) == joined[at : at + T]
            assert 0 <= origin.offset < len(texts[row].encode())


def test_description_of_splits():
    Path("file").write_bytes(some_bytes(1000))
    for state in ("built", "cached"):
        (row,) = open_task(config("file", (0.8, 0.1, 0.1))).describe()
        assert (row.train, row.held_out, row.path) == (800, 100, f"file ({state}; 100B test split)")
    (row,) = open_task(config("file", (0.9, 0.1))).describe()
    assert row.path == "file (built)"


# --- cache -------------------------------------------------------------------------------------------


def cached(found):
    states = {stream.cached for stream in found.values()}
    assert len(states) == 1
    return states.pop()


def test_cache_is_used_until_something_changes():
    data = some_bytes(1000)
    Path("file").write_bytes(data)
    assert [cached(streams("file")) for _ in range(2)] == [False, True]
    other = (0.7, 0.2, 0.1)
    assert [cached(streams("file", other)) for _ in range(2)] == [False, True]
    assert streams("file")["train"].data == data[:800]
    Path("file").write_bytes(some_bytes(1000, seed=1))
    assert not cached(streams("file"))
    assert streams("file")["test"].data == some_bytes(1000, seed=1)[900:]


def test_damaged_split_rebuilds():
    part = "test"
    data = some_bytes(1000)
    Path("file").write_bytes(data)
    streams("file")
    file = Path(f"cache/mine_{part}.bin")
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    found = streams("file")
    assert [split for split, stream in found.items() if not stream.cached] == [part]
    assert b"".join(datas(found).values()) == data


def test_changed_hub_dataset_rebuilds(monkeypatch):
    def serve(*texts):
        table = datasets.Dataset.from_list([{"text": text} for text in texts])
        serve_in_turn(monkeypatch, datasets.DatasetDict({"train": table}))

    serve("abc" * 50, "def" * 50)
    assert [cached(streams("hub:a/b", (0.5, 0.5))) for _ in range(2)] == [False, True]
    serve("abc" * 50, "deg" * 50)
    found = streams("hub:a/b", (0.5, 0.5))
    assert not cached(found)
    assert datas(found) == {"train": b"abc" * 50, "val": b"deg" * 50}


# --- errors ------------------------------------------------------------------------------------------


def test_config_with_a_split_round_trip():
    for split in ((0.9, 0.1), (90_000_000, 5_000_000, 5_000_000)):
        made = config("x", split)
        Path("again.yaml").write_text(dump_config(made), encoding="utf-8")
        again = load_config("again.yaml")
        assert again == made
        assert again.data.sources["mine"].split == split
        assert [type(part) for part in again.data.sources["mine"].split] == [type(part) for part in split]
    for invalid in ("0.9", "[true, 3]", "['0.9', '0.1']"):
        Path("c.yaml").write_text(f"data: {{sources: {{mine: {{path: x, split: {invalid}}}}}}}", encoding="utf-8")
        with pytest.raises(ValueError, match=r"c\.yaml.*data\.sources\.mine\.split"):
            load_config("c.yaml")


def test_split_larger_than_the_file_raises():
    Path("file").write_bytes(bytes(100))
    with pytest.raises(ValueError, match=r"data\.sources\.mine.*101 .*100 .*file"):
        streams("file", (60, 41))


def test_short_split_is_named():
    Path("file").write_bytes(bytes(100))
    with pytest.raises(ValueError, match=rf"mine/test.*{T} bytes.*T \+ 1 = {T + 1}.*split"):
        streams("file", (60, 20, T))


# --- training and evaluation -------------------------------------------------------------------------

CONFIG = """
model: {T: 16, C: 16, L: 1, H: 2}
train: {total_steps: 4, warmup_steps: 0, B: 4, p_train: {mine: 1.0}, p_val: {mine: 1.0}}
data: {sources: {mine: {path: nowhere, split: [0.8, 0.1, 0.1]}}}
output: {eval_every: 2, eval_steps: 2, checkpoint_every: 2, sample_tokens: 4}
"""


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory):
    """A folder with a file, a config and a run; tests use a copy."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("file").write_bytes(some_bytes(2000))
        Path("cut.yaml").write_text(CONFIG, encoding="utf-8")
        assert call("train", "--config", "cut.yaml", "--run-dir", "out", "--source", "mine=file") == 0
    return folder


@pytest.fixture
def trained(trained_once, capsys):
    shutil.copytree(trained_once, ".", dirs_exist_ok=True)
    config = Path("out/config.yaml")  # a run has absolute paths: let them lead to the copy
    config.write_text(config.read_text(encoding="utf-8").replace(str(trained_once), str(Path.cwd())), encoding="utf-8")
    Path("out/.config.yaml.json").unlink()  # else the change is reported
    capsys.readouterr()


def test_train_names_the_missing_path(capsys):
    Path("cut.yaml").write_text(CONFIG, encoding="utf-8")
    assert call("train", "--config", "cut.yaml", "--run-dir", "out") == 1
    message = error_of(capsys)
    assert "nowhere" in message and "--source mine=PATH" in message
    assert not Path("out/checkpoints").exists()


@pytest.mark.parametrize("options", [[], ["--stride", 8, "--limit", 50, "--precision", "bf16"]])
def test_test_split_is_scored(trained, capsys, options):
    assert call("eval", "--run", "out", "--split", "test", "--json", *options) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["scores"]) == ["test_mine"]
    score = result["scores"]["test_mine"]
    model, _ = load_model("out/checkpoints/best.pt")
    given = dict(zip(options[::2], options[1::2], strict=True))
    data = some_bytes(2000)[1800 : 1800 + given.get("--limit", 200)]
    stride, precision = given.get("--stride"), given.get("--precision", "fp32")
    exact = score_stream(model, data, stride=stride, precision=precision)
    assert score["bytes"] == len(data) - 1
    assert score["bits_per_byte"] == pytest.approx(exact.nats_per_token / math.log(2), rel=1e-9)
    assert result["precision"] == precision and result["stride"] == (stride or 16)


def test_eval_of_a_moved_file(trained, capsys):
    Path("file").rename("moved")
    assert call("eval", "--run", "out", "--split", "test") == 1
    assert "--source mine=PATH" in error_of(capsys)
    assert call("eval", "--run", "out", "--split", "test", "--source", "mine=moved") == 0
    assert "test_mine" in capsys.readouterr().out


def test_resume_and_batch_show(trained, capsys):
    assert call("train", "--resume", "--run-dir", "out", "--steps", 6, "--allow-config-change") == 0
    capsys.readouterr()
    assert call("research", "batch", "show", "--run", "out", "--step", 0, "--json") == 0
    for row in json.loads(capsys.readouterr().out):
        assert row["document"] == "file"
        data = some_bytes(2000)[row["offset"] : row["offset"] + 16]
        assert row["text"] == data.decode("utf-8", errors="replace")
    Path("file").write_bytes(some_bytes(2000, seed=5))
    assert call("train", "--resume", "--run-dir", "out", "--steps", 8, "--allow-config-change") == 1
    assert "mine" in error_of(capsys)


def test_token_cache_of_a_byte_split_raises(capsys):
    Path("file").write_bytes(b"a text " * 300)
    Path("cut.yaml").write_text(CONFIG.replace("nowhere", "file"), encoding="utf-8")
    assert call("cache", "build", "mine", "--config", "cut.yaml", "--vocab-size", 300) == 1
    assert "data.sources.mine.split" in capsys.readouterr().err


# --- real data ---------------------------------------------------------------------------------------


@pytest.mark.skipif(not (SHARED / "tiny_shakespeare").is_dir(), reason="the data is not here")
def test_tiny_shakespeare_is_split_like_nanogpt():
    found = streams(SHARED / "tiny_shakespeare", (0.9, 0.1))
    assert [len(stream.data) for stream in found.values()] == [1_003_854, 111_540]
    joined = b"".join(datas(found).values())
    assert hashlib.sha256(joined).hexdigest() == "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "enwik8.gz").is_file(), reason="the data is not here")
def test_enwik8_has_the_standard_split():
    found = streams(SHARED / "enwik8.gz", (90_000_000, 5_000_000, 5_000_000))
    full = gzip.decompress((SHARED / "enwik8.gz").read_bytes())
    assert hashlib.md5(full).hexdigest() == "a1fa5ffddb56f4953e226637dabbb36a"
    assert datas(found) == {"train": full[:90_000_000], "val": full[90_000_000:95_000_000], "test": full[-5_000_000:]}
