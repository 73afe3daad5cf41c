"""Measurements of Rootward. Not part of the installed package; run from a checkout: `python -m benchmarks.NAME`."""
