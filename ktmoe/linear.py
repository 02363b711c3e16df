"""Linear: a dense matrix, y = x W^T + b, packed and computed as experts are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

import numpy as np

from ktmoe import arrays, backends
from ktmoe._native import core
from ktmoe.backends.base import TUNED_FOR, Arenas, PackedMatrix, Plan, Progress
from ktmoe.backends.choice import choose_backend
from ktmoe.background.worker import Worker
from ktmoe.cache.opened import Cache
from ktmoe.errors import ClosedError, InputError, NotCopyableError, asking
from ktmoe.linear_arrays import checked, gradient_target, target_of
from ktmoe.linear_weights import LinearWeights
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.dense import find_matrix
from ktmoe.machine.numa import placement_of
from ktmoe.matrix import Matrix
from ktmoe.messages import show
from ktmoe.weights.folding import ROUNDING


class Linear:
    """A dense matrix, packed for one backend: y = x W^T + b.

    matrix: Matrix [n, k] in any WeightFormat; ktmoe.load_matrix() reads one of a checkpoint. Its bias is b. Or LinearWeights,
    which read it when it is packed.
    backend: a name, or "auto": KTMOE_BACKEND if set, else the best that this CPU and this format allow.
    activations: the mode (ktmoe.modes), of which x's side counts. "bf16": x stays bfloat16 and takes part exactly. Others
    round it and have to be named; "auto" is the backend's first mode for this format, as for MoELayer.
    rounding, tuned_for, numa_nodes, progress: as MoELayer has them. The nodes divide the outputs, so no bit depends on them.
    arenas: the matrix as it lies packed in a file, which is mapped in place of packing it: what ktmoe.cache's Cache.matrix()
    gives, for the same NUMA nodes. LinearWeights are not read then.

    Attributes: name. shape: (n, k). format: WeightFormat. backend, activations, tuned_for: as they were chosen. nbytes: of the
    packed weights. rounding: "folded" if scaled weights are rounded, else "exact". placement. spec. mapped. packed: what
    Backend.pack_linear returned; None after close().

    Raises UnknownNameError, UnavailableError, FormatError (the matrix is not what it should be), OutOfMemoryError, InputError.
    """

    def __init__(
        self,
        matrix: Matrix | LinearWeights,
        backend: str = "auto",
        activations: str = "bf16",
        *,
        rounding: str = "exact",
        tuned_for: str = "decode",
        numa_nodes: Sequence[int] | None = None,
        progress: Progress | None = None,
        arenas: Arenas | None = None,
    ):
        weights = matrix if isinstance(matrix, LinearWeights) else LinearWeights(matrix)
        if rounding not in ROUNDING:
            raise InputError(f"rounding must be one of {ROUNDING}, found {show(rounding)}")
        if tuned_for not in TUNED_FOR:
            raise InputError(f"tuned_for must be one of {TUNED_FOR}, found {show(tuned_for)}")
        choice = choose_backend(backend, weights, activations)
        self.name, self.shape, self.format = weights.name, weights.shape(), weights.formats["weight"]
        self.backend, self.activations, self.tuned_for = choice.name, choice.activations, tuned_for
        self.spec = weights.spec
        self.placement = placement_of(weights, numa_nodes)
        plan = Plan("down_output", self.activations, rounding, self.placement, tuned_for)
        chosen = backends.get(self.backend)
        self.mapped = arenas is not None
        with asking(self.backend, self.name):
            packed = chosen.pack_linear(weights, plan, progress) if arenas is None else chosen.map_linear(weights, plan, arenas)
        if not isinstance(packed, PackedMatrix):
            raise InputError(
                f"{self.name}: what backend {self.backend!r} packs a matrix into must inherit "
                f"ktmoe.backends.base.PackedMatrix, found {show(packed)}"
            )
        if self.mapped and progress:
            progress(weights.nbytes, weights.nbytes)
        self.packed = packed
        self.rounding, self.nbytes = packed.rounding, packed.nbytes

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike,
        name: str,
        backend: str = "auto",
        activations: str = "bf16",
        *,
        scheme: str = "auto",
        numa_nodes: Sequence[int] | None = None,
        cache: str | os.PathLike | None = None,
        **options,
    ) -> Linear:
        """A matrix of a checkpoint folder (or one .safetensors or .gguf file).

        name: what its tensors' names begin with, such as "model.layers.0.self_attn.q_proj"; scheme: a loader's name, or "auto"
        to go by the tensors (ktmoe.load_matrix). numa_nodes, options: Linear's.
        cache: a folder that `ktmoe pack --matrix` has made of this checkpoint. The matrix is mapped from there, and not read or
        packed (docs/packed-caches.md).
        Raises CheckpointError and MissingTensorError besides what Linear raises; CacheError, which names the file, for a cache
        that is damaged, or of another checkpoint, version or number of NUMA nodes.
        """
        with Checkpoint(path) as checkpoint:
            found = find_matrix(checkpoint, name, scheme=scheme)
            weights = LinearWeights.of_headers(found.name, found.format, found.shape, found.read)
            if cache is not None:
                options["arenas"] = Cache(cache, checkpoint).matrix(name, weights, placement_of(weights, numa_nodes))
            return cls(weights, backend, activations, numa_nodes=numa_nodes, **options)

    def forward(self, x, out=None, dtype=None):
        """y [tokens, n], in x's kind and dtype.

        x: [tokens, k]: bfloat16 (ml_dtypes), uint16 holding bfloat16 bits, float32 (rounded to bfloat16 once, to nearest
        even), or a torch CPU tensor of bfloat16 or float32. dtype: None for x's, or float32: y as it is before it would be
        rounded to bfloat16, for an output layer. out: written and returned if given; of x's kind, or float32; C-contiguous and
        aligned, and no overlap with x.
        Raises InputError, which names the argument, what was expected and what was found; ClosedError after close().
        """
        given = checked(x, (None, self.shape[1]))
        tokens = given.array.shape[0]
        target, restore = target_of(x, given, (tokens, self.shape[0]), dtype, out)
        compute((self,), given.array, (0,), (target,))
        return restore(target)

    def submit(self, x, out=None, dtype=None) -> Future:
        """forward() on a thread of its own: job.result() gives y, or raises. Leave the arguments unchanged until then.

        Jobs run in the order of submission. The GIL is free while they compute. A forked child starts with none.
        Raises UnavailableError if the thread cannot be started.
        """
        return _jobs.submit(self.forward, x, out, dtype)

    def backward(self, grad_y, out=None):
        """The gradient of a loss with respect to x, [tokens, k], in grad_y's kind and dtype: grad_y W.

        grad_y: [tokens, n], as forward() takes x; float32 is rounded to bfloat16 once. out: as forward() takes it. The matrix
        has no gradient: it is frozen.
        Raises UnavailableError, which says why, where the mode or a kernel has no transposed product; InputError; ClosedError.
        """
        given = checked(grad_y, (None, self.shape[0]), "grad_y")
        packed = self._open_for("backward")
        target, restore = gradient_target(grad_y, {"grad_y": given}, (given.array.shape[0], self.shape[1]), out)
        with asking(self.backend, self.name):
            packed.backward(arrays.contiguous(given.array), target)
        return restore(target)

    def replace(self, matrix: Matrix) -> None:
        """Put another matrix in the place of this one, while forward calls go on: each sees all of the old or all of the new.

        matrix: of the same shape and format. Memory for one matrix is kept beside it for this.
        Raises InputError, FormatError (what was there stays), UnavailableError if the backend cannot.
        """
        self.spec.check(0, "weight", matrix)
        packed = self._open_for("replace")
        with asking(self.backend, self.name):
            packed.replace(0, {"weight": matrix})
        self.rounding = packed.rounding

    def export(self) -> Matrix:
        """The matrix in the checkpoint's own bytes. Raises ClosedError, UnavailableError if the backend cannot."""
        matrix = Matrix(self.name, self.format, self.shape, **self.format.empty(*self.shape))
        packed = self._open_for("export")
        with asking(self.backend, self.name):
            biases = packed.export(0, [{"weight": matrix.stored}])
        return replace(matrix, bias=biases.get("weight"))

    def close(self) -> None:
        """Give the memory back, after forward calls that are running. A second call does nothing."""
        packed, self.packed = self.packed, None
        if packed is not None:
            packed.close()

    def __enter__(self) -> Linear:
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def __reduce_ex__(self, protocol):
        raise NotCopyableError(
            f"{self.name}: a Linear cannot be copied or pickled, since its packed weights are memory of this process. "
            "Share it between threads as it is, fork after it was made, or make another one with Linear.from_checkpoint"
        )

    def __repr__(self) -> str:
        if "packed" not in vars(self):  # its constructor has raised, or is not done
            return "Linear(not packed)"
        nodes = f"NUMA nodes {self.placement.nodes}" if self.placement.nodes else "no NUMA binding"
        closed = ", closed" if self.packed is None else ""
        return (
            f"Linear({self.name!r}, {self.spec.description}, {self.backend}, {self.activations} activations, {nodes}{closed})"
        )

    def _open_for(self, doing: str) -> PackedMatrix:
        packed = self.packed  # once: close() may come from another thread
        if packed is None:
            raise ClosedError(f"{self.name}: {doing} after close()")
        return packed


