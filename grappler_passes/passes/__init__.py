"""Defines GraphDef in, GraphDef out: one pass a file, and what they are made of."""
