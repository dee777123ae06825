"""The setting of glibc's allocator."""

import sys

import pytest

from niels_gpt.system.allocator import keep_freed_memory, share_one_arena


class FakeLibc:
    def __init__(self):
        self.calls = []

    def mallopt(self, option, value):
        self.calls.append((option, value))
        return 1


def test_freed_memory_is_kept_on_linux(monkeypatch):
    libc = FakeLibc()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("ctypes.CDLL", lambda name: libc)
    keep_freed_memory.__wrapped__()
    options = dict(libc.calls)
    # M_TRIM_THRESHOLD is -1 and M_MMAP_THRESHOLD is -3 in glibc's malloc.h; 32 MiB is its own upper bound.
    assert options == {-3: 2**30, -1: 2**31 - 1}  # mallopt takes a C int


@pytest.mark.parametrize("failure", [OSError("no libc.so.6"), AttributeError("mallopt")])
def test_other_c_libraries_are_no_error(monkeypatch, failure):
    asked = []

    def missing(name):
        asked.append(name)
        raise failure

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("ctypes.CDLL", missing)
    keep_freed_memory.__wrapped__()
    assert asked == ["libc.so.6"]


def test_nothing_changes_on_other_systems(monkeypatch):
    libc = FakeLibc()
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("ctypes.CDLL", lambda name: libc)
    keep_freed_memory.__wrapped__()
    assert libc.calls == []


def test_threads_share_one_arena_on_linux(monkeypatch):
    libc = FakeLibc()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("ctypes.CDLL", lambda name: libc)
    share_one_arena.__wrapped__()
    assert libc.calls == [(-8, 1)]  # M_ARENA_MAX
