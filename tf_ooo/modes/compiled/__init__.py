"""One GPU, inside XLA: dW as calls on streams of their own, in steps compiled with ``jit_compile=True``."""
