"""Experts whose arrays are in memory: what ExpertWeights.from_arrays() checks and reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ktmoe.errors import FormatError
from ktmoe.matrix import Matrix
from ktmoe.weights.formats import WeightFormat

#: The arrays of all experts' matrices of one projection, or the only one.
OfAll = np.ndarray | tuple[np.ndarray, ...]


def checked_arrays(
    name: str, format: WeightFormat, arrays: Mapping[str, OfAll], biases: Mapping[str, np.ndarray] | None
) -> tuple[tuple[int, int, int], Callable[[int, str], Matrix]]:
    """(experts, hidden, intermediate), and what reads a matrix of an expert. Raises FormatError.

    name: the experts', for messages. format: of all matrices. arrays, biases: by projection, gate, up and down.
    """
    labels = tuple(format.arrays(8, 8))
    given: dict[str, dict[str, Any]] = {}
    for projection, of_all in arrays.items():
        listed = of_all if isinstance(of_all, tuple) else (of_all,)
        if len(listed) != len(labels):
            raise FormatError(f"{name}: {projection} must be ({', '.join(labels)}), found {len(listed)} arrays")
        given[projection] = dict(zip(labels, listed, strict=True))
    biases = dict(biases or {})
    if unknown := biases.keys() - given.keys():
        raise FormatError(f"{name}: biases must be by projection, one of {tuple(given)}, found {sorted(unknown)}")
    for projection, bias in biases.items():
        given[projection]["bias"] = bias
    every = [(projection, label, array) for projection, of in given.items() for label, array in of.items()]
    for projection, label, array in every:
        dimensions = ("experts", "rows") if label in ("factor", "bias") else ("experts", "rows", "columns")
        if not isinstance(array, np.ndarray) or array.ndim != len(dimensions):
            found = f"{array.ndim} dimensions" if isinstance(array, np.ndarray) else type(array).__name__
            raise FormatError(f"{name}: {projection} {label} must be an array [{', '.join(dimensions)}], found {found}")
    codes = given["gate"]["codes"]
    num_experts, (intermediate, hidden) = len(codes), format.shape(codes.shape[1:])
    for projection, label, array in every:
        if len(array) != num_experts:
            raise FormatError(f"{name}: {projection} {label} must hold {num_experts} experts, found {len(array)}")

    def read(expert: int, projection: str) -> Matrix:
        shape = (hidden, intermediate) if projection == "down" else (intermediate, hidden)
        stored = {label: array[expert] for label, array in given[projection].items()}
        return Matrix(f"{name}.{expert}.{projection}", format, shape, **stored)

    return (num_experts, hidden, intermediate), read
