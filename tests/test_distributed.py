"""Distributed layers: right numbers, the same bits on any number of ranks, each of which has its part alone."""

import math

import numpy as np
import pytest
from distributed_layers import EXPERTS, HIDDEN, SHARDS, TOP_K, batch_of, made
from helpers import BF16, FORMATS, GPT_OSS, bits, reading
from ranks import Threads, raised

from ktmoe import MXFP4, ExpertWeights, Matrix, MoELayer, reference
from ktmoe.dequantization import dequantize
from ktmoe.distributed import Alone, DistributedLayer, Distribution
from ktmoe.experts import ROUTER_WEIGHTS
from ktmoe.machine.numa import split
from ktmoe.reference import Reference
from ktmoe.reference.errors import gamma
from ktmoe.weights.formats import F32

#: Copies that let some tokens' shards be computed elsewhere: of all experts of shard 0, and of one of shard 7.
COPIES = {0: [1], 1: [1], 14: [0]}


def outputs(experts, size, batch, **options):
    """y on `size` ranks: one array for each with tokens="same", else one joined array of what each gave for its own tokens."""
    x, ids, weights = batch
    ends = np.linspace(0, len(x), size + 1).astype(int)

    def on(communicator):
        distribution = Distribution(communicator, **options)
        own = slice(None) if distribution.tokens == "same" else slice(*ends[communicator.rank : communicator.rank + 2])
        with DistributedLayer(experts, distribution, activations="bf16") as layer:
            return layer.forward(x[own], ids[own], weights[own])

    results = Threads(size).run(on)
    assert not any(raised(results)), raised(results)
    return results if options.get("tokens", "same") == "same" else [np.concatenate(results)]


def piece(experts, first, last):
    """All experts, of which the intermediate dimension is [first, last), dequantized and cut here."""

    def read(expert, projection):
        matrix = experts.matrix(expert, projection)
        weights = dequantize(matrix).astype(np.float32)
        codes = np.ascontiguousarray(weights[:, first:last] if projection == "down" else weights[first:last])
        bias = matrix.bias if projection == "down" else matrix.bias[first:last]
        bias = np.zeros_like(bias) if projection == "down" and first else bias
        return Matrix(matrix.name, F32, codes.shape, codes=codes, bias=bias)

    return ExpertWeights(EXPERTS, experts.hidden, last - first, read, F32, experts.activation)


@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
@pytest.mark.parametrize("cut", [1, 2, 8])
@pytest.mark.parametrize("name", ["b16", "mxfp4", "fp8-row", "gptq-32"])
def test_right(name, cut, router_weight):
    """Against float64: the sum of what each shard alone gives, within the bound that docs/numerics.md derives of theirs."""
    experts = made(formats=FORMATS[name], activation=GPT_OSS)
    x, ids, weights = batch_of(experts, 7, dtype=np.float32)
    pieces = [piece(experts, *ends) for ends in split(experts.intermediate, experts.shard_unit, cut)]
    y, bound, size = np.zeros((3, 7, HIDDEN))
    for group in np.array_split(np.arange(EXPERTS), SHARDS // cut):
        mask = np.isin(np.arange(EXPERTS), group)
        for of in pieces:
            part = reference.forward(
                of, x, ids, weights, expert_mask=mask, router_weight=router_weight, out_dtype="float32", block=512
            )
            y, bound, size = y + part.y, bound + part.bound, size + np.abs(part.y) + part.bound
    expected = Reference(y, bound + gamma(math.ceil(math.log2(SHARDS))) * size)
    layer = DistributedLayer(experts, Distribution(cut=cut), activations="bf16", router_weight=router_weight)
    assert 0 < expected.worst(layer.forward(x, ids, weights)) <= 1


@pytest.mark.parametrize("cut", [1, 2, 8])
def test_same_bits_on_any_number_of_ranks(cut):
    """And for both ways, whatever the first message has room for, with copies and without: as one process gives them."""
    experts = made(formats=MXFP4)
    for tokens in (1, 2, 9):
        batch = batch_of(experts, tokens)
        with DistributedLayer(experts, Distribution(cut=cut), activations="bf16") as alone:
            expected = bits(alone.forward(*batch))
        for size in (2, 3, 4, 8):
            for options in (
                {"tokens": "same"},
                {"tokens": "same", "gathered": 4, "replicas": {None: COPIES}},
                {"tokens": "own", "gathered": 0},
                {"tokens": "own", "gathered": 4},
                {"tokens": "own", "replicas": {None: COPIES}},
                {"tokens": "same", "homes": ([*range(size)] * 8)[:8]},
                {"tokens": "own", "homes": [0] * (9 - size) + [*range(1, size)]},
            ):
                for y in outputs(experts, size, batch, cut=cut, **options):
                    np.testing.assert_array_equal(bits(y), expected, str((tokens, size, options)))


def test_more_tokens_than_one_round_has():
    """Ranks with fewer of their own go on until the last one is done. float32 comes back as float32."""
    experts = made()
    batch = batch_of(experts, 1100, dtype=np.float32)
    with DistributedLayer(experts, Distribution(), activations="bf16") as alone:
        expected = alone.forward(*batch)
    (y, other) = outputs(experts, 2, batch)
    np.testing.assert_array_equal(bits(y), bits(expected))
    np.testing.assert_array_equal(bits(other), bits(expected))
    assert y.dtype == np.float32

    def uneven(communicator):
        own = slice(0, 1100) if communicator.rank else slice(0, 0)
        with DistributedLayer(experts, Distribution(communicator, tokens="own"), activations="bf16") as layer:
            return layer.forward(*(of[own] for of in batch))

    nothing, everything = Threads(2).run(uneven)
    np.testing.assert_array_equal(bits(everything), bits(expected))
    assert nothing.shape == (0, HIDDEN)


def test_no_tokens_and_no_choices():
    experts = made()
    batch = batch_of(experts, 2)
    for tokens in ("same", "own"):
        for y in outputs(experts, 2, [of[:0] for of in batch], tokens=tokens):
            assert y.shape == (0, HIDDEN)
        for y in outputs(experts, 2, (batch[0], batch[1][:, :0], batch[2][:, :0]), tokens=tokens):
            np.testing.assert_array_equal(bits(y), 0)


@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=str)
def test_out_and_one_expert_a_token(dtype):
    """float32 is y before it is rounded."""
    experts = made()
    x, ids, weights = batch_of(experts, 5, dtype=dtype)
    ids, weights = ids[:, :1].copy(), weights[:, :1].copy()
    with DistributedLayer(experts, Distribution(), activations="bf16") as layer:
        expected = layer.forward(x.astype(np.float32), ids, weights)
    for tokens in ("same", "own"):

        def on(communicator, tokens=tokens):
            out = np.full(x.shape, np.nan, np.float32)
            with DistributedLayer(experts, Distribution(communicator, tokens=tokens), activations="bf16") as layer:
                assert layer.forward(x, ids, weights, out) is out
            return out

        for y in Threads(2).run(on):
            np.testing.assert_array_equal(bits(y), bits(expected))


