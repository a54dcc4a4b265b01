"""Builds the parts of schedules that several policies share."""
