"""lives.py FOLDER COUNTS SECONDS: do things again and again in one process, and look at what it has from time to time.

COUNTS: JSON of {kind: how often}; a kind is one of KINDS, which are functions that make what is then done each time. SECONDS:
at most so many for each kind. Prints a line of JSON for each: {"kind", "done", "looks": a list of what look() gives}.

Run it with PYTHONMALLOC=malloc, so that Python's objects are counted, too.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import sys
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np
from checkpoints import SCHEMES, write
from crowded_layers import Dense, Experts, others
from helpers import random_batch, random_experts, reading

from ktmoe import Linear, MoELayer, MoEModel, set_num_threads, synthetic
from ktmoe.cache.packing import pack
from ktmoe.errors import KtmoeError

#: Looks at each kind, fewer if it is done a few times. Before the first it is done LEAST times, or as often
#: as between two: what is made once is there by then.
LOOKS, LEAST = 10, 100
FOLDER = Path(sys.argv[1])


class Heap(ctypes.Structure):
    """struct mallinfo2, of all arenas."""

    NAMES = "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "live", "free", "top"
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES]


C = ctypes.CDLL(None)
C.mallinfo2.restype = Heap


def look() -> dict[str, int]:
    """live: bytes that malloc gave and did not get back. private: bytes of memory that no other process has, once malloc has
    given back what it can. Descriptors, threads, and lines of /proc/self/maps.

    Threads that load have ended, and so has what CPython keeps: names of attributes that were looked up.
    """
    while any(thread.name.startswith(("ktmoe-load", "ktmoe-read")) for thread in threading.enumerate()):
        time.sleep(0.001)
    gc.collect()
    getattr(sys, "_clear_internal_caches", sys._clear_type_cache)()
    C.malloc_trim(0)
    heap = C.mallinfo2()
    pages = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return {
        "live": heap.live + heap.hblkhd,
        "private": sum(1024 * int(line.split()[1]) for line in pages if line.startswith("Private")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": _threads(),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
    }


def _threads() -> int:
    """The fewest in some milliseconds: a thread ends a little after it was joined."""
    fewest = len(os.listdir("/proc/self/task"))
    for _ in range(20):
        time.sleep(1e-3)
        fewest = min(fewest, len(os.listdir("/proc/self/task")))
    return fewest


def load_layers():
    """Layers of several formats, one after another."""
    folders = {}
    for name in ("deepseek_v4", "gpt_oss", "int4", "bf16", "fp8", "int8 per row", "mxfp8"):
        folders[name] = FOLDER / name
        folders[name].mkdir()
        write(folders[name], SCHEMES[name].layer(f"{'' if name.startswith('deepseek') else 'model.'}layers.0")).close()
    paths, batches = itertools.cycle(folders.values()), {}

    def once():
        path = next(paths)
        with MoELayer.from_checkpoint(path, 0) as layer:
            batches[path] = batches.get(path) or random_batch(np.random.default_rng(1), layer, 3, 2)
            layer.forward(*batches[path])

    return once


def _model():
    folder = FOLDER / "model"
    if not folder.exists():
        synthetic.write_deepseek_v4(folder, layers=3, num_experts=4, hidden=128, intermediate=128)
    return folder


def load_models():
    """In the background: waited for and closed, closed half-way, dropped half-way, one layer used and the rest dropped."""
    folder = _model()
    ends = itertools.cycle((MoEModel.wait, MoEModel.close, MoEModel.cancel, lambda model: model[1], lambda model: None))

    def once():
        model = MoEModel.from_checkpoint(folder, wait=False)
        next(ends)(model)
        del model

    return once


def load_linears():
    folder = _model()
    name = next(name for name in _names(folder) if name.endswith("w1.weight")).removesuffix(".weight")

    def once():
        with Linear.from_checkpoint(folder, name) as linear:
            linear.forward(np.ones((2, linear.shape[1]), np.float32))

    return once


def _names(folder):
    from ktmoe.loaders.checkpoint import Checkpoint

    with Checkpoint(folder) as checkpoint:
        return sorted(checkpoint.names())


def load_caches():
    """Layers that are mapped, from a packed cache."""
    folder = _model()
    pack(folder, FOLDER / "cache")

    def once():
        with MoELayer.from_checkpoint(folder, 0, cache=FOLDER / "cache") as layer:
            layer.forward(np.ones((2, layer.hidden), np.float32), np.array([[0, 1]] * 2), np.ones((2, 2), np.float32))

    return once


def refusals():
    """What ends in an exception: weights that are no numbers, layers that are not there, arguments of other shapes."""
    experts = random_experts(np.random.default_rng(1), 4, 64, 64)
    wrong = experts.matrix(3, "up")
    scales = wrong.scales.copy()
    scales[1, 1] = 255

    def read(*key):
        return replace(wrong, scales=scales) if key == (3, "up") else experts.matrix(*key)

    broken, layer, folder = reading(experts, read), MoELayer(experts), _model()
    x, ids, weights = random_batch(np.random.default_rng(1), layer, 3, 2)
    matrices = {p: experts.matrix(0, p) for p in ("gate", "up", "down")}
    tries = itertools.cycle(
        (
            lambda: MoELayer(broken),
            lambda: MoELayer.from_checkpoint(folder, 9),
            lambda: layer.forward(x[:, 1:], ids, weights),
            lambda: layer.submit(x, ids, weights[:1]).result(),
            lambda: layer.replace_expert(0, matrices | {"up": read(3, "up")}),
            lambda: layer.export_expert(9),
        )
    )

    def once():
        with suppress(KtmoeError):
            next(tries)()
            raise AssertionError("it was not refused")

    return once


def calls():
    """All that there is to do with layers that stay, forward most of all."""
    worlds = [Experts(seed, kind) for seed, kind in enumerate(("mxfp4", "int4-64", "fp8"))] + [Dense(1, "mxfp4")]
    each = [call.call for world in worlds for call in world.calls()]
    each += [world.captured().call for world in worlds[:3]] + [call.call for call in others(1)]
    each += [turn.change for world in worlds for turn in world.turns]
    batches = [random_batch(np.random.default_rng(tokens), worlds[0].layer, tokens, 2) for tokens in (1, 2, 7, 30)]
    each += [lambda b=batch: worlds[0].layer.forward(*b) for batch in batches] * 40
    for turn in each:
        turn()  # the most threads that any of them takes leave their stacks
    turns = itertools.cycle(each)
    return lambda: next(turns)()


def forwards():
    """forward() of one thread, of several sizes, now and then by submit(), and of an expert that is replaced."""
    set_num_threads(1)
    experts = [random_experts(np.random.default_rng(seed), 4, 64, 64) for seed in range(2)]
    layer = MoELayer(experts[0])
    batches = [random_batch(np.random.default_rng(tokens), layer, tokens, 2) for tokens in (1, 2, 3, 5, 8, 13, 21)]
    matrices = [{p: of.matrix(0, p) for p in ("gate", "up", "down")} for of in experts]
    numbers = itertools.count()

    def once():
        number = next(numbers)
        batch = batches[number % len(batches)]
        if number % 100 == 0:
            layer.replace_expert(0, matrices[number // 100 % 2])
        if number % 20 == 0:
            layer.submit(*batch).result()
        else:
            layer.forward(*batch)

    return once


_ALL = load_layers, load_models, load_linears, load_caches, refusals, calls, forwards
KINDS = {function.__name__: function for function in _ALL}


def main():
    warnings.simplefilter("ignore")  # of more threads than CPUs
    set_num_threads(2)
    seconds = float(sys.argv[3])
    gc.freeze()  # else each look goes through all modules
    for kind, count in json.loads(sys.argv[2]).items():
        once, end = KINDS[kind](), time.monotonic() + seconds
        names, spans = list(look()), max(2, min(LOOKS, count // 10))
        found = np.zeros((spans + 1, len(names)), np.int64)  # in memory that is there before
        gc.disable()  # what is garbage in a cycle waits for look(), so that it is counted as often
        for _ in range(max(count // spans, min(count, LEAST))):
            once()
        found[0] = list(look().values())
        for at in range(1, spans + 1):
            for _ in range(count // spans):
                once()
            found[at] = list(look().values())
            if time.monotonic() > end:
                break
        looks = [dict(zip(names, row, strict=True)) for row in found[: at + 1].tolist()]
        print(json.dumps({"kind": kind, "done": at * (count // spans), "looks": looks}), flush=True)
        gc.enable()
        del once


if __name__ == "__main__":
    main()
