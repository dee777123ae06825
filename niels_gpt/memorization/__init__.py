"""What a model has memorized: extraction probabilities, membership, and the audit of notes."""
