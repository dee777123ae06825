"""The command line. Each command's options are in `main`, its work in the module of its topic."""
