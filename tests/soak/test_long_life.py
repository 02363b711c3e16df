"""A long life: what is done ten thousand or a million times leaves nothing behind, and what waits uses no CPU.

Memory is counted in two ways. What malloc gave and did not get back is exact: Python's own objects come from malloc, too, and
no thread keeps freed memory in a cache, or in an arena of its own. Private pages are what the machine sees. What grows is the
median of what is added from look to look: a table that was made larger once does not count, and what each cycle leaves does.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from ktmoe import synthetic

HERE = Path(__file__).parent
#: By kind: how often in `make soak`.
COUNTS = {
    "load_layers": 3000,
    "load_models": 1000,
    "load_linears": 3000,
    "load_caches": 3000,
    "refusals": 3000,
    "calls": 20_000,
    "forwards": 1_000_000,
}
#: Bytes that differ from look to look for other reasons: threads that load end in another order.
NOISE = {"load_models": 6000}
SLOW = {"calls", "load_caches"}  # to begin with: `make test` leaves them out
LEAST = 10  # in any run: a few of these are too few to tell
ENVIRONMENT = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.arena_max=1"}


def lives(folder, counts, seconds):
    command = [sys.executable, HERE / "lives.py", folder, json.dumps(counts), str(seconds)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ENVIRONMENT)
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def growth(looks, what):
    """The median of what it grew by from look to look."""
    return statistics.median(after[what] - before[what] for before, after in itertools.pairwise(looks))


def test_nothing_is_left(repeat, tmp_path):
    counts = {kind: repeat.count(count, LEAST) for kind, count in COUNTS.items() if repeat.how or kind not in SLOW}
    seconds = repeat.seconds()
    for life in lives(tmp_path, counts, 1e6 if seconds is None else seconds / len(counts)):
        kind, looks = life["kind"], life["looks"]
        apart = life["done"] / (len(looks) - 1)
        repeat.row(f"{kind} in one process", COUNTS[kind], life["done"])
        for what in ("live", "private"):
            repeat.most(f"bytes of {what} memory left by each", max(0.0, growth(looks, what) / apart))
        for what in ("descriptors", "threads", "mappings"):
            assert growth(looks, what) < 1, (kind, what, looks)  # the number of threads is changed, too
        if apart >= 10:
            assert growth(looks, "live") < NOISE.get(kind, 1500) + apart / 2, (kind, looks)
        if life["done"] >= COUNTS[kind] / 2:  # before, malloc's own places still settle
            assert growth(looks, "private") * len(looks) < 0.01 * looks[0]["private"], (kind, looks)


def test_what_is_left_is_seen():
    """24 bytes in each of a hundred cycles are, and a table that grew once is not."""
    assert growth([{"live": 1000 + 2400 * n} for n in range(11)], "live") == 2400
    assert growth([{"live": 1000 + 500_000 * (n > 4)} for n in range(11)], "live") == 0


@pytest.mark.exhaustive
def test_what_waits_uses_no_cpu(repeat, tmp_path):
    """No thread but the first wakes up at all: of the pool, of submit(), of captured calls."""
    synthetic.write_deepseek_v4(tmp_path, layers=2, num_experts=4, hidden=128, intermediate=128)
    for _ in repeat("processes with layers, a model and queues that wait", 50):
        seconds = 10 if repeat.how == "soak" else 1
        command = [sys.executable, HERE / "idle.py", tmp_path, str(seconds)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        threads = list(json.loads(done.stdout).values())
        assert len(threads) >= 5  # the first, two of the pool, submit()'s and that of captured calls
        (_, ticks, *_), *others = threads
        assert ticks <= 1, threads
        assert all(counts == [0, 0, 0] for _, *counts in others), threads
