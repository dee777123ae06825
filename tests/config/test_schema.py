import ast
import dataclasses
import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from niels_gpt import config, streams
from niels_gpt.config import DataConfig, ModelConfig, OutputConfig, RunConfig, TrainConfig, default_p_train
from niels_gpt.config.checks import check_probabilities
from niels_gpt.config.splice import SpliceConfig
from niels_gpt.config.yaml_file import (
    config_from_dict,
    differences,
    dump_config,
    load_config,
    load_pipeline,
    to_dict,
)

SHIPPED = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))

# --- defaults ----------------------------------------------------------------------------------------


def test_v0_model():
    made = dataclasses.asdict(ModelConfig())
    assert made == {"V": 256, "T": 256, "C": 256, "L": 4, "H": 4, "D": 64, "d_ff": 1024, "dropout": 0.1} | {
        "norm": "layernorm",
        "mlp": "gelu",
        "positions": "rope",
        "n_kv_heads": 0,
        "tie_embeddings": True,
        "rope_theta": 10000.0,
    }


def test_v0_training():
    made = TrainConfig(total_steps=10, seed=3, B=4)
    assert (made.total_steps, made.seed, made.B) == (10, 3, 4)
    assert (made.base_lr, made.warmup_steps, made.min_lr, made.clip_norm) == (3e-4, 200, 3e-5, 1.0)
    assert made.p_train == {"wiki": 0.784, "roam": 0.196, "primer": 0.020}
    assert made.p_val == {"wiki": 1.0}


def test_default_probabilities_are_a_new_dict_each_time():
    default_p_train()["wiki"] = 0.0
    TrainConfig().p_train["wiki"] = 0.0
    assert default_p_train() == TrainConfig().p_train == {"wiki": 0.784, "roam": 0.196, "primer": 0.020}


def test_configs_are_frozen():
    for made, name in ((ModelConfig(), "C"), (TrainConfig(), "B"), (DataConfig(), "seed"), (RunConfig(), "model")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, name, 1)


@pytest.mark.parametrize("module", [config, streams])
def test_every_field_has_a_docstring_under_it(module):
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    checked = 0
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Config"):
            for field, below in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(field, ast.AnnAssign):
                    documented = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
                    assert documented, f"{node.name}.{ast.unparse(field.target)}"
                    checked += 1
    assert checked > 10


# --- model -------------------------------------------------------------------------------------------


@given(heads=st.integers(1, 12), pairs=st.integers(1, 40), d_ff=st.integers(0, 5000))
def test_derived_sizes(heads, pairs, d_ff):
    width = heads * pairs * 2
    made = ModelConfig(C=width, H=heads, d_ff=d_ff)
    assert pairs * 2 == made.D
    assert made.d_ff == (d_ff if d_ff else 4 * width)
    assert ModelConfig(**dataclasses.asdict(made)) == made
    assert ModelConfig.of(dataclasses.asdict(made)) == made


