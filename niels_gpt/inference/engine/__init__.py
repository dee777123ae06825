"""Continuous batching: many requests decoded together."""
