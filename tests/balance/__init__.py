"""Weights from gradient reports."""
