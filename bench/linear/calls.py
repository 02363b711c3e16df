"""The calls of matrices.toml, and random matrices for them."""

from __future__ import annotations

import json
import math
import tomllib
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import ml_dtypes
import numpy as np

from bench import footprints, machine
from bench.peers.workers.dispatches import FORMATS, INPUTS, MATRICES
from ktmoe.matrix import Matrix
from ktmoe.synthetic import tensors

FILE = Path(__file__).with_name("matrices.toml")
#: Bytes that are drawn at a time.
_DRAWN_AT_ONCE = 1 << 25


@dataclass(frozen=True)
class Call:
    """Dispatches that follow each other. The fields are those of matrices.toml."""

    model: str
    call: str
    weights: str
    dispatches: tuple[tuple[tuple[int, int], ...], ...]
    inputs: str = "same"
    biases: bool = False
    default: bool = False
    cached: bool = False
    rows: tuple[int, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "dispatches", tuple(tuple(map(tuple, each)) for each in self.dispatches))
        object.__setattr__(self, "rows", tuple(self.rows))
        if self.weights not in FORMATS:
            raise ValueError(f"{self.id}: weights {self.weights!r} are unknown; known are {', '.join(map(repr, FORMATS))}")
        if self.inputs not in INPUTS:
            raise ValueError(f"{self.id}: inputs must be one of {INPUTS}, found {self.inputs!r}")
        if self.inputs == "own" and self.biases:
            raise ValueError(f"{self.id}: expected no biases where inputs are 'own'")
        for matrices in self.dispatches:
            if not matrices or any(k != matrices[0][1] for _, k in matrices):
                raise ValueError(f"{self.id}: expected matrices [n, k] of one k in a dispatch, found {matrices}")

    @property
    def id(self) -> str:
        return f"{self.model}-{self.call}"

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(n, k) of all matrices, in order."""
        return [shape for matrices in self.dispatches for shape in matrices]

    @property
    def row_flops(self) -> int:
        """FLOPs of a row."""
        return sum(2 * n * k for n, k in self.shapes)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all codes and scales, as they are stored."""
        return sum(
            math.prod(shape) * np.dtype(dtype).itemsize
            for n, k in self.shapes
            for dtype, shape in FORMATS[self.weights].arrays(n, k).values()
        )

    def copies(self, share: float = footprints.MEMORY_SHARE) -> int:
        """How many take turns, so that no cache holds what is read next. share: the most of the available memory for them."""
        if self.cached:
            return 1
        wanted = math.ceil(footprints.wanted_bytes() / self.nbytes)
        return max(1, min(wanted, machine.usable_bytes(share) // self.nbytes))

    def make(self) -> list[list[Matrix]]:
        """The matrices of each dispatch, with random weights of a standard deviation of about 1/sqrt(k)."""
        numbers = iter(range(len(self.shapes)))
        return [[self._matrix(f"{self.id} {next(numbers)}", *shape) for shape in matrices] for matrices in self.dispatches]

    def _matrix(self, name: str, n: int, k: int) -> Matrix:
        made = FORMATS[self.weights]
        if made.scale is None:
            shapers = {"codes": tensors.bf16_numbers(1 / math.sqrt(k))}
        else:
            shapers = {"codes": tensors.codes(made.element), "scales": tensors.scales(made, k)}
        arrays = {label: _drawn(f"{name} {label}", *made.arrays(n, k)[label], shaper) for label, shaper in shapers.items()}
        bias = np.random.default_rng(n).standard_normal(n, np.float32) if self.biases else None
        return Matrix(name, made, (n, k), **arrays, bias=bias)

    def x(self, rows: int) -> list[np.ndarray]:
        """Bits of bfloat16, uint16: for each dispatch [rows, k], or [rows, matrices, k] of inputs of their own."""
        random, made = np.random.default_rng(rows), []
        for matrices in self.dispatches:
            shape = (rows, len(matrices)) if self.inputs == "own" else (rows,)
            x = random.standard_normal((*shape, matrices[0][1]), np.float32)
            made.append(x.astype(ml_dtypes.bfloat16).view(np.uint16))
        return made

    def save(self, dispatches: list[list[Matrix]], folder: Path) -> None:
        """Write matrices of make() where workers find them."""
        folder.mkdir(parents=True, exist_ok=True)
        listed, number = [], 0
        for matrices in dispatches:
            listed.append([])
            for matrix in matrices:
                arrays = {**matrix.stored, **({} if matrix.bias is None else {"bias": matrix.bias})}
                files = {}
                for label, array in arrays.items():
                    files[label] = f"{number}-{label}.npy"
                    np.save(folder / files[label], array.view(f"u{array.itemsize}"))
                listed[-1].append({"name": matrix.name, "shape": matrix.shape, "files": files})
                number += 1
        about = {"weights": self.weights, "inputs": self.inputs, "dispatches": listed}
        (folder / MATRICES).write_text(json.dumps(about))


def _drawn(name: str, dtype: np.dtype, shape: tuple[int, ...], shaper: tensors.Shaper) -> np.ndarray:
    """A large array is drawn in equal parts."""
    dtype = np.dtype(dtype)
    parts = next(
        (parts for parts in range(-(-math.prod(shape) * dtype.itemsize // _DRAWN_AT_ONCE), shape[0]) if shape[0] % parts == 0),
        shape[0],
    )
    tensor = tensors.Tensor(name, {1: "U8", 2: "BF16", 4: "F32"}[dtype.itemsize], shape, shaper, slabs=parts)
    made = np.empty(tensor.nbytes, np.uint8)
    tensor.fill(made, seed=0)
    return made.view(dtype).reshape(shape)


@cache
def calls(path: Path = FILE) -> tuple[Call, ...]:
    """All of them, in the file's order. Raises ValueError, which names the call, for fields that are wrong."""
    found = []
    for model, entries in tomllib.loads(path.read_text()).items():
        for fields in entries:
            try:
                found.append(Call(model, **fields))
            except TypeError as error:  # a field that is missing or unknown, which the text names
                raise ValueError(f"{path.name} [{model}]: {error}") from None
    return tuple(found)
