"""Runs the life of a fit: comparing stock with rewritten, guarding, saving."""
