"""Holds the passes, one per file: each takes a GraphDef and returns a GraphDef."""