@pytest.mark.parametrize(
    ("changes", "mentioned"),
    [
        ({"C": 100, "H": 3}, ["C=100", "H=3"]),
        ({"C": 12, "H": 4}, ["12", "4", "3", "odd"]),
        ({"C": 64, "H": 4, "D": 32}, ["D=32", "64", "4", "16"]),
        ({"V": 0}, ["V", "0"]),
        ({"T": -1}, ["T", "-1"]),
        ({"L": 0}, ["L", "0"]),
        ({"H": 0}, ["H", "0"]),
        ({"C": 2.5}, ["C", "2.5"]),
        ({"T": True}, ["T", "True"]),
        ({"T": "256"}, ["T", "'256'"]),
        ({"d_ff": -4}, ["d_ff", "-4"]),
        ({"d_ff": 1.5}, ["d_ff", "1.5"]),
        ({"dropout": 1.0}, ["dropout", "1.0"]),
        ({"dropout": -0.1}, ["dropout", "-0.1"]),
        ({"dropout": math.nan}, ["dropout", "nan"]),
        ({"dropout": "0.1"}, ["dropout", "'0.1'"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(changes, mentioned):
    for make in (lambda: ModelConfig(**changes), lambda: ModelConfig.of(changes)):
        with pytest.raises(ValueError) as caught:
            make()
        for part in mentioned:
            assert part in str(caught.value)


def test_of_takes_a_dict_or_a_config():
    wanted = ModelConfig(T=64, C=32, H=2, L=1)
    assert ModelConfig.of(wanted) is wanted
    assert ModelConfig.of({"T": 64, "C": 32, "H": 2, "L": 1}) == wanted
    assert ModelConfig.of({"V": 256, "T": 64, "C": 32, "L": 1, "H": 2, "D": 16, "d_ff": 128, "dropout": 0.1}) == wanted


@pytest.mark.parametrize("D", [0, 8, 15, 32, 64])
def test_of_refuses_a_head_width_that_disagrees(D):
    with pytest.raises(ValueError, match=rf"D={D}\b.*16"):
        ModelConfig.of({"C": 32, "H": 2, "D": D})


def test_of_refuses_unknown_keys_and_what_is_no_dict():
    with pytest.raises(ValueError, match=r"droput.*did you mean dropout"):
        ModelConfig.of({"droput": 0.1})
    with pytest.raises(ValueError, match="list"):
        ModelConfig.of([256, 256])


# --- training and probabilities ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "mentioned"),
    [
        ({"total_steps": 0}, ["total_steps", "0"]),
        ({"B": 0}, ["B", "0"]),
        ({"warmup_steps": -1}, ["warmup_steps", "-1"]),
        ({"seed": -5}, ["seed", "-5"]),
        ({"seed": 2**63}, ["train.seed", str(2**63 - 1), str(2**63)]),
        ({"B": 2.5}, ["B", "2.5"]),
        ({"accumulate": -1}, ["accumulate", "-1"]),
        ({"B": 10, "accumulate": 4}, ["B=10", "accumulate=4"]),
        ({"base_lr": -1e-4}, ["base_lr", "-0.0001"]),
        ({"base_lr": math.inf}, ["base_lr", "inf"]),
        ({"min_lr": math.nan}, ["min_lr", "nan"]),
        ({"weight_decay": -0.1}, ["weight_decay", "-0.1"]),
        ({"p_train": {"wiki": 0.5, "roam": 0.4}}, ["p_train", "0.9"]),
        ({"p_train": {}}, ["p_train", "empty"]),
        ({"p_val": {"wiki": 1.5, "roam": -0.5}}, ["p_val", "roam", "-0.5"]),
    ],
)
def test_training_that_does_not_fit_is_refused(changes, mentioned):
    with pytest.raises(ValueError) as caught:
        TrainConfig(**changes)
    for part in mentioned:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "p", [{"a": 1.0}, {"a": 1}, {"a": 0.0, "b": 1.0}, {"a": 0.5, "b": 0.5 + 9e-7}, {"a": 1 - 9e-7}]
)
def test_probabilities(p):
    check_probabilities(p)
    check_probabilities(dict.fromkeys(map(str, range(10)), 0.1))  # ten times 0.1 is not 1 in floats


@pytest.mark.parametrize(
    "p",
    [
        {},
        {"a": 0.5, "b": 0.5 + 2e-6},
        {"a": 1 - 2e-6},
        {"a": 1.1, "b": -0.1},
        {"a": math.nan},
        {"a": math.inf},
        {"a": "1"},
    ],
)
def test_what_is_no_distribution_is_refused(p):
    with pytest.raises(ValueError, match="q"):
        check_probabilities(p, name="q")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("checkpoint_every", 0),
        ("keep", 0),
        ("eval_steps", 0),
        ("sample_every", -1),
        ("sample_tokens", 0),
        ("sample_tokens", 10**12),
    ],
)
def test_output_that_does_not_fit_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"output\.{name} .*{value}"):
        OutputConfig(**{name: value})


def test_output_edges():
    assert OutputConfig(sample_every=0).sample_every == 0
    with pytest.raises(ValueError, match="sample_prompt"):
        OutputConfig(sample_prompt="")


