"""Where a run is exported to."""

from types import SimpleNamespace

import pytest

from niels_gpt.export import gguf_file, run_export


def test_a_refused_gguf_leaves_no_empty_folders(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise ValueError("not supported")

    monkeypatch.setattr(gguf_file, "write_gguf", refuse)
    with pytest.raises(ValueError, match="not supported"):
        run_export.export_gguf(SimpleNamespace(model=None, tokenizer=None), tmp_path / "a" / "b" / "x.gguf")
    assert not list(tmp_path.iterdir())
