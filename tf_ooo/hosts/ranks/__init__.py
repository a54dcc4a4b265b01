"""Connects processes that train together: knows their members and carries their messages."""
