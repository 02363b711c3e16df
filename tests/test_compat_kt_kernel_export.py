"""write_weight_scale_to_buffer: one expert's weights in GPU ranks' host buffers, bit for bit what the checkpoint holds."""

import ctypes

import ml_dtypes
import numpy as np
import pytest
from checkpoints import write as write_tensors
from helpers import BF16
from kt_wrappers import EXPERTS, HIDDEN, INTERMEDIATE, WRITERS, arguments, wrapper, write

from ktmoe import MoELayer, load_experts, synthetic
from ktmoe.compat import methods
from ktmoe.compat.kt_kernel import KTMoEWrapper
from ktmoe.errors import InputError

pytestmark = pytest.mark.usefixtures("nothing_is_left")

GUARD = 64
#: method -> what writes such a checkpoint, for those that WRITERS has not.
PUBLISHED = {"FP8": "FP8", "FP8_PERCHANNEL": "FP8 per row", "MXFP8": "MXFP8", "NVFP4": "NVFP4"}
#: The intermediate size with which four ranks have whole blocks of 128 rows.
WIDE = 512


@pytest.fixture(scope="module", params=[*WRITERS, *PUBLISHED])
def exported(request, tmp_path_factory):
    """A method, a checkpoint of it, and its intermediate size."""
    method, folder = request.param, tmp_path_factory.mktemp(request.param)
    if method in WRITERS:
        return method, write(method, folder), INTERMEDIATE
    sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "intermediate": WIDE, "top_k": 4}
    synthetic.PUBLISHED[PUBLISHED[method]].write(folder, **sizes)
    return method, folder, WIDE


@pytest.fixture(scope="module", params=WRITERS)
def checkpoint(request, tmp_path_factory):
    return request.param, write(request.param, tmp_path_factory.mktemp(request.param))


class Host:
    """Buffers of one kind, one a rank, each between guard bytes."""

    def __init__(self, ranks, nbytes):
        self.memory = [np.full(nbytes + 2 * GUARD, 0xA5, np.uint8) for _ in range(ranks)]
        self.pointers = [array.ctypes.data + GUARD for array in self.memory]

    def read(self, rank):
        """What was written; the guards must be untouched."""
        array = self.memory[rank]
        assert (array[:GUARD] == 0xA5).all()
        assert (array[-GUARD:] == 0xA5).all()
        return array[GUARD:-GUARD]


def scales_of(method, matrix):
    """A matrix's scales [rows, columns] as kt-kernel hands them over, None without: by the numbers that they stand for."""
    if method == "BF16":
        return None
    if method == "FP8_PERCHANNEL":
        return matrix.factor[:, None]
    if method == "MXFP4":
        exact = np.ldexp(1.0, matrix.scales.astype(int) - 127).astype(BF16)
        assert np.array_equal(exact.astype(np.float64), np.ldexp(1.0, matrix.scales.astype(int) - 127))
        return exact
    if method == "NVFP4":
        numbers = matrix.scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return (numbers * matrix.factor[0]).astype(BF16)
    assert matrix.scales.dtype == {"RAWINT4": BF16, "FP8": np.float32, "MXFP8": np.uint8}[method]
    return matrix.scales


def raw(array):
    return np.ascontiguousarray(array).view(np.uint8).ravel()


def expected(method, experts, expert, ranks, rank):
    """(w13, w13 scales, w2, w2 scales) as bytes."""
    gate, up, down = (experts.matrix(expert, projection) for projection in ("gate", "up", "down"))

    def rows(array):
        step = array.shape[0] // ranks
        return array[rank * step : (rank + 1) * step]

    def columns(array):
        step = array.shape[1] // ranks
        return array[:, rank * step : (rank + 1) * step] if array.shape[1] > 1 else array  # one column: a scale per row

    found = []
    for of in (lambda matrix: matrix.codes, lambda matrix: scales_of(method, matrix)):
        if of(gate) is None:
            found += [np.empty(0, np.uint8)] * 2
        else:
            found += [np.concatenate([raw(rows(of(gate))), raw(rows(of(up)))]), raw(columns(of(down)))]
    return found[0], found[2], found[1], found[3]


def check(w, experts, ranks, expert, logical=None):
    wanted = [expected(w.method, experts, expert if logical is None else logical, ranks, rank) for rank in range(ranks)]
    hosts = [Host(ranks, array.nbytes) for array in wanted[0]]
    pointers = [host.pointers if wanted[0][kind].size else [0] * ranks for kind, host in enumerate(hosts)]
    w.submit_write_weight_scale_to_buffer(ranks, expert, *pointers)
    w.sync_write_weight_scale_to_buffer()
    for rank in range(ranks):
        for host, array in zip(hosts, wanted[rank], strict=True):
            assert np.array_equal(host.read(rank), array)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_expert(exported, ranks):
    """Also those on the GPU."""
    method, folder, intermediate = exported
    experts = load_experts(folder, 0)
    mask = np.arange(EXPERTS) % 2 == 0
    with wrapper(folder, method=method, moe_intermediate_size=intermediate, gpu_experts_mask=mask) as w:
        for expert in range(EXPERTS):
            check(w, experts, ranks, expert)


@pytest.mark.cover("pairs")
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("nodes", [2, 3])
def test_more_and_fewer_numa_nodes_than_ranks(exported, fake_nodes, nodes, ranks):
    """What is cut for the nodes is not what is cut for the ranks."""
    method, folder, intermediate = exported
    fake_nodes({node: {0} for node in range(nodes)})
    experts = load_experts(folder, 0)
    with wrapper(folder, method=method, moe_intermediate_size=intermediate, threadpool_count=nodes) as w:
        assert w.moe.placement.shards == nodes
        for expert in range(2):
            check(w, experts, ranks, expert)


