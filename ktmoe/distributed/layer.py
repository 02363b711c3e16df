"""DistributedLayer: the routed experts of one layer on several processes, each of which has a part of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, SupportsIndex

from ktmoe import forks
from ktmoe.arrays import A, AnyArray
from ktmoe.backends.base import Progress
from ktmoe.distributed.communicator import Alone, Communicator
from ktmoe.distributed.division import Division
from ktmoe.distributed.local_experts import LocalExperts
from ktmoe.distributed.messages import AT_ONCE
from ktmoe.distributed.own_tokens import OwnTokens
from ktmoe.distributed.parts import parts_of
from ktmoe.distributed.same_tokens import SameTokens
from ktmoe.distributed.together import together
from ktmoe.errors import ClosedError, InputError, NotCopyableError
from ktmoe.experts import ExpertSpec, ExpertWeights, checked_experts
from ktmoe.layer import MoELayer
from ktmoe.loaders import naming
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.messages import show

#: Whose tokens a rank's call has.
TOKENS = {"same": SameTokens, "own": OwnTokens}


@dataclass(frozen=True, eq=False)
class Distribution:
    """How layers are divided among processes. All processes give the same, but for the communicator, which is their own.

    communicator: a Communicator, such as ktmoe.distributed.gloo.GlooCommunicator() or ktmoe.distributed.mpi.MpiCommunicator().
    shards: virtual shards, 1 to 64. A token's output is the sum of one partial sum for each, added in one order, so that its
    bits do not depend on the number of processes. It is at least that number; equal shares need a multiple of it.
    cut: 1: experts are dealt. shards: the intermediate dimension is cut, and each process has a piece of every expert. Between
    them: groups of experts, each cut into so many pieces.
    tokens: "same": all processes call a layer with the same tokens, and all get the output. "own": each calls it with tokens of
    its own, or with none, and gets theirs.
    replicas: {layer: {expert: ranks}}, copies of experts that are chosen often, on further ranks. A layer without a number or
    name is None here.
    homes: the rank that has each shard, such as [0, 0, 0, 0, 0, 0, 1, 1] where the first machine has more memory. None: as many
    neighbours on each.
    gathered: tokens of a call for which each first message has room. More take further messages.
    One thread of a process calls the layers of a communicator, or their calls could have another order elsewhere.
    Raises InputError.

    Examples:
        >>> Distribution(Alone(), shards=2).division(experts).held(0)[:2]
        [(0, 0), (0, 1)]
    """

    communicator: Communicator = field(default_factory=Alone)
    shards: int = 8
    cut: int = 1
    tokens: str = "same"
    replicas: Mapping[int | str | None, Mapping[int, Sequence[int]]] = field(default_factory=dict)
    homes: Sequence[int] | None = None
    gathered: int = 1
    #: Held while a layer is called: threads take turns.
    lock: threading.Lock = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("shards", "cut", "gathered"):
            if not isinstance(getattr(self, name), int):
                raise InputError(f"{name} must be a whole number, found {show(getattr(self, name))}")
        if not isinstance(self.tokens, str) or self.tokens not in TOKENS:
            raise InputError(f"tokens must be one of {tuple(TOKENS)}, found {show(self.tokens)}")
        if not 0 <= self.gathered <= AT_ONCE:
            raise InputError(f"gathered must be 0 to {AT_ONCE}, found {show(self.gathered)}")
        self.after_fork()
        forks.watch(self)

    def after_fork(self) -> None:
        object.__setattr__(self, "lock", threading.Lock())

    def division(self, experts: ExpertWeights, layer: int | str | None = None) -> Division:
        """Which process has what of a layer. Raises InputError where its experts cannot be divided like this.

        Examples:
            >>> Distribution(Alone(), shards=2).division(experts).groups
            2
        """
        copies = self.replicas.get(layer, {})
        return Division(experts.num_experts, self.shards, self.cut, self.communicator.size, copies, self.homes)

    def check_layers(self, layers: Iterable[int | str]) -> None:
        """Raise InputError for replicas of a layer that is none of these.

        Examples:
            >>> Distribution(Alone(), replicas={3: {0: [0]}}).check_layers([0, 1, 2, 3])
        """
        if unknown := [layer for layer in self.replicas if layer not in set(layers)]:
            raise InputError(f"replicas must be of {naming.listed(list(layers))}, found {show(unknown[0])}")

    @property
    def what(self) -> str:
        """The options that all processes have to give alike."""
        copies = {layer: sorted((e, sorted(r)) for e, r in of.items()) for layer, of in self.replicas.items()}
        return f"{self.shards} {self.cut} {self.tokens} {copies} {self.homes} {self.gathered}"

    def own_part(self, experts: ExpertWeights, layer: int | str | None = None) -> list[ExpertWeights]:
        """What this process has of a layer's experts. Raises InputError.

        Examples:
            >>> sum(part.num_experts for part in Distribution(Alone()).own_part(experts, 3)) == experts.num_experts
            True
        """
        return [part.weights for part in parts_of(experts, self.division(experts, layer), self.communicator.rank)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Distribution:
        """The same object: copies of a model share its connections."""
        return self


class DistributedLayer:
    """The routed experts of one layer, of which this process packs its part alone.

    experts: ExpertWeights of the whole layer; the matrices of this process' part are read, here. layer: its number or name, for
    the distribution's replicas. The other arguments are MoELayer's. Making it sends no message:
    together() tells the others of an error.

    Attributes: distribution, division: who has what.

    Raises what MoELayer raises, and InputError where the experts cannot be divided like this.

    Examples:
        >>> with DistributedLayer(experts, Distribution(Alone()), layer=3) as layer:
        ...     y = layer.forward(x, ids, weights)
        >>> y.shape == x.shape
        True
    """

    def __init__(
        self,
        experts: ExpertWeights,
        distribution: Distribution,
        backend: str = "auto",
        activations: str = "auto",
        *,
        layer: int | str | None = None,
        rounding: str = "exact",
        tuned_for: str = "decode",
        router_weight: str | None = None,
        numa_nodes: Sequence[int] | None = None,
        progress: Progress | None = None,
    ):
        checked_experts(experts)
        self.distribution = distribution
        self._made_in = os.getpid()
        self.division = distribution.division(experts, layer)
        self._local = LocalExperts(
            experts.spec,
            self.division,
            parts_of(experts, self.division, distribution.communicator.rank),
            progress,
            backend=backend,
            activations=activations,
            rounding=rounding,
            tuned_for=tuned_for,
            router_weight=router_weight,
            numa_nodes=numa_nodes,
        )
        self._way = TOKENS[distribution.tokens](self._local, distribution.communicator, distribution.gathered)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        layer: int | str,
        distribution: Distribution,
        backend: str = "auto",
        activations: str = "auto",
        *,
        loader: str = "auto",
        **options: Any,
    ) -> DistributedLayer:
        """One layer of a checkpoint. All processes call it; where one of them raises, all do.

        path, layer, loader: as MoELayer.from_checkpoint has them. options: more arguments of DistributedLayer.
        Raises what MoELayer.from_checkpoint raises, RankError where another process raised.

        Examples:
            >>> layer = DistributedLayer.from_checkpoint("DeepSeek-V4-Flash", 3, Distribution(Alone()))
            >>> layer.num_experts == experts.num_experts
            True
        """
        with together(distribution.communicator, f"layer {layer}", distribution.what), Checkpoint(path) as checkpoint:
            experts = find_loader(checkpoint, loader, layer).load(checkpoint, layer)
            return cls(experts, distribution, backend, activations, layer=naming.layer_key(layer), **options)

    @property
    def spec(self) -> ExpertSpec:
        """Of the whole layer."""
        return self._local.spec

    @property
    def num_experts(self) -> int:
        """Of the whole layer, as all sizes are."""
        return self.spec.num_experts

    @property
    def hidden(self) -> int:
        return self.spec.hidden

    @property
    def intermediate(self) -> int:
        return self.spec.intermediate

    @property
    def layers(self) -> tuple[MoELayer, ...]:
        """What this process has, packed: experts of these layers are pieces of the whole layer's. Empty after close()."""
        return tuple(self._local.layers or ())

    @property
    def nbytes(self) -> int:
        """Of this process' packed weights."""
        return sum(layer.nbytes for layer in self.layers)

    def forward(self, x: A, expert_ids: AnyArray, expert_weights: AnyArray, out: A | None = None) -> A:
        """y [tokens, hidden], in x's kind and dtype. All processes call it, layer after layer in the same order.

        The arguments are those of MoELayer.forward, without shared experts: with tokens="same" the same on all processes, with
        "own" each process' own, which may be of 0 tokens.
        Raises what MoELayer.forward raises, on the process where it happens. RankError: another process raised, is gone, calls
        another layer, or has other arguments where they have to be the same. ClosedError in a forked child.

        Examples:
            >>> layer = DistributedLayer(experts, Distribution(Alone()))
            >>> layer.forward(x, ids, weights).dtype
            dtype('float32')
        """
        if os.getpid() != self._made_in and self.distribution.communicator.size > 1:
            raise ClosedError(f"{self.spec.name}: forward in a forked child, which has no connection to other processes")
        with self.distribution.lock:
            self._way.in_step = False
            try:
                y = self._way.forward(x, expert_ids, expert_weights, out)
            except BaseException:
                if not self._way.in_step:  # others wait for a message, and would take that of another call for it
                    self.distribution.communicator.fail()
                raise
            self._way.in_step = True
            return y

    def close(self) -> None:
        """Give this process' packed weights back. The communicator stays open.

        Examples:
            >>> layer = DistributedLayer(experts, Distribution(Alone()))
            >>> layer.close()
            >>> layer.layers
            ()
        """
        self._local.close()

    def __enter__(self) -> DistributedLayer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise NotCopyableError(
            f"{self.spec.name}: a DistributedLayer cannot be copied or pickled: its weights are memory of this process"
        )

    def __repr__(self) -> str:
        rank, size = self.distribution.communicator.rank, self.distribution.communicator.size
        return f"DistributedLayer({self.spec.name}: {self.spec.description}; rank {rank} of {size}, {self.nbytes} bytes)"