@pytest.mark.parametrize(
    ("changes", "mentioned"),
    [
        ({"seed": -5}, ["data.seed", "-5"]),
        ({"seed": 10**20}, ["data.seed", str(2**63 - 1), str(10**20)]),
        ({"roam_val_frac": 2}, ["data.roam_val_frac", "[0, 1]", "2"]),
        ({"roam_val_frac": math.nan}, ["data.roam_val_frac", "nan"]),
        ({"primer_val_frac": -0.1}, ["data.primer_val_frac", "-0.1"]),
        *(({name: ""}, [f"data.{name} is empty"]) for name in ("wiki", "roam", "primer", "cache_dir", "token_cache")),
    ],
)
def test_data_that_does_not_fit_is_refused(changes, mentioned):
    with pytest.raises(ValueError) as caught:
        DataConfig(**changes)
    for part in mentioned:
        assert part in str(caught.value)


def test_data_edges():
    DataConfig(seed=0, roam_val_frac=0.0, primer_val_frac=1.0)
    DataConfig(seed=2**63 - 1)


# --- loading -----------------------------------------------------------------------------------------


def write(folder, text):
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_nothing_given_is_the_defaults(tmp_path):
    assert load_config() == RunConfig()
    assert load_config(write(tmp_path, "")) == RunConfig()
    assert load_config(write(tmp_path, "# only a comment\n")) == RunConfig()


def test_a_file_and_overrides_on_top(tmp_path):
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
        ("train.B=4.5", ["train.B", "integer", "4.5"]),
        ("train.B='4'", ["train.B", "integer", "'4'"]),
        ("train.B=true", ["train.B", "integer", "True"]),
        ("train.B=", ["train.B", "integer", "None"]),
        ("train.B=[1]", ["train.B", "integer", "[1]"]),
        ("train.base_lr=fast", ["train.base_lr", "number", "'fast'"]),
        ("train.p_train=[wiki]", ["train.p_train", "['wiki']"]),
        ("train.p_train={wiki: a}", ["train.p_train.wiki", "'a'"]),
        ("train.betas=[0.9]", ["train.betas", "[0.9]"]),
        ("data.wiki=3", ["data.wiki", "string", "3"]),
        ("data.wiki=2024-01-01", ["data.wiki", "2024"]),  # YAML's own type: a date
        ("data.encoding_errors=ignore", ["data.encoding_errors", "'strict'", "'replace'", "'ignore'"]),
        ("task=words", ["task", "'bytes'", "'words'"]),
        ("task=[bytes]", ["task", "'bytes'"]),
        ("model=5", ["model", "section", "5"]),
        ("model.C=102", ["C=102", "H=4"]),
        ("model.H=3", ["256", "3"]),
        ("train.p_train.wiki=0.5", ["p_train", "sum"]),
        ("train.B=[", ["train.B=["]),
        ("train.B", ["train.B", "section.key=value"]),
        ("=5", ["=5"]),
        ("train..B=5", ["train..B=5"]),
        ("task.x=5", ["task", "'bytes'", "{'x': 5}"]),
        ("train.B=&a [*a]", ["train.B", "holds itself"]),
        ("data.sources=&a [*a]", ["data.sources", "holds itself"]),
        ("model=&a {C: *a}", ["model.C", "holds itself"]),
        (f"train.B={'[' * 500}{']' * 500}", ["train.B", "nested more than 50 deep"]),
        (f"train.B={'[' * 300}{']' * 300}", ["train.B", "nested more than 50 deep"]),
        ("train.p_val={wiki: 1, roam: 0, wiki: 1}", ["train.p_val", "the key wiki is there twice"]),
        ('output.sample_prompt="\\ud800"', ["output.sample_prompt is not utf-8", r"'\ud800'", "write the text anew"]),
        ('train.p_val={"\\ud800": 1}', ["train.p_val is not utf-8"]),
        ('data.sources={mine: {path: "\\ud800"}}', ["data.sources.mine.path is not utf-8"]),
    ],
)
def test_mistakes_are_named(override, mentioned):
    with pytest.raises(ValueError) as caught:
        load_config(overrides=[override])
    for part in mentioned:
        assert part in str(caught.value)


