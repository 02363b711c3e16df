"""What activation modes change in the results: of one layer on random data, and of a tiny model on a text.

`python -m bench.low_precision` measures both; docs/low-precision.md shows them.
"""
