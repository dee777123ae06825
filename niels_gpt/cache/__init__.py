"""Token caches: text tokenised once, verified always, read from disk."""