def test_an_override_below_a_value_is_refused(tmp_path):
    path = write(tmp_path, "train: {B: 4}\n")
    with pytest.raises(ValueError, match=r"train\.B\.x=5.*B is a value"):
        load_config(path, overrides=["train.B.x=5"])


@pytest.mark.parametrize(
    ("data", "mentioned"),
    [
        (b"model: [1, 2", "not valid YAML"),
        (b"engine: {shard: !!bool abc}", "not valid YAML: 'abc' is no bool; quote it if it is text in"),
        (b"engine: {shard: !!timestamp abc}", "'abc' is no timestamp; quote it if it is text"),
        (b"train:\n  B: !!int abc", "line 2, column 6"),
        (b"output:\n  sample_prompt: 0x_", "'0x_' is no int; quote it if it is text"),
        (b"data: {roam: 2026-02-30}", "'2026-02-30' is no timestamp; quote it if it is text"),
        (b"train: {B: " + b"9" * 5000 + b"}", f"'{'9' * 40}' is no int"),
        (b'data: {primer: "a\\0b"}', r"data.primer has a NUL character in it, got 'a\x00b'"),
        (b"- 1\n- 2\n", "list"),
        (b"just words\n", "str"),
        (b"data: {wiki: '\xff'}", "byte 14"),
        (b"model:\n", "model must be a section"),
        (b"1: 2\n", "unknown key 1"),
        (b"train: {B: x}\n", "train.B"),
        (b"model: {C: 100, H: 3}\n", "C=100"),
        (b"model: " + b"[" * 500 + b"]" * 500, "nested more than 50 deep"),
        (b"model:\n" + b"".join(b" " * i + b"a:\n" for i in range(1, 500)), "nested more than 50 deep"),
        (b"train: {B: 2}\nmodel: {T: 8}\ntrain: {seed: 1}\n", "the key train is there twice"),
        (b"train: {B: 2}\nmodel: {T: 8}\n'train': {seed: 1}\n", "line 3, column 1"),
        (b"train:\n  B: 2\n  seed: 1\n  B: 2\n", "the key B is there twice"),
    ],
)
def test_a_bad_file_is_named(tmp_path, data, mentioned):
    path = tmp_path / "bad.yaml"
    path.write_bytes(data)
    with pytest.raises(ValueError) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    assert mentioned in str(caught.value)


def test_keys_may_stand_twice_where_yaml_merges_them(tmp_path):
    path = write(tmp_path, "data: &d {seed: 1, roam: notes}\npretrain: {data: {<<: *d, seed: 2}}\nsft: {data: *d}\n")
    assert [(made.data.seed, made.data.roam) for made in load_pipeline(path).values()] == [(2, "notes"), (1, "notes")]


def test_a_name_of_another_encoding(tmp_path):
    with pytest.raises(ValueError, match=r"data\.roam is not utf-8, got 'caf\\udce9': rename the place"):
        config_from_dict({"data": {"roam": os.fsdecode(b"caf\xe9")}})


def test_the_head_width_of_a_stored_config_follows_the_width(tmp_path):
    path = write(tmp_path, dump_config(RunConfig(model=ModelConfig(C=16, H=2, L=1))))
    assert load_config(path, overrides=["model.C=32"]).model.D == 16
    assert load_config(path, overrides=["model.H=4"]).model.D == 4
    with pytest.raises(ValueError, match="D=8 disagrees"):
        load_config(path, overrides=["model.C=32", "model.D=8"])


def test_a_file_that_is_not_there_is_named(tmp_path):
    for path in (tmp_path / "nowhere.yaml", tmp_path):
        with pytest.raises(ValueError) as caught:
            load_config(path)
        assert str(path) in str(caught.value)


