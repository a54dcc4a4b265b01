"""One device's ways on a GPU, with JAX alone: the compiled step's HLO is exported here and runs there."""
