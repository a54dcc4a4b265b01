"""These modules run the ways of a case in turns; each is a :class:`benchmarks.cases.Runner`."""
