"""The byte tokenizer against utf-8 by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.tokenizer import ByteTokenizer, decode, encode


def naive_utf8(text):
    """Encode by RFC 3629."""
    ids = []
    for point in map(ord, text):
        if point < 0x80:
            ids.append(point)
        elif point < 0x800:
            ids += [0xC0 | point >> 6, 0x80 | point & 0x3F]
        elif point < 0x10000:
            ids += [0xE0 | point >> 12, 0x80 | point >> 6 & 0x3F, 0x80 | point & 0x3F]
        else:
            ids += [0xF0 | point >> 18, 0x80 | point >> 12 & 0x3F, 0x80 | point >> 6 & 0x3F, 0x80 | point & 0x3F]
    return ids


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("", []),
        ("niels\n", [110, 105, 101, 108, 115, 10]),
        ("\x00\x7f", [0, 127]),
        ("é", [195, 169]),
        ("€", [226, 130, 172]),
        ("\U0001f600", [240, 159, 152, 128]),
        ("\ufeffa\r\n", [239, 187, 191, 97, 13, 10]),
    ],
)
def test_golden(text, ids):
    found = encode(text)
    assert found.tolist() == ids
    assert found.shape == (len(ids),)
    assert found.dtype == torch.int64
    assert decode(found) == text


@settings(max_examples=60)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_encode_is_utf8_and_round_trips(text):
    ids = encode(text)
    assert ids.dtype == torch.int64
    assert ids.tolist() == naive_utf8(text)
    assert decode(ids) == text


@settings(max_examples=60)
@given(st.binary())
def test_decode_accepts_any_bytes(data):
    wanted = data.decode("utf-8", errors="replace")
    assert decode(torch.tensor(list(data), dtype=torch.int64)) == wanted
    assert decode(list(data)) == wanted


def test_the_ids_are_a_copy():
    ids = encode("abc")
    ids += 1
    assert ids.tolist() == [98, 99, 100]
    assert encode("abc").tolist() == [97, 98, 99]


@pytest.mark.parametrize("ids", [[256], [-1], [97, 1000]])
def test_ids_outside_0_to_255_are_an_error(ids):
    with pytest.raises(ValueError):
        decode(torch.tensor(ids))


def test_a_lone_surrogate_is_an_error_with_its_position():
    with pytest.raises(ValueError, match="character 3"):
        encode("abc\ud800")


def test_the_tokenizer_interface():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.sha256, tokenizer.special_token_ids()) == (256, None, {})
    assert tokenizer.token_bytes == [bytes([byte]) for byte in range(256)]
    assert tokenizer.encode("é!") == [195, 169, 33]
    assert tokenizer.decode(torch.tensor([195, 169, 33])) == "é!"


@pytest.mark.parametrize("ids", [torch.tensor(104), torch.tensor([104]), 104, [104]])
def test_a_single_id_is_one_byte(ids):
    assert decode(ids) == ByteTokenizer().decode(ids) == "h"


def test_several_rows_are_refused_with_the_shape():
    for ids in (torch.zeros((2, 3), dtype=torch.int64), torch.zeros((1, 1, 1), dtype=torch.int64).numpy()):
        for each in (decode, ByteTokenizer().decode):
            with pytest.raises(ValueError, match=r"shape \(" + str(ids.shape[0])):
                each(ids)
    with pytest.raises(ValueError, match="300"):
        decode([300])
