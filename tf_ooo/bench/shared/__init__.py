"""What several benchmarks use: networks, workers with their share of this machine, rows and pictures."""
