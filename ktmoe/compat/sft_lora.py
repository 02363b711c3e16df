"""The twelve tensors of an adapter as kt-kernel's callers hold them: A and B of three projections, and their gradients."""

from __future__ import annotations

import itertools
import threading

import numpy as np

from ktmoe import arrays, forks
from ktmoe.errors import memory_for
from ktmoe.experts import PROJECTIONS
from ktmoe.training import Lora

#: The names of an adapter's six matrices, in the order of init_lora_weights().
NAMES = tuple(f"{projection}_lora_{letter}" for projection in PROJECTIONS for letter in "ab")


class GradientMemory:
    """float32 memory for an adapter's gradients, which all layers of a process share, since they are computed one at a time."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.float32)
        self.after_fork()
        forks.watch(self)

    def after_fork(self) -> None:
        """A backward that held the lock runs in the parent alone."""
        self.lock = threading.Lock()

    def pairs(self, lora: Lora) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Arrays like an adapter's, with anything in them. Under the lock."""
        sizes = [array.size for pair in lora.pairs.values() for array in pair]
        if sum(sizes) > self._memory.size:
            self.clear()
            with memory_for("an adapter's gradients in float32"):
                self._memory = np.empty(sum(sizes), np.float32)
        cut = iter(np.split(self._memory[: sum(sizes)], list(itertools.accumulate(sizes))[:-1]))
        return {projection: tuple(next(cut).reshape(array.shape) for array in pair) for projection, pair in lora.pairs.items()}

    def clear(self) -> None:
        self._memory = np.empty(0, np.float32)


class AdapterTensors:
    """tensors and gradients by NAMES: bfloat16 or float32, numpy arrays or torch CPU tensors, C-contiguous and aligned; held,
    not copied.

    shapes: by NAMES. lora: reads the tensors' memory. Raises InputError.
    """

    def __init__(self, tensors: dict, gradients: dict, shapes: dict[str, tuple[int, ...]], alpha: float):
        self.tensors, self._shapes, self._alpha = tensors, shapes, alpha
        self._buffers = {name: self._checked(f"grad_{name}", gradients[name], shapes[name], True) for name in NAMES}
        self.find()

    def find(self) -> None:
        """Find the tensors' memory again: an optimizer may have put other memory into a parameter."""
        for name in NAMES:
            self._checked(name, self.tensors[name], self._shapes[name], False)
        a, b = ([self.tensors[name] for name in NAMES[first::2]] for first in (0, 1))
        self.lora = Lora(dict(zip(PROJECTIONS, zip(a, b, strict=True), strict=True)), self._alpha, finite=False)

    def write(self, gradients: dict[str, tuple[np.ndarray, np.ndarray]], add: bool) -> None:
        """Put float32 gradients into the buffers, each rounded once, or their sums with what is there. They are used up."""
        for buffer, gradient in zip(self._buffers.values(), itertools.chain(*gradients.values()), strict=True):
            if add:
                np.add(gradient, buffer, out=gradient)
            buffer[...] = gradient

    @staticmethod
    def _checked(name: str, value, shape: tuple[int, ...], written: bool) -> np.ndarray:
        """The array of a tensor, as bfloat16 or float32. Raises InputError."""
        array = arrays.view(value, name).array
        arrays.expect_shape(name, array, shape)
        arrays.expect_native(name, array, written=written)
        return array.view(arrays.BF16) if array.dtype == np.uint16 else array
