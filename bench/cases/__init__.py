"""The cases, one module each; importing one imports neither torch nor any contender."""
