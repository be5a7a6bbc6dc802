"""Laws, oracles and refusals of the penalties."""
