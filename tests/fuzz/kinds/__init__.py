"""Random set-ups of what users write themselves: drawn from a number, trained stock and with a callback."""
