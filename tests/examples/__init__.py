"""The examples run, and the docs show what they print."""
