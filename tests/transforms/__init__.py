"""What gradient transforms promise, by themselves and on real optimizers."""
