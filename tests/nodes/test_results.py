"""What layers on real nodes compute: the sum of their shards, bit for bit, as layers on nodes that are made up."""

import numpy as np
import pytest
from helpers import KINDS, assert_right, random_batch, random_experts, same_bits
from linears import DENSE_KINDS, random_matrix, random_x
from shards import added_up

from ktmoe import Linear, MoELayer, set_num_threads
from ktmoe._native import core

CASES = [(name, "auto") for name in ("b16", "folded", "fp8", "int8-row", "int3 super-16", "int2 super-16 minima")]


@pytest.mark.parametrize(("name", "backend"), [*CASES, ("b16", "fp32_lut"), ("folded", "fp32_lut")])
def test_a_layer_is_its_shards_added_up(name, backend, several_nodes):
    rng = np.random.default_rng(1)
    experts = random_experts(rng, 2, 100, 1000, biases=True, **KINDS[name])
    nodes = list(several_nodes)
    for tokens in (1, 9):
        batch = random_batch(rng, experts, tokens, 2, np.float32)
        outputs = []
        for order in (nodes, nodes[::-1]):
            with MoELayer(experts, backend, numa_nodes=order) as layer:
                outputs.append(assert_right(layer, experts, *batch))
                for threads in (1, len(nodes), 7):
                    set_num_threads(threads)
                    outputs.append(layer.forward(*batch))
                activations = layer.activations
        expected = added_up(experts, len(nodes), batch, backend, activations=activations)
        assert all(same_bits(y, expected) for y in outputs)


@pytest.mark.parametrize("name", ["b16", "folded", "int3 super-16"])
def test_a_layer_on_made_up_nodes_has_the_same_bits(name, several_nodes, fake_nodes):
    """As the other tests make them up: they stand for real ones."""
    rng = np.random.default_rng(2)
    experts = random_experts(rng, 3, 100, 1000, **KINDS[name])
    batch = random_batch(rng, experts, 9, 2, np.float32)
    nodes = list(several_nodes)
    with MoELayer(experts, numa_nodes=nodes) as real, MoELayer(experts, numa_nodes=nodes[:1]) as one:
        expected, other = real.forward(*batch), one.forward(*batch)
    assert not same_bits(expected, other)  # or the comparison would show nothing
    cpus = set().union(*several_nodes.values())
    fake_nodes(dict.fromkeys(range(20, 20 + len(nodes)), cpus))
    with MoELayer(experts) as made_up:
        assert made_up.placement.nodes == tuple(range(20, 20 + len(nodes)))
        assert same_bits(made_up.forward(*batch), expected)


@pytest.mark.parametrize("name", ["b16", "mxfp4", "int3 super-16"])
def test_dense_matrices_do_not_depend_on_nodes(name, several_nodes):
    rng = np.random.default_rng(3)
    matrix, x = random_matrix(rng, 700, 500, **DENSE_KINDS[name]), random_x(rng, 9, 500)
    outputs = []
    for nodes in (None, list(several_nodes)[::-1], list(several_nodes)[:1], list(several_nodes)[-1:]):
        with Linear(matrix, numa_nodes=nodes) as linear:
            outputs.append(linear.forward(x))
    assert all(same_bits(y, outputs[0]) for y in outputs)


def test_layers_of_different_nodes_by_turns(several_nodes):
    rng = np.random.default_rng(4)
    experts = random_experts(rng, 3, 100, 1000)
    batch = random_batch(rng, experts, 9, 2)
    layers = [MoELayer(experts, numa_nodes=[node]) for node in several_nodes]
    outputs = [layer.forward(*batch) for _ in range(3) for layer in layers]
    assert all(same_bits(y, outputs[0]) for y in outputs)
    for layer in layers:
        layer.close()
    core.release()
