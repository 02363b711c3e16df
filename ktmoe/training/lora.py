"""Lora: the adapter of one layer's experts, and all checks of it."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ktmoe import arrays
from ktmoe._native import core
from ktmoe.arrays import AnyArray
from ktmoe.errors import InputError
from ktmoe.experts import PROJECTIONS, ExpertSpec
from ktmoe.messages import show

#: The largest rank.
RANK_MAX = core.RANK_MAX

_LARGEST = float(np.finfo(np.float32).max)

_DTYPES = "float32, bfloat16 (ml_dtypes), uint16 holding bfloat16 bits, or a torch CPU tensor of float32 or bfloat16"


class Lora:
    """Low-rank matrices beside frozen ones: W x becomes W x + scale * B (A x), with scale = alpha / rank, for each expert
    (Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1).

    pairs: {projection: (a, b)} for one or more of "gate", "up" and "down": a [experts, rank, inputs] and
    b [experts, outputs, rank], C-contiguous and aligned, each float32, bfloat16 (ml_dtypes), uint16 holding bfloat16 bits, or
    a torch CPU tensor of float32 or bfloat16. float64 is for ktmoe.reference.training alone. They are held, not copied: whoever
    changes them in place changes the adapter.
    alpha: finite. finite: whether NaN and infinities are refused, once, here.

    Attributes: pairs: as arrays (bfloat16 as uint16). alpha. rank: 1 to RANK_MAX, the same for all pairs. scale: alpha / rank.
    num_experts. projections: those that have a pair, in the order of PROJECTIONS. nbytes.

    Raises InputError, which names the array, what was expected and what was found.

    Examples:
        >>> a, b = np.ones((8, 4, 64), np.float32), np.zeros((8, 64, 4), np.float32)
        >>> Lora({"down": (a, b)}, alpha=8)
        Lora(rank=4, alpha=8, down, 8 experts)
    """

    def __init__(self, pairs: Mapping[str, tuple[AnyArray, AnyArray]], alpha: float, *, finite: bool = True):
        if not isinstance(pairs, Mapping) or not pairs:
            raise InputError(f"pairs must be {{projection: (a, b)}}, found {show(pairs)}")
        if unknown := [projection for projection in pairs if projection not in PROJECTIONS]:
            raise InputError(f"pairs must be of the projections {', '.join(PROJECTIONS)}, found {show(unknown[0])}")
        self.alpha = checked_number("alpha", alpha)
        self.projections = tuple(projection for projection in PROJECTIONS if projection in pairs)
        self.pairs: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for projection in self.projections:
            pair = pairs[projection]
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise InputError(f"{projection} must be (a, b), found {show(pair)}")
            a, b = pair
            self.pairs[projection] = _checked(a, f"{projection}'s a", finite), _checked(b, f"{projection}'s b", finite)
        first, _ = self.pairs[self.projections[0]]
        self.num_experts, self.rank = first.shape[:2]
        if not self.num_experts or not 1 <= self.rank <= RANK_MAX:
            raise InputError(
                f"{self.projections[0]}'s a must be [experts, rank, inputs] with a rank of 1 to {RANK_MAX}, "
                f"found {list(first.shape)}"
            )
        self.scale = self.alpha / self.rank
        for projection, (a, b) in self.pairs.items():
            arrays.expect_shape(f"{projection}'s a", a, (self.num_experts, self.rank, None))
            arrays.expect_shape(f"{projection}'s b", b, (self.num_experts, None, self.rank))

    @classmethod
    def initial(
        cls,
        spec: ExpertSpec,
        rank: int,
        alpha: float,
        projections: Iterable[str] = PROJECTIONS,
        seed: int = 0,
        dtype: npt.DTypeLike = np.float32,
    ) -> Lora:
        """An adapter that changes nothing yet: B is zero, and A uniform in +-1 / sqrt(inputs), which is PEFT's default
        (Kaiming-uniform with a = sqrt(5)).

        spec: of the layer (MoELayer.spec). dtype: float32 or bfloat16 (ml_dtypes). Raises InputError.

        Examples:
            >>> Lora.initial(layer.spec, rank=16, alpha=32, projections=["gate", "up"]).scale
            2.0
        """
        shapes = lora_shapes(spec, rank, projections)
        dtype = np.dtype(dtype)
        if dtype not in (np.float32, arrays.BF16):
            raise InputError(f"dtype must be float32 or bfloat16, found {dtype}")
        random = np.random.default_rng(seed)
        pairs = {}
        for projection, (of_a, of_b) in shapes.items():
            a = random.random(of_a, np.float32)
            a -= np.float32(0.5)
            a *= np.float32(2 / math.sqrt(of_a[2]))
            pairs[projection] = (a.astype(dtype, copy=False), np.zeros(of_b, dtype))
        return cls(pairs, alpha)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for pair in self.pairs.values() for array in pair)

    def check(self, spec: ExpertSpec) -> None:
        """Raise InputError if this is no adapter for a layer's experts.

        Examples:
            >>> Lora.initial(layer.spec, rank=16, alpha=32).check(layer.spec)
        """
        for projection, shapes in lora_shapes(spec, self.rank, self.projections).items():
            for name, array, shape in zip("ab", self.pairs[projection], shapes, strict=True):
                arrays.expect_shape(f"{spec.name}: {projection}'s {name}", array, shape)

    def check_dtypes(self, name: str) -> None:
        """Raise InputError for float64, which only ktmoe.reference.training takes. name: whose adapter it is.

        Examples:
            >>> Lora.initial(layer.spec, rank=16, alpha=32, dtype=ml_dtypes.bfloat16).check_dtypes("adapter")
        """
        if any(array.dtype == np.float64 for pair in self.pairs.values() for array in pair):
            raise InputError(f"{name}: lora must be of float32 or bfloat16, found float64")

    def __repr__(self) -> str:
        return f"Lora(rank={self.rank}, alpha={self.alpha:g}, {', '.join(self.projections)}, {self.num_experts} experts)"


def lora_shapes(
    spec: ExpertSpec, rank: int, projections: Iterable[str] = PROJECTIONS
) -> dict[str, tuple[tuple[int, int, int], tuple[int, int, int]]]:
    """{projection: (shape of a, shape of b)}. Raises InputError for an unknown projection, none at all, or a rank that is not
    1 to RANK_MAX."""
    try:
        number = operator.index(rank)
    except TypeError:
        number = 0
    if isinstance(rank, bool) or not 1 <= number <= RANK_MAX:
        raise InputError(f"rank must be an integer from 1 to {RANK_MAX}, found {show(rank)}")
    chosen = [projections] if isinstance(projections, str) else list(projections)
    if not chosen or any(projection not in PROJECTIONS for projection in chosen):
        raise InputError(f"projections must be one or more of {', '.join(PROJECTIONS)}, found {show(chosen)}")
    shapes = {}
    for projection in (projection for projection in PROJECTIONS if projection in chosen):
        n, k = spec.shape(projection)
        shapes[projection] = ((spec.num_experts, number, k), (spec.num_experts, n, number))
    return shapes


def checked_number(name: str, value: float) -> float:
    """Raises InputError for what is no number, or none that is finite in float32."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= _LARGEST:
        raise InputError(f"{name} must be a finite number of float32's range, found {show(value)}")
    return number


def _checked(value: Any, name: str, finite: bool) -> np.ndarray:
    """The array of a value, as float32, uint16 or float64, sharing memory. Raises InputError."""
    if isinstance(value, np.ndarray) and value.dtype == np.float64:
        array = value
    elif isinstance(value, np.ndarray) or arrays.is_torch(value):
        array = arrays.view(value, name).array
    else:
        raise InputError(f"{name} must be {_DTYPES}; found {type(value).__name__}")
    arrays.expect_shape(name, array, (None, None, None))
    arrays.expect_native(name, array, written=False)
    if finite:
        # by expert, so that hardly any memory is needed
        for expert, own in enumerate(array.view(arrays.BF16) if array.dtype == np.uint16 else array):
            with np.errstate(invalid="ignore"):  # of signalling NaNs, of which ml_dtypes warns
                good = np.isfinite(own)
            if not good.all():
                row, column = np.argwhere(~good)[0].tolist()
                raise InputError(f"{name} [{expert}, {row}, {column}] must be finite, found {float(own[row, column])}")
    return array
