"""Each token's output when it is alone in its batch, on one thread: what it has to be, bit for bit, in any other."""

from __future__ import annotations

import numpy as np
from helpers import BF16, DEEPSEEK, assert_folds, assert_right, random_batch, random_experts, same_bits

from ktmoe import MoELayer, set_num_threads

POOL, TOP_K = 24, 3  # different tokens that batches are drawn from
CROWD, REPEATED, ODD, SKIPPED = range(8), 8, 9, 10


class Case:
    """A layer, tokens, and each token's output when it is alone, on one thread, under the default settings.

    Tokens of CROWD have the same experts, so that few() and many() serve them; REPEATED has one expert three times. Of ODD's
    ids one counts, of SKIPPED's none.
    """

    def __init__(self, backend, weights, router_weight="down_output", dtype=BF16, shape=(100, 80), num_experts=5, **settings):
        rng = np.random.default_rng(1)
        self.experts = random_experts(rng, num_experts, *shape, activation=DEEPSEEK, biases=True, **weights)
        self.x, self.ids, self.weights = random_batch(rng, self.experts, POOL, TOP_K, dtype)
        self.ids[CROWD] = [0, 1, 2]
        self.ids[REPEATED] = 4
        self.ids[ODD] = [-1, num_experts, 3]
        self.ids[SKIPPED] = -1
        self.layer = MoELayer(self.experts, backend, router_weight=router_weight, **settings)
        assert_folds(self.layer, self.experts, weights.get("fold", True))
        set_num_threads(1)
        self.alone = np.concatenate([self.forward([token]) for token in range(POOL)])
        assert_right(self.layer, self.experts, self.x, self.ids, self.weights, self.alone)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.layer.close()

    def forward(self, tokens):
        return self.layer.forward(self.x[tokens], self.ids[tokens], self.weights[tokens])

    def check(self, tokens):
        assert same_bits(self.forward(tokens), self.alone[tokens])
