"""Atomic writes, links, hashes, locks, and messages for errors of the file system."""

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import filelock
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import niels_gpt
from niels_gpt.system import files


class Crash(BaseException):
    """An exception that `except Exception` does not catch, such as KeyboardInterrupt."""


def start_python(code, *args):
    env = {**os.environ, "PYTHONPATH": str(Path(niels_gpt.__file__).parents[1])}
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, encoding="utf-8")


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


# --- atomic writes -----------------------------------------------------------------------------------


def test_a_file_appears_or_changes_only_when_the_block_ends(tmp_path):
    path = tmp_path / "data.bin"
    with files.atomic_write(path) as file:
        file.write(b"old")
        file.flush()
        assert not path.exists()
        assert all(name.startswith(".") for name in names_in(tmp_path))
    with files.atomic_write(str(path)) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert names_in(tmp_path) == ["data.bin"]


def test_two_writers_of_one_file_do_not_collide(tmp_path):
    path = tmp_path / "data.bin"
    with files.atomic_write(path) as first, files.atomic_write(path) as second:
        first.write(b"a" * 10)
        second.write(b"b" * 5)
    assert path.read_bytes() == b"a" * 10  # the outer block ends last
    assert names_in(tmp_path) == ["data.bin"]


def test_bytes_reach_the_disk_before_the_name_does(tmp_path, monkeypatch):
    path, events = tmp_path / "data.bin", []
    fsync, replace = os.fsync, os.replace

    def recording_fsync(descriptor):
        status = os.fstat(descriptor)
        kind = "folder" if stat.S_ISDIR(status.st_mode) else f"{status.st_size} bytes"
        events.append(("fsync", kind, path.exists()))
        fsync(descriptor)

    def recording_replace(source, target):
        events.append(("replace", Path(target).name, path.exists()))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    monkeypatch.setattr(os, "replace", recording_replace)
    files.write_bytes(path, b"x" * 1000)
    assert events == [
        ("fsync", "1000 bytes", False),
        ("replace", "data.bin", False),
        ("fsync", "folder", True),
    ]


FAILURES = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError(errno.EIO, "Input/output error"),
    OSError("without a number"),
    ValueError("a bug in the caller"),
    KeyboardInterrupt(),
    Crash(),
]


