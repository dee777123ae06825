"""Configs as YAML: overrides, errors, and round trips."""

import dataclasses
import json

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from niels_gpt.config import DataConfig, ModelConfig, OutputConfig, RunConfig, TrainConfig
from niels_gpt.config.splice import SpliceConfig
from niels_gpt.config.yaml_file import (
    config_from_dict,
    differences,
    dump_config,
    load_config,
    load_pipeline,
    to_dict,
    with_data,
    with_defaults,
)


def write(folder, text):
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_no_file_is_the_defaults(tmp_path):
    assert load_config() == RunConfig()
    assert load_config(write(tmp_path, "")) == RunConfig()
    assert load_config(write(tmp_path, "# only a comment\n")) == RunConfig()


def test_overrides_change_the_file(tmp_path):
    with pytest.raises(ValueError, match=r"train\.B\.x=5"):  # below a value
        load_config(write(tmp_path, "train: {B: 4}\n"), overrides=["train.B.x=5"])
    path = write(tmp_path, "model: {T: 64, C: 64, H: 2}\ntrain:\n  base_lr: 3e-3\n  p_train: {wiki: 1}\n  B: 8\n")
    loaded = load_config(
        path, overrides=["train.B=4", "data.roam=notes", "train.min_lr=1E-5", "train.betas=[0.5, 0.9]"]
    )
    wanted = RunConfig(
        model=ModelConfig(T=64, C=64, H=2),
        train=TrainConfig(base_lr=0.003, min_lr=0.00001, B=4, p_train={"wiki": 1.0}, betas=(0.5, 0.9)),
        data=DataConfig(roam="notes"),
    )
    assert loaded == wanted
    assert isinstance(loaded.train.betas, tuple)
    assert load_config(str(path)).train.B == 8


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.base_lr=3e-4", 0.0003),
        ("train.base_lr=1", 1.0),
        ("train.base_lr=0.5", 0.5),
        ("train.base_lr= +2E-3 ", 0.002),
        ("train.total_steps=1_000", 1000),
        ("train.p_val={roam: 0.25, wiki: 0.75}", {"roam": 0.25, "wiki": 0.75}),
        ("output.sample_prompt=a=b", "a=b"),
        ("output.sample_prompt='1e5'", "1e5"),
        ("data.encoding_errors=replace", "replace"),
    ],
)
def test_override_values_are_yaml(override, value):
    section, name = override.partition("=")[0].split(".")
    found = getattr(getattr(load_config(overrides=[override]), section), name)
    assert found == value
    assert type(found) is type(value)


def test_the_last_override_wins_and_reaches_one_key_of_a_dict():
    loaded = load_config(overrides=["train.B=2", "train.B=6", "train.p_val.roam=0.5", "train.p_val.wiki=0.5"])
    assert loaded.train.B == 6
    assert loaded.train.p_val == {"roam": 0.5, "wiki": 0.5}


