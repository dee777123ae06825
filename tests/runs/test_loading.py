"""Which model a command speaks of, and how it reads."""

import pytest

from niels_gpt.runs.loading import LoadedRun, is_run
from niels_gpt.tokenizer import ByteTokenizer
from tests import token_caches


def test_a_run_or_a_checkpoint(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest/checkpoint.json").write_text("{}", encoding="utf-8")
    (tmp_path / "best.pt").write_bytes(b"")
    assert is_run(tmp_path / "run")
    assert not is_run(tmp_path / "latest")
    assert not is_run(tmp_path / "best.pt")
    assert not is_run(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["one\r\ntwo", "one\ntwo", "a\r b", "\r\n\r\n"])
def test_a_text_is_read_as_it_was_in_training(tmp_path, text):
    by_bytes = LoadedRun(None, 0, tmp_path, None, ByteTokenizer())
    assert by_bytes.encode(text).tolist() == list(text.encode())
    tokenizer = token_caches.tokenizer()
    by_tokens = LoadedRun(None, 0, tmp_path, None, tokenizer)
    assert by_tokens.encode(text).tolist() == tokenizer.encode(text.replace("\r\n", "\n"))
