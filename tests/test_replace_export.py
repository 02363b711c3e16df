"""An expert is replaced while forward calls run, and comes out again in the checkpoint's own bytes, cut as is asked."""

import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bare import Bare
from helpers import (
    B16,
    FORMATS,
    MIXED,
    SCALES,
    TURNED,
    WEIGHTS,
    assert_right,
    bits,
    group_extents,
    random_batch,
    random_experts,
    rounds,
    same_bits,
)

from ktmoe import MXFP4, ExpertWeights, MoELayer, int4
from ktmoe._native import core
from ktmoe.backends import native
from ktmoe.backends.base import Plan
from ktmoe.errors import ClosedError, FormatError, InputError, UnavailableError
from ktmoe.experts import PROJECTIONS

pytestmark = pytest.mark.usefixtures("three_nodes")


def matrices(experts, expert):
    return {projection: experts.matrix(expert, projection) for projection in PROJECTIONS}


def same_stored(matrix, stored, bias=None):
    """stored: arrays by name."""
    assert matrix.stored.keys() == stored.keys()
    assert all(np.array_equal(bits(array), bits(stored[label])) for label, array in matrix.stored.items())
    assert (matrix.bias is None) == (bias is None)
    assert bias is None or np.array_equal(matrix.bias, bias)


def cut(matrix, rows=slice(None), columns=slice(None)):
    """The arrays of a rectangle of a matrix, by what the format says of each; its sides are whole units, or the matrix's."""
    n, k = matrix.shape
    rows, columns = range(n)[rows], range(k)[columns]
    weight_format, order = matrix.format, matrix.format.order

    def of(array, per_row, per_column, turned):
        """per_row, per_column: rows and columns of the matrix that one item of the array's axes is."""
        parts = [slice(along.start // per, -(-along.stop // per)) for along, per in ((rows, per_row), (columns, per_column))]
        return array[tuple(reversed(parts) if turned else parts)]

    codes_n, codes_k = (n, k) if weight_format.family != "q4" else order.codes_shape(n, k)[:: -1 if order.transposed else 1]
    cuts = {"codes": of(matrix.codes, n // codes_n, k // codes_k, order.transposed)}
    for label, (per_row, per_column) in group_extents(weight_format).items():
        eight = label == "offsets" and order.transposed  # zero points an item
        cuts[label] = of(getattr(matrix, label), 8 if eight else per_row, per_column, order.transposed)
    if weight_format.factor:
        cuts["factor"] = matrix.factor[rows.start : rows.stop] if weight_format.factor.per_row else matrix.factor
    return cuts


# Export: the packed layout is every backend's, so one that every CPU has will do

BACKEND = "fp32_lut"


@pytest.mark.cover("values")
@pytest.mark.parametrize("weight_format", (FORMATS | TURNED).values(), ids=FORMATS | TURNED)
@pytest.mark.parametrize("nodes", [[0], [1, 0], [0, 1, 2]], ids=str)
def test_any_cut_of_any_split_is_the_checkpoints_bytes(weight_format, nodes):
    """Shards and parts that begin at the same columns, between them, and across them."""
    rng = np.random.default_rng(1)
    unit = max(32, *weight_format.unit)
    experts = random_experts(rng, 3, 96, 12 * unit, formats=weight_format, biases=True)
    with MoELayer(experts, BACKEND, numa_nodes=nodes) as layer:
        for expert in range(3):
            for parts in (1, 2, 3, 4, 6, 12):
                size = experts.intermediate // parts
                exported = layer.export_expert(expert, parts)
                assert len(exported) == parts
                for i, part in enumerate(exported):
                    own = slice(i * size, (i + 1) * size)
                    for projection in ("gate", "up"):
                        m = experts.matrix(expert, projection)
                        same_stored(part[projection], cut(m, rows=own), m.bias[own])
                        assert part[projection].shape == (size, 96)
                    m = experts.matrix(expert, "down")
                    same_stored(part["down"], cut(m, columns=own), None if i else m.bias)


@pytest.mark.cover("values")
@pytest.mark.parametrize("nodes", [None, [2, 1]], ids=str)
@pytest.mark.parametrize("weights", [*WEIGHTS.values(), *MIXED.values()], ids=[*WEIGHTS, *MIXED])
def test_whole_experts_of_any_shape(weights, nodes):
    rng = np.random.default_rng(2)
    experts = random_experts(rng, 2, 100, 418, **weights)
    with MoELayer(experts, BACKEND, numa_nodes=nodes) as layer:
        for expert in range(2):
            (exported,) = layer.export_expert(expert)
            for projection, matrix in matrices(experts, expert).items():
                same_stored(exported[projection], matrix.stored)
                assert exported[projection].shape == matrix.shape


def test_every_scale_byte_comes_back():
    rng = np.random.default_rng(3)
    experts = random_experts(rng, 1, 32, 256, scales=(0, 254))
    with MoELayer(experts, BACKEND, numa_nodes=[0, 1]) as layer:
        for i, part in enumerate(layer.export_expert(0, 4)):
            same_stored(part["down"], cut(experts.matrix(0, "down"), columns=slice(i * 64, (i + 1) * 64)))


def test_into_arrays_that_are_there():
    rng = np.random.default_rng(4)
    experts = random_experts(rng, 2, 64, 128)
    out = [{p: MXFP4.empty(64, 64) for p in PROJECTIONS} for _ in range(2)]
    with MoELayer(experts, BACKEND) as layer:
        exported = layer.export_expert(1, 2, out)
        for part, given in zip(exported, out, strict=True):
            assert all(array is given[p][label] for p in PROJECTIONS for label, array in part[p].stored.items())
        assert np.array_equal(out[1]["gate"]["codes"], experts.matrix(1, "gate").codes[64:])
        before = out[0]["gate"]["codes"].copy()
        out[1]["up"]["codes"] = out[1]["up"]["codes"][:-1]
        with pytest.raises(FormatError, match=r"up codes: expected shape \[64, 32\], found \[63, 32\]"):
            layer.export_expert(0, 2, out)
        assert np.array_equal(out[0]["gate"]["codes"], before)  # nothing was written
        with pytest.raises(InputError, match="out must be a sequence of 1 parts, found 2"):
            layer.export_expert(0, 1, out)
        with pytest.raises(InputError, match=r"out\[0\] must have arrays for .*gate.*, found \('gate',\)"):
            layer.export_expert(0, 1, [{"gate": out[0]["gate"]}])
        whole = {p: experts.formats[p].empty(*experts.shape(p)) for p in PROJECTIONS}
        whole["up"]["scales"].flags.writeable = False
        with pytest.raises(InputError, match=r"experts\.0\.up: out: scales must be .* writeable; .*, writeable False"):
            layer.export_expert(0, 1, [whole])


@pytest.mark.parametrize(("parts", "unit"), [(0, 32), (-1, 32), (3, 32), (8, 32)])
def test_parts_that_cannot_be(parts, unit):
    experts = random_experts(np.random.default_rng(5), 1, 64, 128)
    with (
        MoELayer(experts, BACKEND) as layer,
        pytest.raises(
            InputError, match=f"parts must divide the intermediate size, 128, into multiples of {unit}, found {parts}"
        ),
    ):
        layer.export_expert(0, parts)


# Replace


@pytest.mark.parametrize("nodes", [None, [0, 1, 2]], ids=str)
@pytest.mark.parametrize(
    "weights", [WEIGHTS["folded"], WEIGHTS["unfolded"], WEIGHTS["all three"]], ids=["folded", "not", "mixed"]
)
def test_a_replaced_expert_is_as_if_it_had_always_been_there(backend, weights, nodes):
    rng = np.random.default_rng(6)
    old, new = (random_experts(rng, 3, 100, 418, biases=biases, **weights) for biases in (True, False))
    batch = random_batch(rng, old, 7, 3, np.float32)
    now = {}

    def read(expert, projection):
        return (new if expert in now else old).matrix(expert, projection)

    both = ExpertWeights(3, 100, 418, read, old.formats, old.activation)
    with MoELayer(both, backend, numa_nodes=nodes) as layer:
        before = layer.forward(*batch)
        for expert in (1, 0, 1, 2):  # 1 twice: what was replaced is replaced again
            now[expert] = True
            layer.replace_expert(expert, matrices(new, expert))
            assert_right(layer, both, *batch)
            (exported,) = layer.export_expert(expert)
            for projection, matrix in matrices(new, expert).items():
                same_stored(exported[projection], matrix.stored)
        with MoELayer(new, backend, numa_nodes=nodes) as fresh:
            assert same_bits(layer.forward(*batch), fresh.forward(*batch))
        for expert in range(3):
            layer.replace_expert(expert, matrices(old, expert))
        assert same_bits(layer.forward(*batch), before)


@pytest.mark.cover("any backend")
@pytest.mark.parametrize("nodes", [None, [0, 1]], ids=str)
def test_forward_calls_see_the_old_expert_or_the_new_and_nothing_between(backend, is_emulated, nodes):
    rng = np.random.default_rng(7)
    first, second = (random_experts(rng, 2, *((64, 128) if is_emulated else (256, 512))) for _ in range(2))
    batch = random_batch(rng, first, 5, 2, np.float32)
    with MoELayer(first, backend, numa_nodes=nodes) as layer:
        outputs = [layer.forward(*batch)]
        layer.replace_expert(0, matrices(second, 0))
        outputs.append(layer.forward(*batch))
        assert not same_bits(*outputs)
        stop, torn, seen = threading.Event(), [], set()

        def call():
            while not stop.is_set():
                y = layer.forward(*batch)
                which = [i for i, known in enumerate(outputs) if same_bits(y, known)]
                seen.update(which)
                if not which:
                    torn.append(y)

        def look():
            while not stop.is_set():
                (exported,) = layer.export_expert(0)
                if not any(
                    all(np.array_equal(exported[p].codes, source.matrix(0, p).codes) for p in PROJECTIONS)
                    for source in (first, second)
                ):
                    torn.append(exported)

        threads = [threading.Thread(target=target) for target in (call, call, look)]
        for thread in threads:
            thread.start()
        for turn in range(2000):
            layer.replace_expert(0, matrices((first, second)[turn % 2], 0))
            if turn >= 60 and seen == {0, 1}:
                break
        stop.set()
        for thread in threads:
            thread.join()
        assert not torn
        assert seen == {0, 1}


@pytest.mark.cover("any backend")
@pytest.mark.parametrize("nodes", [None, [0, 1]], ids=str)
def test_an_experts_biases_are_the_ones_that_came_with_its_matrices(backend, nodes):
    """Also where several threads replace it at once: whichever was last, its biases stay with it, and are in memory."""
    rng = np.random.default_rng(13)
    sources = [random_experts(rng, 1, 64, 96, biases=True) for _ in range(3)]
    batch = random_batch(rng, sources[0], 1, 1, np.float32)
    outputs = []
    for source in sources:
        with MoELayer(source, backend, numa_nodes=nodes) as layer:
            outputs.append(layer.forward(*batch))
    with MoELayer(sources[0], backend, numa_nodes=nodes) as layer:
        wrong, started = [], threading.Barrier(4)

        def exchange(source):
            started.wait()
            for _ in range(150):
                layer.replace_expert(0, matrices(source, 0))

        def look():
            started.wait()
            for _ in range(150):
                y, (exported,) = layer.forward(*batch), layer.export_expert(0)
                ours = [s for s in sources if np.array_equal(exported["up"].codes, s.matrix(0, "up").codes)]
                known = any(same_bits(y, output) for output in outputs)
                if not known or any(not np.array_equal(exported[p].bias, ours[0].matrix(0, p).bias) for p in PROJECTIONS):
                    wrong.append(exported)

        threads = [threading.Thread(target=exchange, args=(source,)) for source in sources]
        threads.append(threading.Thread(target=look))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


def test_whether_weights_are_rounded_is_known_after_a_replacement(backend):
    rng = np.random.default_rng(16)
    small, tiny = (random_experts(rng, 1, 64, 64, formats=int4(32), scales=fields) for fields in (SCALES, (0, 0)))
    with MoELayer(small, backend, rounding="folded") as layer:
        expected = layer.rounding
        assert expected == ("folded" if rounds(layer) else "exact")
        layer.replace_expert(0, matrices(tiny, 0))
        assert layer.rounding == "exact"
        layer.replace_expert(0, matrices(small, 0))
        assert layer.rounding == expected


def test_matrices_that_are_made_when_they_are_asked_for(backend):
    """A Mapping may make them anew each time: what is packed is kept until it is."""
    rng = np.random.default_rng(14)
    old, new = (random_experts(rng, 1, 512, 512) for _ in range(2))

    class Made(Mapping):
        def __getitem__(self, projection):
            matrix = new.matrix(0, projection)
            return replace(matrix, codes=matrix.codes.copy(), scales=matrix.scales.copy())

        def __iter__(self):
            return iter(PROJECTIONS)

        def __len__(self):
            return 3

    with MoELayer(old, backend) as layer:
        layer.replace_expert(0, Made())
        for projection, matrix in layer.export_expert(0)[0].items():
            same_stored(new.matrix(0, projection), matrix.stored)


def test_an_expert_that_was_packed_in_part_may_be_replaced():
    rng = np.random.default_rng(15)
    experts = random_experts(rng, 1, 64, 96)
    packed = core.PackedLayer(native.load_table("portable"), experts, Plan(), [(0, 96)], 1)
    packed.pack(0, {"down": experts.matrix(0, "down")})
    for _ in range(3):
        packed.pack(0, matrices(experts, 0))
        for projection, matrix in matrices(experts, 0).items():
            same_stored(matrix, core.unpack(packed, 0, projection))


def test_what_is_refused_leaves_the_old_expert(backend):
    rng = np.random.default_rng(8)
    experts, other = (random_experts(rng, 2, 64, 96) for _ in range(2))
    batch = random_batch(rng, experts, 4, 2)
    with MoELayer(experts, backend, numa_nodes=[0, 1]) as layer:
        y = layer.forward(*batch)
        good = matrices(other, 0)
        nan = good["down"].scales.copy()
        nan[3, 1] = 255
        with pytest.raises(FormatError, match=r"experts\.0\.down: scale \[3, 1\] is byte 255, which is NaN or infinite"):
            layer.replace_expert(0, good | {"down": replace(good["down"], scales=nan)})
        with pytest.raises(
            FormatError, match=r"gate must be E2M1 with ue8m0 scales per 1x32 \[96, 64\], found BF16 \[96, 64\]"
        ):
            layer.replace_expert(0, good | {"gate": random_experts(rng, 1, 64, 96, formats=B16).matrix(0, "gate")})
        with pytest.raises(FormatError, match=r"up must be .* \[96, 64\], found .* \[64, 96\]"):
            layer.replace_expert(0, good | {"up": good["down"]})
        with pytest.raises(InputError, match=r"matrices must be .*gate.*up.*down.*, found .*gate"):
            layer.replace_expert(0, {"gate": good["gate"]})
        for wrong in (-1, 2):
            with pytest.raises(InputError, match=rf"expert must be in \[0, 2\), found {wrong}"):
                layer.replace_expert(wrong, good)
            with pytest.raises(InputError, match=rf"expert must be in \[0, 2\), found {wrong}"):
                layer.export_expert(wrong)
        assert same_bits(layer.forward(*batch), y)
    for call in (lambda: layer.replace_expert(0, good), lambda: layer.export_expert(0)):
        with pytest.raises(ClosedError):
            call()


@pytest.mark.cover("any backend")
def test_memory_of_one_expert_is_kept_for_it_and_given_back(backend):
    experts = random_experts(np.random.default_rng(9), 2, 2048, 2048)

    def use():
        with MoELayer(experts, backend) as layer:
            layer.replace_expert(0, matrices(experts, 1))
            once = resident_bytes()
            for _ in range(5):
                layer.replace_expert(1, matrices(experts, 0))
            assert resident_bytes() - once < layer.nbytes // 4
        core.release()
        return resident_bytes()

    use()
    before = use()
    assert use() - before < 1 << 21


def test_a_backend_that_cannot(backend, monkeypatch):
    experts = random_experts(np.random.default_rng(10), 1, 64, 96)
    with MoELayer(experts, backend) as layer:
        monkeypatch.setattr(layer, "packed", Bare())
        with pytest.raises(UnavailableError, match=f"backend '{layer.backend}' cannot replace an expert"):
            layer.replace_expert(0, matrices(experts, 0))
        with pytest.raises(UnavailableError, match=f"backend '{layer.backend}' cannot export an expert"):
            layer.export_expert(0)
        monkeypatch.undo()


def resident_bytes():
    """Of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# Redundant experts


def test_physical_experts_are_the_logical_ones_that_the_map_says(backend):
    rng = np.random.default_rng(11)
    experts = random_experts(rng, 4, 64, 96, formats=int4(32), biases=True)
    map_ = np.array([2, 0, 1, 3, 2, 2])
    physical = experts.take(map_)
    assert physical.num_experts == 6
    x, ids, weights = random_batch(rng, physical, 9, 3)
    with MoELayer(physical, backend) as layer, MoELayer(experts, backend) as logical:
        assert_right(layer, physical, x, ids, weights)
        one = ids[:, :1]  # of one expert for each token, the order of sums is no matter
        assert same_bits(layer.forward(x, one, weights[:, :1]), logical.forward(x, map_[one], weights[:, :1]))
        for slot, expert in enumerate(map_):
            assert np.array_equal(layer.export_expert(slot)[0]["up"].codes, experts.matrix(expert, "up").codes)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 4], r"slot 1 must be an expert in \[0, 4\), found 4"),
        ([-1], r"slot 0 .* found -1"),
        ([], "num_experts must be"),
        (3, "ids"),
    ],
)
def test_maps_that_cannot_be(ids, message):
    experts = random_experts(np.random.default_rng(12), 4, 64, 96)
    with pytest.raises(InputError, match=message):
        experts.take(ids)
