"""How often amx's kernels multiply, load and store tiles: formulas in rows, columns and k. Only the emulator counts."""

from collections import Counter

import emulator
import numpy as np
import pytest
import ways
from amx_tiles import counted, expected, formula
from helpers import FORMATS, GROUPS, assert_right, crowd, random_experts, unsigned

from ktmoe import MXFP4, MoELayer, int4, set_num_threads
from ktmoe._native import core
from ktmoe.experts import PROJECTIONS
from ktmoe.weights.formats import FP8_PER_ROW, MXFP8, fp8

ON_AMX = pytest.mark.parametrize("backend", ["amx"], indirect=True)
EMULATED = pytest.mark.skipif(ways.WAYS["amx"] == "native", reason="this CPU has the instructions")
ROWS = [1, 15, 16, 17, 32, 33, 48, 49, 64, 65, 80, 100, core.ROWS_MAX, core.ROWS_MAX + 1, 2 * core.ROWS_MAX + 1]


@ON_AMX
@EMULATED
@pytest.mark.parametrize("m", ROWS)
@pytest.mark.parametrize("shape", [(32, 64), (96, 100), (100, 34)], ids=str)
@pytest.mark.parametrize("name", ["mxfp4", "int4-64", "b16"])
def test_every_instruction_is_accounted_for(backend, name, shape, m):
    experts = random_experts(np.random.default_rng(1), 1, *shape, formats=FORMATS[name])
    set_num_threads(1)  # more would cut the rows in strips
    with MoELayer(experts, backend, rounding="folded") as layer:
        for only_many in (False, True):  # which takes the same pass for one tile of rows
            core.tune(only_many=only_many)
            assert counted(layer, m) == expected(layer, m)


@ON_AMX
@EMULATED
@pytest.mark.parametrize("m", [1, 16, 20, 48, 100])
@pytest.mark.parametrize("group", GROUPS)
def test_two_numbers_a_weight_are_two_multiplications(backend, group, m):
    experts = unsigned(random_experts(np.random.default_rng(5), 1, 160, 100, formats=int4(group)))
    with MoELayer(experts, backend, tuned_for="prefill") as layer:
        assert counted(layer, m) == expected(layer, m, terms=2)
        assert_right(layer, experts, *crowd(layer, m))


@ON_AMX
@EMULATED
@pytest.mark.parametrize("m", [1, 16, 20, 48, 100])
@pytest.mark.parametrize(("weights", "group"), [({"formats": fp8()}, 128), ({"formats": MXFP8, "fold": False}, 32)])
def test_scales_of_sums_store_tiles_after_each_group(backend, weights, group, m):
    experts = random_experts(np.random.default_rng(6), 1, 160, 100, **weights)
    with MoELayer(experts, backend) as layer:
        assert not any(core.folded(layer.packed).values())
        assert counted(layer, m) == expected(layer, m, group=group)
        assert_right(layer, experts, *crowd(layer, m))


@ON_AMX
@EMULATED
def test_e4m3_without_small_numbers_and_with_one(backend):
    """Which are decoded apart: a quarter of a tile with any, and one with none."""
    experts = random_experts(np.random.default_rng(7), 1, 160, 128, formats=FP8_PER_ROW)
    matrices = {p: experts.matrix(0, p) for p in PROJECTIONS}
    for matrix in matrices.values():
        matrix.codes[matrix.codes & 0x78 == 0] = 0x08
        matrix.codes[70, 40], matrix.codes[3, 9], matrix.codes[3, 10] = 0x05, 0x00, 0x87
    with MoELayer(experts, backend) as layer:
        for m in (1, 20, 40):
            assert counted(layer, m) == expected(layer, m)
            assert_right(layer, experts, *crowd(layer, m))


def test_the_formula():
    """By hand, for a panel of two steps."""
    names = ("tdpbf16ps", "tileloadd", "tilezero", "tilestored")
    for m, counts in {
        16: (8, 10, 4, 4),
        32: (16, 16, 8, 8),
        48: (24, 28, 12, 12),
        64: (32, 32, 16, 16),
        65: (16 + 24, 16 + 28, 20, 20),
        112: (32 + 24, 32 + 28, 16 + 12, 16 + 12),
    }.items():
        assert formula(m, 64, 64) == dict(zip(names, counts, strict=True))


@ON_AMX
@EMULATED
@pytest.mark.parametrize("m", [5, 40])
def test_stores_depend_neither_on_k_nor_on_groups(backend, m):
    stores = set()
    for hidden in (64, 256):
        counts = []
        for weight_format in (MXFP4, *map(int4, GROUPS)):
            experts = random_experts(np.random.default_rng(2), 1, hidden, 64, formats=weight_format)
            with MoELayer(experts, backend, rounding="folded") as layer:
                counts.append(counted(layer, m))
        assert all(count == counts[0] for count in counts)
        stores.add(
            counts[0]["tilestored"] - formula(m, hidden, 64)["tilestored"]
        )  # without down, of which hidden are the columns
    assert len(stores) == 1


@ON_AMX
@EMULATED
@pytest.mark.parametrize("weights", [{"fold": False}, {"formats": int4(64)}], ids=["mxfp4", "int4"])
def test_what_does_not_fold_uses_no_tile(backend, weights):
    experts = random_experts(np.random.default_rng(3), 1, 64, 64, **weights)
    with MoELayer(experts, backend) as layer:
        assert counted(layer, 20) == {}
        assert_right(layer, experts, *crowd(layer, 20))


@ON_AMX
@EMULATED
def test_rows_of_several_experts(backend):
    """Each expert's rows are counted for themselves: 1, 17 and 48 of them."""
    experts = random_experts(np.random.default_rng(4), 3, 64, 64)
    rows = (1, 17, 48)
    with MoELayer(experts, backend) as layer:
        x, _, weights = crowd(layer, sum(rows))
        ids = np.repeat(np.arange(3), rows)[::-1, None].copy()
        emulator.reset()
        layer.forward(x, ids, weights)
        counts = emulator.counts()
        for name, count in sum((expected(layer, m) for m in rows), Counter()).items():
            assert counts[name] == count
