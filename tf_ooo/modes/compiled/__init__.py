"""Trains on one GPU, inside XLA: dW are calls on streams of their own, in steps compiled with
``jit_compile=True``."""
