"""Benchmarks: ways of training take turns, every turn is kept, and each gain has an interval."""
