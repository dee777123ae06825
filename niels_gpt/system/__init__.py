"""Files, random generators, devices, processes and the console: shared by all layers."""
