"""The byte task, against batches and losses computed by hand from the files."""

import hashlib
import re
from pathlib import Path

import pytest
import torch

from niels_gpt.model.gpt import GPT
from niels_gpt.system.rng import generator
from niels_gpt.training.tasks.byte_task import source_paths, stream_config
from niels_gpt.training.tasks.registry import open_task
from tests.cache import split_rule
from tests.training import DELIMITER, small_config, write_texts


@pytest.fixture(scope="module")
def task(texts):
    return open_task(small_config(texts))


def roam_files(texts, split):
    return split_rule(sorted((texts / "notes").iterdir(), key=str), 0.10, 42)[split]


def roam_stream(texts, split="train"):
    return b"\n\n".join(path.read_bytes() for path in roam_files(texts, split))


def dialogues(texts):
    return (texts / "primer.txt").read_text(encoding="utf-8").split(DELIMITER)


def primer_stream(texts, split="train"):
    return DELIMITER.join(split_rule(dialogues(texts), 0.10, 42)[split]).encode("utf-8")


def literal_batch(sources, *, p, B, T, draw):
    """`get_batch` as the spec describes it."""
    names = list(p)
    shares = torch.tensor([p[name] for name in names], dtype=torch.float32)
    rows = []
    for choice in torch.multinomial(shares, B, replacement=True, generator=draw).tolist():
        source = sources[names[choice]]
        start = torch.randint(0, len(source) - T, (1,), generator=draw).item()
        rows.append((names[choice], start, source[start : start + T + 1]))
    return rows


def test_a_batch_follows_the_spec_with_the_generator_of_its_step(texts, task):
    """It depends on the seed and the step alone."""
    sources = {"roam": roam_stream(texts), "primer": primer_stream(texts)}
    p = {"roam": 0.6, "primer": 0.4}
    other = open_task(small_config(texts, "train.seed=8", "train.total_steps=500", "output.eval_every=1"))
    for each, seed, step in ((task, 7, 10**6), (task, 7, 0), (task, 7, 1), (other, 8, 0)):
        rows = literal_batch(sources, p=p, B=4, T=16, draw=generator(seed, "batch", step))
        batch = each.batch(step)
        assert batch.x.tolist() == [list(chunk[:-1]) for _, _, chunk in rows]
        assert batch.targets.tolist() == [list(chunk[1:]) for _, _, chunk in rows]
        assert batch.x.dtype == batch.targets.dtype == torch.int64
        assert [(o.row, o.source, o.stream_offset) for o in each.origins(step)] == [
            (row, name, start) for row, (name, start, _) in enumerate(rows)
        ]


def test_no_global_generator_is_used(task, random_states):
    before = random_states()
    task.batch(0)
    task.origins(0)
    assert random_states() == before


def test_origins_name_the_document_and_offset_of_the_text(texts, task):
    blocks = dialogues(texts)
    sources, inside = set(), 0
    for step in range(40):
        rows = task.origins(step)
        x = task.batch(step).x
        assert len(rows) == 4
        for origin, ids in zip(rows, x, strict=True):
            data = bytes(ids.tolist())
            assert origin.text == data.decode("utf-8", errors="replace")
            if origin.source == "roam":
                assert Path(origin.document) in roam_files(texts, "train")
                document, gap = Path(origin.document).read_bytes(), b"\n\n"
            else:
                number = re.fullmatch(r"dialogue (\d+)", origin.document)[1]
                document, gap = blocks[int(number)].encode("utf-8"), DELIMITER.encode()
            here = (document + gap)[origin.offset :]
            assert here, "the offset is past the document and its separator"
            assert data.startswith(here[:16]) or here.startswith(data)
            inside += len(here) >= 16
            sources.add(origin.source)
    assert sources == {"roam", "primer"}
    assert inside > 80


def test_origins_in_wikitext_give_the_row_number(texts, tmp_path):
    rows = [f"row number {i} é has {i} words" for i in range(30)]
    for name in ("train", "validation"):
        (tmp_path / f"{name}.txt").write_text("\n".join(rows) + "\n", encoding="utf-8")
    config = small_config(texts, "train.p_train={wiki: 1.0}", "train.p_val={wiki: 1.0}", f"data.wiki={tmp_path}")
    wiki = open_task(config)
    assert list(wiki.streams) == ["wiki"]  # other sources are not built
    for step in range(5):
        for origin, ids in zip(wiki.origins(step), wiki.batch(step).x, strict=True):
            number = re.fullmatch(r"row (\d+)", origin.document)[1]
            here = (rows[int(number)].encode("utf-8") + b"\n\n")[origin.offset :]
            assert here
            assert bytes(ids.tolist())[: len(here)] == here[:16]


def test_the_fingerprint_is_the_sha256_of_each_training_stream(texts, task):
    assert task.fingerprint() == {
        "roam": hashlib.sha256(roam_stream(texts)).hexdigest(),
        "primer": hashlib.sha256(primer_stream(texts)).hexdigest(),
    }


def test_the_fingerprint_depends_on_the_text_and_the_split_alone(tmp_path):
    texts = write_texts(tmp_path / "data")
    before = open_task(small_config(texts)).fingerprint()
    assert open_task(small_config(texts, "train.seed=8", "train.B=2")).fingerprint() == before
    assert open_task(small_config(texts, "data.seed=43")).fingerprint()["roam"] != before["roam"]
    file = roam_files(texts, "train")[0]
    file.write_text(file.read_text(encoding="utf-8").upper(), encoding="utf-8")
    after = open_task(small_config(texts)).fingerprint()
    assert after["roam"] != before["roam"]
    assert after["primer"] == before["primer"]


