"""Holds a training step as one flat graph, and the code between its gradients and the optimizer."""
