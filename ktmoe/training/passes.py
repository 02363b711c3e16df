"""Training: the forward and the backward pass of a layer with an adapter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ktmoe import arrays
from ktmoe._native import core
from ktmoe.arrays import A, AnyArray
from ktmoe.backends.base import Packed
from ktmoe.batch import checked_batch, checked_out
from ktmoe.errors import ClosedError, InputError, asking, memory_for
from ktmoe.experts import ExpertSpec
from ktmoe.layer import MoELayer
from ktmoe.messages import show
from ktmoe.training.lora import Lora, checked_number
from ktmoe.training.saved import Saved

#: The activation mode that training takes.
MODE = "bf16"
#: What a backward pass can give.
WANTED = ("x", "weights", "lora")


@dataclass(frozen=True, eq=False)
class Gradients:
    """The gradients of a loss.

    x: like x, of its kind and dtype. weights: of the router weights, float32 [tokens, top_k], 0 where a slot is skipped.
    lora: of the adapter, {projection: (da, db)}, float32 of a's and b's shapes. None: not wanted, or no adapter.
    shared_weights: of the shared experts' weights, given or 1, float32 [tokens, num_shared], wanted with "weights"; None for a
    layer without them.

    Examples:
        >>> passes = Training(layer)
        >>> y, saved = passes.forward(x, ids, weights)
        >>> gradients = passes.backward(saved, np.ones_like(y), wanted=["x"])
        >>> gradients.x.shape == x.shape, gradients.lora
        (True, None)
    """

    x: Any
    weights: np.ndarray | None
    lora: dict[str, tuple[Any, Any]] | None
    shared_weights: np.ndarray | None = None


class Training:
    """The forward and the backward pass of a layer whose weights are frozen and stay packed.

    docs/training-numerics.md has all formulas.

    layer: with activations="bf16"; shared experts exclude an adapter. It can still be used by itself. A forward pass copies its
    expert_mask, which its backward pass uses. Do not replace an expert between the two. recompute: whether a forward pass keeps
    its arguments alone, and the backward pass computes g and u again, with the same bits.

    Raises InputError for another activation mode, UnavailableError for a layer that cannot be trained, ClosedError.

    Examples:
        >>> passes = Training(layer, recompute=True)
        >>> y, saved = passes.forward(x, ids, weights)
        >>> np.array_equal(y, layer.forward(x, ids, weights))
        True
    """

    def __init__(self, layer: MoELayer, recompute: bool = False):
        if not isinstance(layer, MoELayer):
            raise InputError(f"layer must be a MoELayer, found {type(layer).__name__}")
        if layer.activations != MODE:
            raise InputError(
                f"{layer.name}: training needs activations={MODE!r}, found {layer.activations!r}, which rounds more; "
                f"make the layer with activations={MODE!r}"
            )
        self.layer = layer  # first: pickle then says why a layer cannot be copied
        self.recompute = bool(recompute)
        with asking(layer.backend, layer.name):
            self._passes = _open(layer, "training").training()

    @property
    def spec(self) -> ExpertSpec:
        """The layer's ExpertSpec."""
        return self.layer.spec

    def __deepcopy__(self, memo: dict[int, Any]) -> Training:
        """The same object: it has nothing of its own, and copies of a module share its layer."""
        return self

    def forward(
        self,
        x: A,
        expert_ids: AnyArray,
        expert_weights: AnyArray,
        lora: Lora | None = None,
        *,
        save: bool = True,
        out: A | None = None,
        shared_weights: AnyArray | None = None,
    ) -> tuple[A, Saved | None]:
        """(y, what backward() needs). y, x, expert_ids, expert_weights, out and shared_weights are those of MoELayer.forward();
        without an adapter y has its bits.

        lora: the adapter; None: none. save: whether to keep anything; None is returned where not.
        Raises what MoELayer.forward() raises, InputError for an adapter of other shapes or of a layer with shared experts,
        OutOfMemoryError.

        Examples:
            >>> lora = Lora.initial(layer.spec, rank=4, alpha=8)
            >>> y, saved = Training(layer).forward(x, ids, weights, lora)
            >>> saved.adapted
            (('gate', 'up', 'down'), 4)
        """
        _open(self.layer, "forward")
        given, num_shared = (x, expert_ids, expert_weights), self.layer.num_shared
        batch = checked_batch(self.spec, self.layer.expert_mask, *given, num_shared, shared_weights)
        adapter = self._adapter(lora)
        target = checked_out(out, batch)
        taken = None
        with memory_for(f"{self.layer.name}: what a forward pass of {len(batch.ids)} tokens keeps"):
            arguments = batch.copied() if save else batch.contiguous()
            if save and not self.recompute:
                taken = self._room(batch.slots, lora)
        if batch.slots == 0:
            target[...] = 0
        else:
            self._passes.forward_training(*arguments, target, adapter, taken)
        saved = None
        if save:
            adapted = None if lora is None else (lora.projections, lora.rank)
            saved = Saved(*arguments, taken, adapted, self.layer, batch.x.restore)
        return batch.x.restore(target) if out is None else out, saved

    def backward(
        self,
        saved: Saved,
        grad_y: AnyArray,
        lora: Lora | None = None,
        *,
        into: Mapping[str, tuple[AnyArray, AnyArray]] | None = None,
        add: bool = False,
        scale: float = 1.0,
        wanted: Iterable[str] = WANTED,
    ) -> Gradients:
        """The gradients of a loss, given that with respect to y.

        saved: what forward() of the same layer gave. grad_y: [tokens, hidden], bfloat16, uint16 holding its bits, float32
        (rounded to bfloat16 once), or a torch CPU tensor of bfloat16 or float32. lora: the adapter of the forward pass, with
        the same numbers in it. into: {projection: (da, db)}, where the adapter's gradients are written: float32, C-contiguous
        and aligned, of a's and b's shapes, arrays or torch CPU tensors; None: new arrays. add: whether they are added to what
        into holds. scale: multiplies the adapter's gradients alone. wanted: which of "x", "weights" and "lora" to compute.
        Raises InputError, ClosedError, OutOfMemoryError.

        Examples:
            >>> passes, lora = Training(layer), Lora.initial(layer.spec, rank=4, alpha=8)
            >>> y, saved = passes.forward(x, ids, weights, lora)
            >>> gradients = passes.backward(saved, np.ones_like(y), lora)
            >>> da, db = gradients.lora["down"]
            >>> da.shape == lora.pairs["down"][0].shape
            True
        """
        _open(self.layer, "backward")
        if not isinstance(saved, Saved) or saved.owner is not self.layer:
            found = "one of another" if isinstance(saved, Saved) else show(saved)
            raise InputError(f"{self.layer.name}: saved must be of a forward pass of this layer, found {found}")
        if (lora and (lora.projections, lora.rank)) != saved.adapted:
            raise InputError(
                f"{self.layer.name}: lora must be the adapter of the forward pass, {show(saved.adapted)}, found {lora!r}"
            )
        wanted = set(wanted)
        if not wanted <= set(WANTED):
            raise InputError(f"wanted must be of {', '.join(WANTED)}, found {show(sorted(map(str, wanted)))}")
        scale = checked_number("scale", scale)
        given = arrays.view(grad_y, "grad_y").array
        arrays.expect_shape("grad_y", given, saved.x.shape)
        adapter = self._adapter(lora)
        if "lora" not in wanted or lora is None:
            if into is not None:
                raise InputError("into must be None where no adapter's gradients are computed")
            sums, gradients = None, None
        with memory_for(f"{self.layer.name}: the gradients of {len(saved.x)} tokens"):
            if "lora" in wanted and lora is not None:
                if into is None and add:
                    raise InputError("add needs into: there is nothing to add to")
                sums = _zeros(lora) if into is None else _checked_targets(lora, into, [given, *saved.held])
                gradients = sums if into is None else dict(into)
                add = add or into is None
            grad_x = np.empty(saved.x.shape, saved.x.dtype) if "x" in wanted else None
            grad_weights = np.zeros(saved.weights.shape, np.float32)
        if saved.ids.size == 0:
            if grad_x is not None:
                grad_x[...] = 0
            for array in () if add else (array for pair in (sums or {}).values() for array in pair):
                array[...] = 0
        else:
            arguments = (saved.x, saved.ids, saved.weights, saved.mask, arrays.contiguous(given), adapter, saved.arrays)
            self._passes.backward(*arguments, grad_x, grad_weights, sums, bool(add), scale)
        of_weights = self._of_weights(grad_weights) if "weights" in wanted else (None, None)
        return Gradients(None if grad_x is None else saved.restore(grad_x), of_weights[0], gradients, of_weights[1])

    def _of_weights(self, all_weights: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """The gradients of the routed experts' weights and of the shared ones', which follow these."""
        if not self.layer.num_shared:
            return all_weights, None
        routed, shared = np.hsplit(all_weights, [all_weights.shape[1] - self.layer.num_shared])
        return routed.copy(), shared.copy()

    def _adapter(self, lora: Lora | None) -> Any:
        """The adapter as the driver takes it. Raises InputError."""
        if lora is None:
            return None
        if not isinstance(lora, Lora):
            raise InputError(f"{self.layer.name}: lora must be a Lora or None, found {type(lora).__name__}")
        if self.layer.num_shared:
            raise InputError(
                f"{self.layer.name}: lora must be None for a layer with shared experts, found {lora!r}; adapters are of routed "
                "experts: make the layer without its shared experts, which a MoELayer of their own computes beside"
            )
        lora.check_dtypes(self.layer.name)
        lora.check(self.layer.spec)
        return core.Adapter(self.layer.spec, lora.scale, lora.pairs)

    def _room(self, slots: int, lora: Lora | None) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """New arrays for g, u and t."""
        g, u = (np.empty((slots, self.layer.intermediate), np.float32) for _ in range(2))
        return g, u, None if lora is None else np.empty((slots, 3, lora.rank), np.float32)


def _open(layer: MoELayer, what: str) -> Packed:
    packed = layer.packed  # once: close() may come from another thread
    if packed is None:
        raise ClosedError(f"{layer.name}: {what} after close()")
    return packed


def _zeros(lora: Lora) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Zeros for gradients to be added to: memory of experts without tokens is not even touched."""
    return {p: (np.zeros(a.shape, np.float32), np.zeros(b.shape, np.float32)) for p, (a, b) in lora.pairs.items()}


def _checked_targets(lora: Lora, into: Mapping[str, tuple[AnyArray, AnyArray]], others: list[np.ndarray]) -> dict[str, Any]:
    """The arrays that an adapter's gradients go to, float32. others: what is read meanwhile. Raises InputError."""
    if not isinstance(into, Mapping) or set(into) != set(lora.projections):
        raise InputError(f"into must have (da, db) for {', '.join(lora.projections)}, found {show(into)}")
    sums = {}
    for projection in lora.projections:
        pair = into[projection]
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InputError(f"into: {projection} must be (da, db), found {show(pair)}")
        names = (f"into: {projection}'s d{name}" for name in "ab")
        sums[projection] = tuple(map(_checked_target, names, pair, lora.pairs[projection]))
    given = [
        (f"into: {projection}'s d{name}", array)
        for projection, pair in sums.items()
        for name, array in zip("ab", pair, strict=True)
    ]
    others = [*others, *(array for pair in lora.pairs.values() for array in pair)]
    for i, (name, array) in enumerate(given):
        if any(np.may_share_memory(array, other) for other in (*others, *(before for _, before in given[:i]))):
            raise InputError(f"{name} must not overlap another argument")
    return sums


def _checked_target(name: str, given: Any, like: np.ndarray) -> np.ndarray:
    array = arrays.as_numpy(given, name)
    if array.dtype != np.float32:
        raise InputError(f"{name} must be float32, found {array.dtype}")
    arrays.expect_native(name, array)
    arrays.expect_shape(name, array, like.shape)
    return array
