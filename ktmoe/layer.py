"""MoELayer: what a user holds. It checks what comes in, hands it to the packed experts, and gives back the same kind."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from ktmoe.arrays import A, AnyArray, expect_native
from ktmoe.backends.base import Arenas, Backend, Packed, Plan, Progress, Stored
from ktmoe.background.worker import jobs
from ktmoe.batch import checked_batch, checked_out
from ktmoe.cache.opened import open_cache
from ktmoe.errors import InputError, asking
from ktmoe.experts import PROJECTIONS, ExpertSpec, ExpertWeights, checked_experts, checked_router_weight
from ktmoe.loaders import naming
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.machine.numa import placement_of
from ktmoe.matrix import Matrix
from ktmoe.messages import show
from ktmoe.packed_weights import PackedWeights


class MoELayer(PackedWeights[Packed]):
    """The routed experts of one layer, and shared ones if given, packed for one backend.

    experts: ExpertWeights, from a loader or from arrays; read once, here.
    shared: experts that every token has besides those that it chooses, computed in the same call and added last: ExpertWeights
    of one or more, of the sizes, activation and formats of `experts`, in any source order. Where these differ, a MoELayer of
    one expert computes it beside. A dense MLP of a checkpoint is ExpertWeights of one expert. Shared expert i is number
    num_experts + i, for replace_expert() and export_expert() alone: expert_ids do not reach it, nor does expert_mask cover it.
    backend: a name, or "auto": KTMOE_BACKEND if set, else the best that this CPU and these weights allow.
    activations: the mode (ktmoe.modes). "bf16": they stay bfloat16. "int16", "int8": they are rounded to integers of 16 or
    8 bits, per token and 32 along k; "mxfp8", "mxfp4": to that format; "mxfp8/mxfp4": x and h apart (docs/numerics.md).
    "auto": the backend's first mode for these weights, never "int8" or an MX mode. The attribute has the shortest name.
    rounding: "exact": weights take part exactly; "folded": a backend may round scaled weights to bfloat16 (relative error below
    2^-8) if that lets it multiply faster; the attribute of that name says whether any are.
    tuned_for: "decode": calls of a few tokens are fast; "prefill": calls of many are, where a backend has another kernel for
    these weights that adds in another order. A token's bits depend on this choice, and not on its batch.
    router_weight: what a router weight multiplies: "down_output" (transformers, kt-kernel), "down_input" (DeepSeek's own code),
    "expert_input" (Llama-4). None: what the experts' own is, which a loader knows. The attribute of that name says which.
    numa_nodes: the NUMA nodes, such as [1] or [1, 0]: each has a shard of the intermediate dimension, whose threads run there
    alone; what the shards give is added in that order. None: all that can be used, or no binding if that is one.
    progress: called with (done_bytes, total_bytes) while packing; an exception from it cancels, and nothing is kept.
    arenas: the same experts as they lie packed in a file, which is mapped in place of packing them: what ktmoe.cache's
    Cache.layer() gives, for the same NUMA nodes. No matrix of `experts` is read then.

    Attributes: num_experts: of the routed ones; num_shared: of the shared ones. expert_mask, bool [num_experts], False = skip
    that expert (it lives on a GPU or another machine); may be changed in place at any time, by any thread, and is read when a
    forward call begins. backend: the name. tuned_for: as it was given. nbytes: of the packed weights. spec:
    ktmoe.experts.ExpertSpec of the routed ones. placement: ktmoe.machine.numa.Placement. packed: what Backend.pack returned,
    for whoever looks into it; None after close(). mapped: whether they are parts of a file.

    Raises UnknownNameError, UnavailableError, FormatError (a tensor is not what it should be), OutOfMemoryError, InputError.

    Examples:
        >>> with ktmoe.MoELayer(ktmoe.load_experts("DeepSeek-V4-Flash", 3), activations="bf16") as layer:
        ...     y = layer.forward(x, ids, weights)
        >>> y.shape == x.shape
        True
    """

    _kind = Packed

    spec: ExpertSpec
    expert_mask: np.ndarray

    def __init__(
        self,
        experts: ExpertWeights,
        backend: str = "auto",
        activations: str = "auto",
        *,
        shared: ExpertWeights | None = None,
        rounding: str = "exact",
        tuned_for: str = "decode",
        router_weight: str | None = None,
        numa_nodes: Sequence[int] | None = None,
        progress: Progress | None = None,
        arenas: Arenas | None = None,
    ):
        checked_experts(experts)
        self.spec = experts.spec
        self.num_experts = experts.num_experts
        self.num_shared = 0
        if shared is not None:
            _refuse_with_shared("arenas", arenas)
            experts = experts.with_shared(shared)
            self.num_shared = shared.num_experts
        self._packed_spec = experts.spec
        self.router_weight = experts.router_weight if router_weight is None else checked_router_weight(router_weight)
        self.hidden = experts.hidden
        self.intermediate = experts.intermediate
        self._pack(
            experts,
            backend,
            activations,
            rounding=rounding,
            tuned_for=tuned_for,
            numa_nodes=numa_nodes,
            progress=progress,
            arenas=arenas,
            router_weight=self.router_weight,
        )
        self.expert_mask = np.ones(self.num_experts, bool)  # now that so many are known to fit into memory

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        layer: int | str,
        backend: str = "auto",
        activations: str = "auto",
        *,
        loader: str = "auto",
        shared: ExpertWeights | None = None,
        rounding: str = "exact",
        tuned_for: str = "decode",
        router_weight: str | None = None,
        numa_nodes: Sequence[int] | None = None,
        physical_to_logical: Sequence[int] | None = None,
        progress: Progress | None = None,
        cache: str | os.PathLike[str] | None = None,
    ) -> MoELayer:
        """One layer of a checkpoint folder (or one .safetensors or .gguf file).

        layer: its number, or a name such as "mtp.0".
        loader: a name, or "auto" to go by the tensors. physical_to_logical: which of the checkpoint's experts each of the
        layer's is, once or more often (redundant experts); expert_ids, expert_mask and so on count the layer's.
        cache: a folder that `ktmoe pack` has made of this checkpoint. The experts are mapped from there, and not read or packed
        (docs/packed-caches.md); it excludes physical_to_logical and shared, since a cache has the routed experts alone.
        Raises CheckpointError and MissingTensorError besides what MoELayer raises; CacheError, which names the file, for a
        cache that is damaged, or of another checkpoint, version or number of NUMA nodes.

        Examples:
            >>> layer = ktmoe.MoELayer.from_checkpoint("DeepSeek-V4-Flash", layer=3)
            >>> layer.name, layer.num_experts == experts.num_experts
            ('layers.3.ffn.experts', True)
        """
        with Checkpoint(path) as checkpoint:
            experts = find_loader(checkpoint, loader, layer).load(checkpoint, layer)
            if physical_to_logical is not None:
                experts = experts.take(physical_to_logical)
            options: dict[str, Any] = {
                "rounding": rounding,
                "tuned_for": tuned_for,
                "router_weight": router_weight,
                "numa_nodes": numa_nodes,
            }
            if shared is not None:
                _refuse_with_shared("cache", cache)
            if cache is not None:
                name = naming.layer_key(layer)
                options["arenas"] = open_cache(cache, checkpoint, physical_to_logical).layer(
                    name, experts, placement_of(experts, numa_nodes)
                )
            return cls(experts, backend, activations, shared=shared, **options, progress=progress)

    def forward(
        self, x: A, expert_ids: AnyArray, expert_weights: AnyArray, out: A | None = None, shared_weights: AnyArray | None = None
    ) -> A:
        """y [tokens, hidden], in x's kind and dtype.

        x: [tokens, hidden]: bfloat16 (ml_dtypes), uint16 holding bfloat16 bits, float32 (rounded to bfloat16 once, to nearest
        even), or a torch CPU tensor of bfloat16 or float32. expert_ids: integers [tokens, top_k]; an id outside
        [0, num_experts) or masked adds zero; a repeated one counts twice. expert_weights: float32 [tokens, top_k].
        out: written and returned if given; of x's kind, dtype and shape, or float32, which is y before it would be rounded;
        C-contiguous and aligned; x itself, or no overlap with any argument. The other arrays are copied if they are not aligned
        to their items.
        shared_weights: float32 [tokens, num_shared], for models that gate their shared experts; they multiply what router
        weights do (router_weight). None: 1.
        Raises InputError, which names the argument, what was expected and what was found; ClosedError after close();
        CacheError if the file that the layer maps was changed.

        Examples:
            >>> x = np.ones((2, layer.hidden), np.float32)
            >>> ids, weights = np.array([[0, 1], [5, 3]]), np.full((2, 2), 0.5, np.float32)
            >>> y = layer.forward(x, ids, weights)
            >>> y.dtype, y.shape == x.shape
            (dtype('float32'), True)
        """
        packed = self._open_for("forward")
        batch = checked_batch(self.spec, self.expert_mask, x, expert_ids, expert_weights, self.num_shared, shared_weights)
        target = checked_out(out, batch, float32=True)
        if batch.slots == 0:
            target[...] = 0
        else:
            packed.forward(*batch.contiguous(), target)
        return batch.x.restore(target) if out is None else out

    def submit(
        self, x: A, expert_ids: AnyArray, expert_weights: AnyArray, out: A | None = None, shared_weights: AnyArray | None = None
    ) -> Future[A]:
        """forward() on a thread of its own: job.result() gives y, or raises. Leave the arguments unchanged until then.

        Jobs run in the order of submission. The GIL is free while they compute. A forked child starts with none: those that its
        parent submitted end in the parent alone. Raises UnavailableError if the thread cannot be started.

        Examples:
            >>> job = layer.submit(x, ids, weights)
            >>> np.array_equal(job.result(), layer.forward(x, ids, weights))
            True
        """
        return jobs.submit(self.forward, x, expert_ids, expert_weights, out, shared_weights)

    def replace_expert(self, expert: int, matrices: Mapping[str, Matrix]) -> None:
        """Put other weights in the place of an expert's, while forward calls go on: each sees all of the old or all of the new.

        matrices: {"gate", "up", "down": Matrix} of the layer's shapes and formats. The memory of one expert is kept beside the
        layer's for this. Raises InputError, FormatError (what was there stays), UnavailableError if the backend cannot.

        Examples:
            >>> layer.replace_expert(0, {projection: experts.matrix(1, projection) for projection in ("gate", "up", "down")})
            >>> y = layer.forward(x, ids, weights)  # expert 0 is now a copy of expert 1
        """
        self._packed_spec.check_expert(expert)
        if not isinstance(matrices, Mapping) or set(matrices) != set(PROJECTIONS):
            raise InputError(f"matrices must be by projection, {PROJECTIONS}, found {show(matrices)}")
        matrices = dict(matrices)
        for projection, matrix in matrices.items():  # here, so that no backend has to
            self._packed_spec.check(expert, projection, matrix)
        packed = self._open_for("replace")
        with asking(self.backend, self.name):
            packed.replace(expert, matrices)
        self.rounding = packed.rounding

    def export_expert(self, expert: int, parts: int = 1, out: Sequence[Stored] | None = None) -> list[dict[str, Matrix]]:
        """An expert in the checkpoint's own bytes, cut for tensor parallelism: part i has rows [i n / parts, (i + 1) n / parts)
        of gate and up and those columns of down, n being the intermediate size. down's bias comes with part 0.

        out: for each part {"gate", "up", "down": the arrays of format.arrays() by name}, C-contiguous and aligned, of Matrix's
        shapes and dtypes, to write into. Raises InputError, which says what parts must divide, ClosedError.

        Examples:
            >>> (expert,) = layer.export_expert(0)
            >>> np.array_equal(expert["down"].codes, experts.matrix(0, "down").codes)
            True
        """
        self._packed_spec.check_expert(expert)
        parts = operator.index(parts)
        one = self.spec.part(parts, "parts")
        part: Any  # of out, then of matrices
        if out is None:
            out = [{p: one.formats[p].empty(*one.shape(p)) for p in PROJECTIONS} for _ in range(parts)]
        elif len(out) != parts:
            raise InputError(f"out must be a sequence of {parts} parts, found {len(out)}")
        for i, part in enumerate(out):
            if set(part) != set(PROJECTIONS):
                raise InputError(f"out[{i}] must have arrays for {PROJECTIONS}, found {tuple(part)}")
        name = f"{self.name}.{expert}"
        matrices = [{p: Matrix(f"{name}.{p}", one.formats[p], one.shape(p), **part[p]) for p in PROJECTIONS} for part in out]
        for part, matrix in ((part[p], matrix) for part, of in zip(out, matrices, strict=True) for p, matrix in of.items()):
            for label in matrix.stored:  # of an array that is not aligned, the Matrix has a copy
                expect_native(f"{matrix.name}: out: {label}", part[label])
        stored = [{p: matrix.stored for p, matrix in part.items()} for part in matrices]
        packed = self._open_for("export")
        with asking(self.backend, self.name):
            biases = packed.export(expert, stored)
        for projection, bias in biases.items():
            cut = [bias, *[None] * (parts - 1)] if projection == "down" else np.array_split(bias, parts)
            for part, own in zip(matrices, cut, strict=True):
                part[projection] = replace(part[projection], bias=own)
        return matrices

    @staticmethod
    def _packed_by(
        chosen: Backend, weights: ExpertWeights, plan: Plan, progress: Progress | None, arenas: Arenas | None
    ) -> Packed:
        return chosen.pack(weights, plan, progress) if arenas is None else chosen.map(weights, plan, arenas)

    def _description(self) -> str:
        shared = f", {self.num_shared} shared expert{'s' * (self.num_shared > 1)}" if self.num_shared else ""
        return f"{self.spec.description}{shared}"


def _refuse_with_shared(name: str, given: object) -> None:
    if given is not None:
        raise InputError(
            f"{name} must be None where shared experts are given: a packed cache has the routed experts alone; found "
            f"{show(given)}; a MoELayer of the shared experts alone computes them beside"
        )
