"""The command line: one file per command, with its options, its work and what it prints."""