def test_a_config_file_runs_no_code(tmp_path):
    path = write(tmp_path, f"data: !!python/object/apply:pathlib.Path.touch [{tmp_path / 'touched'}]\n")
    with pytest.raises(ValueError, match="not valid YAML"):
        load_config(path)
    assert not (tmp_path / "touched").exists()


def test_config_from_dict():
    assert config_from_dict({}) == RunConfig()
    assert config_from_dict({"model": {"T": 8}}).model.T == 8
    with pytest.raises(ValueError, match=r"^here: .*train\.Bee"):
        config_from_dict({"train": {"Bee": 8}}, where="here")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_configs_are_valid(path):
    phases = load_pipeline(path).values() if path.name.startswith("pipeline") else [load_config(path)]
    for loaded in phases:
        assert loaded.train.warmup_steps < loaded.train.total_steps


def test_there_are_shipped_configs():
    assert "debug.yaml" in [path.name for path in SHIPPED]


# --- round trip --------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12) | st.sampled_from(
    [
        "null",
        "yes",
        "1",
        "0x1",
        "1_000",
        "3.5",
        "2024-01-01",
        "=",
        "~",
        "- a",
        "a: b",
        "#",
        "'",
        '"',
        "\r\n",
    ]
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


@given(run_configs())
@example(RunConfig())
def test_what_is_dumped_loads_back_equal(tmp_path_factory, made):
    path = tmp_path_factory.getbasetemp() / "dumped.yaml"
    path.write_text(dump_config(made), encoding="utf-8")
    loaded = load_config(path)
    assert loaded == made
    assert dump_config(loaded) == dump_config(made)


@pytest.mark.parametrize("text", ["1e5", "+1E-3", "2e0", "1.5e3", "1_0e1", "3.0e+4", ".5", "12", "0x1f", "1:30"])
def test_a_name_that_looks_like_a_number_stays_a_name(tmp_path, text):
    """The loader takes 3e-4 for a number, YAML 1.1 does not: a folder called 1e5 must be quoted."""
    made = RunConfig(
        train=TrainConfig(p_train={text: 1.0}),
        data=DataConfig(roam=text),
        output=OutputConfig(sample_prompt=text),
    )
    assert load_config(write(tmp_path, dump_config(made))) == made


def test_the_dump_names_every_key():
    import yaml

    config = RunConfig(splice=SpliceConfig(num_docs=2))
    dumped = yaml.safe_load(dump_config(config))
    assert "splice" not in yaml.safe_load(dump_config(RunConfig()))  # nothing to say: not a splice run
    for section in dataclasses.fields(RunConfig):
        made = getattr(config, section.name)
        if dataclasses.is_dataclass(made):
            assert list(dumped[section.name]) == [field.name for field in dataclasses.fields(made)]
    assert dumped["model"]["D"] == 64  # resolved, not as given


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


@given(run_configs(), run_configs())
def test_differences_are_those_of_the_flat_tables(first, second):
    def flat(made):
        return {
            (s.name, f.name): getattr(getattr(made, s.name), f.name)
            for s in dataclasses.fields(made)
            if s.name not in ("task", "init_from")
            for f in dataclasses.fields(getattr(made, s.name))
        }

    a, b = flat(first), flat(second)
    wanted = {f"{section}.{name}" for section, name in a if a[section, name] != b[section, name]}
    assert set(differences(to_dict(first), to_dict(second))) == wanted


def test_fp8_wants_sides_of_16():
    train = TrainConfig(precision="fp8")
    RunConfig(model=ModelConfig(C=48, H=3, L=1), train=train)
    with pytest.raises(ValueError, match=r"fp8 .*multiples of 16, which model.C=24 is not: .*bf16"):
        RunConfig(model=ModelConfig(C=24, H=3, L=1, d_ff=64), train=train)
    with pytest.raises(ValueError, match=r"which model.C=24 and model.d_ff=100 is not"):
        RunConfig(model=ModelConfig(C=24, H=3, L=1, d_ff=100), train=train)
    RunConfig(model=ModelConfig(C=24, H=3, L=1), train=TrainConfig(precision="bf16"))
