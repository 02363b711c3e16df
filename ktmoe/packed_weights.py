"""PackedWeights: weights that a backend has packed, and that can be used until close(). MoELayer and Linear both are that."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar, Generic, NoReturn, Self, SupportsIndex, TypeVar

from ktmoe import backends
from ktmoe.backends.base import TUNED_FOR, Arenas, Backend, Packed, PackedMatrix, Plan, Progress
from ktmoe.backends.choice import choose_backend
from ktmoe.errors import ClosedError, InputError, NotCopyableError, asking
from ktmoe.experts import ExpertWeights
from ktmoe.linear_weights import LinearWeights
from ktmoe.machine.numa import Placement, placement_of
from ktmoe.messages import show
from ktmoe.weight_spec import WeightSpec
from ktmoe.weights.folding import ROUNDING

Weights = ExpertWeights | LinearWeights


#: What a backend packs the weights into.
P = TypeVar("P", Packed, PackedMatrix)


class PackedWeights(ABC, Generic[P]):
    """What a MoELayer and a Linear have in common: a backend that has packed them, and an end.

    spec: what the weights are. name: theirs, for messages. backend, activations, tuned_for: as they were chosen. placement: the
    NUMA nodes. packed: what the backend returned; None after close(). mapped: whether it lies in a file. nbytes: of the packed
    weights. rounding: "folded" if any scaled weight is rounded, else "exact".
    """

    #: What a backend packs them into.
    _kind: ClassVar[type[Any]]

    spec: WeightSpec
    name: str
    backend: str
    activations: str
    tuned_for: str
    placement: Placement
    packed: P | None
    mapped: bool
    nbytes: int
    rounding: str

    @staticmethod
    @abstractmethod
    def _packed_by(chosen: Backend, weights: Any, plan: Plan, progress: Progress | None, arenas: Arenas | None) -> Any:
        """What a backend packs the weights into, or makes of arenas."""

    def _pack(
        self,
        weights: Weights,
        backend: str,
        activations: str,
        *,
        rounding: str,
        tuned_for: str,
        numa_nodes: Sequence[int] | None,
        progress: Progress | None,
        arenas: Arenas | None,
        router_weight: str = "down_output",
    ) -> None:
        """Choose a backend, and have the weights packed, or mapped if there are arenas. Sets all attributes but spec.

        Raises what the constructors say; nothing is kept then.
        """
        if rounding not in ROUNDING:
            raise InputError(f"rounding must be one of {ROUNDING}, found {show(rounding)}")
        if tuned_for not in TUNED_FOR:
            raise InputError(f"tuned_for must be one of {TUNED_FOR}, found {show(tuned_for)}")
        choice = choose_backend(backend, weights, activations)
        self.name, self.mapped = weights.name, arenas is not None
        self.backend, self.activations, self.tuned_for = choice.name, choice.activations, tuned_for
        self.placement = placement_of(weights, numa_nodes)
        plan = Plan(router_weight, self.activations, rounding, self.placement, tuned_for)
        chosen = backends.get(self.backend)
        with asking(self.backend, self.name):
            packed = self._packed_by(chosen, weights, plan, progress, arenas)
        if not isinstance(packed, self._kind) or not hasattr(packed, "nbytes"):
            with suppress(Exception):  # it need not have a close(), or one that works
                packed.close()
            raise InputError(
                f"{self.name}: what backend {self.backend!r} packs into must inherit ktmoe.backends.base.{self._kind.__name__} "
                f"and have nbytes, found {show(packed)}"
            )
        if self.mapped and progress:
            progress(weights.nbytes, weights.nbytes)
        self._closing = threading.Lock()
        self.packed, self.rounding, self.nbytes = packed, packed.rounding, packed.nbytes

    def close(self) -> None:
        """Give the memory back, after calls that are running. A second call does nothing.

        Examples:
            >>> layer.close()
            >>> layer.packed is None
            True
        """
        packed, self.packed = self.packed, None
        if packed is not None and self._closing.acquire(blocking=False):  # of threads that close it at once, one does
            packed.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        kind = type(self).__name__
        raise NotCopyableError(
            f"{self.name}: a {kind} cannot be copied or pickled, since its packed weights are memory of this process. "
            f"Share it between threads as it is, fork after it was made, or make another one with {kind}.from_checkpoint"
        )

    def __repr__(self) -> str:
        kind = type(self).__name__
        if "packed" not in vars(self):  # its constructor has raised, or is not done
            return f"{kind}(not packed)"
        nodes = f"NUMA nodes {self.placement.nodes}" if self.placement.nodes else "no NUMA binding"
        closed = ", closed" if self.packed is None else ""
        how = f"{self.backend}, {self.activations} activations, {nodes}{closed}"
        return f"{kind}({self.name!r}, {self._description()}, {how})"

    def _description(self) -> str:
        """What the weights are, for repr()."""
        return self.spec.description

    def _open_for(self, doing: str) -> P:
        """What the backend packed. Raises ClosedError, which says what was to be done."""
        packed = self.packed  # once: close() may come from another thread
        if packed is None:
            raise ClosedError(f"{self.name}: {doing} after close()")
        return packed
