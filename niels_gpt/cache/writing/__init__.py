"""Writing token caches: encoding, shards, resumable builds, atomic publication."""