def test_evaluation_is_weighted_by_p_val_on_fixed_held_out_windows(texts, task):
    torch.manual_seed(0)
    model = GPT(task.config.model)
    losses, value = task.evaluate(model, "cpu")
    assert list(losses) == ["val_roam", "val_chat"]
    assert value == pytest.approx(0.25 * losses["val_roam"] + 0.75 * losses["val_chat"])
    assert task.evaluate(model, "cpu") == (losses, value)
    assert model.training
    draw = generator(7, "eval")
    with torch.no_grad():
        model.eval()
        for name, stream in (("val_roam", roam_stream(texts, "val")), ("val_chat", primer_stream(texts, "val"))):
            means = []
            for _ in range(2):
                rows = literal_batch({"s": stream}, p={"s": 1.0}, B=4, T=16, draw=draw)
                ids = torch.tensor([list(chunk) for _, _, chunk in rows])
                logits = model(ids[:, :-1])
                means.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item())
            assert losses[name] == pytest.approx(sum(means) / 2, rel=1e-5)


def test_a_source_with_share_0_is_not_needed(texts):
    config = small_config(
        texts, "train.p_train={roam: 1.0, primer: 0.0}", "train.p_val={roam: 1.0}", "data.primer=/does/not/exist"
    )
    task = open_task(config)
    assert {o.source for step in range(5) for o in task.origins(step)} == {"roam"}
    assert list(task.fingerprint()) == ["roam"]


@pytest.mark.parametrize("key", ["p_train", "p_val"])
def test_an_unknown_source_is_named_with_its_key(texts, key):
    with pytest.raises(ValueError, match=rf"{key}.*'notes'.*roam"):
        open_task(small_config(texts, f"train.{key}={{notes: 1.0}}"))


@pytest.mark.parametrize(
    ("V", "named"), [(100, r"model\.V=100.* 195 .*roam"), (195, r"model\.V=195.* 195 "), (257, "256 ids")]
)
def test_a_vocabulary_that_does_not_fit_the_bytes(texts, V, named):
    """The texts have an e with an accent and a sharp s: 195 169 and 195 159."""
    with pytest.raises(ValueError, match=named):
        open_task(small_config(texts, f"model.V={V}"))


def test_a_small_vocabulary_that_fits_the_bytes(texts):
    assert open_task(small_config(texts, "model.V=196")).batch(0).x.max() < 196
    with pytest.raises(ValueError, match=r"model\.V=196.* 225 .*sample_prompt"):
        open_task(small_config(texts, "model.V=196", "output.sample_prompt=ᚠ"))


def test_an_evaluation_that_does_not_fit_is_split(texts, monkeypatch):
    task = open_task(small_config(texts, "train.B=5"))
    torch.manual_seed(0)
    model = GPT(task.config.model)
    full = task.evaluate(model, "cpu")
    forward, limit = GPT.forward, [1]

    def limited(self, x, **options):
        if len(x) > limit[0]:
            torch.empty(2**50)
        return forward(self, x, **options)

    monkeypatch.setattr(GPT, "forward", limited)
    losses, value = task.evaluate(model, "cpu")
    assert losses == pytest.approx(full[0], rel=1e-6)
    assert value == pytest.approx(full[1], rel=1e-6)
    limit[0] = 0  # not even one row fits
    with pytest.raises(RuntimeError, match="memory"):
        task.evaluate(model, "cpu")


def test_sources_are_described(texts, tmp_path):
    config = small_config(texts, f"data.cache_dir={tmp_path / 'fresh'}")
    roam, primer = (
        [len(stream(texts, split)) for split in ("train", "val")] for stream in (roam_stream, primer_stream)
    )
    for state in ("built", "cached"):
        assert open_task(config).describe() == [
            ("roam", 0.6, *roam, "B", 12, f"{texts / 'notes'} ({state})"),
            ("primer", 0.4, *primer, "B", 40, f"{texts / 'primer.txt'} ({state})"),
        ]


def test_auto_paths_are_resolved(tmp_path, monkeypatch):
    """`auto` is the usual path if it exists, else the embedded text."""
    monkeypatch.chdir(tmp_path)
    options = ["data.roam=auto", "data.primer=auto", "data.wiki=auto", "data.sources.mine.path=rows.jsonl"]
    shares = ["train.p_train={wiki: 0.5, roam: 0.0, mine: 0.5}", "train.p_val={primer: 1.0}"]
    config = small_config(tmp_path, *options, *shares)
    cfg = stream_config(config)
    assert cfg.enabled_sources == cfg.required_sources == ("wiki", "primer", "mine")
    paths = source_paths(cfg)
    assert paths == {"wiki": "embedded", "roam": "embedded", "primer": "embedded", "mine": str(tmp_path / "rows.jsonl")}
    (tmp_path / ".roam-data").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "primer.txt").touch()
    paths = source_paths(stream_config(config))
    assert (paths["roam"], paths["primer"]) == (str(tmp_path / ".roam-data"), str(tmp_path / "data/primer.txt"))
    hub = small_config(tmp_path, "data.wiki=hub", "data.roam=~/notes", *shares[1:], "train.p_train={wiki: 1.0}")
    paths = source_paths(stream_config(hub))
    assert paths["wiki"] == "hub"
    assert paths["roam"] == str(Path("~/notes").expanduser())
