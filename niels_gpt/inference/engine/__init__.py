"""Continuous batching: many requests decoded together, joining and leaving between steps."""
