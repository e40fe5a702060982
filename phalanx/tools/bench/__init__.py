"""Benchmarks that run on ranks: collectives and gradient compression."""
