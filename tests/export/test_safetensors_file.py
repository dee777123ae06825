"""Our writer and the `safetensors` library agree."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from niels_gpt.export.safetensors_file import NamedTensor, write_safetensors

TENSORS = {
    "b": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)),
    "a": torch.tensor([1.0, float("inf"), -0.0]),
    "empty": torch.zeros(0, 4),
    "transposed é": torch.arange(6.0).view(2, 3).t(),
}


@pytest.mark.parametrize(
    ("dtype", "expected"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.half)]
)
def test_the_library_reads_what_was_written(tmp_path, dtype, expected):
    path = tmp_path / "m.safetensors"
    tensors = [NamedTensor(name, tuple(t.shape), lambda t=t: t) for name, t in TENSORS.items()]
    write_safetensors(path, tensors, dtype=dtype)
    loaded = load_file(path)
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == expected and torch.equal(loaded[name], tensor.to(expected))
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 8 == 0


def test_a_wrong_shape_writes_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"\bx\b.*\(2,\).*\(3,\)"):
        write_safetensors(tmp_path / "m.safetensors", [NamedTensor("x", (3,), lambda: torch.zeros(2))])
    assert list(tmp_path.iterdir()) == []
