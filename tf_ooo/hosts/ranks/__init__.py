"""Processes that train together: which there are, and what they say to each other."""
