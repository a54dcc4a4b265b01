"""Runs LayerPipe: forward, dO and dW of different steps at the same time on different devices."""
