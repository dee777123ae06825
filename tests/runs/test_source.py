"""Where an imported model comes from."""

import pytest

from niels_gpt.runs.source import source_text


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({"name": "SmolLM", "licence": "apache-2.0", "model_type": "llama"}, "SmolLM (llama), licence: apache-2.0"),
        ({"name": "mine", "licence": ""}, "mine, licence: unknown"),
    ],
)
def test_the_source_on_one_line(source, text):
    assert source_text(source) == text
