"""Sources that are cut by bytes: from `split` in the config to `train`, `eval --split test` and `batch show`."""

import gzip
import hashlib
import json
import math
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
"""Where the real data lies on some machines."""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NIELS_GPT_DEBUG", raising=False)
    monkeypatch.delenv("NIELS_GPT_DATA", raising=False)


def some_bytes(n, seed=0):
    """Of all kinds: most runs of them are not utf-8."""
    return bytes(torch.randint(256, (n,), generator=torch.Generator().manual_seed(seed)).tolist())


def build_config(path, split, **options):
    own = {"mine": SourceConfig(str(path), split=split, **options)}
    return StreamBuildConfig(own=own, enabled_sources=("mine",), required_sources=("mine",), cache_dir="cache")


def streams(path, split=(0.8, 0.1, 0.1), **options):
    return load_streams(build_config(path, split, **options), T=T)["mine"]


def datas(found):
    return {split: stream.data for split, stream in found.items()}


# --- the streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
def test_the_parts_are_slices_of_the_file(packed):
    data = some_bytes(1003)
    Path("file").write_bytes(gzip.compress(data) if packed else data)
    place = Path("file").rename("file.gz") if packed else Path("file")
    assert datas(streams(place)) == {"train": data[:802], "val": data[802:902], "test": data[902:]}
    assert datas(streams(place, (0.9, 0.1))) == {"train": data[:902], "val": data[902:]}
    assert datas(streams(place, (700, 100))) == {"train": data[:700], "val": data[700:800]}
    found = streams(place, (900, 50, 53))
    assert {split: stream.sha256 for split, stream in found.items()} == {
        "train": hashlib.sha256(data[:900]).hexdigest(),
        "val": hashlib.sha256(data[900:950]).hexdigest(),
        "test": hashlib.sha256(data[950:]).hexdigest(),
    }


def test_the_contracts_function_gives_train_and_val():
    data = some_bytes(500)
    Path("file").write_bytes(data)
    train, val = build_sources(build_config("file", (0.8, 0.1, 0.1)), T=T)
    assert (train, val) == ({"mine": data[:400]}, {"mine": data[400:450]})


@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=6), shares=st.sampled_from([(0.5, 0.5), (0.4, 0.3, 0.3)])
)
def test_rows_files_and_one_file_are_the_same_bytes(tmp_path_factory, sizes, shares):
    """Where documents end has no influence on where the bytes are cut; and every byte is found again."""
    folder = tmp_path_factory.mktemp("cut")
    texts = [sentence(i, size)[:size] for i, size in enumerate(sizes)]
    joined = "".join(texts).encode()
    (folder / "one").write_bytes(joined)
    (folder / "files").mkdir()
    for i, text in enumerate(texts):
        (folder / "files" / f"{i}.txt").write_bytes(text.encode())
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    contents = []
    for place in ("one", "files", "rows.jsonl"):
        cfg = StreamBuildConfig(
            own={"mine": SourceConfig(str(folder / place), split=shares)},
            enabled_sources=("mine",),
            required_sources=("mine",),
            cache_dir=str(folder / f"cache {place}"),
        )
        contents.append(datas(load_streams(cfg, T=-1)["mine"]))
    assert contents[0] == contents[1] == contents[2]
    assert b"".join(contents[0].values()) == joined


def test_splits_of_files_are_put_together_again():
    """tiny_shakespeare as the Hub has it: three rows, cut elsewhere than nanoGPT cuts."""
    text = sentence(1, 300)
    for split, part in (("train", text[:900]), ("validation", text[900:1000]), ("test", text[1000:])):
        datasets.Dataset.from_list([{"text": part}]).to_parquet(f"tiny/{split}.parquet")
    data = text.encode()
    found = streams("tiny", (0.9, 0.1))
    assert datas(found) == {"train": data[: int(len(data) * 0.9)], "val": data[int(len(data) * 0.9) :]}


# --- provenance --------------------------------------------------------------------------------------


def test_a_place_in_a_part_is_a_place_in_the_file():
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


