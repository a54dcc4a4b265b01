"""Tells the user about a training: its report, and the report's page."""
