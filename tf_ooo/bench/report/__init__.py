"""One page of figures from the rows that runs of the benchmarks keep."""
