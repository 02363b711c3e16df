"""Each shard's packed weights and scratch memory are on its node, page by page: of layers, of dense matrices, of models."""

import ctypes
import mmap
import os
import threading

import ggml_records
import numpy as np
import pytest
from helpers import KINDS, random_batch, random_experts
from linears import DENSE_KINDS, random_matrix, random_x
from nodes_of_pages import PAGE_BYTES, nodes_by_shard, nodes_of

from ktmoe import Linear, LinearGroup, MoELayer, MoEModel, set_num_threads, synthetic
from ktmoe._native import core
from ktmoe.experts import PROJECTIONS

FORMATS = ("b16", "folded", "fp8", "int8-row", "int3 super-16", "gguf Q4_K", "gguf IQ2_XS")


def experts_of(name, hidden=300, intermediate=1100, num_experts=3, seed=1):
    """Their sizes are no multiples of pages: an expert begins within the page where the one before it ends."""
    rng = np.random.default_rng(seed)
    if name.startswith("gguf "):
        return ggml_records.random_experts(rng, num_experts, 512, 1024, name.removeprefix("gguf "))
    return random_experts(rng, num_experts, hidden, intermediate, **KINDS[name], biases=True)


def assert_on_its_nodes(packed_weights):
    nodes = packed_weights.placement.nodes
    assert nodes_by_shard(core.packed_at(packed_weights.packed)) == {shard: {node} for shard, node in enumerate(nodes)}


def call(layer, tokens=5, seed=2):
    return layer.forward(*random_batch(np.random.default_rng(seed), layer.spec, tokens, 2))


@pytest.mark.parametrize("name", FORMATS)
def test_layers(name, chosen, several_nodes):
    with MoELayer(experts_of(name), numa_nodes=chosen) as layer:
        assert layer.placement.nodes == tuple(several_nodes if chosen is None else chosen)
        assert_on_its_nodes(layer)
        call(layer)
        assert_on_its_nodes(layer)


def test_experts_may_share_a_page():
    """Or the tests here would not be about such pages."""
    for name in ("folded", "gguf IQ2_XS"):
        with MoELayer(experts_of(name)) as layer:
            assert any(address % PAGE_BYTES for _, address, _ in core.packed_at(layer.packed)), name


@pytest.mark.parametrize("name", ["b16", "gguf Q4_K"])
def test_replaced_experts(name, chosen):
    """The first replacement goes into new memory, the next one to where the first expert was."""
    other = experts_of(name, seed=3)
    with MoELayer(experts_of(name), numa_nodes=chosen) as layer:
        before = core.packed_at(layer.packed)
        for expert in (1, 0, 1, 2):
            layer.replace_expert(expert, {projection: other.matrix(expert, projection) for projection in PROJECTIONS})
            assert_on_its_nodes(layer)
        assert core.packed_at(layer.packed) != before


@pytest.mark.parametrize("name", ["b16", "mxfp4", "int3 super-16"])
def test_dense_matrices(name, chosen):
    rng = np.random.default_rng(4)
    sizes = (700, 1400, 130)
    matrices = [random_matrix(rng, n, 1000, **DENSE_KINDS[name], bias=True, name=f"w{n}") for n in sizes]
    linears = [Linear(matrix, numa_nodes=chosen) for matrix in matrices if chosen is None or matrix.shape[0] > 64 * len(chosen)]
    with LinearGroup(linears) as group:
        for x in (random_x(rng, 1, 1000), random_x(rng, 40, 1000)):
            group.forward(x)
        for linear in linears:
            if linear.placement.nodes:
                assert_on_its_nodes(linear)
        assert linears[0].placement.nodes


def test_a_model_whose_layers_are_loaded_by_several_threads(tmp_path, chosen):
    """And from a thread that is kept to the last node, which says nothing of where the weights are to be."""
    synthetic.write_deepseek_v4(tmp_path / "model", layers=4, num_experts=4, hidden=256, intermediate=512)

    def load():
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        with MoEModel.from_checkpoint(tmp_path / "model", numa_nodes=chosen) as model:
            for layer in model:
                call(model[layer])
                assert_on_its_nodes(model[layer])
            done.append(len(model))

    done = []
    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert done == [4]


@pytest.mark.parametrize("tokens", [1, 300])
def test_scratch_memory_of_layers(tokens, several_nodes):
    """Of layers by turns that are on the same nodes in another order, whose shards' scratch memory is not the same."""
    experts = experts_of("folded", num_experts=4)
    nodes = list(several_nodes)
    with MoELayer(experts, numa_nodes=nodes) as one, MoELayer(experts, numa_nodes=nodes[::-1]) as other:
        for layer in (one, other, one):
            call(layer, tokens)
            assert_scratch_is_on(layer.placement.nodes)


def test_scratch_memory_of_dense_matrices(several_nodes):
    """Forward and backward."""
    rng = np.random.default_rng(5)
    nodes = tuple(several_nodes)[::-1]
    with Linear(random_matrix(rng, 1400, 500, **DENSE_KINDS["b16"]), numa_nodes=nodes) as linear:
        linear.backward(linear.forward(random_x(rng, 80, 500)))
        assert_scratch_is_on(nodes)


def assert_scratch_is_on(nodes):
    """What no thread has written is nowhere yet."""
    found = nodes_by_shard(core.scratch_at())
    assert found
    for shard, on in found.items():
        assert on - {None} == {nodes[shard]}


def test_fewer_threads_than_nodes(several_nodes):
    """One thread packs all shards, and yet each is on its node."""
    nodes = tuple(several_nodes)
    set_num_threads(1)
    with MoELayer(experts_of("b16"), numa_nodes=nodes) as layer:
        call(layer)
        assert_on_its_nodes(layer)


def test_what_is_looked_at_may_lie_elsewhere(several_nodes):
    """Memory of this test's own, which it writes on one node after the other: nodes_of() tells them apart."""
    own = os.sched_getaffinity(0)
    try:
        for node, cpus in several_nodes.items():
            os.sched_setaffinity(0, cpus)
            with mmap.mmap(-1, 4 * PAGE_BYTES) as memory:
                memory.madvise(mmap.MADV_NOHUGEPAGE)
                memory[PAGE_BYTES] = memory[2 * PAGE_BYTES] = 1
                address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                assert nodes_of(address, 4 * PAGE_BYTES) == [None, node, node, None]
                assert nodes_of(address + 3 * PAGE_BYTES - 1, 2) == [node, None]
    finally:
        os.sched_setaffinity(0, own)
