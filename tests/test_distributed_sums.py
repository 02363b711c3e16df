"""The order of partial sums: a tree over the shards, written here as a recursion, whoever has which of them."""

import numpy as np
import pytest
from helpers import bits

from ktmoe.distributed.sums import All, Own, sent


def tree(leaves):
    """float32: pairs of neighbours, then of their sums; None is nothing."""
    if len(leaves) == 1:
        return leaves[0]
    pairs = [leaves[i : i + 2] for i in range(0, len(leaves), 2)]
    return tree([of[0] if len(of) == 1 or of[1] is None else of[1] if of[0] is None else of[0] + of[1] for of in pairs])


@pytest.mark.parametrize("shards", [1, 2, 3, 6, 8, 13])
def test_added(shards):
    rng = np.random.default_rng(shards)
    values = (rng.standard_normal((50, shards, 3)) * 10.0 ** rng.integers(-3, 4, (50, shards, 1))).astype(np.float32)
    wanted = rng.random((50, shards)) < 0.6
    wanted[0] = False
    for ranks in (1, 2, 3, 5):
        owner = rng.integers(0, ranks, (50, shards))
        parts, places = [], []
        for rank in range(ranks):
            own = Own.of(wanted, wanted & (owner == rank))
            parts.append(own.run(values[own.computed]))
            places.append(own.sent)
            for found, expected in zip(sent(wanted, wanted & (owner == rank)), own.sent, strict=True):
                np.testing.assert_array_equal(found, expected)
        y = All.of(places, 50, shards).run(parts, 50)
        for token in range(50):
            whole = tree([values[token, shard] if wanted[token, shard] else None for shard in range(shards)])
            np.testing.assert_array_equal(bits(y[token]), 0 if whole is None else bits(whole))


def test_sent():
    """A node travels as its first shard; what somebody else needs for it, apart."""
    everything = np.ones((1, 8), bool)

    def shards(wanted, computed):
        return sent(wanted, computed)[1].tolist()

    def of(*chosen):
        return np.isin(np.arange(8), chosen)[None]

    assert shards(everything, of(0, 1, 2, 3)) == [0]
    assert shards(everything, of(4, 5, 6)) == [4, 6]
    assert shards(everything, of(1, 2, 3)) == [1, 2]
    assert shards(of(0, 3, 5), of(0, 3)) == [0]
    assert shards(of(0, 3, 5), of(0, 5)) == [0, 4]
    assert shards(of(3), of(3)) == [0]
    assert shards(of(3), of()) == []
