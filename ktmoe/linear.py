"""Linear: a dense matrix, y = x W^T + b, packed and computed as experts are."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from ktmoe import arrays
from ktmoe._native import core
from ktmoe.arrays import A, AnyArray
from ktmoe.backends.base import Arenas, Backend, PackedMatrix, Plan, Progress
from ktmoe.background.worker import jobs
from ktmoe.cache.opened import Cache
from ktmoe.errors import asking
from ktmoe.linear_arrays import checked, checked_ids, gradient_target, rows_target, target_of
from ktmoe.linear_products import compute
from ktmoe.linear_rows import read_rows, read_rows_of_export
from ktmoe.linear_weights import LinearSpec, LinearWeights
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.loaders.dense import find_matrix
from ktmoe.machine.numa import placement_of
from ktmoe.matrix import Matrix
from ktmoe.packed_weights import PackedWeights
from ktmoe.weights.formats import WeightFormat


class Linear(PackedWeights[PackedMatrix]):
    """A dense matrix, packed for one backend: y = x W^T + b.

    matrix: Matrix [n, k] in any WeightFormat; ktmoe.load_matrix() reads one of a checkpoint. Its bias is b. Or LinearWeights,
    which read it when it is packed.
    backend: a name, or "auto": KTMOE_BACKEND if set, else the best that this CPU and this format allow.
    activations: the mode (ktmoe.modes), of which x's side counts. "bf16": x stays bfloat16 and takes part exactly. Others
    round it and have to be named; "auto" is the backend's first mode for this format, as for MoELayer.
    rounding, tuned_for, numa_nodes, progress: as MoELayer has them. The nodes divide the outputs, so no bit of y depends on
    them. A gradient is added up over the outputs, node by node, so its bits depend on how many nodes there are.
    arenas: the matrix as it lies packed in a file, which is mapped in place of packing it: what ktmoe.cache's Cache.matrix()
    gives, for the same NUMA nodes. LinearWeights are not read then.

    Attributes: name. shape: (n, k). format: WeightFormat. backend, activations, tuned_for: as they were chosen. nbytes: of the
    packed weights. rounding: "folded" if scaled weights are rounded, else "exact". placement: ktmoe.machine.numa.Placement, the
    NUMA nodes. spec: ktmoe.linear_weights.LinearSpec. mapped: whether it lies in a file. packed: what Backend.pack_linear
    returned; None after close(). replaced: how often replace() has changed it.

    Raises UnknownNameError, UnavailableError, FormatError (the matrix is not what it should be), OutOfMemoryError, InputError.

    Examples:
        >>> with ktmoe.Linear(ktmoe.load_matrix("Qwen3-30B-A3B", "lm_head")) as linear:
        ...     y = linear.forward(np.ones((1, linear.shape[1]), np.float32))
        >>> y.shape == (1, linear.shape[0])
        True
    """

    _kind = PackedMatrix

    spec: LinearSpec
    shape: tuple[int, int]
    format: WeightFormat

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
        self.spec, self.shape, self.format = weights.spec, weights.shape(), weights.formats["weight"]
        self.replaced, self._counting = 0, threading.Lock()
        self._pack(
            weights,
            backend,
            activations,
            rounding=rounding,
            tuned_for=tuned_for,
            numa_nodes=numa_nodes,
            progress=progress,
            arenas=arenas,
        )

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        name: str,
        backend: str = "auto",
        activations: str = "bf16",
        *,
        scheme: str = "auto",
        rounding: str = "exact",
        tuned_for: str = "decode",
        numa_nodes: Sequence[int] | None = None,
        progress: Progress | None = None,
        cache: str | os.PathLike[str] | None = None,
    ) -> Linear:
        """A matrix of a checkpoint folder (or one .safetensors or .gguf file).

        name: what its tensors' names begin with, such as "model.layers.0.self_attn.q_proj". scheme: the name of a loader, whose
        scheme it is, or "auto" to go by the tensors (ktmoe.load_matrix).
        cache: a folder that `ktmoe pack --matrix` has made of this checkpoint. The matrix is mapped from there, and not read or
        packed (docs/packed-caches.md).
        Raises CheckpointError and MissingTensorError besides what Linear raises; CacheError, which names the file, for a cache
        that is damaged, or of another checkpoint, version or number of NUMA nodes.

        Examples:
            >>> linear = ktmoe.Linear.from_checkpoint("Qwen3-30B-A3B", "model.layers.0.self_attn.q_proj")
            >>> linear.name, linear.format.description
            ('model.layers.0.self_attn.q_proj', 'BF16')
        """
        with Checkpoint(path) as checkpoint:
            found = find_matrix(checkpoint, name, scheme=scheme)
            weights = LinearWeights.of_headers(found.name, found.format, found.shape, found.read)
            arenas = None
            if cache is not None:
                arenas = Cache(cache, checkpoint).matrix(name, weights, placement_of(weights, numa_nodes))
            return cls(
                weights,
                backend,
                activations,
                rounding=rounding,
                tuned_for=tuned_for,
                numa_nodes=numa_nodes,
                progress=progress,
                arenas=arenas,
            )

    def forward(self, x: A, out: A | None = None, dtype: object = None) -> A:
        """y [tokens, n], in x's kind and dtype.

        x: [tokens, k]: bfloat16 (ml_dtypes), uint16 holding bfloat16 bits, float32 (rounded to bfloat16 once, to nearest
        even), or a torch CPU tensor of bfloat16 or float32. dtype: None for x's, or float32: y as it is before it would be
        rounded to bfloat16, for an output layer. out: written and returned if given; of x's kind, or float32; C-contiguous and
        aligned, and no overlap with x.
        Raises InputError, which names the argument, what was expected and what was found; ClosedError after close().

        Examples:
            >>> x = np.ones((2, linear.shape[1]), ml_dtypes.bfloat16)
            >>> linear.forward(x).dtype, linear.forward(x, dtype="float32").dtype
            (dtype(bfloat16), dtype('float32'))
        """
        given = checked(x, (None, self.shape[1]))
        tokens = given.array.shape[0]
        target, restore = target_of(x, given, (tokens, self.shape[0]), dtype, out)
        compute((self,), given.array, (0,), (target,))
        return restore(target)

    def submit(self, x: A, out: A | None = None, dtype: object = None) -> Future[A]:
        """forward() on a thread of its own: job.result() gives y, or raises. Leave the arguments unchanged until then.

        Jobs run in the order of submission. The GIL is free while they compute. A forked child starts with none.
        Raises UnavailableError if the thread cannot be started.

        Examples:
            >>> x = np.ones((2, linear.shape[1]), np.float32)
            >>> job = linear.submit(x)
            >>> np.array_equal(job.result(), linear.forward(x))
            True
        """
        return jobs.submit(self.forward, x, out, dtype)

    def backward(self, grad_y: A, out: A | None = None) -> A:
        """The gradient of a loss with respect to x, [tokens, k], in grad_y's kind and dtype: grad_y W.

        grad_y: [tokens, n], as forward() takes x; float32 is rounded to bfloat16 once. out: as forward() takes it. The matrix
        has no gradient: it is frozen.
        Raises UnavailableError, which says why, where the mode or a kernel has no transposed product; InputError; ClosedError.

        Examples:
            >>> grad_x = linear.backward(np.ones((2, linear.shape[0]), np.float32))
            >>> grad_x.shape == (2, linear.shape[1])
            True
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

        Examples:
            >>> linear.replace(matrix)
            >>> linear.replaced
            1
        """
        self.spec.check(0, "weight", matrix)
        packed = self._open_for("replace")
        with asking(self.backend, self.name):
            packed.replace(0, {"weight": matrix})
        self.rounding = packed.rounding
        with self._counting:
            self.replaced += 1

    def export(self) -> Matrix:
        """The matrix in the checkpoint's own bytes. Raises ClosedError, UnavailableError if the backend cannot.

        Examples:
            >>> np.array_equal(linear.export().codes, matrix.codes)
            True
        """
        matrix = Matrix(self.name, self.format, self.shape, **self.format.empty(*self.shape))
        packed = self._open_for("export")
        with asking(self.backend, self.name):
            biases = packed.export(0, [{"weight": matrix.stored}])
        return replace(matrix, bias=biases.get("weight"))

    def rows(self, ids: AnyArray, out: AnyArray | None = None, dtype: object = None) -> Any:
        """Rows of W by their numbers, [count, k]: what an embedding looks up that shares the output layer's matrix.

        ids: integers in [0, n), [count], in any order: a numpy array or a torch CPU tensor. dtype: None for bfloat16, or
        float32. out: written and returned if given: of ids' library; bfloat16, uint16 (bfloat16 bits) or float32; C-contiguous
        and aligned.
        A weight is the checkpoint's number, whatever `rounding` is, rounded once, to nearest even; bfloat16 weights are exact.
        Only what the packed panels have of these rows is read. A backend with a layout of its own exports the whole matrix.
        Raises InputError, which names the argument; ClosedError; UnavailableError if such a backend cannot export.

        Examples:
            >>> rows = linear.rows(np.array([3, 1, 3]))
            >>> rows.dtype, np.array_equal(rows[1], matrix.codes[1])
            (dtype(bfloat16), True)
        """
        numbers = checked_ids(ids, self.shape[0])
        packed = self._open_for("rows")
        target, restore = rows_target(ids, (len(numbers), self.shape[1]), dtype, out)
        if not len(numbers):
            return restore(target)
        if isinstance(packed, core.PackedLinear):
            read_rows(packed, self.format, numbers, target)
        else:
            read_rows_of_export(self.export(), numbers, target)
        return restore(target)

    @staticmethod
    def _packed_by(
        chosen: Backend, weights: LinearWeights, plan: Plan, progress: Progress | None, arenas: Arenas | None
    ) -> PackedMatrix:
        return chosen.pack_linear(weights, plan, progress) if arenas is None else chosen.map_linear(weights, plan, arenas)