@pytest.mark.parametrize(
    ("override", "mentioned"),
    [
        ("train.total_step=5", ["train.total_step", "did you mean total_steps"]),
        ("trian.B=5", ["trian", "did you mean train"]),
        ("model.qqqq=5", ["model.qqqq", "dropout", "d_ff"]),  # nothing near: all known keys
        ("train.B=", ["train.B", "integer", "None"]),
        ("train.p_train=[wiki]", ["train.p_train", "['wiki']"]),
        ("train.p_train={wiki: a}", ["train.p_train.wiki", "'a'"]),
        ("train.betas=[0.9]", ["train.betas", "[0.9]"]),
        ("data.wiki=2024-01-01", ["data.wiki", "2024"]),  # YAML's own type: a date
        ("data.encoding_errors=ignore", ["data.encoding_errors", "'strict'", "'replace'", "'ignore'"]),
        ("task=words", ["task", "'bytes'", "'words'"]),
        ("task=[bytes]", ["task", "'bytes'"]),
        ("model=5", ["model", "section", "5"]),
        ("model.C=102", ["C=102", "H=4"]),
        ("train.p_train.wiki=0.5", ["p_train", "sum"]),
        ("train.B=[", ["train.B=["]),
        ("train.B", ["train.B", "section.key=value"]),
        ("=5", ["=5"]),
        ("train..B=5", ["train..B=5"]),
        ("task.x=5", ["task", "'bytes'", "{'x': 5}"]),
        ("train.B=&a [*a]", ["train.B", "itself"]),
        ("data.sources=&a [*a]", ["data.sources", "itself"]),
        ("model=&a {C: *a}", ["model.C", "itself"]),
        (f"train.B={'[' * 300}{']' * 300}", ["train.B", "50"]),
        ("train.p_val={wiki: 1, roam: 0, wiki: 1}", ["train.p_val", "duplicate", "wiki"]),
        ('output.sample_prompt="\\ud800"', ["output.sample_prompt", "utf-8", r"'\ud800'"]),
        ('train.p_val={"\\ud800": 1}', ["train.p_val", "utf-8"]),
        ('data.sources={mine: {path: "\\ud800"}}', ["data.sources.mine.path", "utf-8"]),
    ],
)
def test_invalid_overrides_are_named(override, mentioned):
    with pytest.raises(ValueError) as caught:
        load_config(overrides=[override])
    for part in mentioned:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("data", "mentioned"),
    [
        (b"model: [1, 2", "not valid YAML"),
        (b"engine: {shard: !!bool abc}", "'abc' is not a valid bool"),
        (b"train:\n  B: !!int abc", "line 2, column 6"),
        (b"output:\n  sample_prompt: 0x_", "'0x_' is not a valid int"),
        (b"data: {roam: 2026-02-30}", "'2026-02-30' is not a valid timestamp"),
        (b"train: {B: " + b"9" * 5000 + b"}", f"'{'9' * 40}' is not"),
        (b'data: {primer: "a\\0b"}', r"NUL character, got 'a\x00b'"),
        (b"- 1\n- 2\n", "list"),
        (b"just words\n", "str"),
        (b"data: {wiki: '\xff'}", "byte 14"),
        (b"model:\n", "model"),
        (b"1: 2\n", "unknown key 1"),
        (b"model: {C: 100, H: 3}\n", "C=100"),
        (b"model: " + b"[" * 500 + b"]" * 500, "50"),
        (b"model:\n" + b"".join(b" " * i + b"a:\n" for i in range(1, 500)), "50"),
        (b"train: {B: 2}\nmodel: {T: 8}\ntrain: {seed: 1}\n", "duplicate key train"),
        (b"train: {B: 2}\nmodel: {T: 8}\n'train': {seed: 1}\n", "line 3, column 1"),
        (b"train:\n  B: 2\n  seed: 1\n  B: 2\n", "duplicate key B"),
    ],
)
def test_a_bad_file_is_named(tmp_path, data, mentioned):
    path = tmp_path / "bad.yaml"
    path.write_bytes(data)
    with pytest.raises(ValueError) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert mentioned in str(caught.value)


def test_merge_keys_are_no_duplicates(tmp_path):
    path = write(tmp_path, "data: &d {seed: 1, roam: notes}\npretrain: {data: {<<: *d, seed: 2}}\nsft: {data: *d}\n")
    assert [(made.data.seed, made.data.roam) for made in load_pipeline(path).values()] == [(2, "notes"), (1, "notes")]


def test_the_head_width_of_a_stored_config_follows_the_width(tmp_path):
    path = write(tmp_path, dump_config(RunConfig(model=ModelConfig(C=16, H=2, L=1))))
    assert load_config(path, overrides=["model.C=32"]).model.D == 16
    assert load_config(path, overrides=["model.H=4"]).model.D == 4
    with pytest.raises(ValueError, match=r"D=8.*16"):
        load_config(path, overrides=["model.C=32", "model.D=8"])


