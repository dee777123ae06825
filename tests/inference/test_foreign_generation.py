"""Models with tokenizers of others: ids outside the vocabulary, several ends, conversations, the start of a text."""

import pytest
import torch

from niels_gpt.config import ModelConfig
from niels_gpt.inference.conversation import Conversation
from niels_gpt.inference.generation import TextOutput, generate, stream_text, text_prompt
from niels_gpt.inference.inspection import logit_lens
from niels_gpt.inference.int8 import Int8GPT
from niels_gpt.inference.logprobs import score_from
from niels_gpt.inference.sampling import Sampling
from niels_gpt.model.gpt import GPT
from niels_gpt.runs.checkpoint import save_checkpoint
from niels_gpt.runs.folder import RunFolder
from niels_gpt.runs.loading import load_run
from niels_gpt.tokenizer import load_tokenizer
from tests import chat_templates as templates
from tests import foreign_tokenizers as made
from tests.training import small_config

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def smollm(tmp_path_factory):
    folder = made.make("smollm", tmp_path_factory.mktemp("smollm"), chat_template=templates.CHATML)
    return load_tokenizer(folder)


def padded_model(tokenizer, extra=61, T=64):
    """A model with more ids than the tokenizer, which prefers those that the tokenizer does not have."""
    torch.manual_seed(0)
    model = GPT(ModelConfig(V=tokenizer.vocab_size + extra, T=T, C=16, L=1, H=2, dropout=0.0, tie_embeddings=False))
    with torch.no_grad():
        model.lm_head.weight[tokenizer.vocab_size :] = 100 * model.lm_head.weight[:1]
        model.lm_head.weight[tokenizer.vocab_size + 1 :: 2] *= -1
    return model.eval()


class Replies:
    """Replaces a model's decoding by given ids."""

    def __init__(self, monkeypatch, *replies):
        replies = iter(replies)

        class Decoder:
            def __init__(self, rows):
                self.ids = [next(replies) for _ in range(rows)]
                self.finished = []

            def tokens(self):
                for row, ids in enumerate(self.ids):
                    for i in ids:
                        if row in self.finished:
                            break
                        yield row, [i]

            def finish(self, row):
                self.finished.append(row)

            def close(self, *, keep):
                pass

        self.prompts = []

        def decoder_for(model, prompts, **options):
            self.prompts += prompts
            return Decoder(len(prompts))

        monkeypatch.setattr("niels_gpt.inference.generation.decoder_for", decoder_for)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_ids_are_never_generated(smollm, use_cache, temperature):
    model = padded_model(smollm)
    logits = model(torch.tensor([smollm.encode("dog")]))[0, -1]
    assert int(logits.argmax()) >= smollm.vocab_size  # what the model itself prefers
    options = {"temperature": temperature, "top_k": None, "generator": torch.Generator().manual_seed(1)}
    text = generate(model, "dog", max_new_tokens=80, tokenizer=smollm, use_cache=use_cache, **options)
    assert text.startswith("dog")
    assert model.sampled_ids == smollm.vocab_size
    assert model.weights().head.shape[0] == smollm.vocab_size


def test_padded_ids_have_no_probability_in_what_is_shown(smollm):
    model = padded_model(smollm)
    model.sampled_ids = smollm.vocab_size
    ids = smollm.encode("The dog sleeps")
    for scored in score_from(model, ids, 1, top=5):
        assert all(token < smollm.vocab_size for token, _ in scored.top)
    for layer in logit_lens(model, ids, len(ids) - 1, 5):
        assert all(token < smollm.vocab_size for token, _ in layer)


def test_int8_models_generate_no_padded_ids(smollm):
    model = padded_model(smollm)
    model.sampled_ids = smollm.vocab_size
    rounded = Int8GPT.of(model)
    assert rounded.sampled_ids == smollm.vocab_size
    text = generate(rounded, "dog", max_new_tokens=20, temperature=0.0, tokenizer=smollm)
    assert text.startswith("dog")


