"""Tells the user: the report of a training, its page."""
