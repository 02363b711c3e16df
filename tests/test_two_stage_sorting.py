"""moe_sorting(): integer-exact against a plain restatement; orders of scale bytes against their formula."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from two_stage_pipeline import plain_sorting

from ktmoe import two_stage
from ktmoe.errors import InputError
from ktmoe.two_stage import UNITS, moe_sorting
from ktmoe.two_stage.pairs import pairs_of


def assert_sorted(ids, weights, num_experts, unit, mask=None):
    """All of moe_sorting()'s arrays are those of the restatement; returns them."""
    found = moe_sorting(ids, weights, num_experts, unit, mask)
    expected = plain_sorting(ids, weights, num_experts, unit, mask)
    for (name, array), numbers in zip(found._asdict().items(), expected, strict=True):
        dtype = np.float32 if name == "sorted_weights" else np.int32
        assert array.dtype == dtype, name
        np.testing.assert_array_equal(array, np.array(numbers, dtype), name)
    return found


def test_an_example_by_hand():
    """Two tokens, two slots, three experts, of which the second is used by nobody."""
    ids = np.array([[2, 0], [0, 2]], np.int32)
    weights = np.array([[0.25, 0.75], [0.5, 0.125]], np.float32)
    found = moe_sorting(ids, weights, 3, 16)
    pad = 2 << 24 | 2
    assert found.sorted_token_ids.tolist() == [1 << 24 | 0, 0 << 24 | 1, *[pad] * 14, 0, 1 << 24 | 1, *[pad] * 14, *[pad] * 18]
    assert found.sorted_weights.tolist() == [0.75, 0.5, *[0.0] * 14, 0.25, 0.125, *[0.0] * 32]
    assert found.sorted_expert_ids.tolist() == [0, 2, -1, -1]
    assert found.num_valid_ids.tolist() == [32, 2]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_routing(data):
    """Ids that repeat in a token, more slots than experts, masked experts, no tokens, no slots."""
    num_experts = data.draw(st.integers(1, 9), "experts")
    tokens, top_k = data.draw(st.integers(0, 12), "tokens"), data.draw(st.integers(0, 12), "top_k")
    used = data.draw(st.lists(st.integers(0, num_experts - 1), min_size=1), "experts that are used")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    ids = rng.choice(used, (tokens, top_k)).astype(np.int32)
    weights = rng.standard_normal((tokens, top_k)).astype(np.float32)
    mask = data.draw(st.none() | st.lists(st.booleans(), min_size=num_experts, max_size=num_experts), "mask")
    unit = data.draw(st.sampled_from(UNITS), "unit")
    mask = mask if mask is None else np.array(mask)
    sorting = assert_sorted(ids, weights, num_experts, unit, mask)
    assert_inverted(sorting, ids, weights, np.ones(num_experts, bool) if mask is None else mask)


def assert_inverted(sorting, ids, weights, mask):
    """A layer gets back what was sorted, without the masked experts."""
    pairs = pairs_of(sorting, mask)
    assert len(pairs.ids) == len(ids)
    kept = mask[ids]
    if not kept.any():
        assert (pairs.ids == -1).all()
        return
    top_k = pairs.ids.shape[1]
    assert not kept[:, top_k:].any()
    kept = kept[:, :top_k]
    np.testing.assert_array_equal(pairs.ids, np.where(kept, ids[:, :top_k], -1))
    np.testing.assert_array_equal(pairs.weights[kept], weights[:, :top_k][kept])
    token, slot = np.nonzero(kept)
    np.testing.assert_array_equal(np.asarray(sorting.sorted_token_ids)[pairs.rows[kept]], slot << 24 | token)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("routing", ["random", "all to one", "all to the last", "many experts"])
def test_many_tokens(unit, routing):
    rng = np.random.default_rng(7)
    tokens, top_k, num_experts = (300, 4, 8) if routing != "many experts" else (40, 4, 500)
    ids = rng.integers(0, num_experts, (tokens, top_k)).astype(np.int32)
    if routing.startswith("all"):
        ids[:] = 0 if routing == "all to one" else num_experts - 1
    weights = rng.standard_normal(ids.shape).astype(np.float32)
    assert_sorted(ids, weights, num_experts, unit)
    assert_sorted(ids, weights, num_experts, unit, rng.random(num_experts) < 0.5)


