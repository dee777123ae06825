"""Use a model: sampling, cached decoding, text generation, conversations, continuous batching.

All entry points share one calling convention. The model and the prompt come first; the rest is keyword-only:

- `max_new_tokens`: the longest continuation, in tokens (bytes for a model over bytes).
- `sampling`: a `Sampling`; None means its defaults. (By the spec `generate` takes the fields of `Sampling` instead.)
- `generator`: a `torch.Generator`; None means torch's default one. For several prompts, one for all or one each.
- `stop`: what ends a text: strings where text comes out, token ids in `Engine.submit`.
- `tokenizer`: None means bytes.

| call | prompt | result |
|---|---|---|
| `generate(model, text, ...)` | one text | the prompt and its continuation |
| `stream_text(model, text or ids, ...)` | one text, or its ids | an iterator over pieces of the continuation |
| `generate_batch(model, texts, ...)` | several texts | prompt and continuation of each |
| `Conversation(model, ...).reply(text)` | a user's message | an iterator over pieces of the reply |
| `Engine(model).submit(ids, ...)` | ids | a `Request`; `step` returns its new tokens |
"""
