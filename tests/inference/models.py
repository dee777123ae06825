"""Models for the tests of inference (random weights that make every token matter, scripted replies), and checks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from niels_gpt import GPT, ModelConfig
from niels_gpt.inference.decoding import Decoder, EngineDecoder
from niels_gpt.inference.sampling import Sampling
from tests.token_caches import special, tokenizer

GREEDY = Sampling(temperature=0.0)


def spread_model(*, V: int = 256, T: int = 16, dropout: float = 0.3, dtype: torch.dtype = torch.float64) -> GPT:
    """Return a model whose weights are large enough that every token in the window matters.

    In float64 the ways to compute the same logits differ by 1e-13, so no near-tie changes an id.
    """
    torch.manual_seed(2)
    model = GPT(ModelConfig(V=V, T=T, C=32, L=2, H=2, d_ff=64, dropout=dropout))
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape)
            gain = 4 if name.endswith(("out.weight", "down.weight")) else 2
            p.copy_(1 + 0.3 * noise if p.dim() == 1 else gain * noise / p.shape[1] ** 0.5)
        model.tok_emb.weight.copy_(0.3 * torch.randn(V, 32))
        model.norm.weight.mul_(2)
    return model.to(dtype).eval()


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Scripted(nn.Module):
    """Answers each new prompt with the next of the given replies (bytes or ids), and records the prompts."""

    def __init__(self, *replies: Sequence[int], V: int = 256, T: int = 4096, after: int = ord(".")) -> None:
        """`after`: the token that follows a reply."""
        super().__init__()
        self.config = ModelConfig(V=V, T=T, C=2, L=1, H=1)
        self.tok_emb = nn.Embedding(V, 2)
        self.replies = [list(reply) for reply in replies]
        self.prompts: list[list[int]] = []
        self.calls = 0
        self._after = after
        self._expected: list[int] = []
        self._at = 0

    @property
    def device(self) -> torch.device:
        return self.tok_emb.weight.device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        window = x[0].tolist()
        if window != self._expected:  # not the last window and its token: a new prompt
            self.prompts.append(window)
            self._at = 0
        self.calls += 1
        reply = self.replies[len(self.prompts) - 1]
        token = reply[self._at] if self._at < len(reply) else self._after
        self._at += 1
        self._expected = [*window, token][-self.config.T :]
        return 50.0 * nn.functional.one_hot(torch.tensor(token), self.config.V).float().expand(*x.shape, -1)


def scripted_tokens(*replies: Sequence[int], T: int = 4096) -> Scripted:
    """Return a `Scripted` over the ids of the test tokenizer."""
    return Scripted(*replies, V=tokenizer().vocab_size, T=T, after=tokenizer().encode("the")[0])


def text_of(ids: Sequence[int]) -> str:
    """Return the text of ids of the test tokenizer."""
    return b"".join(tokenizer().token_bytes[i] for i in ids).decode("utf-8", errors="replace")


def token_model(T: int = 16) -> GPT:
    """Return a `spread_model` over the test tokenizer that never emits a role id."""
    model = spread_model(V=tokenizer().vocab_size, T=T)
    with torch.no_grad():  # the head shares the embedding's weight
        model.tok_emb.weight[[special(name) for name in ("sys", "usr", "asst")]] = 0.0
    return model


@torch.no_grad()
def naive_greedy(model: GPT, prompt: Sequence[int], steps: int, *, end: int | None = None) -> list[int]:
    """Return the greedy continuation, one forward pass over the last T ids per token, up to `end`."""
    ids, T = list(prompt), model.config.T
    for _ in range(steps):
        token = int(model(torch.tensor([ids[-T:]]))[0, -1].argmax())
        if token == end:
            break
        ids.append(token)
    return ids[len(prompt) :]


def check_engine_decoder(decoder: EngineDecoder, plain: Decoder) -> None:
    """Check that both give the same tokens; row 3 is finished after four."""
    prompts = [list(ids) for ids in plain.ids]
    got = [list(prompt) for prompt in prompts]
    for row, tokens in decoder.tokens():
        got[row] += tokens
        if row == 3 and len(got[row]) >= len(prompts[row]) + 4:
            decoder.finish(row)
            del got[row][len(prompts[row]) + 4 :]
    decoder.close()
    for _ in plain.tokens():
        pass
    assert got == [ids[: len(prompts[3]) + 4] if row == 3 else ids for row, ids in enumerate(plain.ids)]