def test_origins_name_the_row_and_the_byte():
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


def test_what_is_described():
    Path("file").write_bytes(some_bytes(1000))
    for state in ("built", "cached"):
        (row,) = open_task(config("file", (0.8, 0.1, 0.1))).describe()
        assert (row.train, row.held_out, row.path) == (800, 100, f"file ({state}; 100B test split)")
    (row,) = open_task(config("file", (0.9, 0.1))).describe()
    assert row.path == "file (built)"


# --- the cache ---------------------------------------------------------------------------------------


def cached(found):
    states = {stream.cached for stream in found.values()}
    assert len(states) == 1
    return states.pop()


def test_the_cache_is_served_until_something_changes():
    data = some_bytes(1000)
    Path("file").write_bytes(data)
    assert [cached(streams("file")) for _ in range(2)] == [False, True]
    other = (0.7, 0.2, 0.1)
    assert [cached(streams("file", other)) for _ in range(2)] == [False, True]
    assert streams("file")["train"].data == data[:800]
    Path("file").write_bytes(some_bytes(1000, seed=1))
    assert not cached(streams("file"))
    assert streams("file")["test"].data == some_bytes(1000, seed=1)[900:]


@pytest.mark.parametrize("part", ["train", "val", "test"])
def test_a_damaged_part_is_built_again(part):
    data = some_bytes(1000)
    Path("file").write_bytes(data)
    streams("file")
    file = Path(f"cache/mine_{part}.bin")
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    found = streams("file")
    assert [split for split, stream in found.items() if not stream.cached] == [part]
    assert b"".join(datas(found).values()) == data


def test_with_and_without_split_are_not_mistaken_for_each_other():
    Path("texts").mkdir()
    for i in range(20):
        Path(f"texts/{i:02d}.txt").write_text(sentence(i, 20), encoding="utf-8")
    whole = "".join(sentence(i, 20) for i in range(20)).encode()
    for _ in range(2):
        assert datas(streams("texts", (0.5, 0.5)))["train"] == whole[: len(whole) // 2]
        documents = StreamBuildConfig(
            own={"mine": SourceConfig("texts")},
            enabled_sources=("mine",),
            required_sources=("mine",),
            cache_dir="cache",
        )
        assert len(load_streams(documents, T=T)["mine"]["train"].starts) == 18


def test_a_dataset_of_the_hub_is_built_again_when_its_bytes_change(monkeypatch):
    def serve(*texts):
        table = datasets.Dataset.from_list([{"text": text} for text in texts])
        serve_in_turn(monkeypatch, datasets.DatasetDict({"train": table}))

    serve("abc" * 50, "def" * 50)
    assert [cached(streams("hub:a/b", (0.5, 0.5))) for _ in range(2)] == [False, True]
    serve("abc" * 50, "deg" * 50)
    found = streams("hub:a/b", (0.5, 0.5))
    assert not cached(found)
    assert datas(found) == {"train": b"abc" * 50, "val": b"deg" * 50}


# --- what is wrong with them -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("split", "mentioned"),
    [
        ("[0.9, 0.2]", ["sum to 1", "[0.9, 0.2]"]),
        ("[0.5, 0.4, 0.05]", ["sum to 1"]),
        ("[0.9, 1]", ["whole numbers of bytes", "[0.9, 1]"]),
        ("[90.0, 10.0]", ["whole numbers of bytes"]),
        ("[0.9]", ["two or three", "[0.9]"]),
        ("[1]", ["two or three"]),
        ("[1, 2, 3, 4]", ["two or three"]),
        ("[0, 10]", ["above 0"]),
        ("[1.1, -0.1]", ["above 0"]),
        ("[.nan, 1]", ["split"]),
        ("[true, 3]", ["data.sources.mine.split"]),
        ("['0.9', '0.1']", ["data.sources.mine.split", "'0.9'"]),
        ("0.9", ["data.sources.mine.split", "0.9"]),
    ],
)
def test_splits_that_are_none(split, mentioned):
    Path("c.yaml").write_text(f"data: {{sources: {{mine: {{path: x, split: {split}}}}}}}", encoding="utf-8")
    with pytest.raises(ValueError) as caught:
        load_config("c.yaml")
    assert "\n" not in str(caught.value)
    for part in ("c.yaml", *mentioned):
        assert part in str(caught.value)


