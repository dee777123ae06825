"""The four special strings, and finding them in text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niels_gpt.tokenizer import SPECIAL_TOKENS, find_special, refuse_special

# As in the specification.
SYS = "<|ngpt_sys_84a5023f67d74cf29cc4001becde983c|>"
USR = "<|ngpt_usr_84a5023f67d74cf29cc4001becde983c|>"
ASST = "<|ngpt_asst_84a5023f67d74cf29cc4001becde983c|>"
EOT = "<|ngpt_eot_84a5023f67d74cf29cc4001becde983c|>"
ALL = [SYS, USR, ASST, EOT]

# Similar strings.
NEAR = [
    "",
    "<|ngpt_",
    "<|ngpt_sys_|>",
    SYS[:-1],
    SYS[1:],
    SYS.upper(),
    SYS.replace("sys", "sys "),
    SYS.replace("84a5", "84a6"),
    SYS.replace("sys", "system"),
    SYS.replace("|", "\u2502"),
    USR[:20] + "\n" + USR[20:],
    ASST.replace("<|", "<\u200b|"),
    EOT.replace("ngpt", "gpt"),
    "<|endoftext|>",
]


def test_the_four_strings_in_order():
    assert list(SPECIAL_TOKENS) == ALL


@settings(max_examples=150)
@given(st.lists(st.sampled_from([*ALL, *NEAR, "a", " ", "é"]), max_size=8).map("".join))
def test_a_special_string_is_found_if_and_only_if_the_text_contains_one(text):
    inside = {token for token in ALL for i in range(len(text)) if text[i : i + len(token)] == token}
    found = find_special(text)
    if not inside:
        assert found is None
        refuse_special(text)
    else:
        assert found in inside
        with pytest.raises(ValueError) as caught:
            refuse_special(text)
        assert found in str(caught.value)


def test_the_error_is_short():
    with pytest.raises(ValueError) as caught:
        refuse_special("x" * 100_000 + EOT + "y" * 100_000)
    assert len(str(caught.value)) < 300
