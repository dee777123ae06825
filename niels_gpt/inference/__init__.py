"""Use a model: sampling, cached decoding, text generation, conversations."""
