"""Build caches by source name: which texts go in, with which tokenizer and limits."""
