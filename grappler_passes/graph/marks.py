"""Attributes that say something about a node, written by one room and read by another."""

VARIABLE_ATTR = "_ooo_variable"
"""On arguments that are variables: JSON ``{"name": str, "trainable": bool}``."""
