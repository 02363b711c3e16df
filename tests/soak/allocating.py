"""The process in which requests for memory and threads fail: each operation of a layer, and what must be true afterwards.

Asked {"operation", "modules", "kinds", "at", "error", "lasting"}, it answers {"calls", "hit", "error", "message", "faults"}.
"""

from __future__ import annotations

import gc
import sys
import sysconfig
import tempfile
import traceback
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from adapter_files import QWEN
from cached import write_model
from failing_calls import MODULES, Library, serve
from helpers import FORMATS, random_batch, random_experts
from linears import random_matrix

from ktmoe import Linear, MoELayer, MoEModel, set_num_threads, synthetic
from ktmoe._native import core
from ktmoe.adapters import export_adapter, import_adapter
from ktmoe.cache.packing import pack
from ktmoe.conversion import convert
from ktmoe.errors import KtmoeError
from ktmoe.machine import numa
from ktmoe.quantization import Quantizer
from ktmoe.training import Training
from ktmoe.training.lora import Lora
from ktmoe.two_stage import gemm1, gemm2, moe_sorting

LIBRARY = Library()
RNG = np.random.default_rng(3)
FOLDER = Path(tempfile.mkdtemp(dir=sys.argv[1]))
#: A format whose codes packing puts into another order, with zero points; biases. Of factors, see OTHER.
EXPERTS = random_experts(RNG, 3, 128, 256, formats=FORMATS["gptq-128"], biases=True)
OTHER = random_experts(RNG, 2, 128, 128, formats=FORMATS["nvfp4"])
MATRIX = random_matrix(RNG, 128, 128, FORMATS["fp8-row"], bias=True)
B16 = random_matrix(RNG, 64, 128, FORMATS["b16"])
BATCH = random_batch(RNG, EXPERTS, 5, 2)
CHECKPOINT, CACHE = write_model(FOLDER, layers=1)
CONVERTED = FOLDER / "bf16"
synthetic.write_qwen3(CONVERTED, num_experts=2, hidden=128, intermediate=128, layers=1)


def adapter() -> Lora:
    shapes = {"gate": (256, 128), "up": (256, 128), "down": (128, 256)}
    rng = np.random.default_rng(1)
    return Lora(
        {p: tuple(rng.standard_normal(s, np.float32) for s in ((3, 2, k), (3, n, 2))) for p, (n, k) in shapes.items()}, 2
    )


LORA = adapter()
ADAPTER = FOLDER / "adapter"
export_adapter(ADAPTER, {0: LORA}, QWEN)
LAYER = MoELayer(EXPERTS, "auto", "bf16")
STAGES = MoELayer(random_experts(RNG, 3, 128, 128), "auto", "mxfp8/mxfp4")
SORTING = moe_sorting(BATCH[1].astype(np.int32), BATCH[2], 3)
LINEAR = Linear(MATRIX)


def forward():
    return [LAYER.forward(*BATCH)]


def load():
    with MoELayer(EXPERTS) as layer:
        return [layer.forward(*BATCH)]


def load_factors():
    with MoELayer(OTHER) as layer:
        return [layer.export_expert(1)[0]["down"].codes]


def load_on_nodes():
    cpus, nodes = frozenset(numa.usable_cpus()), numa.nodes
    numa.nodes = lambda: {0: cpus, 1: cpus}
    try:
        with MoELayer(EXPERTS, numa_nodes=[0, 1]) as layer:
            return [layer.forward(*BATCH)]
    finally:
        numa.nodes = nodes


def replace():
    LAYER.replace_expert(1, {p: EXPERTS.matrix(1, p) for p in ("gate", "up", "down")})
    return forward()


def replace_new():
    with MoELayer(EXPERTS) as layer:
        layer.replace_expert(0, {p: EXPERTS.matrix(1, p) for p in ("gate", "up", "down")})
        return [layer.forward(*BATCH)]


def export():
    return [array for part in LAYER.export_expert(2, 2) for matrix in part.values() for array in matrix.stored.values()]


def submit():
    job: Future = LAYER.submit(*BATCH)
    return [job.result()]


def train():
    training = Training(LAYER)
    y, saved = training.forward(*BATCH, LORA)
    found = training.backward(saved, y, LORA)
    return [y, found.x, found.weights, *(array for pair in found.lora.values() for array in pair)]


def linear():
    with Linear(MATRIX) as layer:
        y = layer.forward(BATCH[0])
        return [y, layer.backward(y), layer.rows(np.array([1, 7])), layer.export().codes]


def round_weights():
    made, _ = Quantizer("mxfp4").matrix(B16)
    return [made.codes, made.scales]


def two_stages():
    return [gemm2(STAGES, gemm1(STAGES, BATCH[0], SORTING), SORTING)]