def test_the_tokenizer_of_a_run(tmp_path, smollm):
    config = small_config(tmp_path, f"model.V={smollm.vocab_size + 5}")
    run = RunFolder(tmp_path / "run")
    with run.lock():
        run.write_config(config)
        run.write_tokenizer(smollm)
        save_checkpoint(run.latest, GPT(config.model), None, 1, config.model)
    assert (run.path / "tokenizer" / "tokenizer.json").is_file()
    assert not run.tokenizer_path.exists()
    for path in (run.path, run.latest):
        loaded = load_run(path)
        assert loaded.tokenizer.sha256 == smollm.sha256
        assert loaded.model.sampled_ids == smollm.vocab_size
        assert loaded.encode("The\r\ndog").tolist() == smollm.encode("The\ndog")
    named = made.make("llama2", tmp_path / "named")
    size = load_tokenizer(named).vocab_size
    with pytest.raises(ValueError, match=rf"named has {size} ids.*V={smollm.vocab_size + 5}"):
        load_run(run.path, tokenizer=named)
    run.release()
    assert not (run.path / "tokenizer").exists()


def test_a_text_ends_at_any_end(tmp_path, monkeypatch):
    folder = made.make("llama3", tmp_path, chat_template=templates.LLAMA3)
    (folder / "generation_config.json").write_text('{"eos_token_id": [401, 404]}')
    tokenizer = load_tokenizer(folder)
    words = tokenizer.encode(" dog")
    Replies(monkeypatch, [*words, 401, *words], [*words, 404, *words], [*words, *words])
    model = padded_model(tokenizer)
    for expected in (" dog", " dog", " dog dog"):
        assert "".join(stream_text(model, "The", max_new_tokens=9, tokenizer=tokenizer)) == expected


class TestConversation:
    def test_reads_the_template_and_ends_at_the_end_of_the_turn(self, smollm, monkeypatch):
        end = smollm.special_token_ids()["<|im_end|>"]
        replies = Replies(monkeypatch, [*smollm.encode("Paris 漢"), end, 5], [end])
        talk = Conversation(padded_model(smollm, T=512), tokenizer=smollm, system="Be brief.", sampling=GREEDY)
        assert "".join(talk.reply("Capital?<|im_end|>")) == "Paris 漢"
        assert "".join(talk.reply("More?")) == ""
        start = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nCapital?"
        rest = "<|im_end|>\n<|im_start|>assistant\nParis 漢<|im_end|>\n<|im_start|>user\nMore?<|im_end|>\n"
        expected = [
            *smollm.encode(start),
            *smollm.encode_as_text("<|im_end|>"),
            *smollm.encode(rest + "<|im_start|>assistant\n"),
        ]
        assert replies.prompts[1] == expected

    def test_a_base_model_reads_a_transcript(self, tmp_path, monkeypatch):
        tokenizer = load_tokenizer(made.make("llama2", tmp_path))
        replies = Replies(monkeypatch, tokenizer.encode_inside(" Paris.\nuser: and"))
        talk = Conversation(padded_model(tokenizer, T=512), tokenizer=tokenizer, sampling=GREEDY)
        assert "".join(talk.reply("Capital?")).strip() == "Paris."
        assert replies.prompts == [[1, *tokenizer.encode("user: Capital?\nassistant:")]]
        assert talk.turns[-1]["content"] == "Paris."


class TestStartOfAText:
    def test_a_prompt_starts_as_a_document(self, tmp_path):
        tokenizer = load_tokenizer(made.make("llama2", tmp_path))
        assert text_prompt(tokenizer, "The dog") == [1, *tokenizer.encode("The dog")]
        assert text_prompt(tokenizer, "<s>The dog") == [1, *tokenizer.encode("The dog")]
        assert text_prompt(tokenizer, "") == []

    @pytest.mark.parametrize(("prompt", "expected"), [([1], "dog"), ([1, 300], " dog")])
    def test_the_space_of_sentencepiece(self, tmp_path, monkeypatch, prompt, expected):
        """A text that begins with its first token has no space there; a continuation has."""
        tokenizer = load_tokenizer(made.make("llama2", tmp_path))
        assert tokenizer.token_bytes[300]
        Replies(monkeypatch, tokenizer.encode("dog"))
        pieces = stream_text(padded_model(tokenizer), prompt, max_new_tokens=9, tokenizer=tokenizer)
        assert "".join(pieces) == expected

    @pytest.mark.parametrize(
        ("data", "text"), [([b" a", b" b"], "a b"), ([b"", b" a"], "a"), ([b"a", b" b"], "a b"), ([b"  a"], " a")]
    )
    def test_one_space_is_skipped(self, data, text):
        for stops in ([], [b"stop"]):
            output = TextOutput(stops, skip_space=True)
            assert "".join([*map(output.add, data), output.flush()]) == text
