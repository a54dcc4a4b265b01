"""Trains on one GPU inside XLA: with ``jit_compile=True`` dW are calls on streams of their own."""
