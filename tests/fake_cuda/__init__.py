"""A CUDA runtime and a torch for machines without a GPU: fake.h says what the runtime is, torch.py what the torch is.

The runtime is C with real threads, compiled by the tests. It shows what a caller does wrong: calls from host functions, calls
that a capture forbids, copies from memory that was freed. Whether CUDA and torch themselves take the calls is for tests that
need a GPU.
"""
