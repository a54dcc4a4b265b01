"""Holds graphs as data: ops, values, dependencies, sizes and lifetimes."""
