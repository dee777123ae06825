"""What a run trains on: byte streams, token caches, chats or splice spans, as batches."""
