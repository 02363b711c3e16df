"""Random calls of all native code, a case a number; run_cases.py runs them.

A case comes from its number alone, so two modules that agree print the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import warnings
from pathlib import Path

import ggml_records
import numpy as np
import pytest
import trained
import ways
from cached import arenas_of
from helpers import ALL_FORMATS, BF16, DEEPSEEK, GPT_OSS, MIXED, WEIGHTS, random_batch, random_experts
from linears import DENSE_FORMATS, random_matrix
from simulated_training import Lora
from topology import listed

from ktmoe import SILU, Linear, LinearGroup, MoELayer, set_num_threads, two_stage
from ktmoe._native import core
from ktmoe.errors import FormatError, InputError, UnavailableError
from ktmoe.experts import PROJECTIONS, ROUTER_WEIGHTS
from ktmoe.machine import numa, topology
from ktmoe.matrix import Matrix
from ktmoe.quantization import RULES, Quantizer

SIZES = 2, 31, 32, 34, 63, 64, 66, 100, 128, 130, 160, 200, 258
TOKENS = 0, 1, 1, 2, 3, 4, 5, 6, 7, 12, 13, 16, 17, 31, 33, 40, 70
ACTIVATIONS = SILU, DEEPSEEK, GPT_OSS
ALL_WEIGHTS = {**WEIGHTS, **MIXED, **{f"gguf {name}": name for name in ggml_records.IN_RECORDS}}
#: What this CPU can run, and what was compiled.
SUBJECTS = [
    name
    for name, subject in sorted(ways.SUBJECTS.items())
    if subject.isa in os.environ.get("KTMOE_TEST_SANITIZE_ISAS", subject.isa).split(",")
    and "skipped" not in ways.WAYS[subject.isa]
]
MX_MODES = "mxfp4", "mxfp8", "mxfp8/mxfp4", "mxfp4:even/mxfp8:floor"
#: Every rule that rounds weights: what to, its name.
ROUNDINGS = list(RULES)


class Case:
    """What a case is made of, and its results."""

    def __init__(self, number: int, folder: Path, patch: pytest.MonkeyPatch, on_nodes: bool = True):
        self.number, self.folder, self.patch, self.on_nodes = number, folder, patch, on_nodes
        self.rng = np.random.default_rng(number)
        place, kind = number % len(KINDS), KINDS[number % len(KINDS)]
        self.turn = number // len(KINDS) * KINDS.count(kind) + KINDS[:place].count(kind)  # of cases of this kind
        self.results: list[np.ndarray] = []
        self.words: list[str] = []
        set_num_threads(self.one_of(1, 2, 3, 5))
        core.tune(
            scratch_bytes=self.one_of(256 << 20, 1 << 19, 1),
            reduce_slots=self.one_of(0, 20, 10**9),
            uneven=self.one_of(0, 1, 0xDEADBEEF),
            only_many=self.one_of(False, False, True),
        )

    def one_of(self, *values):
        return values[self.rng.integers(len(values))]

    def by_turns(self, values):
        """Each kind of case goes through all values; each time, other values of the next list come with them."""
        self.turn, values = self.turn + self.turn // len(values), list(values)
        self.words.append(str(values[self.turn % len(values)]))
        return values[self.turn % len(values)]

    def size(self) -> int:
        return int(self.one_of(*SIZES))

    def experts(self, count=None):
        weights = ALL_WEIGHTS[self.by_turns(ALL_WEIGHTS)]
        count = count or int(self.rng.integers(1, 6))
        if isinstance(weights, str):
            return ggml_records.random_experts(self.rng, count, 256, self.one_of(256, 512), weights)
        activation, biases = self.one_of(*ACTIVATIONS), self.one_of(False, True)
        return random_experts(self.rng, count, self.size(), self.size(), biases=biases, activation=activation, **weights)

    def batch(self, experts, tokens=None):
        """Some ids are -1 or beyond, some come twice; x of either dtype."""
        tokens = self.one_of(*TOKENS) if tokens is None else tokens
        batch = random_batch(self.rng, experts, tokens, int(self.rng.integers(1, 5)), self.one_of(BF16, np.float32))
        batch[1][self.rng.random(batch[1].shape) < 0.1] = -1
        return batch

    def backend(self):
        """The backend of a subject, and what to leave in the end."""
        return ways.chosen(ways.SUBJECTS[self.by_turns(SUBJECTS)], self.folder)

    def nodes(self) -> dict:
        """Nothing, or NUMA nodes that are made up, each with all CPUs."""
        if self.one_of(True, False) or not self.on_nodes:
            return {}
        folder = self.folder / "nodes"
        for node in range(3):
            own = folder / f"node{node}"
            own.mkdir(parents=True, exist_ok=True)
            (own / "cpulist").write_text(listed(os.sched_getaffinity(0)) + "\n")
            (own / "distance").write_text(" ".join("10" if other == node else "20" for other in range(3)) + "\n")
            (own / "meminfo").write_text("")
        (folder / "has_memory").write_text("0-2\n")
        (folder / "status").write_text("Name:\tpython\nMems_allowed_list:\t0-2\n")
        for module, name, path in ((topology, "CPUS", folder), (numa, "NODES", folder), (numa, "STATUS", folder / "status")):
            self.patch.setattr(module, name, path)
        self.words.append("nodes")
        return {"numa_nodes": self.one_of([0], [2, 0], [0, 1, 2])}

    def settings(self) -> dict:
        return {
            "router_weight": self.one_of(*ROUTER_WEIGHTS),
            "rounding": self.one_of("exact", "folded"),
            "tuned_for": self.one_of("decode", "prefill"),
        }


def layers(case: Case):
    """forward() and submit(), masks, experts that are replaced and exported; on nodes, from a packed cache, in an MX mode."""
    experts = case.experts()
    with case.backend() as backend:
        nodes, cached = case.nodes(), case.one_of(False, False, True)
        mode = case.one_of("auto", "auto", "auto", *MX_MODES)
        arenas = None
        if cached:
            case.words.append("cached")
            arenas = arenas_of(case.folder, experts, nodes.get("numa_nodes"))  # by the best backend: all pack alike
        with MoELayer(experts, backend, mode, arenas=arenas, **nodes, **case.settings()) as layer:
            for turn in range(3):
                x, ids, weights = case.batch(experts)
                layer.expert_mask[:] = case.rng.random(experts.num_experts) < 0.9
                out = case.one_of(None, np.empty_like(x))
                case.results.append(layer.forward(x, ids, weights, out=out))
                if turn == 1:
                    waiting = [layer.submit(x, ids, weights) for _ in range(2)]
                    case.results.extend([future.result() for future in waiting])
                expert, other = case.rng.integers(0, experts.num_experts, 2)
                layer.replace_expert(int(expert), {p: experts.matrix(int(other), p) for p in PROJECTIONS})
                for part in layer.export_expert(int(expert)):
                    for matrix in part.values():
                        case.results.extend([array for array in matrix.stored.values() if array is not None])


def linears(case: Case):
    """Dense matrices by themselves and in groups, rows read back, backward."""
    name = case.by_turns(DENSE_FORMATS)
    weight_format = DENSE_FORMATS[name]
    shape = (case.size(), 256 * int(case.rng.integers(1, 3))) if name.startswith("gguf ") else (case.size(), case.size())
    matrices = [random_matrix(case.rng, *shape, weight_format, bias=case.one_of(False, True)) for _ in range(3)]
    with case.backend() as backend:
        packed = [Linear(matrix, backend, "auto", **case.nodes()) for matrix in matrices]
        linear, (n, k) = packed[0], matrices[0].shape
        tokens, dtype = case.one_of(*TOKENS), case.one_of(BF16, np.float32)
        x = case.rng.standard_normal((tokens, k)).astype(dtype)
        case.results.extend([linear.forward(x), linear.submit(x).result(), linear.rows(case.rng.integers(0, n, 3))])
        case.results.extend(LinearGroup(packed).forward(x))
        case.results.extend(
            LinearGroup(packed, "own").forward(case.rng.standard_normal((tokens, 3, k)).astype(dtype)).swapaxes(0, 1)
        )
        linear.replace(matrices[1])
        case.results.extend([array for array in linear.export().stored.values() if array is not None])
        if linear.activations == "bf16":
            case.results.append(linear.backward(case.rng.standard_normal((tokens, n)).astype(dtype)))
        for one in packed:
            one.close()


def training(case: Case):
    """Both passes, with and without an adapter, gradients that are added, what forward keeps or backward makes anew."""
    experts = case.experts()
    with case.backend() as backend:
        settings = {"router_weight": case.one_of(*ROUTER_WEIGHTS), **case.nodes()}
        with MoELayer(experts, backend, "bf16", **settings) as layer:
            layer.expert_mask[0] = case.one_of(False, True)
            x, ids, weights = case.batch(experts)
            grad = case.rng.standard_normal(x.shape).astype(x.dtype)
            lora = None
            if case.one_of(True, True, False):
                rank, projections = int(case.one_of(1, 3, 15, 16, 17, 65)), case.one_of(PROJECTIONS, ("gate",), ("up", "down"))
                lora = Lora(case.rng, experts, rank, projections, dtype=case.one_of(np.float32, BF16))
            try:
                kept = trained.forward(layer, x, ids, weights, lora)
            except UnavailableError:  # int8 rows cannot be trained
                case.words.append("not trained")
                return
            found = trained.backward(layer, x, ids, weights, grad, lora, case.one_of(None, kept.saved))
            case.results.extend([kept.y, *trained.arrays_of(found).values()])
            if lora:
                more = trained.backward(layer, x, ids, weights, grad, lora, None, into=found.lora, add=True, of_x=False)
                case.results.extend(trained.arrays_of(more).values())


def quantizing(case: Case):
    """Weights to each target by each rule; then they are packed."""
    to, rule = case.by_turns(ROUNDINGS)
    source = case.one_of("b16", "f16", "f32")
    weights = random_matrix(case.rng, case.size(), 128 * int(case.rng.integers(1, 4)), ALL_FORMATS[source])
    made, _ = Quantizer(to, rule=rule).matrix(weights)
    case.results.extend([array for array in made.stored.values() if array is not None])
    with case.backend() as backend, Linear(made, backend, "auto") as linear:
        case.results.append(linear.forward(case.rng.standard_normal((3, made.shape[1])).astype(BF16)))


def captured(case: Case):
    """Calls of CUDA graphs: several records of one layer, some of whose experts are deferred, run by their own thread."""
    experts = case.experts(count=5)
    with case.backend() as backend, MoELayer(experts, backend) as layer:
        core.start_captured_calls()
        records, memory, earlier, top_k = [], [], None, 3
        for _ in range(3):
            tokens = int(case.rng.integers(1, 9))
            x = case.rng.standard_normal((tokens, experts.hidden)).astype(BF16).view(np.uint16)
            ids = case.rng.integers(-1, 6, (tokens, top_k))
            weights = case.rng.random((tokens, top_k), np.float32)
            y, mask, on_gpu = np.zeros_like(x), np.ones(5, np.uint8), np.zeros(5, np.uint8)
            on_gpu[case.rng.integers(5)] = 1
            scratch = np.zeros(core.CallRecord.scratch_bytes(tokens, top_k, experts.hidden, 5), np.uint8)
            urgent = case.one_of(None, 1, 2)
            late = None if urgent is None else np.zeros_like(y)
            earlier = earlier if earlier is not None and earlier[1] == tokens and earlier[2] is not None else (None, 0, None)
            record = core.CallRecord(layer.packed, x, ids, weights, y, mask, on_gpu, urgent, late, earlier[0], scratch)
            earlier = record, tokens, urgent
            records.append(record)
            memory.append((x, ids, weights, y, mask, on_gpu, late, scratch))
        for _ in range(2):
            for record in records:
                core.submit_captured(record.address)
            for record in records:
                core.await_captured(record.address)
        while not all(record.idle for record in records):
            pass
        case.results.extend([y for *_, y, _, _, _, _ in memory])


def two_stages(case: Case):
    """Sorting, both stages by themselves, rows that are rounded to MX blocks before."""
    experts = case.experts()
    mode = case.one_of("bf16", *MX_MODES)
    with case.backend() as backend, MoELayer(experts, backend, mode) as layer:
        x, ids, weights = case.batch(experts)
        unit = case.one_of(*two_stage.UNITS)
        sorting = two_stage.moe_sorting(
            (ids % experts.num_experts).astype(np.int32), weights, layer.num_experts, unit, layer.expert_mask
        )
        h = two_stage.gemm1(layer, x, sorting)
        case.results.append(two_stage.gemm2(layer, h, sorting, case.one_of("float32", "bfloat16")))


def refused(case: Case):
    """Scales that are no numbers, found while they are packed; then the layer is what it was."""
    weight_format = ALL_FORMATS[case.one_of("int4-64", "gptq-128", "nvfp4", "fp8-bf16", "int8-64", "super-32 minima")]
    matrix = random_matrix(case.rng, case.size(), 256, weight_format)
    wrong = {label: array.copy() for label, array in matrix.stored.items() if array is not None}
    wrong["scales"].reshape(-1).view(np.uint8)[:] = 0x7F if wrong["scales"].dtype.itemsize == 1 else 0xFF
    with case.backend() as backend, Linear(matrix, backend, "auto") as linear:
        x = case.rng.standard_normal((2, matrix.shape[1])).astype(BF16)
        case.results.append(linear.forward(x))
        try:
            linear.replace(Matrix("wrong", weight_format, matrix.shape, **wrong))
        except FormatError:
            case.words.append("refused")
        case.results.append(linear.forward(x))


KINDS = (layers, linears, layers, training, linears, layers, quantizing, training, layers, captured, two_stages, refused)


def run(number: int, folder: Path) -> dict:
    """A case's number, kind, words and digest."""
    kind = KINDS[number % len(KINDS)]
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir=folder) as own:
        try:
            case = Case(number, Path(own), patch)
            try:
                kind(case)
            except InputError as error:
                if "can be cut" not in str(error):  # into shards
                    raise
                case = Case(number, Path(own), patch, on_nodes=False)
                kind(case)
        except UnavailableError as error:  # no kernel for these weights in this mode
            case.words.append(f"unavailable: {error}")
    digest = hashlib.blake2b(digest_size=8)
    for array in case.results:
        array = np.ascontiguousarray(array)
        digest.update(f"{array.dtype} {array.shape}".encode() + array.tobytes())
    words = " ".join(case.words)
    return {"case": number, "kind": kind.__name__, "of": words, "results": len(case.results), "digest": digest.hexdigest()}


