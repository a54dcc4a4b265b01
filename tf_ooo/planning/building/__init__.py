"""Builds what several policies share."""
