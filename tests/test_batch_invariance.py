"""A token's output has the same bits whatever else is in the batch, wherever it stands, and however the work is split."""

import itertools

import numpy as np
import pytest
from alone import POOL, TOP_K, Case
from helpers import BF16, KINDS, MANY_THREADS, random_batch, random_experts, same_bits

from ktmoe import MoELayer, set_num_threads
from ktmoe._native import core
from ktmoe.experts import ROUTER_WEIGHTS

SETTINGS = {
    "scratch_bytes": (256 << 20, 1 << 19, 1),  # all at once, in a few chunks, a token a chunk
    "reduce_slots": (0, 20, 10**9),
    "uneven": (0, 1, 0xDEADBEEF),
    "only_many": (False, True),
}


def random_settings(rng):
    return {name: values[rng.integers(len(values))] for name, values in SETTINGS.items()}


@pytest.fixture(scope="module", params=[("folded", BF16), ("unfolded", BF16), *((name, np.float32) for name in KINDS)], ids=str)
def case(request, backend):
    """float32 shows every bit of the sums; bfloat16 is what small batches multiply without a copy."""
    name, dtype = request.param
    case = Case(backend, KINDS[name], dtype=dtype)
    yield case
    case.layer.close()


@pytest.mark.cover("values")
@pytest.mark.parametrize("seed", range(8))
def test_random_batches(case, is_emulated, seed):
    rng = np.random.default_rng(seed)
    set_num_threads(int(rng.integers(1, MANY_THREADS, endpoint=True)))
    core.tune(**random_settings(rng))
    for _ in range(1 if is_emulated else 3):
        case.check(rng.integers(0, POOL, rng.integers(1, 60)))


@pytest.mark.cover("values")
@pytest.mark.parametrize("threads", range(1, MANY_THREADS + 1))
def test_every_thread_count(case, is_emulated, threads):
    set_num_threads(threads)
    for reduce_slots, uneven in ((0, 0), (10**9, 7)) if is_emulated else itertools.product((0, 10**9), (0, 7)):
        core.tune(reduce_slots=reduce_slots, uneven=uneven)
        case.check(np.arange(POOL))
        case.check([3])


@pytest.mark.cover("values")
def test_every_setting_matters_to_no_bit(case, is_emulated):
    set_num_threads(2)
    for values in list(itertools.product(*SETTINGS.values()))[:: 13 if is_emulated else 1]:  # each value is in some of these
        core.tune(**dict(zip(SETTINGS, values, strict=True)))
        case.check(np.arange(POOL)[::-3])


@pytest.mark.cover("values")
@pytest.mark.parametrize("count", [2, 3, 5, 6, 7, 12, 13, 25, core.ROWS_MAX + 8])
def test_duplicates_of_one_token(case, count):
    """All of them have the same row in every kernel of every height."""
    for only_many in (False, True):
        core.tune(only_many=only_many)
        case.check(np.zeros(count, int))


@pytest.mark.cover("values")
@pytest.mark.parametrize("shape", [(544, 32), (32, 544)], ids=str)
@pytest.mark.parametrize("weights", KINDS.values(), ids=KINDS)
def test_sums_longer_than_a_kernels_block(backend, weights, shape):
    """Kernels for many rows put sums aside between blocks of k, and those for few do not."""
    case = Case(backend, weights, dtype=np.float32, shape=shape)
    with case.layer:
        for only_many in (False, True):
            core.tune(only_many=only_many)
            for count in (1, 2, 4, 13):
                case.check(np.zeros(count, int))
            case.check(np.arange(12))


@pytest.mark.cover("values")
def test_every_position(case, is_emulated):
    others = np.arange(POOL)
    for position in range(0, POOL, 13 if is_emulated else 5):
        case.check(np.roll(others, position))
        case.check(np.delete(others, position))


@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=str)
@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
def test_router_weights_and_kinds(backend, is_emulated, router_weight, dtype):
    case = Case(backend, {}, router_weight, dtype)
    rng = np.random.default_rng(2)
    with case.layer:
        for _ in range(2 if is_emulated else 6):
            set_num_threads(int(rng.integers(1, MANY_THREADS, endpoint=True)))
            core.tune(**random_settings(rng))
            case.check(rng.integers(0, POOL, rng.integers(1, 40)))


@pytest.mark.cover("values")
def test_skipped_slots_change_nothing(case):
    """A token's own list may hold any number of skipped ids, anywhere."""
    rng = np.random.default_rng(3)
    ids, weights = np.full((POOL, 2 * TOP_K), -1), rng.standard_normal((POOL, 2 * TOP_K)).astype(np.float32)
    for token in range(POOL):
        at = np.sort(rng.choice(2 * TOP_K, TOP_K, replace=False))
        ids[token, at], weights[token, at] = case.ids[token], case.weights[token]
    assert same_bits(case.layer.forward(case.x, ids, weights), case.alone)


@pytest.mark.cover("values")
def test_the_last_chunk_may_be_short(case):
    """Chunks hold a power-of-two share of the batch; 2 << 17 bytes and odd counts make the last one shorter."""
    set_num_threads(1)
    for count in (3, 11, 23, 59):
        core.tune(scratch_bytes=1 << 18)
        case.check(np.arange(count) % POOL)


@pytest.mark.cover("values")
def test_two_layers_share_the_scratch(case, backend):
    other = random_experts(np.random.default_rng(4), 2, 256, 192)
    with MoELayer(other, backend) as layer:
        x, ids, weights = random_batch(np.random.default_rng(5), other, 3, 2)
        y = layer.forward(x, ids, weights)
        for _ in range(3):
            case.check(np.arange(POOL))
            assert same_bits(layer.forward(x, ids, weights), y)
