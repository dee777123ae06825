"""Checkpoints: round trips, damaged and hostile files, atomic writes."""

from __future__ import annotations

import copy
import errno
import getpass
import inspect
import io
import json
import os
import pickle
import platform
import signal
import socket
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from niels_gpt import GPT, ModelConfig, load_checkpoint, loss_fn, save_checkpoint
from niels_gpt.runs.checkpoint import CheckpointError, check_weights, load_model, read_checkpoint
from tests.training import same

CONFIG = {"V": 17, "T": 8, "C": 8, "L": 2, "H": 2, "D": 4, "d_ff": 16, "dropout": 0.1}
CONFIG |= {"norm": "layernorm", "mlp": "gelu", "positions": "rope"}
CONFIG |= {"n_kv_heads": 0, "tie_embeddings": True, "rope_theta": 10000.0, "head_dim": 0, "norm_eps": 1e-5}
CONFIG |= {
    "qkv_bias": False,
    "bias": False,
    "qk_norm": False,
    "rope_scale": 1.0,
    "rope_low": 1.0,
    "rope_high": 4.0,
    "rope_context": 8192,
}


def make(seed: int = 0, **changes: Any) -> GPT:
    torch.manual_seed(seed)
    return GPT({**CONFIG, **changes})


def train_step(model: GPT, optimizer: torch.optim.Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(17, (2, 2, 8), generator=generator)
    optimizer.zero_grad()
    loss_fn(model.eval()(x), y).backward()
    optimizer.step()


def trained(steps: int = 3, seed: int = 0) -> tuple[GPT, torch.optim.Optimizer]:
    model = make(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    for step in range(steps):
        train_step(model, optimizer, step)
    return model, optimizer


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- round trips ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.pt", "model.pth"])
def test_roundtrip(tmp_path: Path, name: str) -> None:
    model, optimizer = trained()
    path = tmp_path / "x" / "y" / name
    save_checkpoint(path, make(1), None, 9, CONFIG)  # is replaced
    save_checkpoint(str(path), model, optimizer, 3, CONFIG)
    config, state, optimizer_state, step = load_checkpoint(str(path), "cpu")
    assert config == CONFIG and type(config) is dict
    assert type(step) is int and step == 3
    assert same(dict(state), dict(model.state_dict()))
    assert same(optimizer_state, optimizer.state_dict())
    assert names(path.parent) == ["config.json", name]
    with pytest.raises(ValueError, match=r"a\.bin"):
        save_checkpoint(path.with_name("a.bin"), model, None, 0, CONFIG)
    assert names(path.parent) == ["config.json", name]


def test_the_signatures_follow_the_spec() -> None:
    saving = inspect.signature(save_checkpoint).parameters
    assert list(saving)[:5] == ["path", "model", "optimizer", "step", "config"]
    for more in list(saving.values())[5:]:
        assert more.kind is inspect.Parameter.KEYWORD_ONLY and more.default is not inspect.Parameter.empty
    assert list(inspect.signature(load_checkpoint).parameters) == ["path", "device"]


@pytest.mark.parametrize("config", [CONFIG, ModelConfig(**CONFIG)], ids=["dict", "ModelConfig"])
def test_the_config_is_a_dict_and_is_written_beside(tmp_path: Path, config: Any) -> None:
    save_checkpoint(tmp_path / "a.pt", make(), None, 0, config)
    assert load_checkpoint(tmp_path / "a.pt", "cpu")[0] == CONFIG
    assert load_checkpoint(tmp_path / "a.pt", "cpu")[2:] == (None, 0)
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8")) == CONFIG


def test_extra_round_trips_and_numpy_scalars_become_python_numbers(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "b.pt", make(), None, 0, CONFIG)
    assert read_checkpoint(tmp_path / "b.pt", "cpu")["extra"] == {}
    model, optimizer = trained()
    optimizer.param_groups[0]["lr"] = np.float64(1e-4)
    config: dict[str, Any] = {**CONFIG, "seen": np.int64(3), "rates": (np.float32(0.5), 2)}
    save_checkpoint(tmp_path / "a.pt", model, optimizer, 1, config, extra={"x": {"y": [np.float32(2), None]}, "é": 1})
    saved = read_checkpoint(tmp_path / "a.pt", "cpu")
    assert same(saved["config"]["seen"], 3)
    assert same(saved["config"]["rates"], (0.5, 2))
    assert same(saved["extra"], {"x": {"y": [2.0, None]}, "é": 1})
    assert same(saved["optimizer"]["param_groups"][0]["lr"], 1e-4)


@pytest.mark.parametrize(("where", "value"), [("config", Path("x")), ("extra", np.zeros(3)), ("optimizer", object())])
def test_content_that_could_not_be_loaded_is_rejected_and_the_old_file_stays(
    tmp_path: Path, where: str, value: object
) -> None:
    model, optimizer = trained()
    save_checkpoint(tmp_path / "a.pt", model, optimizer, 1, CONFIG)
    before = (tmp_path / "a.pt").read_bytes()
    config: dict[str, Any] = dict(CONFIG)
    extra: dict[str, Any] = {}
    {"config": config, "extra": extra, "optimizer": optimizer.param_groups[0]}[where]["odd"] = value
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path / "a.pt", model, optimizer, 2, config, extra=extra)
    assert (tmp_path / "a.pt").read_bytes() == before
    assert names(tmp_path) == ["a.pt", "config.json"]


@pytest.mark.parametrize(
    "error", [RuntimeError("std::bad_alloc"), MemoryError(), OSError(12, "Cannot allocate memory")]
)
def test_a_checkpoint_that_cannot_be_read_for_lack_of_memory_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise error

    model, optimizer = trained(1)
    save_checkpoint(tmp_path / "a.pt", model, optimizer, 1, model.config)
    monkeypatch.setattr(torch, "load", load)
    monkeypatch.setattr("niels_gpt.system.host_limits._address_space", lambda: 1 << 30)
    with pytest.raises(CheckpointError, match=r"a\.pt does not fit into the memory of cpu; .* 1\.00 GiB .ulimit -v"):
        read_checkpoint(tmp_path / "a.pt", "cpu")


def test_the_format_is_the_dict_of_torch_save(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    save_checkpoint(tmp_path / "a.pt", model, optimizer, 4, CONFIG)
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    assert same(dict(content["model"]), dict(model.state_dict()))
    assert content["step"] == 4 and content["config"] == CONFIG
    needed = {key: content[key] for key in ("model", "optimizer", "step", "config")}
    for zipped in (True, False):
        torch.save(needed, tmp_path / "b.pt", _use_new_zipfile_serialization=zipped)
        assert same(load_checkpoint(tmp_path / "b.pt", "cpu"), load_checkpoint(tmp_path / "a.pt", "cpu"))


def test_load_model(tmp_path: Path) -> None:
    model, optimizer = trained()
    save_checkpoint(tmp_path / "a.pt", model, optimizer, 3, CONFIG)
    loaded, step = load_model(tmp_path / "a.pt")
    assert step == 3 and not loaded.training
    assert loaded.lm_head.weight is loaded.tok_emb.weight
    ids = torch.arange(8)[None]
    assert torch.equal(loaded(ids), model.eval()(ids))


def test_no_global_generator_is_used(tmp_path: Path, random_states: Any) -> None:
    model, optimizer = trained(1)
    before = random_states()
    save_checkpoint(tmp_path / "a.pt", model, optimizer, 1, CONFIG)
    load_checkpoint(tmp_path / "a.pt", "cpu")
    load_model(tmp_path / "a.pt")
    assert random_states() == before


# --- a checkpoint is publishable -------------------------------------------------------------------


def test_the_file_holds_no_name_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(variable, "user-quetzal")
    monkeypatch.setenv("HOSTNAME", "host-quetzal")
    monkeypatch.setenv("HOME", "/home/user-quetzal")
    monkeypatch.setattr(socket, "gethostname", lambda: "host-quetzal")
    monkeypatch.setattr(platform, "node", lambda: "host-quetzal")
    assert getpass.getuser() == "user-quetzal"
    folder = tmp_path / "folder-quetzal"
    model, optimizer = trained(1)
    save_checkpoint(folder / "file-quetzal.pt", model, optimizer, 1, CONFIG)
    raw = (folder / "file-quetzal.pt").read_bytes() + (folder / "config.json").read_bytes()
    with zipfile.ZipFile(folder / "file-quetzal.pt") as archive:  # in case an entry is compressed
        raw += b"".join(name.encode() + archive.read(name) for name in archive.namelist())
    assert b"quetzal" not in raw
    for private in (str(tmp_path), tmp_path.name, __file__, Path(__file__).name):
        assert private.encode() not in raw


def test_the_bytes_do_not_depend_on_the_path(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    for path in (tmp_path / "a.pt", tmp_path / "elsewhere" / "of-another-name.pt"):
        save_checkpoint(path, model, optimizer, 1, CONFIG)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "elsewhere" / "of-another-name.pt").read_bytes()


# --- a checkpoint is data --------------------------------------------------------------------------


class Hostile:
    """Unpickling this creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize(("where", "kind"), [("extra", "zip"), ("config", "legacy"), ("step", "pickle")])
def test_code_is_rejected_and_does_not_run(tmp_path: Path, where: str, kind: str) -> None:
    marker, path = tmp_path / "it-ran", tmp_path / "a.pt"
    hostile = {"x": Hostile(marker)}
    if kind == "pickle":
        path.write_bytes(pickle.dumps(hostile, protocol=2))
    else:
        torch.save(payload(**{where: hostile}), path, _use_new_zipfile_serialization=kind == "zip")
    for load in (lambda: load_checkpoint(path, "cpu"), lambda: load_model(path), lambda: read_checkpoint(path, "cpu")):
        with pytest.raises(CheckpointError, match=r"a\.pt"):
            load()
    assert not marker.exists()
    pickle.loads(pickle.dumps(Hostile(marker)))  # the trap works
    assert marker.exists()


# --- damaged, foreign, missing ---------------------------------------------------------------------


@pytest.fixture
def smallest(tmp_path: Path) -> Path:
    """A checkpoint of a few kilobytes, so that many of its bytes can be tried."""
    sizes = {"V": 5, "T": 4, "C": 4, "L": 1, "H": 1, "D": 4, "d_ff": 4, "dropout": 0.0}
    torch.manual_seed(0)
    save_checkpoint(tmp_path / "smallest.pt", GPT(sizes), None, 1, sizes)
    return tmp_path / "smallest.pt"


def test_truncated(smallest: Path, tmp_path: Path) -> None:
    raw, path = smallest.read_bytes(), tmp_path / "a.pt"
    for size in range(0, len(raw), 97):
        path.write_bytes(raw[:size])
        with pytest.raises(CheckpointError, match=rf"a\.pt is damaged .*it is {'truncated' if size else 'empty'}"):
            load_checkpoint(path, "cpu")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_a_flipped_byte_is_detected_or_harmless(smallest: Path, tmp_path: Path) -> None:
    """Padding and unused header fields may change; the content that is read may not."""
    raw, path = smallest.read_bytes(), tmp_path / "a.pt"
    intact = read_checkpoint(smallest, "cpu")
    directory = raw.index(b"PK\x01\x02")  # the zip directory at the end of the file
    silent = []
    for at in [*range(0, directory, 41), *range(directory, len(raw), 5)]:
        path.write_bytes(raw[:at] + bytes([raw[at] ^ (1 if at % 2 else 255)]) + raw[at + 1 :])
        try:
            if not same(read_checkpoint(path, "cpu"), intact):
                silent.append(at)
        except CheckpointError as err:
            assert "a.pt" in str(err)
    assert silent == []


def test_a_flipped_weight_is_detected(tmp_path: Path) -> None:
    model = make()
    with torch.no_grad():
        model.tok_emb.weight[0, 0] = 1234.5
    save_checkpoint(tmp_path / "a.pt", model, None, 1, CONFIG)
    raw = (tmp_path / "a.pt").read_bytes()
    at = raw.index(np.float32(1234.5).tobytes())
    (tmp_path / "a.pt").write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    with pytest.raises(CheckpointError, match=r"a\.pt"):
        load_checkpoint(tmp_path / "a.pt", "cpu")


def a_zip_file() -> bytes:
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        archive.writestr("notes.txt", "nothing to see")
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        *((b"", "empty"), (b"hi\n", r"torch\.save did not"), (b"hello\n", r"torch\.save did not")),
        *((b"PK", "truncated"), (b"\x80\x02}q\x00.", ""), (bytes(5000), ""), (a_zip_file(), "")),
    ],
)
def test_not_a_torch_file(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"a\.pt is damaged .*{why}"):
        load_checkpoint(tmp_path / "a.pt", "cpu")


def test_a_file_that_inflates_is_rejected_before_it_is_read(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.pt", make(), None, 1, CONFIG)
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as source,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as target,
    ):
        for entry in source.infolist():
            with target.open(entry.filename, "w", force_zip64=True) as record:
                for _ in range(64 if entry.filename.endswith("data/0") else 0):
                    record.write(bytes(1 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"b\.pt is damaged .*compressed records"):
            read_checkpoint(tmp_path / "b.pt", "cpu")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_records_that_share_their_bytes_are_rejected(tmp_path: Path) -> None:
    """Stored records can point to the same bytes, so that they are larger than the file."""
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data/0", bytes(10_000))
        first = archive.infolist()[0]
        for number in range(1, 40):
            again = copy.copy(first)
            again.filename = f"a/data/{number}"
            archive.filelist.append(again)
    with pytest.raises(CheckpointError, match=r"a\.pt is damaged .*larger than the file"):
        read_checkpoint(tmp_path / "a.pt", "cpu")


def test_the_advice_of_torch_is_not_passed_on(tmp_path: Path) -> None:
    """torch advises weights_only=False for code, and for archives of TorchScript."""
    torch.save({"model": Path("x")}, tmp_path / "code.pt")
    with pytest.warns(DeprecationWarning, match="jit"):
        torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "script.pt"))
    for name in ("code.pt", "script.pt"):
        with pytest.raises(CheckpointError, match=r"\.pt (was rejected|is damaged)") as caught:
            read_checkpoint(tmp_path / name, "cpu")
        assert "weights_only" not in str(caught.value) and "\n" not in str(caught.value)


def payload(**entries: Any) -> dict[str, Any]:
    """The content of a checkpoint, with some entries replaced."""
    return {"model": make().state_dict(), "optimizer": None, "step": 1, "config": CONFIG, "extra": {}} | entries


@pytest.mark.parametrize("missing", ["model", "optimizer", "step", "config"])
def test_a_missing_entry_is_named(tmp_path: Path, missing: str) -> None:
    torch.save({key: value for key, value in payload().items() if key != missing}, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=rf"a\.pt.*{missing}"):
        load_checkpoint(tmp_path / "a.pt", "cpu")


@pytest.mark.parametrize("content", [[1, 2], "text", torch.zeros(3), {}], ids=repr)
def test_not_a_checkpoint(tmp_path: Path, content: Any) -> None:
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"a\.pt"):
        load_checkpoint(tmp_path / "a.pt", "cpu")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"a\.pt"):
        load_checkpoint(tmp_path / "a.pt", "cpu")
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path, "cpu")


@pytest.mark.parametrize(
    ("changes", "weight"),
    [
        ({"V": 18}, "tok_emb"),
        ({"d_ff": 20}, "mlp"),
        ({"L": 3}, r"blocks\.2"),
        ({"L": 1}, r"blocks\.1"),
    ],
)
def test_weights_of_another_architecture(tmp_path: Path, changes: dict[str, int], weight: str) -> None:
    save_checkpoint(tmp_path / "a.pt", make(), None, 1, {**CONFIG, **changes})
    with pytest.raises(CheckpointError, match=rf"a\.pt.*{weight}"):
        load_model(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("entry", "facts"),
    [
        ({"config": {**CONFIG, "width": 3}}, ["model.width", "d_ff"]),  # and the known keys
        ({"config": {**CONFIG, "C": 9}}, ["model.C=9", "model.H=2"]),
        ({"config": {**CONFIG, "D": torch.zeros(3)}}, ["model.D", "tensor"]),
        ({"config": None}, ["config", "not a dict"]),
        ({"model": dict.fromkeys(make().state_dict(), 3)}, ["weights", "tok_emb.weight"]),
        ({"model": None}, ["weights", "dict"]),
        ({"model": []}, ["weights", "dict"]),
    ],
    ids=["unknown key", "odd sizes", "tensors", "no config", "numbers for weights", "no weights", "a list of weights"],
)
def test_content_that_cannot_be_a_model(tmp_path: Path, entry: dict[str, Any], facts: list[str]) -> None:
    """load_model raises CheckpointError with the path and what is wrong; without the entry it loads the model."""
    torch.save(payload(), tmp_path / "a.pt")
    load_model(tmp_path / "a.pt")
    torch.save(payload(**entry), tmp_path / "a.pt")
    with pytest.raises(CheckpointError) as caught:
        load_model(tmp_path / "a.pt")
    message = str(caught.value)
    assert all(fact in message for fact in [str(tmp_path / "a.pt"), *facts]) and "\n" not in message


@pytest.mark.parametrize(
    "entry",
    [
        *({"step": -1}, {"step": True}, {"config": []}),
        *({"extra": None}, {"extra": {"data": []}}, {"optimizer": torch.zeros(2)}),
    ],
    ids=repr,
)
def test_entries_of_the_wrong_type(tmp_path: Path, entry: dict[str, Any]) -> None:
    torch.save(payload(**entry), tmp_path / "a.pt")
    for read in (read_checkpoint, load_checkpoint, load_model):
        with pytest.raises(CheckpointError, match=rf"a\.pt.*{next(iter(entry))}") as caught:
            read(tmp_path / "a.pt", "cpu")
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("step", "extra"), [(-1, {}), (1, {"data": [1]})])
def test_invalid_entries_are_not_written(tmp_path: Path, step: int, extra: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"a\.pt"):
        save_checkpoint(tmp_path / "a.pt", make(), None, step, CONFIG, extra=extra)
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "positions"),
    [
        ({"C": 2**40}, "rope"),
        ({"T": 2**50}, "rope"),
        ({"T": 2**50}, "learned"),
        ({"L": 2**70}, "learned"),
    ],
)
def test_a_config_larger_than_its_weights_is_not_built(tmp_path: Path, change: dict[str, int], positions: str) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "D"} | {"positions": positions}
    save_checkpoint(tmp_path / "a.pt", make(positions=positions), None, 1, config | change)
    with pytest.raises(CheckpointError, match=r"a\.pt"):
        load_model(tmp_path / "a.pt")


@pytest.mark.parametrize(
    "change",
    [lambda w: w.to("meta"), lambda w: w.to_sparse(), lambda w: w.int(), lambda w: w.cfloat()],
    ids=["meta", "sparse", "int", "complex"],
)
def test_weights_that_are_not_dense_floats(tmp_path: Path, change: Any) -> None:
    state = make().state_dict()
    state["norm.weight"] = change(state["norm.weight"])
    torch.save(payload(model=state), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"a\.pt.*norm\.weight"):
        load_model(tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"a\.pt.*norm\.weight"):
        check_weights(make(1).state_dict(), state, where="a.pt")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_of_another_precision_are_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    weights = {name: weight.to(dtype) for name, weight in make().state_dict().items()}
    torch.save(payload(model=weights), tmp_path / "a.pt")
    loaded = load_model(tmp_path / "a.pt")[0].state_dict()
    assert same(dict(loaded), {name: weight.float() for name, weight in weights.items()})


# --- writes are atomic -----------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "number"), [("fsync", errno.ENOSPC), ("replace", errno.EIO)])
def test_a_failing_call_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    save_checkpoint(tmp_path / "a.pt", make(0), None, 1, CONFIG)
    before = (tmp_path / "a.pt").read_bytes()

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)  # pathlib uses os.replace too
        with pytest.raises(OSError, match=r"a\.pt") as caught:
            save_checkpoint(tmp_path / "a.pt", make(1), None, 2, CONFIG)
    assert caught.value.errno == number
    assert names(tmp_path) == ["a.pt", "config.json"]
    assert (tmp_path / "a.pt").read_bytes() == before
    assert load_checkpoint(tmp_path / "a.pt", "cpu")[3] == 1


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """A process that may not write beyond a file size gets an OSError, and nothing is lost."""
    resource = pytest.importorskip("resource")
    path = tmp_path / "a.pt"
    save_checkpoint(path, make(0), None, 1, CONFIG)
    size = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for limit in (0, size // 2, size - 1):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            with pytest.raises(OSError, match=r"a\.pt"):
                save_checkpoint(path, make(1), None, 2, CONFIG)
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert names(tmp_path) == ["a.pt", "config.json"]
    _, state, _, step = load_checkpoint(path, "cpu")
    assert step == 1 and same(dict(state), dict(make(0).state_dict()))
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8")) == CONFIG
