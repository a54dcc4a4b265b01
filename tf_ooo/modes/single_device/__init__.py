"""One device, on the graph executor."""
