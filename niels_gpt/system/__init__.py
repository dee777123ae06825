"""Files, random number generators, devices, processes and the terminal: what every layer may use."""
