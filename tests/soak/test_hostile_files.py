"""A hundred thousand hostile folders: a token is computed by what was read, or a KtmoeError says what is wrong.

Checkpoints of every scheme and of GGUF, packed caches, adapters and unfinished conversions, as hostile_files.py makes them.
"""

from hostile_processes import run_all


def test_hostile_files(repeat):
    counts = run_all("files", repeat, "hostile files", 100_000)
    for kind in ("checkpoint", "gguf", "cache", "adapter"):
        assert counts[f"{kind} loaded"]
        assert counts[f"{kind} refused"]
