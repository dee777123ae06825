"""Gutenberg: its Hub requests, and books as text files."""

import inspect

import pytest
import torch

from niels_gpt.data.gutenberg import iter_gutenberg
from niels_gpt.data.types import PretrainSample
from tests.data import RowHub, write_rows

ID = "nikolina-p/gutenberg_clean_en_splits"
RAW = "manu/project_gutenberg"


def books(n):
    return [{"id": i, "text": f"Book {i}\n\nChapter 1\n", "title": f"Title {i}"} for i in range(n)]


@pytest.fixture
def serve(monkeypatch):
    """Return a function that installs a fake Hub with these rows."""
    return lambda rows: RowHub(rows).install(monkeypatch)


def test_the_signature():
    parameters = inspect.signature(iter_gutenberg).parameters
    wanted = {
        "dataset_id": ID,
        "split": "train",
        "streaming": True,
        "shuffle": True,
        "shuffle_buffer_size": 10_000,
        "seed": 42,
        "take": None,
    }
    assert {name: parameters[name].default for name in wanted} == wanted


def test_requests_to_the_hub(serve):
    hub = serve(books(5))
    assert len(list(iter_gutenberg())) == 5
    list(iter_gutenberg(dataset_id=RAW, split="en", seed=7, shuffle_buffer_size=3))
    list(iter_gutenberg(streaming=False, shuffle=False))
    assert [(args[0], kwargs) for args, kwargs in hub.calls] == [
        (ID, {"split": "train", "streaming": True}),
        (RAW, {"split": "en", "streaming": True}),
        (ID, {"split": "train", "streaming": False}),
    ]
    assert hub.shuffles == [
        {"seed": 42, "buffer_size": 10_000, "max_buffer_input_shards": 1},
        {"seed": 7, "buffer_size": 3, "max_buffer_input_shards": 1},
    ]


def test_samples_and_their_order(serve):
    serve(books(20))
    (first, *_) = iter_gutenberg(shuffle=False)
    assert first == PretrainSample("Book 0\n\nChapter 1\n", "gutenberg", {"id": 0, "title": "Title 0"})
    order = torch.randperm(20, generator=torch.Generator().manual_seed(42)).tolist()
    assert [sample.meta["id"] for sample in iter_gutenberg(streaming=False)] == order


def test_the_raw_books_have_a_split_per_language(tmp_path):
    # On the Hub: data/en-00000-of-00052.parquet, data/de-00000-of-00005.parquet, ...
    for language in ("de", "en"):
        for i in range(2):
            file = tmp_path / "data" / f"{language}-0000{i}-of-00002.parquet"
            write_rows(file, [{"id": f"{language} {i}", "text": f"{language} {i}"}])
    for language in ("de", "en"):
        samples = iter_gutenberg(dataset_id=RAW, path=tmp_path, split=language, shuffle=False)
        assert [sample.text for sample in samples] == [f"{language} 0", f"{language} 1"]


@pytest.mark.parametrize("streaming", [True, False])
def test_a_text_file_is_a_book(tmp_path, streaming):
    (tmp_path / "shelf").mkdir()
    (tmp_path / "b.txt").write_text("\ufeffTitle\n\nChapter 1\n\n  It was é.\n", encoding="utf-8")
    (tmp_path / "a.txt").write_text("One line", encoding="utf-8")
    (tmp_path / "shelf" / "c.txt").write_text("Third\n", encoding="utf-8")
    (tmp_path / "nothing.txt").write_text("\n\n", encoding="utf-8")
    stats = {}
    samples = list(iter_gutenberg(path=tmp_path, streaming=streaming, shuffle=False, stats=stats))
    assert [sample.text for sample in samples] == ["One line", "\ufeffTitle\n\nChapter 1\n\n  It was é.\n", "Third\n"]
    assert stats == {"empty": 1}
    (single,) = iter_gutenberg(path=tmp_path / "a.txt", streaming=streaming)
    assert single == PretrainSample("One line", "gutenberg", {})
