"""Benchmarks: pytest-benchmark, run by `make bench`."""