def test_a_missing_file_is_named(tmp_path):
    for path in (tmp_path / "nowhere.yaml", tmp_path):
        with pytest.raises(ValueError) as caught:
            load_config(path)
        assert str(path) in str(caught.value)


def test_a_config_file_runs_no_code(tmp_path):
    path = write(tmp_path, f"data: !!python/object/apply:pathlib.Path.touch [{tmp_path / 'touched'}]\n")
    with pytest.raises(ValueError, match="not valid YAML"):
        load_config(path)
    assert not (tmp_path / "touched").exists()


def test_data_options_change_only_what_is_given():
    config = load_config(overrides=["data.sources={a: {path: x}, b: {path: y}}", "data.roam=notes"])
    assert with_data(config, {"wiki": None, "roam": None}) is config
    changed = with_data(config, {"wiki": "hub", "roam": None}, ["b=z=1"])
    assert (changed.data.wiki, changed.data.roam) == ("hub", "notes")
    assert (changed.data.sources["a"].path, changed.data.sources["b"].path) == ("x", "z=1")
    assert changed.train == config.train


@pytest.mark.parametrize(
    ("sources", "facts"), [(["a"], "NAME=PATH.*'a'"), (["c=x"], r"data\.sources\.c.* none"), (["a="], "NAME=PATH")]
)
def test_source_options_that_are_refused(sources, facts):
    with pytest.raises(ValueError, match=facts):
        with_data(RunConfig(), {}, sources)
    with pytest.raises(ValueError, match="encoding_errors"):
        with_data(RunConfig(), {"encoding_errors": "ignore"})


def test_config_from_dict():
    assert config_from_dict({}) == RunConfig()
    assert config_from_dict({"model": {"T": 8}}).model.T == 8
    with pytest.raises(ValueError, match=r"^here: .*train\.Bee"):
        config_from_dict({"train": {"Bee": 8}}, where="here")


# Loading refuses surrogates and NUL, which no path can hold.
TEXT = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=12
) | st.sampled_from(
    ["null", "yes", "1", "0x1", "1_000", "3.5", "2024-01-01", "=", "~", "- a", "a: b", "#", "'", '"', "\r\n"]
)


COUNT = st.integers(1, 10**6)


FLOAT = st.floats(0, 1e300)


@st.composite
def probabilities(draw):
    weights = draw(st.dictionaries(TEXT, st.integers(1, 100), min_size=1, max_size=4))
    return {name: weight / sum(weights.values()) for name, weight in weights.items()}


@st.composite
def run_configs(draw):
    heads, parts = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    return RunConfig(
        model=ModelConfig(
            V=draw(COUNT), T=draw(COUNT), L=draw(COUNT), H=heads, C=2 * heads * draw(st.integers(1, 50)),
            d_ff=draw(COUNT), dropout=draw(st.floats(0, 1, exclude_max=True)),
        ),
        train=TrainConfig(
            total_steps=draw(COUNT), base_lr=draw(FLOAT), min_lr=draw(FLOAT), warmup_steps=draw(st.integers(0, 10**6)),
            seed=draw(st.integers(0, 2**63 - 1)), B=parts * draw(COUNT), accumulate=parts,
            betas=(draw(st.floats(0, 0.999)), draw(st.floats(0, 0.999))),
            p_train=draw(probabilities()), p_val=draw(probabilities()),
        ),
        data=DataConfig(wiki=draw(TEXT), roam=draw(TEXT), cache_dir=draw(TEXT), encoding_errors="replace"),
        output=OutputConfig(keep=draw(COUNT), sample_every=0, sample_prompt=draw(TEXT)),
    )  # fmt: skip


@settings(max_examples=25)
@given(run_configs())
@example(RunConfig())
@example(RunConfig(train=TrainConfig(p_val={"\x85": 1.0}), output=OutputConfig(sample_prompt="a\u2028b\u2029")))
def test_dump_and_load_give_an_equal_config(tmp_path_factory, made):
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump_config(made), encoding="utf-8")
    loaded = load_config(path)
    assert loaded == made
    assert dump_config(loaded) == dump_config(made)


