"""A million hostile headers: each is read, or a KtmoeError says in a few words what is wrong with which file.

Of safetensors files, GGUF files, an index, config.json, adapters, packed caches and conversions. hostile_child.py says what is
promised besides, and how it is measured.
"""

from hostile_cases import HEADERS
from hostile_processes import run_all


def test_hostile_headers(repeat):
    counts = run_all("headers", repeat, "hostile headers", 1_000_000)
    for kind in HEADERS:  # that the cases are of both sorts
        assert counts[f"{kind} loaded"]
        assert counts[f"{kind} refused"]
