"""Draws timelines; each module is imported when it is needed, and none knows costs or graphs."""
