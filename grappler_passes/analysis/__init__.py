"""Classifies the ops of a training step: forward, dO, dW, update; layers, loops, steps."""
