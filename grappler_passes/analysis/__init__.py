"""What the ops of a training step are for: forward, dO, dW, update; layers, loops, steps."""
