"""Results of TDPBF16PS that a CPU gave, for the emulator and the model to be compared with.

Run as a program, with tests/ in PYTHONPATH, on a CPU with AMX: records tests/golden/tdpbf16ps.npz, with that CPU's name.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

import emulator
from emulator import amx, model

PATH = Path(__file__).parents[1] / "golden" / "tdpbf16ps.npz"
SHAPES = [(16, 16, 16), (3, 5, 7), (1, 16, 16), (16, 1, 2), (2, 3, 1), (7, 16, 13)]  # rows, columns, pairs
KINDS = ("ordinary", "special", "any", "cancelling", "tiny", "huge", "ties")


def _bf16(x):
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def inputs(kind, rng, m, n, k):
    """c [m, n] as float32 bits, a [m, 2k] and b [k, 2n] as bf16 bits."""
    shapes = [(m, n), (m, 2 * k), (k, 2 * n)]
    if kind == "special":
        c, a, b = (model.bf16_values(rng, shape[0] * shape[1]).reshape(shape) for shape in shapes)
        return c.astype(np.uint32) << 16 | rng.integers(0, 1 << 16, c.shape, dtype=np.uint32), a, b
    if kind == "any":
        a, b = (rng.integers(0, 1 << 16, shape, dtype=np.uint16) for shape in shapes[1:])
        return rng.integers(0, 1 << 32, (m, n), dtype=np.uint32), a, b
    c, a, b = (rng.normal(0, 1, shape) for shape in shapes)
    if kind == "cancelling":  # the odd sum is about minus the even one, and c about minus a product of another scale
        a *= 2.0 ** rng.integers(-20, 20, (m, 1))
        a[:, 1::2] = a[:, 0::2]
        b[:, 1::2] = -b[:, 0::2] * (1 + (rng.random((k, n)) < 0.2) * 2.0**-7)
        c = -a[:, :1] * b[:1, ::2] * 2.0 ** rng.integers(-24, 2, (m, n))
    elif kind == "tiny":  # results around the smallest normal number, products that are denormal or nearly so
        a, b, c = a * 2.0**-64, b * 2.0 ** rng.integers(-66, -58, (k, 1)), c * 2.0 ** rng.integers(-130, -122, (m, n))
    elif kind == "huge":  # around overflow, also of one sum only
        a, b, c = a * 2.0**64, b * 2.0 ** rng.integers(58, 63, (k, 1)), c * 2.0 ** rng.integers(120, 127, (m, n))
    elif kind == "ties":  # small integers, and c so large that the sum lies halfway between two numbers
        a, b = rng.integers(-3, 4, a.shape), rng.integers(-3, 4, b.shape)
        c = rng.choice([-1, 1], (m, n)) * (2.0**24 + 2 * rng.integers(0, 1 << 20, (m, n)))
    return c.astype(np.float32).view(np.uint32), _bf16(a), _bf16(b)


def load():
    """(c, a, b, result) for each recorded instruction, without padding."""
    with np.load(PATH) as stored:
        arrays = {name: stored[name] for name in ("shape", "c", "a", "b", "result")}
    for i, (m, n, k) in enumerate(arrays["shape"]):
        c, a, b = arrays["c"][i, :m, :n], arrays["a"][i, :m, : 2 * k], arrays["b"][i, :k, : 2 * n]
        yield c.view(np.float32), a, b, arrays["result"][i, :m, :n]


def _cpu():
    with open("/proc/cpuinfo") as file:
        first = file.read().split("\n\n")[0]
    fields = dict(line.split("\t: ") for line in first.replace("\t\t:", "\t:").splitlines() if "\t: " in line)
    return [f"{name}: {fields[name]}" for name in ("vendor_id", "model name", "cpu family", "model", "stepping")]


def record(path=PATH):
    """Run the instructions on this CPU and store what it makes of them."""
    if not emulator.permit():
        raise RuntimeError("this CPU has no AMX, or this process may not use it")
    rng = np.random.default_rng(20251)
    with tempfile.TemporaryDirectory() as folder:
        program = amx.Program(folder)
        shape = [shape for _ in KINDS for shape in SHAPES]
        arrays = {"c": (16, 16, np.uint32), "a": (16, 32, np.uint16), "b": (16, 32, np.uint16), "result": (16, 16, np.uint32)}
        stored = {name: np.zeros((len(shape), *rest), dtype) for name, (*rest, dtype) in arrays.items()}
        for i, (m, n, k) in enumerate(shape):
            c, a, b = inputs(KINDS[i // len(SHAPES)], rng, m, n, k)
            stored["c"][i, :m, :n], stored["a"][i, :m, : 2 * k], stored["b"][i, :k, : 2 * n] = c, a, b
            stored["result"][i, :m, :n] = program.dot(amx.EXECUTED, "tdpbf16ps", c, a, b)
    np.savez_compressed(path, shape=np.array(shape), cpu=np.array(_cpu()), **stored)


if __name__ == "__main__":
    record()
