"""Holds a training step as one flat graph, and what stands between its gradients and the optimizer."""
