"""A dense matrix of a checkpoint."""

from __future__ import annotations

from ktmoe.matrix import Matrix


def load_matrix(path, name: str, *, scheme: str = "auto") -> Matrix:
    raise NotImplementedError