def test_a_slot_has_the_expert_that_fills_it(exported):
    method, folder, intermediate = exported
    physical = np.array([3, 3, 0, 7])
    with wrapper(folder, physical=physical, num_experts=4, method=method, moe_intermediate_size=intermediate) as w:
        for slot, logical in enumerate(physical):
            check(w, load_experts(folder, 0), 2, slot, logical)


def test_every_ue8m0_scale(tmp_path):
    """0 to 254, each as the bfloat16 number that it is; byte 0, 2**-127, is a subnormal one."""
    rng = np.random.default_rng(0)
    tensors = {}
    for expert in range(2):
        for stem, n, k in (("w1", 64, 128), ("w3", 64, 128), ("w2", 128, 64)):
            base = f"layers.0.ffn.experts.{expert}.{stem}"
            tensors[f"{base}.weight"] = ["I8", rng.integers(0, 256, (n, k // 2), np.uint8)]
            scales = np.arange(n * k // 32) % 255
            tensors[f"{base}.scale"] = ["F8_E8M0", scales.astype(np.uint8).reshape(n, k // 32)]
    write_tensors(tmp_path, tensors).close()
    with wrapper(tmp_path, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=64) as w:
        experts = load_experts(tmp_path, 0)
        assert (experts.matrix(0, "gate").scales == 0).any()
        check(w, experts, 2, 1)


def test_pointers_of_any_integer_kind_and_writes_in_a_row(checkpoint):
    """SGLang submits the next expert into the other half of its buffers before it has copied this one."""
    method, folder = checkpoint
    experts = load_experts(folder, 0)
    wanted = [expected(method, experts, expert, 1, 0) for expert in range(EXPERTS)]
    hosts = [Host(EXPERTS, array.nbytes) for array in wanted[0]]
    with wrapper(folder, method=method) as w:
        for expert in range(EXPERTS):
            w.submit_write_weight_scale_to_buffer(
                np.int64(1), np.int32(expert), *([np.uint64(host.pointers[expert])] for host in hosts)
            )
        w.sync_write_weight_scale_to_buffer()
        w.sync_write_weight_scale_to_buffer()  # nothing is left to wait for
    for expert in range(EXPERTS):
        for host, array in zip(hosts, wanted[expert], strict=True):
            assert np.array_equal(host.read(expert), array)


def test_what_does_not_fit(checkpoint):
    method, folder = checkpoint
    memory = ctypes.create_string_buffer(2 * HIDDEN * INTERMEDIATE * 2)
    good = [ctypes.addressof(memory)]
    with wrapper(folder, method=method) as w:

        def submit(ranks=1, expert=0, w13=good, w13_scales=good, w2=good, w2_scales=good):
            w.submit_write_weight_scale_to_buffer(ranks, expert, w13, w13_scales, w2, w2_scales)

        for changed, message in (
            ({"expert": EXPERTS}, r"expert_id must be in \[0, 8\), found 8"),
            ({"expert": -1}, "expert_id must be a whole number, 0 or more, found -1"),
            ({"ranks": 3}, "gpu_tp_count must divide the intermediate size, 128, into multiples of .* found 3"),
            ({"ranks": 0}, "gpu_tp_count must divide .* found 0"),
            ({"ranks": 128}, "gpu_tp_count must divide .* found 128") if method != "BF16" else ({"ranks": 256}, "found 256"),
            ({"w13": []}, r"w13_weight_ptrs must have 1 host addresses, .* found \[\]"),
            ({"w2": [0]}, r"w2_weight_ptrs must have 1 host addresses, .* found \[0\]"),
            ({"w2": good[0]}, r"w2_weight_ptrs must have 1 host addresses, .* found \d+$"),
            ({"w2": [1.0]}, "w2_weight_ptrs must be a whole number, found 1.0"),
        ):
            with pytest.raises(InputError, match=message):
                submit(**changed)
        if method != "BF16":
            with pytest.raises(InputError, match="w13_scale_ptrs must have 1 host addresses"):
                submit(w13_scales=[0])
            with pytest.raises(InputError, match="w2_scale_ptrs must have 1 host addresses"):
                submit(w2_scales=[])
            if methods.SERVED[method].scales.alignment > 1:
                with pytest.raises(InputError, match=r"w2_scale_ptrs must have addresses that are aligned to \w+"):
                    submit(w2_scales=[good[0] + 1])
        else:
            with pytest.raises(InputError, match="w13_weight_ptrs must have addresses that are aligned to bfloat16, mul"):
                submit(w13=[good[0] + 1])
    with pytest.raises(InputError, match="must come first"):
        KTMoEWrapper(**arguments()).submit_write_weight_scale_to_buffer(1, 0, good, good, good, good)


def test_an_error_of_a_write_is_raised_by_sync(checkpoint, monkeypatch):
    method, folder = checkpoint
    memory = ctypes.create_string_buffer(2 * HIDDEN * INTERMEDIATE * 2)
    pointers = [[ctypes.addressof(memory)]] * 4
    with wrapper(folder, method=method) as w:
        with monkeypatch.context() as patch:
            patch.setattr(MoELayer, "export_expert", lambda *_, **__: 1 / 0)
            w.submit_write_weight_scale_to_buffer(1, 0, *pointers)
            w.submit_write_weight_scale_to_buffer(1, 1, *pointers)
            with pytest.raises(ZeroDivisionError):
                w.sync_write_weight_scale_to_buffer()
        w.sync_write_weight_scale_to_buffer()
