"""Speed, memory and accuracy, each beside a peer in the same run.

``python -m benchmarks`` runs all; ``python -m benchmarks norms`` one. What was measured, where and
with which versions, is in ``RESULTS.md``.
"""
