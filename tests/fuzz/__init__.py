"""Random set-ups of a training: drawn from a number, run stock and rewritten, made minimal if they fail."""