def plain(name: str, folder: Path) -> None:
    """Small calls of everything, with matrices that end within a panel and a block."""
    rng, bf16 = np.random.default_rng(1), ways.SUBJECTS[name].activations == "bf16"
    set_num_threads(1)
    with ways.chosen(ways.SUBJECTS[name], folder) as backend:
        for weights in ("b16", "int4-32", "fp8", "folded"):
            experts = random_experts(rng, 3, 100, 66, biases=True, **WEIGHTS[weights])
            with MoELayer(experts, backend) as layer:
                for tokens in (1, 9):
                    x, ids, router_weights, grad = trained.training_batch(rng, experts, tokens, dtype=np.float32)
                    ids[-1] = 1, 2
                    layer.forward(x, ids, router_weights)
                    layer.replace_expert(1, {p: experts.matrix(2, p) for p in PROJECTIONS})
                    layer.forward(x, ids, router_weights)
                    if bf16:
                        lora = Lora(rng, experts, 5)
                        trained.backward(
                            layer,
                            x,
                            ids,
                            router_weights,
                            grad,
                            lora,
                            trained.forward(layer, x, ids, router_weights, lora).saved,
                        )


def main(first: int, end: int) -> None:
    warnings.filterwarnings("ignore", ".* threads make calls slow here")  # more than there are CPUs
    with tempfile.TemporaryDirectory() as folder:
        for number in range(first, end):
            print(json.dumps({"begin": number, "kind": KINDS[number % len(KINDS)].__name__}), flush=True)
            print(json.dumps(run(number, Path(folder))), flush=True)
