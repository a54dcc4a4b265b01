"""What runs the ways of a case in turns: each module is a :class:`benchmarks.case.Runner`."""