def test_chats_have_no_split():
    with pytest.raises(ValueError, match="chat has no split"):
        SourceConfig("x", kind="chat", split=(0.5, 0.5))


def test_a_config_with_a_split_is_written_and_read_back():
    for split in ((0.9, 0.1), (90_000_000, 5_000_000, 5_000_000)):
        made = config("x", split)
        Path("again.yaml").write_text(dump_config(made), encoding="utf-8")
        again = load_config("again.yaml")
        assert again == made
        assert again.data.sources["mine"].split == split
        assert [type(part) for part in again.data.sources["mine"].split] == [type(part) for part in split]


def test_more_bytes_than_the_file_has():
    Path("file").write_bytes(bytes(100))
    with pytest.raises(ValueError, match=r"data\.sources\.mine.*asks for 101 bytes, but there are 100 in file"):
        streams("file", (60, 41))


def test_a_part_that_is_too_short_is_named():
    Path("file").write_bytes(bytes(100))
    with pytest.raises(ValueError, match=rf"mine/test has {T} bytes, fewer than T \+ 1 = {T + 1}.*split"):
        streams("file", (60, 20, T))


# --- from the config to a score ----------------------------------------------------------------------

CONFIG = """
model: {T: 16, C: 16, L: 1, H: 2}
train: {total_steps: 4, warmup_steps: 0, B: 4, p_train: {mine: 1.0}, p_val: {mine: 1.0}}
data: {sources: {mine: {path: nowhere, split: [0.8, 0.1, 0.1]}}}
output: {eval_every: 2, eval_steps: 2, checkpoint_every: 2, sample_tokens: 4}
"""


@pytest.fixture
def trained(capsys):
    Path("file").write_bytes(some_bytes(2000))
    Path("cut.yaml").write_text(CONFIG, encoding="utf-8")
    assert call("train", "--config", "cut.yaml", "--run-dir", "out", "--source", "mine=file") == 0
    capsys.readouterr()


def test_train_says_which_place_is_missing(capsys):
    Path("cut.yaml").write_text(CONFIG, encoding="utf-8")
    assert call("train", "--config", "cut.yaml", "--run-dir", "out") == 1
    message = error_of(capsys)
    assert "nowhere" in message and "--source mine=PATH" in message
    assert not Path("out/checkpoints").exists()


def test_the_place_of_a_source_is_an_option(trained, capsys):
    assert load_config("out/config.yaml").data.sources["mine"].path == "file"
    assert call("train", "--config", "cut.yaml", "--source", "mine=a: b", "--print-config") == 0
    Path("shown.yaml").write_text(capsys.readouterr().out, encoding="utf-8")
    assert load_config("shown.yaml").data.sources["mine"] == SourceConfig("a: b", split=(0.8, 0.1, 0.1))


@pytest.mark.parametrize(
    ("given", "mentioned"),
    [
        ("mine", ["NAME=PATH", "'mine'"]),
        ("mine=", ["NAME=PATH"]),
        ("=file", ["data.sources."]),
        ("roam=notes", ["data.sources.roam", "mine"]),
    ],
)
@pytest.mark.parametrize("command", ["train", "eval"])
def test_places_of_sources_that_are_none(trained, capsys, command, given, mentioned):
    place = ["--config", "cut.yaml", "--run-dir", "other"] if command == "train" else ["--run", "out"]
    assert call(command, *place, "--source", given) == 1
    message = error_of(capsys)
    for part in mentioned:
        assert part in message


@pytest.mark.parametrize("options", [[], ["--stride", 8], ["--limit", 50], ["--precision", "bf16"]])
def test_the_test_part_is_scored(trained, capsys, options):
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


