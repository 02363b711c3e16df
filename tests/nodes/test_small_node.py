"""A node that has less memory than its shard needs: Linux takes the rest from another one, and the layer computes the same."""

import numpy as np
import pytest
from helpers import random_batch, random_experts, same_bits
from nodes_of_pages import nodes_by_shard

from ktmoe import BF16, MoELayer
from ktmoe._native import core
from ktmoe.machine import memory

#: 12 MiB each; the guest's second node has 320 MiB.
EXPERTS, HIDDEN, INTERMEDIATE = 30, 1024, 2048


@pytest.fixture(scope="module")
def experts():
    """All alike, so that they take little memory before they are packed."""
    one = random_experts(np.random.default_rng(1), 1, HIDDEN, INTERMEDIATE, formats=BF16)
    return one.take([0] * EXPERTS)


@pytest.mark.parametrize("guest", ["unequal"], indirect=True)
def test_a_shard_that_its_node_has_no_room_for(guest, experts):
    batch = random_batch(np.random.default_rng(2), experts, 1, 2)
    with MoELayer(experts.take([0]), numa_nodes=[0]) as layer:
        expected = layer.forward(batch[0], np.zeros((1, 2), np.int64), batch[2])
    assert memory.free_on([1]) < EXPERTS * 12 << 20 < memory.free_on([0, 1])
    with MoELayer(experts, numa_nodes=[1]) as layer:
        assert nodes_by_shard(core.packed_at(layer.packed)) == {0: {0, 1}}
        assert same_bits(layer.forward(*batch), expected)
