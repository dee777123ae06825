"""One module per case; importing one imports neither torch nor any contender."""
