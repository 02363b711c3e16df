"""Saved: what a forward pass keeps for its backward pass; how many bytes that is; and a stack of them."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ktmoe.errors import InputError, UnavailableError

#: Bytes of one router weight and expert id.
_OF_A_SLOT = 4 + 8


@dataclass(frozen=True, eq=False, repr=False)
class Saved:
    """One forward pass, for Training.backward(), once or more often. All arrays are its own.

    x: uint16 (bfloat16 bits) or float32 [tokens, hidden]. ids: int64 [tokens, top_k]; weights: float32 like it; mask: uint8
    [num_experts]; of a layer's shared experts too, which follow the others in all three. arrays: (g, u, t), float32
    [tokens * top_k, intermediate] twice and [tokens * top_k, 3, rank], t None without an adapter; None with recompute=True.
    adapted: (projections, rank) of the adapter, None without one. owner: the layer. restore: turns an array like x into the
    kind that x had.

    Examples:
        >>> y, saved = Training(layer).forward(x, ids, weights)
        >>> saved.nbytes > x.nbytes
        True
    """

    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    mask: np.ndarray
    arrays: tuple[np.ndarray, np.ndarray, np.ndarray | None] | None
    adapted: tuple[tuple[str, ...], int] | None
    owner: object
    restore: Callable[[np.ndarray], object]

    def __repr__(self) -> str:
        return f"Saved({len(self.x)} tokens, adapter {self.adapted}, {self.nbytes} bytes)"

    @property
    def nbytes(self) -> int:
        """Bytes that are kept: saved_nbytes() of these sizes."""
        return sum(array.nbytes for array in self.held)

    @property
    def held(self) -> list[np.ndarray]:
        """All arrays that are kept."""
        kept = (self.x, self.ids, self.weights, self.mask, *(self.arrays or ()))
        return [array for array in kept if array is not None]


def saved_nbytes(
    tokens: int,
    top_k: int,
    *,
    num_experts: int,
    hidden: int,
    intermediate: int,
    rank: int = 0,
    x_bytes: int = 2,
    recompute: bool = False,
) -> int:
    """Bytes that a forward pass keeps: tokens * top_k * (8 * intermediate + 12 * rank) for g, u and what A gives, and the
    arguments: tokens * (hidden * x_bytes + 12 * top_k) + num_experts. With recompute=True the arguments alone.

    top_k, num_experts: with shared experts, if any. rank: 0 without an adapter. x_bytes: of an item of x, 2 for bfloat16 and 4
    for float32.

    Examples:
        >>> saved_nbytes(1024, 6, num_experts=256, hidden=4096, intermediate=2048)
        109125888
    """
    arguments = tokens * (hidden * x_bytes + _OF_A_SLOT * top_k) + num_experts
    return arguments + (0 if recompute else tokens * top_k * (8 * intermediate + 12 * rank))


class SavedStack:
    """What forward passes keep, last in, first out, at most `depth` of them.

    depth: at least 1. forgets: whether the oldest makes room for one too many; else that is refused. Raises InputError.

    Examples:
        >>> stack = SavedStack(depth=2)
        >>> y, saved = Training(layer).forward(x, ids, weights)
        >>> stack.push(saved)
        >>> len(stack), stack.pop() is saved
        (1, True)
    """

    def __init__(self, depth: int = 1, *, forgets: bool = False):
        try:
            self.depth = operator.index(depth)
        except TypeError:
            self.depth = 0
        if self.depth < 1:
            raise InputError(f"depth must be an integer of at least 1, found {depth!r}")
        self._forgets = forgets
        self._kept: deque[Saved] = deque(maxlen=self.depth)

    def push(self, saved: Saved) -> None:
        """Raises UnavailableError if the stack is full and forgets nothing: more forward passes than depth without a backward
        pass.

        Examples:
            >>> stack = SavedStack(depth=1, forgets=True)
            >>> for _ in range(3):
            ...     stack.push(Training(layer).forward(x, ids, weights)[1])
            >>> len(stack)
            1
        """
        if len(self._kept) == self.depth and not self._forgets:
            raise UnavailableError(
                f"expected at most {self.depth} forward passes without their backward passes, found another one; "
                "call backward() or clear(), save less, or make the stack deeper"
            )
        self._kept.append(saved)

    @property
    def last(self) -> Saved:
        """What pop() would take. Raises UnavailableError if there is none."""
        if not self._kept:
            raise UnavailableError("expected a forward pass that was saved, found none: each serves one backward pass")
        return self._kept[-1]

    def pop(self) -> Saved:
        """Take what was kept last. Raises UnavailableError if there is nothing.

        Examples:
            >>> stack = SavedStack()
            >>> stack.push(Training(layer).forward(x, ids, weights)[1])
            >>> stack.pop().adapted is None, len(stack)
            (True, 0)
        """
        last = self.last
        self._kept.pop()
        return last

    def clear(self) -> None:
        """Forget everything.

        Examples:
            >>> stack = SavedStack()
            >>> stack.push(Training(layer).forward(x, ids, weights)[1])
            >>> stack.clear()
            >>> len(stack)
            0
        """
        self._kept.clear()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def nbytes(self) -> int:
        return sum(saved.nbytes for saved in self._kept)
