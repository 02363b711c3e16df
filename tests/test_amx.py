"""Rows in tiles of 16 on amx, and the tiles themselves, which no thread keeps. What all backends do is tested elsewhere."""

import itertools
import threading

import numpy as np
import pytest
from amx_tiles import Tiles
from emulator import amx
from environments import NEEDS_COMPILER
from helpers import BF16, FORMATS, assert_right, crowd, random_batch, random_experts, same_bits

from ktmoe import MoELayer, set_num_threads
from ktmoe._native import core
from ktmoe.experts import ROUTER_WEIGHTS

pytestmark = pytest.mark.parametrize("backend", ["amx"], indirect=True)
#: Rows of one expert at and beside multiples of 16, 48 and a kernel call's most, with every rest.
ROWS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 80, 81, 112, core.ROWS_MAX - 1, core.ROWS_MAX, core.ROWS_MAX + 1, 400)
DIFFERENT = 37  # tokens, so that no two tiles of a batch are alike


def layer_of(backend, name, shape, experts=1, **keywords):
    """A layer whose kernels all use tiles, and its experts."""
    made = random_experts(np.random.default_rng(shape), experts, *shape, formats=FORMATS[name], biases=True)
    return MoELayer(made, backend, rounding="folded", **keywords), made


@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=str)
@pytest.mark.parametrize("shape", [(96, 64), (100, 34)], ids=str)
@pytest.mark.parametrize("name", ["mxfp4", "int4-32", "int4-128", "b16"])
def test_any_number_of_rows(backend, name, shape, dtype):
    """Each row has the bits that it has alone, whichever passes its tile goes through."""
    layer, experts = layer_of(backend, name, shape)
    with layer:
        x, ids, weights = crowd(layer, DIFFERENT, dtype)
        alone = np.concatenate([layer.forward(*(part[[token]] for part in (x, ids, weights))) for token in range(DIFFERENT)])
        assert_right(layer, experts, x, ids, weights, alone)
        for rows in ROWS:
            tokens = np.arange(rows) % DIFFERENT
            assert same_bits(layer.forward(x[tokens], ids[tokens], weights[tokens]), alone[tokens])


#: The experts of each token, of six; "apart": x may be taken as it is, since a row alone is a tile by itself.
ROUTES = {
    "apart": [[0, 1], [2, 3], [4, -1]],
    "one shared": [[0, 1], [2, 3], [4, 3]],
    "repeated": [[0, 0], [1, 1], [2, -1]],
    "repeated and shared": [[0, 0], [0, 2], [2, 0]],
    "tokens 1 to 3": [[0, 1], [5, 2], [5, 3], [5, 4]],
    "a tile and a row": [[5, token % 5] for token in range(17)],
    "two tiles of three tokens": [[5] * 11] * 3,
}


@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=str)
@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
@pytest.mark.parametrize("name", ["mxfp4", "b16"])
def test_whoever_shares_an_expert(backend, name, router_weight, dtype):
    layer, experts = layer_of(backend, name, (96, 80), 6, router_weight=router_weight)
    rng = np.random.default_rng(7)
    with layer:
        for ids in map(np.array, ROUTES.values()):
            x, _, weights = random_batch(rng, experts, *ids.shape, dtype)
            y = assert_right(layer, experts, x, ids, weights)
            for token in range(len(ids)):
                assert same_bits(layer.forward(x[[token]], ids[[token]], weights[[token]]), y[[token]])


@pytest.mark.parametrize("name", ["int4-64", "b16"])
def test_however_rows_are_split(backend, name):
    """Into chunks, of which the last is short; among threads; and with d added up at once or later."""
    layer, experts = layer_of(backend, name, (160, 200), 2)
    with layer:
        x, ids, weights = random_batch(np.random.default_rng(8), experts, 101, 2)
        y = assert_right(layer, experts, x, ids, weights)
        for threads, chunked, slots, uneven in itertools.product((1, 3), (False, True), (0, 10**9), (0, 3)):
            set_num_threads(threads)
            scratch = (threads + 1 << 17) if chunked else 1 << 30  # too little: each thread has its own
            core.tune(scratch_bytes=scratch, reduce_slots=slots, uneven=uneven, only_many=bool(uneven))
            assert same_bits(layer.forward(x, ids, weights), y)


def test_a_row_that_is_not_finite_stays_in_its_row(backend):
    """Its tile's other rows have the bits that they had."""
    layer, _ = layer_of(backend, "mxfp4", (96, 64))
    with layer:
        x, ids, weights = crowd(layer, 50)
        y = layer.forward(x, ids, weights)
        for token in (0, 16, 49):
            wrong = x.copy()
            wrong[token, 5] = np.nan
            others = np.arange(50) != token
            found = layer.forward(wrong, ids, weights)
            assert np.isnan(found[token].astype(float)).all()
            assert same_bits(found[others], y[others])


# A thread's tiles


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    return Tiles(tmp_path_factory.mktemp("tiles"))


@NEEDS_COMPILER
def test_the_configuration_is_seen(backend, tiles):
    tiles.write(amx.config())
    assert tiles.read()[0] == 1
    tiles.write(np.zeros(64, np.uint8))
    assert not tiles.read().any()


@NEEDS_COMPILER
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_call_leaves_no_tiles(backend, tiles, tokens):
    """With tiles in use, a switch of threads would save 8 KiB, and a core might stay slower."""
    layer, _ = layer_of(backend, "mxfp4", (96, 64))
    with layer:
        for threads in (1, 2):
            set_num_threads(threads)
            layer.forward(*crowd(layer, tokens))
            assert not tiles.read().any()


@NEEDS_COMPILER
def test_callers_side_by_side(backend, tiles):
    """Each thread has tiles of its own, and gives them back."""
    layers = [layer_of(backend, name, (96, 64))[0] for name in ("mxfp4", "int4-64", "b16")]
    batches = [crowd(layer, tokens) for layer, tokens in zip(layers, (3, 20, 50), strict=True)]
    expected = [layer.forward(*batch) for layer, batch in zip(layers, batches, strict=True)]
    seen = []

    def work(first):
        for i in range(first, first + 9):
            y = layers[i % 3].forward(*batches[i % 3])
            seen.append(same_bits(y, expected[i % 3]) and not tiles.read().any())

    callers = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert seen == [True] * 36
    for layer in layers:
        layer.close()
