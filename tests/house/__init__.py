"""Tests that hold the house: structure, surface, cost, types, and the words around the code."""
