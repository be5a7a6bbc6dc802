"""Captures, parameters, wrapped losses, steps and runs."""