@settings(max_examples=60)
@given(
    old=st.none() | st.binary(max_size=50),
    pieces=st.lists(st.binary(max_size=20), min_size=1, max_size=5),
    failure=st.sampled_from(FAILURES),
    where=st.sampled_from(["block", "write", "fsync", "replace"]),
    data=st.data(),
)
def test_a_failure_anywhere_leaves_the_old_file(old, pieces, failure, where, data):
    moment = data.draw(st.integers(0, len(pieces) - 1))

    def fail(*args):
        raise failure

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "data.bin"
        if old is not None:
            path.write_bytes(old)
        if where in ("fsync", "replace"):
            patch.setattr(os, where, fail)
        with pytest.raises(type(failure)) as caught, files.atomic_write(path) as file:
            for number, piece in enumerate(pieces):
                if where == "block" and number == moment:
                    raise failure
                if where == "write" and number == moment:
                    file.write(piece[: len(piece) // 2])
                    fail()
                file.write(piece)
        patch.undo()
        assert names_in(Path(folder)) == ([] if old is None else ["data.bin"])
        if old is not None:
            assert path.read_bytes() == old
        if isinstance(failure, OSError) and failure.errno:
            assert caught.value.errno == failure.errno
            assert str(path) in str(caught.value)
            assert ("previous file is intact" in str(caught.value)) == (old is not None)
            assert ("free some space" in str(caught.value)) == (failure.errno == errno.ENOSPC)


def test_a_disk_that_is_really_full(tmp_path):
    resource = pytest.importorskip("resource")
    path = tmp_path / "data.bin"
    path.write_bytes(b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(OSError, match=r"data\.bin.*intact.*free some space"):
            files.write_bytes(path, b"n" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == b"old"
    assert names_in(tmp_path) == ["data.bin"]


def test_sudden_death_in_mid_write(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(b"old")
    (tmp_path / "notes.tmp").write_bytes(b"another program's")
    (tmp_path / ".draft.tmp").write_bytes(b"another program's")
    (tmp_path / ".notes.7.1.tmp").mkdir()
    code = (
        "import os, sys\n"
        "from niels_gpt.system import files\n"
        "with files.atomic_write(sys.argv[1]) as file:\n"
        "    file.write(b'new' * 1000); file.flush(); os._exit(9)\n"
    )
    assert start_python(code, path).wait() == 9
    assert path.read_bytes() == b"old"
    assert len(names_in(tmp_path)) == 5  # with the temporary file of the dead writer
    files.remove_temporaries(tmp_path)
    assert names_in(tmp_path) == [".draft.tmp", ".notes.7.1.tmp", "data.bin", "notes.tmp"]
    files.remove_temporaries(tmp_path, ours=True)
    assert names_in(tmp_path) == ["data.bin", "notes.tmp"]
    files.write_bytes(path, b"new")
    assert path.read_bytes() == b"new"


def test_an_output_path_is_checked_without_writing(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in ("new", "a/b/c"):
        files.check_output_path(tmp_path / path, "--out")
        files.check_output_path(tmp_path / path, "--out", folder=True)
    files.check_output_path(tmp_path / "file", "--out")
    files.check_output_path(tmp_path, "--out", folder=True)
    assert names_in(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("path", "folder", "message"),
    [
        (".", False, r"^\. is a folder.*--out"),
        ("file", True, "^file is a file.*--out"),
        ("file/below", False, "/file is a file.* file/below .*--out"),
        ("file/a/b", True, "/file is a file.* file/a/b .*--out"),
    ],
)
def test_an_output_path_that_cannot_be_created(tmp_path, monkeypatch, path, folder, message):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        files.check_output_path(path, "--out", folder=folder)


def test_an_output_path_without_permission(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(ValueError, match=f"{tmp_path}.*--out"):
        files.check_output_path(tmp_path / "a" / "b", "--out")
    with pytest.raises(ValueError, match=f"{tmp_path}.*--out"):
        files.check_output_path(tmp_path, "--out", folder=True)


@settings(max_examples=30)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_text_is_written_as_it_is(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        files.write_text(path, text)
        assert path.read_bytes() == text.encode("utf-8")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text("aé€\n\"'"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abcé", max_size=3), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=40)
@given(VALUES)
def test_json_comes_back(value):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "value.json"
        files.write_json(path, value)
        assert json.loads(path.read_text(encoding="utf-8")) == value
        assert path.read_bytes().endswith(b"\n")


def test_json_golden_and_a_failure_leaves_the_old_file(tmp_path):
    files.write_json(tmp_path / "a.json", {"é": "caf\udce9"})
    assert (tmp_path / "a.json").read_bytes() == b'{\n  "\\u00e9": "caf\\udce9"\n}\n'
    files.write_json(tmp_path / "b.json", {"é": 1, "a": {"d": 2, "c": "é"}})  # keys are sorted
    before = '{\n  "a": {\n    "c": "é",\n    "d": 2\n  },\n  "é": 1\n}\n'.encode()
    assert (tmp_path / "b.json").read_bytes() == before
    with pytest.raises(TypeError):
        files.write_json(tmp_path / "b.json", {"a": object()})
    with pytest.raises(ValueError, match="surrogate"):
        files.write_text(tmp_path / "b.json", "bad \ud800")
    with pytest.raises(FileNotFoundError):
        files.link_or_copy(tmp_path / "nowhere", tmp_path / "b.json")
    assert (tmp_path / "b.json").read_bytes() == before
    assert names_in(tmp_path) == ["a.json", "b.json"]


def test_large_json_is_one_line(tmp_path):
    """Up to 2**20 characters it is indented, above that it is one line."""
    overhead = len(json.dumps({"a": ""}, indent=2))
    for size, lines in ((2**20 - overhead, 3), (2**20 - overhead + 1, 1)):
        files.write_json(tmp_path / "large.json", {"a": "x" * size})
        text = (tmp_path / "large.json").read_text(encoding="utf-8")
        assert json.loads(text) == {"a": "x" * size}
        assert text.count("\n") == lines


# --- links -------------------------------------------------------------------------------------------


def test_link_is_the_same_file(tmp_path):
    first, second, name = tmp_path / "first", tmp_path / "second", tmp_path / "best"
    first.write_bytes(b"1")
    second.write_bytes(b"2")
    files.link_or_copy(first, name)
    assert name.samefile(first)
    for _ in range(2):  # rename(2) between two names of one file does nothing, and keeps both
        files.link_or_copy(second, name)
        assert name.samefile(second)
    assert (first.read_bytes(), second.read_bytes()) == (b"1", b"2")
    assert names_in(tmp_path) == ["best", "first", "second"]


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EACCES, "permissions"),
        (errno.EROFS, "choose another path"),
        (errno.ENOTDIR, "choose another path"),
        (errno.EEXIST, "choose another path"),
        (errno.EISDIR, "remove it"),
        (errno.ENOENT, "check the path"),
        (errno.ENOSPC, "free some space"),
        (errno.EIO, ""),
    ],
)
def test_errors_of_the_system_have_a_path_and_a_remedy(number, remedy):
    for name in ("/a/b", b"/a/b"):
        text = files.describe_os_error(OSError(number, os.strerror(number), name))
        assert text.startswith(f"cannot open /a/b: {os.strerror(number)}") and remedy in text


def test_messages_with_a_remedy_are_unchanged():
    assert files.describe_os_error(OSError(28, "cannot write x: full")) == "cannot write x: full"
    assert files.describe_os_error(OSError("no such thing")) == "no such thing"
    without_number = OSError("some text")
    without_number.strerror, without_number.filename = "as it is", "/a"
    assert files.describe_os_error(without_number) == "as it is"


@pytest.mark.parametrize(("name", "named"), [("file/x.lock", "file"), ("file/below/x.lock", "file/below")])
def test_a_lock_file_that_cannot_be_created_is_named(tmp_path, name, named):
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(OSError, match="choose another path") as caught, files.lock(tmp_path / name):
        pytest.fail("the lock was acquired")
    assert f"cannot write {tmp_path / named}:" in str(caught.value)


def test_writing_over_a_folder_or_into_a_missing_one_names_it(tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(IsADirectoryError, match="remove it") as caught:
        files.write_bytes(tmp_path / "x", b"")
    assert str(tmp_path / "x") in str(caught.value) and "intact" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match="nowhere") as caught:
        files.write_bytes(tmp_path / "nowhere" / "data.bin", b"x")
    assert "intact" not in str(caught.value)
    assert names_in(tmp_path) == ["x"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_read_only_folder_needs_no_lock(tmp_path, monkeypatch, number):
    def refuse(path, *args, **kwargs):
        raise OSError(number, os.strerror(number), str(path))

    (tmp_path / ".a.bin.7.1.tmp").write_bytes(b"left by a killed writer")
    with files.lock_folder(tmp_path):
        assert names_in(tmp_path) == ["build.lock"]
    monkeypatch.setattr(filelock.FileLock, "acquire", refuse)
    with files.lock_folder(tmp_path):
        pass
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(OSError, match=r"cannot write .*nowhere"), files.lock_folder(tmp_path / "nowhere"):
        pytest.fail("the folder was locked")


def test_link_copies_where_there_are_no_hard_links(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.EPERM, "Operation not permitted")

    first, name = tmp_path / "first", tmp_path / "best"
    first.write_bytes(b"1" * 100_000)
    name.write_bytes(b"old")
    monkeypatch.setattr(os, "link", refuse)
    files.link_or_copy(first, name)
    assert name.read_bytes() == b"1" * 100_000
    assert not name.samefile(first)
    assert names_in(tmp_path) == ["best", "first"]


SHA256 = {  # FIPS 180-2, and the million letters of its long example
    b"": "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    b"abc": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    b"a" * 1_000_000: "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0",
}


@pytest.mark.parametrize("data", SHA256, ids=len)
def test_sha256(tmp_path, data):
    path = tmp_path / "data"
    path.write_bytes(data)
    assert files.sha256_bytes(data) == SHA256[data]
    assert files.sha256_file(path) == SHA256[data]
    assert files.sha256_file(str(path)) == SHA256[data]


# --- locks -------------------------------------------------------------------------------------------


def assert_free(path):
    with files.lock(path, wait=False):
        pass


def test_a_lock_is_exclusive(tmp_path):
    path = tmp_path / "new" / "folder" / "run.lock"
    with pytest.raises(Crash), files.lock(path):
        raise Crash
    with files.lock(path):  # the exception freed it
        assert path.exists()
        with pytest.raises(BlockingIOError), files.lock(path, wait=False):
            raise AssertionError("held twice")
        with files.lock(path.with_name("other.lock"), wait=False):
            pass
    assert_free(path)


def test_the_system_frees_the_lock_of_a_killed_process(tmp_path):
    path = tmp_path / "run.lock"
    code = (
        "import sys, time\n"
        "from niels_gpt.system import files\n"
        "with files.lock(sys.argv[1]):\n"
        "    print('held', flush=True); time.sleep(600)\n"
    )
    holder = start_python(code, path)
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError), files.lock(path, wait=False):
            raise AssertionError("held twice")
        threading.Timer(0.1, holder.kill).start()
        with files.lock(path):  # waits
            pass
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    assert_free(path)


def test_expand_home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert files.expand_home("~/notes") == Path("/home/someone/notes")
    assert files.expand_home("~") == Path("/home/someone")
    for name in ("~unknown-user/x", "~draft.txt", "a/~/b", "/a", "b"):
        assert files.expand_home(name) == Path(name)


def test_a_device_is_written_to_and_stays_a_device(tmp_path):
    """A replaced device would swallow all later output of the machine; a pipe has a reader."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        files.write_text(pipe, "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode) and names_in(tmp_path) == ["pipe"]
    with pytest.raises(OSError, match="/dev/full"):
        files.write_text("/dev/full", "text")
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)


def test_a_link_is_followed(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder/file")
    for text in ("new", "replaced"):
        files.write_text(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "folder" / "file").read_text(encoding="utf-8") == text
    (tmp_path / "to a folder").symlink_to("folder")
    with pytest.raises(IsADirectoryError, match="to a folder"):
        files.write_text(tmp_path / "to a folder", "text")


@pytest.mark.parametrize(
    ("before", "umask", "after"), [(0o600, 0o022, 0o600), (0o644, 0o077, 0o600), (0o664, 0, 0o664)]
)
def test_a_replaced_file_passes_on_its_permissions(tmp_path, before, umask, after):
    path = tmp_path / "file"
    path.touch()
    path.chmod(before)
    mask = os.umask(umask)
    try:
        files.write_text(path, "text")
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == after


def test_temporaries_of_dead_processes_are_swept(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left, living, other = (f".f.{dead.pid}.0.tmp", f".f.{os.getppid()}.0.tmp", f".g.{dead.pid}.0.tmp")
    for name in (left, living, other):
        (tmp_path / name).touch()
    files.write_text(tmp_path / "f", "text")
    assert names_in(tmp_path) == sorted(["f", living, other])


def test_matching_entries_of_a_folder(tmp_path, monkeypatch):
    for name in ("b.bin", "a.bin", ".hidden.bin", "c.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in files.matching(tmp_path, "*.bin")] == [".hidden.bin", "a.bin", "b.bin"]
    assert [path.name for path in files.matching(tmp_path, "[!.]*.bin")] == ["a.bin", "b.bin"]
    assert files.matching(tmp_path / "absent", "*") == files.matching(tmp_path / "c.txt", "*") == []

    def refuse(folder):
        raise PermissionError(errno.EACCES, "denied", str(folder))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(PermissionError):
        files.matching(tmp_path, "*")
