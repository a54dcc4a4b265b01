"""Handles devices and addresses, and joins workers, watches them, and measures the links between them."""
