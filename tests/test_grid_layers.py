"""Layers and matrices of GGUF's grid types and TQ1_0, which are packed as their records stand: right in every mode on every
instruction set, byte for byte again on any NUMA nodes, row by row, and refused where a super-scale is no number."""

from dataclasses import replace

import numpy as np
import pytest
import ways
from helpers import assert_right, random_batch, same_bits

from ktmoe import Linear, MoELayer, MoEModel, cli, synthetic
from ktmoe._native import core
from ktmoe.dequantization import dequantize
from ktmoe.errors import FormatError
from ktmoe.experts import PROJECTIONS
from ktmoe.matrix import Matrix
from ktmoe.synthetic.gguf import write_gguf
from ktmoe.weights.ggml import GRIDS

every_type = pytest.mark.parametrize("name", GRIDS)


@pytest.fixture(scope="module", params=list(ways.SUBJECTS))
def backend(request, emulator_folder):
    with ways.chosen(ways.SUBJECTS[request.param], emulator_folder) as name:
        yield name


def matrix_of(name, n, k, seed=0):
    """A matrix of random records."""
    projections = synthetic.gguf_experts(types=name, num_experts=1, hidden=k, intermediate=-(-n // 256) * 256, seed=seed)
    gate = projections.matrix(0, "gate")
    return Matrix("w", gate.format, (n, k), np.ascontiguousarray(gate.codes[:n]))


@pytest.mark.cover("values")
@pytest.mark.parametrize("tokens", [1, 2, 5, 13, 40])
@pytest.mark.parametrize("name", [*GRIDS, "IQ4_NL", "IQ4_XS"])
def test_layers_are_right(backend, name, tokens):
    """Few rows and many: of a pass, of two, of tiles. IQ4's values are integers of up to 7 bits."""
    experts = synthetic.gguf_experts(types=name, num_experts=2, hidden=512, intermediate=256)
    rng = np.random.default_rng(tokens)
    batch = random_batch(rng, experts, tokens, top_k=1)
    with MoELayer(experts, backend) as layer:
        assert_right(layer, experts, *batch)


@pytest.mark.cover("values")
@every_type
def test_bits_do_not_depend_on_the_rows_beside(backend, name):
    matrix = matrix_of(name, 70, 512)
    x = np.random.default_rng(1).standard_normal((30, 512)).astype(np.float32)
    with Linear(matrix, backend) as linear:
        together = linear.forward(x)
        for first, count in ((0, 1), (3, 2), (5, 5), (8, 12), (2, 13)):
            np.testing.assert_array_equal(linear.forward(x[first : first + count]), together[first : first + count])


@pytest.mark.usefixtures("three_nodes")
@pytest.mark.parametrize("nodes", [[0], [1, 0], [0, 1, 2]], ids=str)
@every_type
def test_bytes_come_back(name, nodes):
    """Shards begin at whole records of down. An expert that took another's place, too."""
    experts = synthetic.gguf_experts(types=name, num_experts=2, hidden=256, intermediate=1024)
    with MoELayer(experts, "fp32_lut", numa_nodes=nodes) as layer:
        layer.replace_expert(0, {projection: experts.matrix(1, projection) for projection in PROJECTIONS})
        for expert in range(2):
            for parts in (1, 2, 4):
                size = 1024 // parts
                for i, part in enumerate(layer.export_expert(expert, parts)):
                    for projection in ("gate", "up"):
                        codes = experts.matrix(1, projection).codes[i * size : (i + 1) * size]
                        assert same_bits(part[projection].codes, codes)
                    codes = experts.matrix(1, "down").codes
                    width = codes.shape[1] // parts
                    assert same_bits(part["down"].codes, codes[:, i * width : (i + 1) * width])
        batch = random_batch(np.random.default_rng(2), experts, 3, top_k=1)
        batch[1][:] = 1
        assert_right(layer, experts, *batch)


@every_type
def test_rows(name):
    matrix, ids = matrix_of(name, 130, 512), np.array([129, 0, 64, 64, 63])
    with Linear(matrix, "fp32_lut") as linear:
        np.testing.assert_array_equal(linear.rows(ids, dtype=np.float32), dequantize(matrix)[ids].astype(np.float32))


@every_type
def test_super_scales_that_are_no_numbers_are_refused(name):
    matrix = matrix_of(name, 70, 512)
    order = matrix.format.order
    codes = matrix.codes.copy()
    field = order.super_scales if order.packed == "grid" else order.scales
    records = codes.reshape(-1, order.nbytes)
    for piece in field.items[0]:  # fp16's exponent, all ones
        records[-1, piece.byte] |= (0x7C00 >> piece.shift & (1 << piece.bits) - 1) << piece.first
    with pytest.raises(FormatError, match="is nan"):
        Linear(replace(matrix, codes=codes), "fp32_lut")


def test_versions_of_the_layouts():
    assert {"grid", "ternary"} <= core.LAYOUT_VERSIONS.keys()


@every_type
def test_a_packed_cache_has_the_records(tmp_path, name):
    """What is mapped computes the same bits and gives the same records back."""
    write_gguf(tmp_path / "model", types=name, num_experts=2, hidden=256, intermediate=512)
    assert cli.main(["pack", str(tmp_path / "model"), str(tmp_path / "cache")]) == 0
    x, ids, weights = np.ones((2, 256), np.float32), np.array([[0, 1], [1, 0]]), np.ones((2, 2), np.float32)
    found = []
    for cache in (None, tmp_path / "cache"):
        with MoEModel.from_checkpoint(tmp_path / "model", cache=cache) as model:
            records = model[0].export_expert(1)[0]
            found.append((model[0].forward(x, ids, weights), *(records[projection].codes for projection in PROJECTIONS)))
    assert all(map(same_bits, *found))
