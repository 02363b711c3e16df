"""Backend: packs ExpertWeights for one way to compute. Packed: computes. What they need not have, they refuse by default."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ktmoe._native import core
from ktmoe.errors import InputError, LackingError
from ktmoe.experts import ExpertWeights
from ktmoe.linear_weights import LinearWeights
from ktmoe.machine.numa import UNBOUND, Placement
from ktmoe.matrix import Matrix
from ktmoe.messages import show
from ktmoe.modes import MX, Mode, mode_of
from ktmoe.weight_spec import WeightSpec

#: What a layer's kernels may be chosen for: calls of a few tokens, or of many.
TUNED_FOR = ("decode", "prefill")

#: Activation modes that a user has to name, since they round too much to be anybody's default: "auto" passes over them.
NEVER_AUTO = frozenset({"int8", *MX})

Progress = Callable[[int, int], object]
#: The checkpoint's bytes of some matrices: by projection, the arrays of WeightFormat.arrays() by name.
Stored = Mapping[str, Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Found:
    """How a backend computes. activations: the mode, by its shortest name. table: the kernels, and form: of the rows that these
    take; None for a backend without a kernel table.

    Examples:
        >>> found = ktmoe.backends.get(layer.backend).lookup(experts, "bf16")
        >>> found.activations
        'bf16'
    """

    activations: str
    table: core.KernelTable | None = None
    form: str | None = None


@dataclass(frozen=True)
class Missing:
    """Why a backend cannot compute what it was asked for: the CPU, the build, the weights, or the mode."""

    reason: str


@dataclass(frozen=True)
class Plan:
    """How a layer's experts are packed and computed.

    router_weight: a value of ktmoe.experts.ROUTER_WEIGHTS. activations: the mode, as Backend.lookup found it.
    rounding: "exact", or "folded": weights may be rounded to bfloat16, as docs/numerics.md has it.
    placement: the NUMA nodes that hold the shards; a backend that does not know nodes ignores it.
    tuned_for: one of TUNED_FOR: which kernel serves weights for which there are two with different orders of sums.
    """

    router_weight: str = "down_output"
    activations: str = "bf16"
    rounding: str = "exact"
    placement: Placement = UNBOUND
    tuned_for: str = "decode"


@dataclass(frozen=True)
class Arenas:
    """A layer's experts, or a dense matrix, as they lie in a file, packed.

    file: the arenas. seen: of the scales of each matrix, what kernels are chosen by, uint8 [num_experts, projections, 3], as
    core.seen() gives it. biases: by projection, float32 [num_experts, n]. factors: likewise, or [num_experts, 1].
    """

    file: core.ArenaFile
    seen: np.ndarray
    biases: Mapping[str, np.ndarray]
    factors: Mapping[str, np.ndarray]


class Packed(ABC):
    """One layer's experts, ready to compute: what Backend.pack returns.

    By default they compute, and refuse all else with a LackingError. nbytes: of memory.
    rounding: "folded" if any scaled weight is rounded, else "exact".
    """

    nbytes: int
    rounding: str = "exact"

    @abstractmethod
    def forward(self, x: np.ndarray, ids: np.ndarray, weights: np.ndarray, mask: np.ndarray, out: np.ndarray) -> None:
        """Write y into out. x: uint16 (bfloat16 bits) or float32 [tokens, hidden]; out: of x's dtype or float32, likewise;
        ids: int64 [tokens, top_k]; weights: float32 [tokens, top_k]; mask: uint8 [num_experts], 0 = skip. C-contiguous; tokens
        and top_k at least 1."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back once running forward calls are done."""

    def replace(self, expert: int, matrices: Mapping[str, Matrix]) -> None:
        """Put all three matrices in the place of an expert's; a forward call sees all of the old ones or all of the new."""
        raise LackingError("cannot replace an expert")

    def export(self, expert: int, parts: Sequence[Stored]) -> Mapping[str, np.ndarray]:
        """Fill the arrays, C-contiguous and of Matrix's dtypes, with the checkpoint's own bytes: part i has the i-th rows of
        gate and up and the i-th columns of down, as many as their shapes say. A factor per matrix is in every part.
        Returns whole biases by projection, if any."""
        raise LackingError("cannot export an expert")

    def stages(self) -> core.PackedLayer:
        """The object that has gate_up() and down(), the two stages of forward(): this one, where it has them."""
        raise LackingError("has no stages of its own")

    def training(self) -> core.PackedLayer:
        """The object that has forward_training() and backward(): this one, where it has them.

        Raises UnavailableError, which says why, where the mode or a kernel rules that out.
        """
        raise LackingError("has no training")


