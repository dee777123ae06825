"""Token caches: text is tokenized once, checked, and read from disk."""
