"""Plans without TensorFlow or graphs: from the costs of layers to a simulated schedule."""
