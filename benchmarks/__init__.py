"""Benchmarks that need no accelerator. ``make bench`` runs them all; ``python -m benchmarks.run --help`` lists them."""
