"""EleutherAI's lm_eval runs on an export and gives our log-likelihoods; skipped where it is not installed."""

import pytest
import torch

from niels_gpt.export.hugging_face import write_hf
from tests.export import make


@pytest.mark.slow
@torch.no_grad()
def test_log_likelihoods_are_ours(tmp_path):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = make("v1")
    write_hf(model, tokenizer, tmp_path)
    text = "Some words, and more of them."
    harness = HFLM(pretrained=str(tmp_path), device="cpu", dtype="float32", batch_size=1)
    request = Instance(request_type="loglikelihood_rolling", doc={}, arguments=(text,), idx=0)
    [found] = harness.loglikelihood_rolling([request])
    ids = [tokenizer.special_token_ids()["eot"], *tokenizer.encode(text)]
    log_p = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
    expected = float(log_p.gather(1, torch.tensor(ids[1:])[:, None]).sum())
    assert found == pytest.approx(expected, abs=1e-3)
