"""Compiled pipelines: the plain pipeline's numbers, from one function."""
