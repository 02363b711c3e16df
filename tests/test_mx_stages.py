"""The two stages of a layer, alone: with what the mode makes of h between them they are the layer, bit for bit."""

import numpy as np
import pytest
from helpers import BF16, random_batch, random_experts, same_bits

from ktmoe import MoELayer, backends
from ktmoe._native import core
from ktmoe.errors import ClosedError, InputError
from ktmoe.experts import ROUTER_WEIGHTS
from ktmoe.modes import mode_of

SIDES = ("mxfp4", "mxfp8", "mxfp8/mxfp4:even", "mxfp4/bf16", "bf16/mxfp8:compressed-tensors")


def rounded(rule, bits):
    """What a rule of a mode makes of bits [rows, k]: blocks of 32, the last one padded with zeros."""
    if rule is None:
        return bits
    padded = np.zeros((len(bits), -(-bits.shape[1] // 32) * 32), np.uint16)
    padded[:, : bits.shape[1]] = bits
    return np.ascontiguousarray(core.round_blocks(rule, padded)[:, : bits.shape[1]])


class Stages:
    """Two stages of a layer for a batch, by hand: gate_up(), what its mode makes of h, down()."""

    def __init__(self, layer, x, ids, weights):
        self.packed, self.tokens = layer.packed, len(x)
        self.mask = layer.expert_mask.view(np.uint8)
        self.pairs = np.ascontiguousarray(ids, np.int64), weights, self.mask
        rng = np.random.default_rng(7)
        self.rows = rng.permutation(ids.size + 3)[: ids.size].reshape(ids.shape)
        self.shape = ids.size + 3, layer.intermediate
        self.used = self.rows[
            (ids >= 0) & (ids < layer.num_experts) & layer.expert_mask[np.clip(ids, 0, layer.num_experts - 1)]
        ]

    def gate_up(self, x, **more):
        h = np.full(self.shape, 0xABCD, np.uint16)
        self.packed.gate_up(x, *self.pairs, self.rows, h, **more)
        untouched = np.delete(np.arange(len(h)), self.used)
        assert (h[untouched] == 0xABCD).all()
        h[untouched] = 0x7FC0  # a NaN that nobody may read
        return h

    def down(self, h, like):
        y = np.full((self.tokens, like.shape[1]), 0xAB).astype(like.dtype)
        self.packed.down(h, *self.pairs, self.rows, y)
        return y


@pytest.mark.cover("values")
@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
@pytest.mark.parametrize("mode", SIDES)
@pytest.mark.parametrize("shape", [(96, 160), (70, 98), (32, 64)], ids=str)
@pytest.mark.parametrize(("tokens", "dtype"), [(1, BF16), (9, np.float32), (40, BF16)], ids=str)
def test_the_stages_are_the_layer(backend, router_weight, mode, shape, tokens, dtype):
    """forward(x) is down(round_h(gate_up(x))), bit for bit; where the kernels take bfloat16, so are the stages of a layer that
    rounds nothing, with x and h rounded by hand. What is said to be rounded is not rounded again."""
    rng = np.random.default_rng(tokens)
    experts = random_experts(rng, 5, *shape, biases=True)
    x, ids, weights = random_batch(rng, experts, tokens, 3, dtype)
    ids[::4, 1] = -1
    ids[::5, 2] = 9
    modes = mode_of(mode).block_rules()
    with MoELayer(experts, backend, mode, router_weight=router_weight) as layer:
        layer.expert_mask[3] = False
        y = layer.forward(x, ids, weights)
        own = Stages(layer, x, ids, weights)
        bits = x.view(np.uint16) if dtype == BF16 else x
        h = own.gate_up(bits)
        like = y.view(bits.dtype)
        assert same_bits(own.down(rounded(modes[1], h), like), like)
        by_hand = rounded(modes[0], x.astype(BF16).view(np.uint16))
        if router_weight != "expert_input" or modes[0] is None:
            assert same_bits(own.gate_up(by_hand, rounded=True), h)
        else:
            with pytest.raises(InputError, match="x cannot be rounded already: the layer multiplies it by router weights"):
                own.gate_up(by_hand, rounded=True)
        if router_weight == "expert_input" or backends.get(backend).lookup(experts, mode).form != "bf16":
            return
        untouched = own.gate_up(bits, rounded=True), own.down(h, like)
    with MoELayer(experts, backend, "bf16", router_weight=router_weight) as layer:
        layer.expert_mask[3] = False
        plain = Stages(layer, x, ids, weights)
        assert same_bits(plain.gate_up(bits), untouched[0])
        assert same_bits(plain.down(h, like), untouched[1])
        assert same_bits(plain.gate_up(by_hand), h)
        assert same_bits(plain.down(rounded(modes[1], h), like), like)


@pytest.mark.cover("values")
@pytest.mark.parametrize("mode", ["bf16", "mxfp4", "mxfp8"])
def test_stages_of_shards_and_chunks(backend, three_nodes, is_emulated, mode):
    rng = np.random.default_rng(3)
    experts = random_experts(rng, 4, 96, 224)
    x, ids, weights = random_batch(rng, experts, 5 if is_emulated else 50, 2)
    rule = mode_of(mode).block_rules()[1]
    with MoELayer(experts, backend, mode, numa_nodes=[1, 0, 2]) as layer:
        y = layer.forward(x, ids, weights).view(np.uint16)
        for settings in ({}, {"scratch_bytes": 1 << 17}, {"reduce_slots": 0}, {"halves": 2}, {"halves": 1, "uneven": 5}):
            core.tune(**settings)
            own = Stages(layer, x, ids, weights)
            assert same_bits(own.down(rounded(rule, own.gate_up(x.view(np.uint16))), y), y)


def test_h_is_padded_with_zeros(backend):
    """And not with what another layer's call has left in the scratch memory."""
    rng = np.random.default_rng(8)
    for intermediate in (128, 98):
        experts = random_experts(rng, 2, 64, intermediate)
        x, ids, weights = random_batch(rng, experts, 2, 2)
        for mode in ("mxfp8", "mxfp4"):
            with MoELayer(experts, backend, mode) as layer:
                own = Stages(layer, x, ids, weights)
                y, h = layer.forward(x, ids, weights).view(np.uint16), own.gate_up(x.view(np.uint16))
                assert same_bits(own.down(rounded(mode_of(mode).block_rules()[1], h), y), y)
                assert np.isnan(own.down(np.full(h.shape, 0x7FC0, np.uint16), y).view(BF16).astype(float)).all()


# What stages refuse


@pytest.fixture(scope="module")
def layer():
    experts = random_experts(np.random.default_rng(6), 3, 64, 96)
    with MoELayer(experts, "fp32_lut", "mxfp8") as made:
        yield made


def arguments(tokens=2, top_k=2):
    """x, ids, weights, mask, rows, h of gate_up()."""
    ids, rows = np.zeros((tokens, top_k), np.int64), np.arange(tokens * top_k, dtype=np.uint32).reshape(tokens, top_k)
    weights, h = np.ones((tokens, top_k), np.float32), np.zeros((tokens * top_k, 96), np.uint16)
    return {
        "x": np.zeros((tokens, 64), np.uint16),
        "ids": ids,
        "weights": weights,
        "mask": np.ones(3, np.uint8),
        "rows": rows,
        "h": h,
    }


WRONG = {
    "x": (np.zeros((3, 64), np.uint16), r"x must be \[2, 64\], found \[3, 64\]"),
    "weights": (np.zeros((2, 1), np.float32), r"weights and mask must be \[2, 2\] and \[3\], found \[2, 1\] and \[3\]"),
    "mask": (np.zeros(4, np.uint8), r"weights and mask must be \[2, 2\] and \[3\], found \[2, 2\] and \[4\]"),
    "h": (np.zeros((4, 64), np.uint16), r"h must be \[rows, 96\], found \[4, 64\]"),
    "rows of other shape": (np.zeros((2, 3), int), r"rows must be integers \[2, 2\], found int64 \[2, 3\]"),
    "rows of other dtype": (np.zeros((2, 2)), r"rows must be integers \[2, 2\], found float64"),
    "rows beyond h": (np.array([[0, 1], [2, 4]]), r"rows\[1, 1\] must be a row of h, of 4, found 4"),
    "rows before h": (np.array([[0, -1], [2, 3]]), r"rows\[0, 1\] must be a row of h, of 4, found -1"),
    "rows with one twice": (np.array([[0, 1], [2, 1]]), "rows must be distinct, found 1 more than once"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_stage_refuses(layer, name):
    wrong, message = WRONG[name]
    args = arguments() | {name.partition(" ")[0]: wrong}
    with pytest.raises(InputError, match=message):
        layer.packed.gate_up(*args.values())
    out = np.zeros((2, 64), np.uint16)
    if name not in ("x", "rows with one twice"):
        with pytest.raises(InputError, match=message):
            layer.packed.down(*(args[part] for part in ("h", "ids", "weights", "mask", "rows")), out)


def test_rows_of_no_expert_are_not_looked_at(layer):
    args = arguments()
    args["ids"][:] = [[-1, 3], [0, 1]]
    args["rows"] = np.array([[-5, 99], [0, 3]])
    layer.packed.gate_up(*args.values())


def test_stages_without_pairs(layer):
    """No tokens, no slots; y is zeros."""
    for tokens, top_k in ((0, 2), (2, 0), (0, 0)):
        args = arguments(tokens, top_k)
        layer.packed.gate_up(*args.values())
        y = np.ones((tokens, 64), np.float32)
        layer.packed.down(*(args[part] for part in ("h", "ids", "weights", "mask", "rows")), y)
        assert not y.any()


def test_stages_without_an_expert(layer):
    """Pairs, but none of an expert that is there: h is not touched, y is zeros."""
    args = arguments()
    args["ids"][:] = [[-1, 3], [0, 0]]
    args["mask"][0] = 0
    args["h"][:] = 0xABCD
    layer.packed.gate_up(*args.values())
    assert (args["h"] == 0xABCD).all()
    y = np.ones((2, 64), np.float32)
    layer.packed.down(*(args[part] for part in ("h", "ids", "weights", "mask", "rows")), y)
    assert not y.any()


def test_stages_of_a_closed_layer():
    with MoELayer(random_experts(np.random.default_rng(6), 3, 64, 96), "fp32_lut") as closed:
        packed = closed.packed
    for args in (arguments(), arguments(0), arguments(2, 0)):
        with pytest.raises(ClosedError):
            packed.gate_up(*args.values())
        y = np.ones((len(args["x"]), 64), np.uint16)
        with pytest.raises(ClosedError):
            packed.down(*(args[part] for part in ("h", "ids", "weights", "mask", "rows")), y)
        assert (y == 1).all()
