"""Trains on emulated devices, whose tasks take as long as on GPUs: ``tf-ooo demo`` and the benchmarks."""
