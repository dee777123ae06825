"""The machine and the software on it, in words."""

from types import SimpleNamespace

import torch

from niels_gpt.system import machine


def test_gpus_are_described(monkeypatch):
    gpu = SimpleNamespace(name="Abacus 9000", total_memory=2**31, major=9, minor=1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    _, first, second, apple = machine.devices()
    assert first == "cuda:0: Abacus 9000, 2 GiB, compute capability 9.1"
    assert second.startswith("cuda:1: ") and apple.startswith("mps: ")


def test_the_processor_is_named(tmp_path, monkeypatch):
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "Path", lambda _: cpuinfo)
    assert machine.devices()[0].startswith("cpu: ")  # no such file outside Linux
    cpuinfo.write_text("processor: 0\nmodel name : Abacus 1\nmodel name : Abacus 2\n", encoding="utf-8")
    assert machine.devices()[0] == "cpu: Abacus 1"


def test_versions_of_packages():
    assert machine.package_version("torch") == torch.__version__
    assert machine.package_version("no-such-package-1") is None


def test_facts_name_the_device_in_use():
    facts = machine.machine_facts("cpu")
    assert facts["device"] == "cpu" and facts["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads() and facts["devices"] == machine.devices()