@pytest.mark.parametrize("text", ["1e5", "+1E-3", "1_0e1", "3.0e+4", ".5", "0x1f", "1:30"])
def test_a_path_that_looks_like_a_number_is_quoted(tmp_path, text):
    """The loader reads 3e-4 as a number, which YAML 1.1 does not, so a folder named 1e5 must be quoted."""
    made = RunConfig(
        train=TrainConfig(p_train={text: 1.0}),
        data=DataConfig(roam=text),
        output=OutputConfig(sample_prompt=text),
    )
    assert load_config(write(tmp_path, dump_config(made))) == made


def test_the_dump_names_every_key():
    config = RunConfig(splice=SpliceConfig(num_docs=2))
    dumped = yaml.safe_load(dump_config(config))
    assert "splice" not in yaml.safe_load(dump_config(RunConfig()))  # not a splice run
    for section in dataclasses.fields(RunConfig):
        made = getattr(config, section.name)
        if dataclasses.is_dataclass(made):
            assert list(dumped[section.name]) == [field.name for field in dataclasses.fields(made)]
    assert dumped["model"]["D"] == 64  # resolved


def test_to_dict_is_plain():
    made = to_dict(RunConfig())
    assert json.loads(json.dumps(made)) == made
    assert made["train"]["betas"] == [0.9, 0.95]
    made["train"]["p_train"]["wiki"] = 0.0  # a copy
    assert RunConfig().train.p_train["wiki"] == 0.784


def test_differences_golden():
    old = {"model": {"C": 64, "T": 8}, "train": {"p_train": {"wiki": 1.0}, "B": 4}, "task": "bytes"}
    new = {"model": {"C": 128, "T": 8}, "train": {"p_train": {"wiki": 0.5, "roam": 0.5}, "B": 4, "new": 1}}
    assert differences(old, new) == {
        "model.C": (64, 128),
        "train.p_train": ({"wiki": 1.0}, {"wiki": 0.5, "roam": 0.5}),
        "train.new": (None, 1),
        "task": ("bytes", None),
    }
    assert differences(old, json.loads(json.dumps(old))) == {}


def test_options_of_newer_versions_get_their_defaults():
    old = to_dict(RunConfig(train=TrainConfig(B=4)))
    del old["train"]["accumulate"], old["engine"]
    complete = with_defaults(old)
    assert complete["train"] == to_dict(RunConfig(train=TrainConfig(B=4)))["train"]
    assert complete["task"] == "bytes"
    assert "engine" not in complete  # RunConfig has the default of a missing section


@pytest.mark.parametrize(
    ("override", "facts", "accepted"),
    [
        ("splice.shuffle_offsets=x", ["splice.shuffle_offsets", "true or false", "integer", "'x'"], [True, 2]),
        ("splice.groups=1", ["splice.groups", "text", "list", "1"], ["a", ("a", "b")]),
        ("splice.content_stride=[1, x]", ["splice.content_stride.1", "integer", "'x'"], [3, (1, 2)]),
        ("splice.alpha=x", ["splice.alpha", "number", "list", "'x'"], [0.5, (0.5, 1.5)]),
        ("train.betas=[0.9, x]", ["train.betas.1", "number", "'x'"], [(0.8, 0.9)]),
    ],
)
def test_an_option_of_several_types_names_them_all(override, facts, accepted):
    """And accepts a value of each."""
    with pytest.raises(ValueError) as error:
        load_config(None, overrides=[override])
    assert all(fact in str(error.value) for fact in facts) and "\n" not in str(error.value)
    section, _, name = override.partition("=")[0].partition(".")
    for value in accepted:
        loaded = load_config(None, overrides=[f"{section}.{name}={json.dumps(value)}"])
        assert getattr(getattr(loaded, section), name) == value
