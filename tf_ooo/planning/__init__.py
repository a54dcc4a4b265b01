"""Plans, with no TensorFlow and no graphs. From the costs of layers to a schedule, simulated."""
