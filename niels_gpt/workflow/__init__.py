"""Whole jobs, from a folder of text to a model that answers: plan, build the caches, train, measure."""