def checkpoint():
    with MoEModel.from_checkpoint(CHECKPOINT) as model:
        return [model[0].forward(*BATCH)]


def cached():
    with MoELayer.from_checkpoint(CHECKPOINT, 0, cache=CACHE) as layer:
        return [layer.forward(*BATCH)]


def files_of(folder: Path):
    return [np.fromfile(file, np.uint8) for file in sorted(folder.rglob("*")) if file.is_file()]


def in_a_new_folder(make):
    """The files that it makes in a folder, which is removed."""

    def made():
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            make(Path(folder) / "out")
            return files_of(Path(folder) / "out")

    return made


def captured():
    x, ids, weights = BATCH
    y, scratch = np.zeros(x.shape, np.uint16), np.zeros(core.CallRecord.scratch_bytes(*ids.shape, 128, 3), np.uint8)
    mask, on_gpu = np.ones(3, np.uint8), np.zeros(3, np.uint8)
    arrays = x.view(np.uint16), ids, weights, y, mask, on_gpu
    mark = core.GraphMark()
    record = core.CallRecord(LAYER.packed, *arrays, None, None, None, scratch)
    core.start_captured_calls()
    core.submit_captured(record.address)
    core.await_captured(record.address)
    record.check("layer")
    assert mark.dropped  # no graph holds it
    return [y]


OPERATIONS = {
    "forward": forward,
    "load": load,
    "load factors": load_factors,
    "load on two nodes": load_on_nodes,
    "replace an expert": replace,
    "replace an expert first": replace_new,
    "export": export,
    "submit": submit,
    "train": train,
    "linear": linear,
    "quantize": round_weights,
    "two stages": two_stages,
    "checkpoint": checkpoint,
    "cached": cached,
    "pack": in_a_new_folder(lambda out: pack(CHECKPOINT, out)),
    "convert": in_a_new_folder(lambda out: convert(CONVERTED, out, "mxfp4")),
    "export adapter": in_a_new_folder(lambda out: export_adapter(out, {0: LORA}, QWEN)),
    "import adapter": lambda: list(import_adapter(ADAPTER, QWEN)[0].pairs["up"]),
    "captured": captured,
}
#: What each gives when nothing fails.
RIGHT: dict[str, list[np.ndarray]] = {}
UNRAISABLE: list[str] = []


def same(found, expected) -> bool:
    pairs = zip(found, expected, strict=True)
    return len(found) == len(expected) and all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in pairs)


def settle() -> dict[str, int]:
    gc.collect()
    core.release()
    return LIBRARY.held()


def answer(operation: str, modules: list[str], kinds: list[str], at: int, **how) -> dict:
    run = OPERATIONS[operation]
    if operation not in RIGHT:
        run()  # what stays for good is there from now on
        RIGHT[operation] = run()
    faults, failure, found = [], None, None
    UNRAISABLE.clear()
    before = settle()
    LIBRARY.refuse(modules)
    try:
        LIBRARY.begin(kinds, at, **how)
        found = run()
    except BaseException as error:
        calls = LIBRARY.end()
        failure = type(error).__name__, str(error), isinstance(error, KtmoeError | MemoryError)
        if not failure[2]:
            traceback.print_exception(error)
        del error
    else:
        calls = LIBRARY.end()
    hit = LIBRARY.hit
    if failure is None and not same(found, RIGHT[operation]):
        faults.append("other bits")
    after = settle()
    if "python" in modules:  # some of Python's own calls seem to come from who calls Python
        after["allocations"] = before["allocations"]
    faults += [f"{what}: {before[what]} before, {after[what]} after" for what in before if after[what] > before[what]]
    faults += [f"not raised: {what}" for what in UNRAISABLE]
    if failure and not failure[2]:
        faults.append("no error of ktmoe")
    if not same(run(), RIGHT[operation]):
        faults.append("other bits afterwards")
    failure = failure or ("", "")
    return {"calls": calls, "hit": hit, "error": failure[0], "message": failure[1], "faults": faults}


def main() -> None:
    set_num_threads(3)
    gc.collect()
    gc.freeze()  # what is there need not be gone through again and again
    sys.unraisablehook = lambda args: UNRAISABLE.append(f"{args.exc_type.__name__} in {args.object!r}")
    LIBRARY.module(core.__file__, MODULES["ktmoe"], counts=True)
    LIBRARY.arrays()
    LIBRARY.module(sys.modules["mmap"].__file__, MODULES["mmap"])
    for path in (sys.executable, sysconfig.get_config_var("LIBDIR") + "/" + sysconfig.get_config_var("INSTSONAME")):
        LIBRARY.module(path, MODULES["python"])
    serve(answer)


if __name__ == "__main__":
    main()
