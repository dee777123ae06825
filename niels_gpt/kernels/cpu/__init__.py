"""Training kernels for the CPU: C compiled on this machine, and fast compositions of torch operators."""
