"""Runs LayerPipe: F, dO and dW of different steps at the same time on different devices."""