def test_whole_blocks_have_no_padding():
    """As many pairs as a block has rows, so that nothing but the count tells where the next one begins."""
    ids = np.repeat(np.arange(3, dtype=np.int32), 32)[:, None]
    sorting = assert_sorted(ids, np.ones((96, 1), np.float32), 3, 32)
    assert sorting.num_valid_ids.tolist() == [96, 96]
    assert_inverted(sorting, ids, np.ones((96, 1), np.float32), np.ones(3, bool))


def test_the_capacity_is_enough_and_no_larger_than_said():
    """Each expert with one row more than whole blocks: as much padding as there can be."""
    assert two_stage.capacity(128, 2, 8, 32) == 128 * 2 + 8 * 32 - 2
    ids = np.repeat(np.arange(8, dtype=np.int32), 33)[:, None]
    sorting = assert_sorted(ids, np.ones(ids.shape, np.float32), 8, 32)
    assert sorting.num_valid_ids[0] == 8 * 64 <= len(sorting.sorted_token_ids) == 264 + 8 * 32 - 1
    ids = np.zeros((1, 17), np.int32)  # more slots than experts
    sorting = assert_sorted(ids, np.ones(ids.shape, np.float32), 1, 16)
    assert sorting.num_valid_ids[0] == 32 == len(sorting.sorted_token_ids)


def test_the_largest_slot_fits():
    ids = np.zeros((3, 127), np.int32)
    sorting = assert_sorted(ids, np.ones(ids.shape, np.float32), 2, 16)
    assert sorting.sorted_token_ids.max() == 127 << 24 | 3
    assert sorting.sorted_token_ids.min() >= 0


@pytest.mark.exhaustive
def test_as_many_tokens_as_have_a_number():
    tokens = 2**24 - 1
    ids = np.broadcast_to(np.int32(0), (tokens, 1))
    found = moe_sorting(ids, np.broadcast_to(np.float32(1), ids.shape), 1, 128)
    np.testing.assert_array_equal(found.sorted_token_ids[:tokens], np.arange(tokens))
    assert set(found.sorted_token_ids[tokens:].tolist()) == {1 << 24 | tokens}


def test_other_integers_and_masks():
    """ids and units of other integers, and masks of integers, mean the same."""
    rng = np.random.default_rng(3)
    ids, weights = rng.integers(0, 5, (9, 3)), rng.standard_normal((9, 3)).astype(np.float32)
    mask = np.array([1, 0, 1, 1, 0])
    found, expected = moe_sorting(ids, weights, 5, 16, mask), moe_sorting(ids.astype(np.int32), weights, 5, 16, mask > 0)
    for array, of_bool in zip(found, expected, strict=True):
        np.testing.assert_array_equal(array, of_bool)
    narrow = moe_sorting(ids.astype(np.uint64), weights, 1000, np.int16(128))  # 128000 is no int16
    for array, of_int in zip(narrow, moe_sorting(ids, weights, 1000, 128), strict=True):
        np.testing.assert_array_equal(array, of_int)


