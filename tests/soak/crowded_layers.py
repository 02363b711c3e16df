"""Layers, dense matrices and a checkpoint that threads use at once: the Calls and Turns of all that can be done with them."""

from __future__ import annotations

import random
from concurrent.futures import CancelledError

import numpy as np
from changing import CANCELLED, Call, Turn
from checkpoints import SCHEMES, write
from helpers import BF16, FORMATS, random_batch, random_experts
from linears import random_matrix, random_x

from ktmoe import Linear, LinearGroup, MoELayer, MoEModel, quantize, set_num_threads
from ktmoe._native import core
from ktmoe.errors import ClosedError, UnavailableError
from ktmoe.experts import PROJECTIONS
from ktmoe.quantization import Quantizer
from ktmoe.training import Lora, Training
from ktmoe.two_stage import gemm1, gemm2, moe_sorting

EXPERTS, TOP_K, INTERMEDIATE = 4, 2, 256
SIZES = (1, 5, 40)
#: Names of FORMATS, one for each kind of kernel.
KINDS = ("mxfp4", "int4-64", "nvfp4", "fp8", "int8-row", "int5 fp16", "super-32 minima", "gptq-128", "b16", "f32")


def stored(matrices) -> bytes:
    """All bytes of some Matrices."""
    return b"".join(array.tobytes() for matrix in matrices for array in matrix.stored.values())


