"""Files that we write, read by the `safetensors` library and by us."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from niels_gpt.pretrained.safetensors_file import NamedTensor, read_header, write_safetensors

TENSORS = {
    "b": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)),
    "a": torch.tensor([1.0, float("inf"), -0.0]),
    "empty": torch.zeros(0, 4),
    "transposed é": torch.arange(6.0).view(2, 3).t(),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_library_reads_what_was_written(tmp_path, dtype):
    path = tmp_path / "m.safetensors"
    tensors = [NamedTensor(name, tuple(t.shape), lambda t=t: t) for name, t in TENSORS.items()]
    write_safetensors(path, tensors, dtype)
    loaded, ours = load_file(path), {name: stored.read() for name, stored in read_header(path).items()}
    assert loaded.keys() == ours.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        for found in (loaded[name], ours[name]):
            assert found.dtype == dtype and torch.equal(found, tensor.to(dtype))
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 8 == 0


def test_a_wrong_shape_writes_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"\bx\b.*\(2,\).*\(3,\)"):
        write_safetensors(tmp_path / "m.safetensors", [NamedTensor("x", (3,), lambda: torch.zeros(2))], torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_float16_does_not_have_write_nothing(tmp_path):
    large = NamedTensor("x", (2,), lambda: torch.tensor([65504.0, -70000.0]))
    with pytest.raises(ValueError, match=r"\bx\b.*70000.*float16.*65504"):
        write_safetensors(tmp_path / "m.safetensors", [large], torch.float16)
    assert list(tmp_path.iterdir()) == []
    write_safetensors(tmp_path / "m.safetensors", [large], torch.bfloat16)