def test_a_token_does_not_depend_on_its_batch():
    experts = made()
    x, ids, weights = batch_of(experts, 40)
    (together, _) = outputs(experts, 2, (x, ids, weights))
    for token in (0, 1, 17):
        one = slice(token, token + 1)
        (alone, _) = outputs(experts, 2, (x[one], ids[one], weights[one]))
        np.testing.assert_array_equal(bits(alone), bits(together[one]))


def test_one_shard_is_the_layer_itself():
    experts = made(formats=MXFP4)
    batch = batch_of(experts, 9)
    y = DistributedLayer(experts, Distribution(shards=1), activations="bf16").forward(*batch)
    np.testing.assert_array_equal(bits(y), bits(MoELayer(experts, activations="bf16").forward(*batch)))


@pytest.mark.parametrize("cut", [1, 4])
def test_each_rank_reads_and_packs_its_part_alone(cut):
    experts, size, read = made(), 4, [set() for _ in range(4)]
    whole = MoELayer(experts)

    def on(communicator):
        def reads(expert, projection):
            read[communicator.rank].add(expert)
            return experts.matrix(expert, projection)

        layer = DistributedLayer(reading(experts, reads), Distribution(communicator, cut=cut, replicas={3: {15: [0]}}), layer=3)
        return layer.nbytes

    nbytes = Threads(size).run(on)
    one = whole.nbytes // EXPERTS
    if cut == 1:
        assert read == [{0, 1, 2, 3, 15}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}]
        assert nbytes == [5 * one, 4 * one, 4 * one, 4 * one]
    else:  # two groups of experts in four pieces each: a rank has two pieces of one group
        assert read == [{*range(8), 15}, {*range(8)}, {*range(8, 16)}, {*range(8, 16)}]
        assert nbytes == [4 * one + one, 4 * one, 4 * one, 4 * one]


def test_a_row_goes_once_to_each_rank_that_needs_it():
    """And comes back as one partial sum, already added up from that rank's shards."""
    experts = made()
    x, _, weights = batch_of(experts, 64)
    ids = np.tile([0, 1, 2, 7], (64, 1))  # of shards 0, 0, 1 and 3, which rank 0 has; rank 1 has none of them
    group = Threads(2)

    def on(communicator):
        own = slice(0, 0) if communicator.rank == 0 else slice(None)
        with DistributedLayer(experts, Distribution(communicator, tokens="own", gathered=0)) as layer:
            layer.forward(x[own], ids[own], weights[own])

    assert not any(raised(group.run(on)))
    row, header = HIDDEN * 2 + TOP_K * 8 + 8, group.sent[0, 0] // 2  # rank 0 gives itself two messages without a row
    assert group.sent[1, 0] == 2 * header + 64 * row
    assert group.sent[0, 1] == 2 * header + 64 * HIDDEN * 4
    assert group.calls == 3


def test_few_tokens_take_one_message():
    experts, group = made(), Threads(2)
    batch = batch_of(experts, 1)

    def on(communicator):
        with DistributedLayer(experts, Distribution(communicator)) as layer:
            layer.forward(*batch)

    assert not any(raised(group.run(on)))
    assert group.calls == 1
    assert group.sent[0, 1] == group.sent[1, 0] < HIDDEN * 4 + 1000


def test_copies_share_the_work():
    """Half of the tokens that choose an expert which is on both ranks are computed on each."""
    experts, computed = made(), [0, 0]
    x, _, weights = batch_of(experts, 64)
    ids = np.zeros((64, TOP_K), int)

    def on(communicator):
        layer = DistributedLayer(experts, Distribution(communicator, replicas={None: {0: [1]}}))
        real = layer.layers[0].forward

        def counted(x, *others):
            computed[communicator.rank] = len(x)
            return real(x, *others)

        layer.layers[0].forward = counted
        return layer.forward(x, ids, weights)

    assert not any(raised(Threads(2).run(on)))
    assert computed == [32, 32]


def test_alone():
    assert (Alone().rank, Alone().size) == (0, 1)
    assert "rank 0 of 1" in repr(DistributedLayer(made(), Distribution()))
