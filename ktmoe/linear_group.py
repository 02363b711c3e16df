"""LinearGroup: dense matrices that one dispatch of the threads computes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from ktmoe import arrays
from ktmoe._native import core
from ktmoe.arrays import AnyArray, FloatArray
from ktmoe.backends.base import Progress
from ktmoe.background.worker import jobs
from ktmoe.errors import InputError
from ktmoe.linear import Linear
from ktmoe.linear_arrays import checked, fitting_each, gradient_target, items_of, new_output, target_of
from ktmoe.linear_products import compute, differentiate
from ktmoe.machine.numa import Placement
from ktmoe.matrix import Matrix
from ktmoe.matrix_cuts import take_rows
from ktmoe.messages import show

#: What the matrices of a LinearGroup take: all of them the same x, or each an x of its own.
INPUTS = ("same", "own")


class LinearGroup:
    """Several Linears that are computed together: one dispatch of the threads, however many matrices there are.

    linears: of one backend and mode. Those on the same NUMA nodes are one dispatch. By default, a matrix of few outputs may lie
    on fewer nodes than a large one, and a group of both has one dispatch more.
    inputs: "same": all take the same x, as q, k and v do; "own": each takes an x of its own, and all have one shape, as
    DeepSeek-V4's o_a_proj has. close() closes all of them.
    Attributes: linears, inputs. dispatches: which of the linears are computed at once.

    Raises InputError, which names the Linear that does not fit.

    Examples:
        >>> attention = "model.layers.0.self_attn"
        >>> qkv = [ktmoe.Linear.from_checkpoint("Qwen3-30B-A3B", f"{attention}.{name}_proj") for name in "qkv"]
        >>> with ktmoe.LinearGroup(qkv) as group:
        ...     q, k, v = group.forward(np.ones((1, qkv[0].shape[1]), np.float32))
    """

    linears: tuple[Linear, ...]
    inputs: str
    dispatches: tuple[tuple[int, ...], ...]

    def __init__(self, linears: Sequence[Linear], inputs: str = "same"):
        self.linears = items_of(linears)
        if inputs not in INPUTS:
            raise InputError(f"inputs must be one of {INPUTS}, found {show(inputs)}")
        given = self.linears or ()
        if not 1 <= len(given) <= core.LINEARS_MAX or not all(isinstance(linear, Linear) for linear in given):
            raise InputError(f"linears must be a sequence of 1 to {core.LINEARS_MAX} Linears, found {show(linears)}")
        first = self.linears[0]
        for linear in self.linears[1:]:
            for what in ("backend", "activations"):
                if getattr(linear, what) != getattr(first, what):
                    raise InputError(
                        f"{linear.name}: {what} must be that of {first.name}, {show(getattr(first, what))}, "
                        f"found {show(getattr(linear, what))}"
                    )
            fits = linear.shape == first.shape if inputs == "own" else linear.shape[1] == first.shape[1]
            if not fits:
                wanted = f"the shape of {first.name}, {list(first.shape)}"
                wanted = wanted if inputs == "own" else f"as many inputs as {first.name}, {first.shape[1]}"
                raise InputError(f"{linear.name}: expected {wanted}, found [n, k] = {list(linear.shape)}")
        self.inputs = inputs
        by_placement: dict[Placement, list[int]] = {}
        for i, linear in enumerate(self.linears):
            by_placement.setdefault(linear.placement, []).append(i)
        self.dispatches = tuple(map(tuple, by_placement.values()))

    @classmethod
    def of_rows(
        cls,
        matrix: Matrix,
        count: int,
        backend: str = "auto",
        activations: str = "bf16",
        *,
        rounding: str = "exact",
        tuned_for: str = "decode",
        numa_nodes: Sequence[int] | None = None,
        progress: Progress | None = None,
    ) -> LinearGroup:
        """A group of "own" inputs, of one stored matrix whose rows are those of `count` matrices, one after another.

        backend and what follows it: as Linear has them; progress is that of all matrices.
        Raises InputError unless count divides the rows, and is not more than a group may have; FormatError where that cuts
        through what shares a scale; and what Linear raises.

        Examples:
            >>> group = ktmoe.LinearGroup.of_rows(matrix, 2)
            >>> [linear.shape[0] for linear in group.linears] == [matrix.shape[0] // 2] * 2
            True
        """
        if not isinstance(matrix, Matrix):
            raise InputError(f"matrix must be a ktmoe.Matrix, found {show(matrix)}; ktmoe.load_matrix(path, name) gives one")
        n = matrix.shape[0]
        try:
            found = operator.index(count)
        except TypeError:
            found = 0
        if found < 1 or n % found:
            raise InputError(f"{matrix.name}: count must be an integer that divides its {n} rows, found {show(count)}")
        if found > core.LINEARS_MAX:
            raise InputError(f"{matrix.name}: count must be at most {core.LINEARS_MAX}, found {found}")
        rows = n // found

        def progress_of(i: int) -> Progress | None:
            return progress and (lambda done, total: progress(i * total + done, found * total))

        linears: list[Linear] = []
        try:
            for i in range(found):
                linears.append(
                    Linear(
                        take_rows(matrix, i * rows, (i + 1) * rows),
                        backend,
                        activations,
                        rounding=rounding,
                        tuned_for=tuned_for,
                        numa_nodes=numa_nodes,
                        progress=progress_of(i),
                    )
                )
            return cls(linears, inputs="own")
        except BaseException:
            for linear in linears:
                linear.close()
            raise

    def close(self) -> None:
        """Give the memory of all Linears back, after calls that are running. A second call does nothing.

        Examples:
            >>> group = ktmoe.LinearGroup([linear])
            >>> group.close()
            >>> linear.packed is None
            True
        """
        for linear in self.linears:
            linear.close()

    def __enter__(self) -> LinearGroup:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def forward(self, x: AnyArray, out: AnyArray | Sequence[AnyArray] | None = None, dtype: object = None) -> Any:
        """Of "same" inputs: a list of y [tokens, n], one for each Linear, of x [tokens, k].
        Of "own" ones: y [tokens, linears, n] of x [tokens, linears, k].

        x, dtype: as Linear.forward() takes them. out: what is returned, if given: a sequence of arrays of one dtype, or one
        array.
        Raises InputError, ClosedError.

        Examples:
            >>> group = ktmoe.LinearGroup([linear, ktmoe.Linear(matrix)])
            >>> a, b = group.forward(np.ones((1, linear.shape[1]), np.float32))
            >>> np.array_equal(a, b)
            True
        """
        count, (n, k) = len(self.linears), self.linears[0].shape
        if self.inputs == "same":
            given = checked(x, (None, k))
            tokens = given.array.shape[0]
            shapes = [(tokens, linear.shape[0]) for linear in self.linears]
            if out is None:
                made = [new_output(x, given, shape, dtype) for shape in shapes]
                targets = [target for target, _ in made]
            else:
                targets = fitting_each(out, given, shapes, dtype)
            compute(self.linears, given.array, (0,) * count, targets, self.dispatches)
            return [restore(target) for target, restore in made] if out is None else out
        given = checked(x, (None, count, k))
        tokens = given.array.shape[0]
        target, restore = target_of(x, given, (tokens, count, n), dtype, out)
        flat = given.array.reshape(tokens, count * k)
        ys = [target[:, i] for i in range(count)]
        compute(self.linears, flat, [i * k for i in range(count)], ys, self.dispatches)
        return restore(target)

    def submit(self, x: AnyArray, out: AnyArray | Sequence[AnyArray] | None = None, dtype: object = None) -> Future[Any]:
        """forward() as Linear.submit() does it.

        Examples:
            >>> group = ktmoe.LinearGroup([linear])
            >>> (y,) = group.submit(np.ones((1, linear.shape[1]), np.float32)).result()
        """
        return jobs.submit(self.forward, x, out, dtype)

    def backward(self, grads: AnyArray | Sequence[AnyArray], out: AnyArray | None = None) -> Any:
        """The gradient of a loss with respect to what forward() takes, in grads' kind and dtype.

        Of "same" inputs: [tokens, k], the sum of every Linear's, rounded once, of a sequence of gradients [tokens, n].
        Of "own" ones: [tokens, linears, k] of [tokens, linears, n].
        grads, out: as Linear.backward() takes them; gradients of one dtype.
        Raises UnavailableError, InputError, ClosedError, as Linear.backward() does.

        Examples:
            >>> group = ktmoe.LinearGroup([linear, ktmoe.Linear(matrix)])
            >>> grad_y = np.ones((1, linear.shape[0]), np.float32)
            >>> np.array_equal(group.backward([grad_y, grad_y]), 2 * linear.backward(grad_y))
            True
        """
        count, (n, k) = len(self.linears), self.linears[0].shape
        if self.inputs == "own":
            given = checked(grads, (None, count, n), "grads")
            target, restore = gradient_target(grads, {"grads": given}, (given.array.shape[0], count, k), out)
            array = arrays.contiguous(given.array)
            of_y, of_x = ([each[:, i] for i in range(count)] for each in (array, target))
            differentiate(self.linears, of_y, of_x, self.dispatches)
            return restore(target)
        of_each = items_of(grads)
        if of_each is None or len(of_each) != count:
            raise InputError(f"grads must be a sequence of {count} arrays, found {show(grads)}")
        tokens: Any = None
        each: dict[str, FloatArray] = {}
        for i, (grad, linear) in enumerate(zip(of_each, self.linears, strict=True)):
            each[f"grads[{i}]"] = given = checked(grad, (tokens, linear.shape[0]), f"grads[{i}]")
            tokens, first = given.array.shape[0], each["grads[0]"]
            if given.array.dtype != first.array.dtype:
                raise InputError(f"grads[{i}] must be of grads[0]'s dtype, a {first.kind}; found a {given.kind}")
        target, restore = gradient_target(of_each[0], each, (tokens, k), out)
        of_y = [arrays.contiguous(given.array) for given in each.values()]
        differentiate(self.linears, of_y, [target], self.dispatches)
        return restore(target)

    def __repr__(self) -> str:
        return f"LinearGroup({[linear.name for linear in self.linears]}, inputs={self.inputs!r})"