IDS, WEIGHTS = np.array([[0, 1], [2, 0]], np.int32), np.ones((2, 2), np.float32)
BAD = {
    "an id below": ((IDS - 1, WEIGHTS, 3), "token 0 has id -1 in slot 0; expected 0 to 2"),
    "an id above": ((IDS, WEIGHTS, 2), "token 1 has id 2 in slot 0; expected 0 to 1"),
    "a large unsigned id": ((IDS.astype(np.uint64) + np.uint64(2**63), WEIGHTS, 3), "token 0 has id 9223372036854775808"),
    "float ids": ((IDS.astype(float), WEIGHTS, 3), "topk_ids must be integers, found float64"),
    "ids of one dimension": ((IDS[0], WEIGHTS[0], 3), r"topk_ids must have shape \[any, any\], found \[2\]"),
    "a list": ((IDS.tolist(), WEIGHTS, 3), "topk_ids must be a numpy array or a torch CPU tensor; found list"),
    "float64 weights": ((IDS, WEIGHTS.astype(float), 3), "topk_weights must be float32, found float64"),
    "fewer weights": ((IDS, WEIGHTS[:1], 3), r"topk_weights must have shape \[2, 2\], found \[1, 2\]"),
    "another unit": ((IDS, WEIGHTS, 3, 48), r"unit must be one of \(16, 32, 64, 128\), found 48"),
    "a unit that is no number": ((IDS, WEIGHTS, 3, None), "unit must be one of"),
    "a unit of float": ((IDS, WEIGHTS, 3, 32.0), "unit must be one of .*, found 32.0"),
    "units": ((IDS, WEIGHTS, 3, np.array([16, 32])), "unit must be one of .*, found array"),
    "no experts": ((IDS, WEIGHTS, 0), "num_experts must be an integer from 1 to"),
    "half an expert": ((IDS, WEIGHTS, 2.5), "num_experts must be an integer from 1 to .*, found 2.5"),
    "a short mask": ((IDS, WEIGHTS, 3, 32, np.ones(2, bool)), r"expert_mask must have shape \[3\], found \[2\]"),
    "a mask of ids": ((IDS, WEIGHTS, 3, 32, np.arange(3)), "expert_mask must be bool, or integers 0 and 1"),
    "a mask of floats": ((IDS, WEIGHTS, 3, 32, np.ones(3)), "expert_mask must be bool, or integers 0 and 1, found float64"),
    "128 slots": ((np.zeros((1, 128), np.int32), np.ones((1, 128), np.float32), 3), "at most 16777215 tokens and 127 slots"),
    "2^24 tokens": (
        (np.broadcast_to(np.int32(0), (2**24, 1)), np.broadcast_to(np.float32(1), (2**24, 1)), 3),
        "16777215 tokens",
    ),
    "too many rows": ((IDS, WEIGHTS, 2**25, 128), r"must be fewer than 2\^31"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_sorted(name):
    arguments, message = BAD[name]
    with pytest.raises(InputError, match=message):
        moe_sorting(*arguments)


def test_tiles_follow_their_formula():
    """The byte of each row and block, one by one, for a size that fills no tile."""
    scales = np.random.default_rng(1).integers(0, 256, (70, 13), dtype=np.uint8)
    tiled = two_stage.tile_scales(scales)
    assert tiled.shape == (96, 16)
    flat = tiled.ravel()
    for row in range(70):
        for block in range(13):
            tile = row // 32 * 2 + block // 8
            within = 64 * (block % 4) + 4 * (row % 16) + 2 * (block // 4 % 2) + row // 16 % 2
            assert flat[256 * tile + within] == scales[row, block]
    assert flat.astype(int).sum() == scales.astype(int).sum()  # the rest is 0


def test_tiles_of_16_rows():
    """A tile for each 16 rows: the same formula, each 16 rows at the place of 32."""
    scales = np.random.default_rng(2).integers(0, 256, (40, 8), dtype=np.uint8)
    spread = np.zeros((96, 8), np.uint8)
    for first in range(0, 40, 16):
        spread[2 * first : 2 * first + 16][: len(scales[first : first + 16])] = scales[first : first + 16]
    np.testing.assert_array_equal(two_stage.tile_scales(scales, "tiled16"), two_stage.tile_scales(spread))


@pytest.mark.parametrize("order", two_stage.SCALE_ORDERS)
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (32, 8), (33, 9), (100, 24)])
def test_tiles_come_back(order, shape):
    scales = np.random.default_rng(3).integers(0, 256, shape, dtype=np.uint8)
    tiled = two_stage.tile_scales(scales, order)
    np.testing.assert_array_equal(two_stage.untile_scales(tiled, *shape, order), scales)
    longer = np.concatenate([tiled, np.full((256, tiled.shape[1]), 7, np.uint8)])  # as kernels that pad to 256 rows have it
    np.testing.assert_array_equal(two_stage.untile_scales(longer, *shape, order), scales)


def test_scales_of_tokens_in_sorted_rows():
    rng = np.random.default_rng(4)
    ids, weights = rng.integers(0, 5, (9, 3)).astype(np.int32), np.ones((9, 3), np.float32)
    sorting = moe_sorting(ids, weights, 5, 16)
    scales = rng.integers(1, 255, (9, 3), dtype=np.uint8)
    rows = two_stage.BlockScaled(np.zeros((9, 48), np.uint8), scales, "mxfp4")
    found = two_stage.sort_scales(rows, sorting, "plain")
    for row, packed in enumerate(sorting.sorted_token_ids):
        token = packed & 0xFFFFFF
        assert found[row].tolist() == (scales[token].tolist() if token < 9 else [0, 0, 0])
    np.testing.assert_array_equal(two_stage.sort_scales(rows, sorting), two_stage.tile_scales(found))
    with pytest.raises(InputError, match="rows must be of 9 tokens, which num_valid_ids says, found 8"):
        two_stage.sort_scales(two_stage.BlockScaled(rows.codes[:8], scales[:8], "mxfp4"), sorting)
