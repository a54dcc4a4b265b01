"""Benchmarks that a user can run on their own machine."""