def compute(linears: Sequence[Linear], x: np.ndarray, columns: Sequence[int], outs: Sequence[np.ndarray]) -> None:
    """Write y of each Linear into its out. columns: of x, the first one that each takes."""
    packed = [linear._open_for("forward") for linear in linears]
    if not x.shape[0]:
        return
    x = arrays.contiguous(x)
    if all(isinstance(each, core.PackedLinear) for each in packed):
        core.linear_forward(packed, x, columns, outs)
        return
    for each, linear, column, out in zip(packed, linears, columns, outs, strict=True):
        with asking(linear.backend, linear.name):
            each.forward(arrays.contiguous(x[:, column : column + linear.shape[1]]), out)


def differentiate(linears: Sequence[Linear], grads: Sequence[np.ndarray], outs: Sequence[np.ndarray]) -> None:
    """The gradients of what linears take, or their sum, where outs has one array."""
    packed = [linear._open_for("backward") for linear in linears]
    if all(isinstance(each, core.PackedLinear) for each in packed):
        core.linear_backward(packed, grads, outs)
        return
    if not grads[0].shape[0]:
        return
    added = np.zeros((len(outs), *outs[0].shape), np.float32)
    for i, (each, linear, grad) in enumerate(zip(packed, linears, grads, strict=True)):
        one = np.empty_like(added[0])
        with asking(linear.backend, linear.name):
            each.backward(arrays.contiguous(grad), one)
        added[i % len(outs)] += one
    for out, total in zip(outs, added, strict=True):
        out[...] = total if out.dtype == np.float32 else total.astype(arrays.BF16).view(np.uint16)


_jobs = Worker("ktmoe-submit-linear")
