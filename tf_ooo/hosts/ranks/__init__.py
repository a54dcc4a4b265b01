"""Connects processes that train together: which there are, and what they say to each other."""
