"""fineweb-edu: its Hub requests, its stream shuffle, and local documents."""

import inspect

import datasets
import pytest
import torch

from niels_gpt.data.fineweb_edu import iter_fineweb_edu, select_text_field
from niels_gpt.data.reading import text_rows
from niels_gpt.data.types import PretrainSample
from tests.data import RowHub, write_rows

ID = "HuggingFaceFW/fineweb-edu"


def pages(n):
    return [{"text": f"page {i}", "id": f"<urn:{i}>", "score": i / 2} for i in range(n)]


def texts(samples):
    return [sample.text for sample in samples]


@pytest.fixture
def serve(monkeypatch):
    """Return a function that installs a fake Hub with these rows."""
    return lambda rows: RowHub(rows).install(monkeypatch)


def test_the_signature():
    parameters = inspect.signature(iter_fineweb_edu).parameters
    wanted = {
        "name": "CC-MAIN-2024-10",
        "split": "train",
        "streaming": True,
        "shuffle": True,
        "shuffle_buffer_size": 10_000,
        "seed": 42,
        "take": None,
    }
    assert {name: parameters[name].default for name in wanted} == wanted
    assert select_text_field is text_rows.select_text_field


def test_requests_to_the_hub(serve):
    hub = serve(pages(5))
    assert len(list(iter_fineweb_edu())) == 5
    list(iter_fineweb_edu(name="sample-10BT", split="test", seed=7, shuffle_buffer_size=3))
    list(iter_fineweb_edu(streaming=False, shuffle=False))
    list(iter_fineweb_edu(shuffle=False, dataset_id="other/pages"))
    assert hub.calls == [
        ((ID, "CC-MAIN-2024-10"), {"split": "train", "streaming": True}),
        ((ID, "sample-10BT"), {"split": "test", "streaming": True}),
        ((ID, "CC-MAIN-2024-10"), {"split": "train", "streaming": False}),
        (("other/pages", "CC-MAIN-2024-10"), {"split": "train", "streaming": True}),
    ]
    assert hub.shuffles == [
        {"seed": 42, "buffer_size": 10_000, "max_buffer_input_shards": 1},
        {"seed": 7, "buffer_size": 3, "max_buffer_input_shards": 1},
    ]


@pytest.mark.parametrize(("seed", "buffer_size"), [(0, 7), (42, 1000)])
def test_a_stream_has_the_order_of_datasets(serve, seed, buffer_size):
    serve(pages(30))
    stream = datasets.IterableDataset.from_generator(lambda: iter(pages(30)))
    wanted = [row["text"] for row in stream.shuffle(seed=seed, buffer_size=buffer_size)]
    assert texts(iter_fineweb_edu(seed=seed, shuffle_buffer_size=buffer_size)) == wanted
    assert texts(iter_fineweb_edu(seed=seed, shuffle_buffer_size=buffer_size, take=9)) == wanted[:9]


def test_a_table_is_shuffled_completely(serve):
    hub = serve(pages(30))
    order = torch.randperm(30, generator=torch.Generator().manual_seed(42)).tolist()
    assert texts(iter_fineweb_edu(streaming=False, shuffle_buffer_size=2)) == [f"page {i}" for i in order]
    assert hub.shuffles == []


@pytest.mark.parametrize(("take", "buffer_size"), [(49, None), (5, 10)])
def test_take_pulls_no_more_rows_than_it_needs(serve, take, buffer_size):
    hub = serve(pages(100))
    shuffle = {"shuffle": False} if buffer_size is None else {"shuffle_buffer_size": buffer_size}
    assert len(list(iter_fineweb_edu(take=take, **shuffle))) == take
    assert take <= hub.pulled <= take + (buffer_size or 0)


def test_take_pulls_no_more_from_many_shards(monkeypatch):
    pulled = []

    def generate(shards):
        for shard in shards:
            for i in range(50):
                pulled.append((shard, i))
                yield {"text": f"{shard} {i}"}

    stream = datasets.IterableDataset.from_generator(generate, gen_kwargs={"shards": list(range(12))})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stream)
    assert len(list(iter_fineweb_edu(take=5, shuffle_buffer_size=10))) == 5
    assert 5 <= len(pulled) <= 15


@pytest.mark.parametrize("streaming", [True, False])
def test_a_text_file_is_a_document(tmp_path, streaming):
    (tmp_path / "b.txt").write_text("one\n\ntwo é\n  three  \n", encoding="utf-8")
    (tmp_path / "a.txt").write_text("no end of line", encoding="utf-8")
    (tmp_path / "c.txt").write_text(" \n", encoding="utf-8")
    (tmp_path / "d.txt").write_text("", encoding="utf-8")
    stats = {}
    samples = list(iter_fineweb_edu(path=tmp_path, streaming=streaming, shuffle=False, stats=stats))
    assert samples == [
        PretrainSample("no end of line", "fineweb_edu", {}),
        PretrainSample("one\n\ntwo é\n  three  \n", "fineweb_edu", {}),
    ]
    assert stats == {"empty": 2}


def test_a_document_of_10_mb(tmp_path):
    big = "é" + "0123456789" * 1_048_576 + " end"
    write_rows(tmp_path / "train.jsonl.gz", [{"text": big}])
    (sample,) = iter_fineweb_edu(path=tmp_path, shuffle=False)
    assert sample.text == big


def test_a_slice_of_a_local_split(tmp_path):
    write_rows(tmp_path / "train.jsonl", pages(10))
    found = texts(iter_fineweb_edu(path=tmp_path, split="train[2:5]", streaming=False, shuffle=False))
    assert found == ["page 2", "page 3", "page 4"]
    with pytest.raises(ValueError, match=r"train\[2:5\]"):
        list(iter_fineweb_edu(path=tmp_path, split="train[2:5]", shuffle=False))
