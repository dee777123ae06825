"""A shared tokenizer, trained on generated notes."""

import random

import pytest

from niels_gpt.tokenizer import load_tokenizer, train_tokenizer

VOCAB_SIZE = 600
"""Number of pieces of the shared tokenizer, without the four special tokens."""
SYLLABLES = [first + rest for first in "bdfghklmnprst" for rest in ("a", "e", "i", "o", "u", "ei", "orn")]


def make_corpus(seed=7, notes=300):
    """Return markdown notes with headings, lists, links, indented code, umlauts and emoji."""
    rng = random.Random(seed)
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(500)]
    words += ["über", "Äpfel", "naïve", "größer", "the", "and", "bridge"]

    def sentence():
        return " ".join(rng.choices(words, k=rng.randint(4, 12))).capitalize() + rng.choice([".", "?", "!", " 🍎"])

    corpus = []
    for number in range(notes):
        lines = [f"# Note {number}", "", sentence() + "  " + sentence(), "", f"- [[{rng.choice(words)}]]: {sentence()}"]
        if number % 3 == 0:
            lines += ["", f"    def {rng.choice(words)}(x):", f"        return x + {number}", ""]
        corpus.append("\n".join(lines))
    return corpus


@pytest.fixture(scope="session")
def corpus():
    return make_corpus()


@pytest.fixture(scope="session")
def model_path(corpus, tmp_path_factory):
    """The `spm.model` of the shared tokenizer; tests must not change it."""
    return train_tokenizer(corpus, tmp_path_factory.mktemp("tokenizer"), vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="session")
def tokenizer(model_path):
    return load_tokenizer(model_path)
