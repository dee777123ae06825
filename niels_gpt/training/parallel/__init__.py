"""Training on several processes: DDP, FSDP2, and the checks that all processes agree."""
