"""When to track, what the parameters say, and what many steps say together."""