def test_val_is_the_default_and_a_checkpoint_knows_its_run(trained, capsys):
    for part in ("train", "validation"):
        Path("wiki").mkdir(exist_ok=True)
        Path(f"wiki/{part}.txt").write_text(f"a row of {part}\nanother row of text\n" * 5, encoding="utf-8")
    assert call("eval", "--checkpoint", "out/checkpoints/best.pt", "--wiki", "wiki", "--json") == 0
    scores = json.loads(capsys.readouterr().out)["scores"]
    assert set(scores) == {"val_wiki", "val_roam", "val_chat", "val_mine"}
    assert scores["val_mine"]["bytes"] == 199


def test_eval_of_a_file_that_has_moved(trained, capsys):
    Path("file").rename("moved")
    assert call("eval", "--run", "out", "--split", "test") == 1
    assert "--source mine=PATH" in error_of(capsys)
    assert call("eval", "--run", "out", "--split", "test", "--source", "mine=moved") == 0
    assert "test_mine" in capsys.readouterr().out


def test_a_run_without_a_test_part(capsys):
    Path("file").write_bytes(some_bytes(2000))
    Path("cut.yaml").write_text(CONFIG.replace("[0.8, 0.1, 0.1]", "[0.9, 0.1]"), encoding="utf-8")
    assert call("train", "--config", "cut.yaml", "--run-dir", "out", "--source", "mine=file") == 0
    capsys.readouterr()
    assert call("eval", "--run", "out", "--split", "test") == 1
    assert "data.sources.NAME.split" in error_of(capsys)


@pytest.mark.parametrize(
    ("option", "value", "allowed"), [("--split", "tset", "val or test"), ("--precision", "fp16", "fp32 or bf16")]
)
def test_choices_of_eval(trained, capsys, option, value, allowed):
    assert call("eval", "--run", "out", option, value) == 1
    assert error_of(capsys) == f"{option} must be {allowed}, got {value!r}"


def test_resume_and_batch_show(trained, capsys):
    assert call("train", "--resume", "--run-dir", "out", "--steps", 6, "--allow-config-change") == 0
    capsys.readouterr()
    assert call("batch", "show", "--run", "out", "--step", 0, "--json") == 0
    for row in json.loads(capsys.readouterr().out):
        assert row["document"] == "file"
        data = some_bytes(2000)[row["offset"] : row["offset"] + 16]
        assert row["text"] == data.decode("utf-8", errors="replace")
    Path("file").write_bytes(some_bytes(2000, seed=5))
    assert call("train", "--resume", "--run-dir", "out", "--steps", 8, "--allow-config-change") == 1
    assert "mine" in error_of(capsys)


def test_no_token_cache_of_it(capsys):
    Path("file").write_bytes(b"a text " * 300)
    Path("cut.yaml").write_text(CONFIG.replace("nowhere", "file"), encoding="utf-8")
    assert call("cache", "build", "mine", "--config", "cut.yaml", "--vocab-size", 300) == 1
    assert "cut by bytes (data.sources.mine.split)" in capsys.readouterr().err


# --- the real thing ----------------------------------------------------------------------------------


@pytest.mark.skipif(not (SHARED / "tiny_shakespeare").is_dir(), reason="the data is not here")
def test_tiny_shakespeare_is_cut_as_nanogpt_cuts_it():
    found = streams(SHARED / "tiny_shakespeare", (0.9, 0.1))
    assert [len(stream.data) for stream in found.values()] == [1_003_854, 111_540]
    whole = b"".join(datas(found).values())
    assert hashlib.sha256(whole).hexdigest() == "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "enwik8.gz").is_file(), reason="the data is not here")
def test_enwik8_is_cut_as_everybody_cuts_it():
    found = streams(SHARED / "enwik8.gz", (90_000_000, 5_000_000, 5_000_000))
    whole = gzip.decompress((SHARED / "enwik8.gz").read_bytes())
    assert hashlib.md5(whole).hexdigest() == "a1fa5ffddb56f4953e226637dabbb36a"
    assert datas(found) == {
        "train": whole[:90_000_000],
        "val": whole[90_000_000:95_000_000],
        "test": whole[-5_000_000:],
    }