class Experts:
    """A layer whose experts 0 and 1 are replaced and whose expert 2 is masked, and all that can be done with it."""

    def __init__(self, seed: int, kind: str, **options):
        self.rng = np.random.default_rng(seed)
        given = [random_experts(self.rng, EXPERTS, 128, INTERMEDIATE, formats=FORMATS[kind]) for _ in range(2)]
        self.layer = MoELayer(given[0], **options)
        self.parts = min(2, INTERMEDIATE // given[0].shard_unit)  # what the format allows
        matrices = [[{p: of.matrix(e, p) for p in PROJECTIONS} for of in given] for e in range(2)]
        self.replaced = [Turn(lambda state, e=e: self.layer.replace_expert(e, matrices[e][state])) for e in range(2)]
        self.masked = Turn(lambda state: self.layer.expert_mask.__setitem__(2, not state))
        self.turns = [*self.replaced, self.masked]

    def calls(self) -> list[Call]:
        made = []
        for tokens in SIZES:
            for dtype in (BF16, np.float32):
                batch = random_batch(self.rng, self.layer, tokens, TOP_K, dtype)
                made.append(Call(f"forward {dtype} {tokens}", lambda b=batch: self.layer.forward(*b).tobytes(), *self.turns))
        made += [
            Call("submit", lambda b=batch: self.layer.submit(*b).result().tobytes(), *self.turns),
            Call("cancel", lambda b=batch: self._cancelled(b), *self.turns),
            *self._staged(),
        ]
        for e in range(2):
            made.append(Call(f"export {e}", lambda e=e: stored(self._exported(e)), self.replaced[e]))
        made.append(Call("export in parts", lambda: stored(self._exported(0, self.parts)), self.replaced[0]))
        return made + self._training()

    def captured(self) -> Call:
        """A call that is replayed: of one thread, since its memory is."""
        x, ids, weights = random_batch(self.rng, self.layer, 5, TOP_K)
        y, on_gpu = np.zeros_like(x), np.zeros(EXPERTS, np.uint8)
        scratch = np.zeros(core.CallRecord.scratch_bytes(len(x), TOP_K, self.layer.hidden, EXPERTS), np.uint8)
        mask = self.layer.expert_mask.view(np.uint8)
        places = x.view(np.uint16), ids, weights, y.view(np.uint16), mask, on_gpu, None, None, None, scratch
        record = core.CallRecord(self.layer.packed, *places)

        def replay():
            core.submit_captured(record.address)
            core.await_captured(record.address)
            record.check("captured")
            return y.tobytes()

        core.start_captured_calls()
        return Call("captured", replay, *self.turns)

    def _exported(self, expert, parts=1):
        return [part[p] for part in self.layer.export_expert(expert, parts) for p in PROJECTIONS]

    def _cancelled(self, batch):
        job = self.layer.submit(*batch)
        if job.cancel():
            return CANCELLED
        try:
            return job.result().tobytes()
        except CancelledError:
            return CANCELLED

    def _staged(self) -> list[Call]:
        """Each of the two stages, of the experts that are replaced: the mask is no part of how these are counted."""
        x, ids, weights = random_batch(self.rng, self.layer, 5, TOP_K)
        sorting = moe_sorting((ids % 2).astype(np.int32), weights, EXPERTS)
        h = gemm1(self.layer, x, sorting)
        return [
            Call("first stage", lambda: gemm1(self.layer, x, sorting).tobytes(), *self.replaced),
            Call("second stage", lambda: gemm2(self.layer, h, sorting).tobytes(), *self.replaced),
        ]

    def _training(self) -> list[Call]:
        try:
            training = Training(self.layer)
        except UnavailableError:
            return []
        x, ids, weights = random_batch(self.rng, self.layer, 5, TOP_K)
        lora = Lora.initial(self.layer.spec, 4, 8.0)
        for _, b in lora.pairs.values():
            b[...] = self.rng.standard_normal(b.shape) / 8
        _, saved = training.forward(x, ids, weights, lora)

        def backward():
            found = training.backward(saved, x, lora)
            return b"".join(a.tobytes() for a in (found.x, found.weights, *(m for pair in found.lora.values() for m in pair)))

        return [
            Call("training", lambda: training.forward(x, ids, weights, lora)[0].tobytes(), *self.turns),
            Call("backward", backward, *self.replaced),  # the mask is what it was in the forward pass
        ]


class Dense:
    """A group of two dense matrices, one of which is replaced, and all that can be done with them."""

    def __init__(self, seed: int, kind: str):
        rng = np.random.default_rng(seed)
        matrices = [random_matrix(rng, 136, 128, FORMATS[kind], bias=True) for _ in range(2)]
        self.linears = [Linear(matrix) for matrix in matrices]
        self.turns = [Turn(lambda state: self.linears[0].replace(matrices[state]))]
        self.x, self.grad = random_x(rng, 5, 128), random_x(rng, 5, self.linears[0].shape[0])

    def calls(self) -> list[Call]:
        (one, _), group, (turn,) = self.linears, LinearGroup(self.linears), self.turns
        calls = {
            "Linear": lambda: one.forward(self.x).tobytes(),
            "submit of Linear": lambda: one.submit(self.x).result().tobytes(),
            "rows": lambda: one.rows(np.array([3, 130, 3])).tobytes(),
            "export of Linear": lambda: stored([one.export()]),
            "group": lambda: b"".join(y.tobytes() for y in group.forward(self.x)),
            "gradient": lambda: one.backward(self.grad).tobytes(),
            "gradient of a group": lambda: group.backward([self.grad] * 2).tobytes(),
        }
        return [Call(name, call, turn) for name, call in calls.items()]


class Files:
    """A checkpoint whose layers are loaded in the background of everything else."""

    SCHEMES = ("gpt_oss", "bf16", "int4", "fp8")

    def __init__(self, folder, scheme: str):
        self.folder, tensors = folder, {}
        for number in range(3):
            tensors |= SCHEMES[scheme].layer(f"model.layers.{number}", seed=number)
        write(folder, tensors).close()

    def calls(self) -> list[Call]:
        with MoELayer.from_checkpoint(self.folder, 0) as layer:
            batch = random_batch(np.random.default_rng(1), layer, 3, TOP_K)

        def load():
            with MoELayer.from_checkpoint(self.folder, 0) as layer:
                return layer.forward(*batch).tobytes()

        def load_all():
            with MoEModel.from_checkpoint(self.folder, wait=False) as model:
                return model[1].forward(*batch).tobytes()

        def give_up():
            MoEModel.from_checkpoint(self.folder, wait=False).close()

        return [Call("load", load), Call("load all", load_all), Call("give up", give_up)]


def others(seed: int) -> list[Call]:
    """What else runs: matrices that are rounded, and other numbers of threads."""
    rng = np.random.default_rng(seed)
    matrix = random_matrix(rng, 64, 128, FORMATS["b16"])
    rounds = {to: Quantizer(to) for to in ("mxfp4", "int8", "int4")}
    made = [Call(f"rounding to {to}", lambda q=q: stored([q.matrix(matrix)[0]])) for to, q in rounds.items()]
    experts = random_experts(rng, 2, 64, 64, formats=FORMATS["b16"])
    batch = random_batch(rng, experts, 3, TOP_K)

    def rounded():
        with MoELayer(quantize(experts, "mxfp4")) as layer:
            return layer.forward(*batch).tobytes()

    numbers = random.Random(seed)
    return [*made, Call("a rounded layer", rounded), Call("threads", lambda: set_num_threads(numbers.randint(1, 4)))]


class Closing:
    """A layer that is closed while others call it, and the next one, of the same weights."""

    def __init__(self, seed: int):
        rng = np.random.default_rng(seed)
        self.experts = random_experts(rng, 2, 64, 64)
        self.batch = random_batch(rng, self.experts, 3, TOP_K)
        self.closed, self.closing = set(), set()  # ids in the list of all layers
        self.layers = [MoELayer(self.experts)]
        self.y = self.layers[0].forward(*self.batch).tobytes()
        self.refused = 0

    def close(self) -> None:
        number = len(self.layers) - 1
        self.layers.append(MoELayer(self.experts))
        self.closing.add(number)
        self.layers[number].close()
        self.closed.add(number)

    def call(self, number: int | None = None, submit: bool = False) -> None:
        """The y that it has, or ClosedError: never before close() was called, always after it has returned."""
        number = len(self.layers) - 1 if number is None else number
        layer, was_closed = self.layers[number], number in self.closed
        try:
            y = layer.submit(*self.batch).result() if submit else layer.forward(*self.batch)
        except ClosedError:
            assert number in self.closing, "ClosedError before close()"
            self.refused += 1
        else:
            assert not was_closed, "no ClosedError after close()"
            assert y.tobytes() == self.y, "another y while the layer is closed"