class PackedMatrix(ABC):
    """A dense matrix, ready to compute: what Backend.pack_linear returns.

    By default it computes, and refuses all else with a LackingError. nbytes, rounding: as Packed has them.
    """

    nbytes: int
    rounding: str = "exact"

    @abstractmethod
    def forward(self, x: np.ndarray, out: np.ndarray) -> None:
        """Write y into out. x: uint16 (bfloat16 bits) or float32 [tokens, k], C-contiguous; out: of x's dtype or float32
        [tokens, n], whose rows may be apart."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back once running forward calls are done."""

    def backward(self, grad_y: np.ndarray, grad_x: np.ndarray) -> None:
        """Write grad_y W into grad_x. grad_y: uint16 (bfloat16 bits) or float32 [tokens, n], C-contiguous; grad_x: of grad_y's
        dtype or float32 [tokens, k], whose rows may be apart."""
        raise LackingError("has no backward pass of a dense matrix")

    def replace(self, expert: int, matrices: Mapping[str, Matrix]) -> None:
        """Put another matrix, {"weight": Matrix}, in the place of this one; expert is 0."""
        raise LackingError("cannot replace a matrix")

    def export(self, expert: int, parts: Sequence[Stored]) -> Mapping[str, np.ndarray]:
        """Fill the arrays of [{"weight": arrays by name}] with the checkpoint's own bytes; expert is 0. Returns
        {"weight": bias}, if there is one."""
        raise LackingError("cannot export a matrix")


class Backend(ABC):
    """One way to compute. rank: "auto" takes the highest that can run. modes: its activation modes, its preference first.

    Examples:
        >>> backend = ktmoe.backends.get(layer.backend)
        >>> backend.modes[0], backend.linear
        ('bf16', True)
    """

    rank: int = 0
    #: Whether it has pack_linear().
    linear: bool = False
    modes: tuple[str, ...] = ("bf16",)

    def lookup(self, experts: ExpertWeights | None = None, activations: str = "auto") -> Found | Missing:
        """How the backend computes these weights on this CPU, or why it cannot. Nothing is asked of the operating system.

        experts: None for any weights. activations: a mode by any of its names (ktmoe.modes), or "auto" for the first that fits
        and is not in NEVER_AUTO.
        By default a backend runs on every CPU, and has all of its modes for all weights.
        """
        return select({mode: Found(mode) for mode in self.modes}, experts, activations)

    def claim(self, experts: ExpertWeights | None = None, activations: str = "auto") -> Found | Missing:
        """lookup() for a backend that is about to be used: what it needs of the operating system is asked for now.

        A refusal is remembered: what was refused, lookup() does not find again. By default there is nothing to ask for.
        """
        return self.lookup(experts, activations)

    @abstractmethod
    def pack(self, experts: ExpertWeights, plan: Plan, progress: Progress | None = None) -> Packed:
        """Read and pack all matrices. progress(done_bytes, total_bytes) may raise to cancel; nothing is kept then."""

    def map(self, experts: ExpertWeights, plan: Plan, arenas: Arenas) -> Packed:
        """What pack() returns, of experts that lie packed in a file, which is mapped; no matrix is read.

        By default a LackingError: a backend has a layout of its own.
        """
        raise LackingError("cannot start from a packed cache")

    def pack_each(
        self, experts: ExpertWeights | LinearWeights, plan: Plan
    ) -> Generator[core.PackedLayer | core.PackedLinear, None, None]:
        """Yield a layer of one expert for each expert in turn, packed as pack() packs it: what a packed cache holds.
        Of a dense matrix, yield it, as pack_linear() packs it.

        By default a LackingError.
        """
        raise LackingError("has no packed layout that a cache can hold")

    def pack_linear(self, weights: LinearWeights, plan: Plan, progress: Progress | None = None) -> PackedMatrix:
        """Pack a dense matrix, as pack() packs experts. By default a LackingError."""
        raise LackingError("computes no dense matrices")

    def map_linear(self, weights: LinearWeights, plan: Plan, arenas: Arenas) -> PackedMatrix:
        """What pack_linear() returns, of a matrix that lies packed in a file. By default a LackingError."""
        raise LackingError("cannot start a dense matrix from a packed cache")

    def packed_nbytes(self, experts: ExpertWeights, placement: Placement = UNBOUND) -> int:
        """Bytes of memory that these experts take once they are packed; nothing is read."""
        return experts.nbytes


def mode_by(name: str) -> tuple[Mode, str]:
    """The mode that a name means, and "". Of a name that ktmoe.modes does not know: one that a plugin may have, and why not."""
    try:
        return mode_of(name), ""
    except InputError as error:
        own = name if isinstance(name, str) else show(name)
        return Mode(own, None, None, (own,)), str(error)


def select(
    modes: Mapping[str, Found], experts: WeightSpec | None, activations: str, why_not: str | None = None
) -> Found | Missing:
    """What lookup() returns for a backend that has these modes for these weights, in the order of its preference.

    why_not: what a mode of the backend lacks that is not among them, "" if nothing is known; None: the backend may not have it.
    """
    if activations == "auto":
        fitting, which = [mode for mode in modes if mode not in NEVER_AUTO], 'that "auto" may mean'
    else:
        mode, unknown = mode_by(activations)
        fitting, which = [mode.name] if mode.name in modes else [], show(activations)
        why_not = unknown if why_not is None else why_not
    if fitting:
        return modes[fitting[0]]
    whose = "" if experts is None else " for these weights"
    only = f", only {', '.join(modes)}" if modes else ""
    return Missing(f"it has no activation mode {which}{whose}{only}{f' ({why_not})' if why_not else ''}")
