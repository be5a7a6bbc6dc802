"""Pipelines in the trainers that people use, in real runs of each."""
