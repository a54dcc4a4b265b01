"""Trains on one device, on the graph executor."""
