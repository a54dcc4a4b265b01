"""Handles devices and addresses; joins workers, watches them, and measures the links between them."""
