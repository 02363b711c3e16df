"""AMX against the system's assembler, a numpy model, and what a CPU computed.

Each test runs code in two ways. Executed: on the CPU itself if it has AMX, unless emulation is forced; else it traps. In frames
made up for the emulator: it emulates on any CPU, LDTILECFG and the others that a CPU with AMX never lets it see included.
"""

from __future__ import annotations

import emulator
import numpy as np
import pytest
from emulator import amx, golden, model
from emulator.amx_assembly import CONFIGS, DOTS, MOVES

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason=str(emulator.unavailable()))

SIGNED = {"tdpbssd": "ss", "tdpbsud": "su", "tdpbusd": "us", "tdpbuud": "uu"}  # A and B
TYPE = {"s": np.int8, "u": np.uint8}


def dot(op, c, a, b):
    """The model of any TDP on the bytes of tiles."""
    if op == "tdpbf16ps":
        return model.tdpbf16ps(c.view(np.float32), a.view(np.uint16), b.view(np.uint16)).view(np.uint8)
    return model.tdpb(c.view(np.int32), a.view(TYPE[SIGNED[op][0]]), b.view(TYPE[SIGNED[op][1]])).view(np.uint8)


# --- decoding and operands ---


def cases_of(tile_program, op):
    return [(i, case) for i, case in enumerate(tile_program.cases) if case.op == op]


def test_decodes_what_the_assembler_encodes(tile_program, emulated):
    for i, case in enumerate(tile_program.cases):
        code = tile_program.code(i)
        assert emulator.decode(code) == (case.op, len(code)), case.text


@pytest.mark.parametrize("op", CONFIGS)
def test_every_address_of_a_configuration(tile_program, tiles_trap, way, op):
    rng = np.random.default_rng(1)
    for i, case in cases_of(tile_program, op):
        config, other = amx.random_config(rng), amx.random_config(rng)
        tiles = amx.random_tiles(rng)
        area, start = tile_program.memory(case)
        area[start : start + 64] = other
        tiles_after, config_after = tile_program.run(way, i, config, tiles)
        if op == "sttilecfg":
            stored = area[start : start + 64].copy()
            if way == amx.EXECUTED and tiles_trap:
                stored[1] = 0  # executed by the CPU nevertheless, it shows the emulator's start_row
            np.testing.assert_array_equal(stored, config, err_msg=case.text)
            np.testing.assert_array_equal(tiles_after, amx.visible(tiles, config), err_msg=case.text)
        else:
            np.testing.assert_array_equal(config_after, other, err_msg=case.text)
            assert not tiles_after.any(), case.text


@pytest.mark.parametrize("op", MOVES)
def test_every_address_of_a_tile(tile_program, way, op):
    """Bases, indices, displacements and strides, also negative ones: tiles and memory are as they should be."""
    rng = np.random.default_rng(2)
    for i, case in cases_of(tile_program, op):
        config, tiles = amx.random_config(rng), amx.random_tiles(rng)
        rows, size = int(config[48 + case.tile]), int(config[16 + 2 * case.tile])
        area, start = tile_program.memory(case)
        area[:] = rng.integers(0, 256, area.size, dtype=np.uint8)
        memory = area.copy()
        tiles_after, config_after = tile_program.run(way, i, config, tiles)
        for r in range(rows):
            row = slice(start + r * case.stride, start + r * case.stride + size)
            if op == "tilestored":
                memory[row] = tiles[case.tile, r, :size]
            else:
                tiles[case.tile, r, :size] = memory[row]
        if case.base == "rsp":  # below it, where the signal frame was
            np.testing.assert_array_equal(area[start:], memory[start:], err_msg=case.text)
        else:
            np.testing.assert_array_equal(area, memory, err_msg=case.text)
        np.testing.assert_array_equal(tiles_after, amx.visible(tiles, config), err_msg=case.text)
        np.testing.assert_array_equal(config_after, config, err_msg=case.text)


def test_tilezero(tile_program, way):
    rng = np.random.default_rng(3)
    for i, case in cases_of(tile_program, "tilezero"):
        config, tiles = amx.random_config(rng), amx.random_tiles(rng)
        tiles_after, _ = tile_program.run(way, i, config, tiles)
        tiles[case.tile] = 0
        np.testing.assert_array_equal(tiles_after, amx.visible(tiles, config))


@pytest.mark.parametrize("op", DOTS)
def test_every_triple_of_tiles(tile_program, way, op):
    """Destination, A and B are the tiles that they should be, at random shapes; the others stay as they are."""
    rng = np.random.default_rng(4)
    for i, case in cases_of(tile_program, op):
        m, n, k = rng.integers(1, [17, 17, 3])
        shapes = {case.tile: (m, 4 * n), case.a: (m, 4 * k), case.b: (k, 4 * n)}
        config, tiles = amx.config(shapes), amx.random_tiles(rng)
        tiles_after, config_after = tile_program.run(way, i, config, tiles)
        operands = [np.ascontiguousarray(tiles[tile, : shapes[tile][0], : shapes[tile][1]]) for tile in shapes]
        tiles[case.tile, :m, : 4 * n] = dot(op, *operands)
        np.testing.assert_array_equal(tiles_after, amx.visible(tiles, config), err_msg=case.text)
        np.testing.assert_array_equal(config_after, config)


def test_cases_cover_the_forms(tile_program):
    for op in MOVES + CONFIGS:
        texts = [case.text for _, case in cases_of(tile_program, op)]
        forms = ["(%rsp", "(%r12", "(%rbp", "(%r13", "(,%", ",%r12,", ",%r13,", ",8)", "(%rsi"]
        forms += ["(%rip)"] if op in CONFIGS else []
        for form in forms:
            assert any(form in text for text in texts), (op, form)
    moves = [case for op in MOVES for _, case in cases_of(tile_program, op)]
    assert {case.tile for case in moves} == set(range(8))
    assert {np.sign(case.stride) for case in moves} == {-1, 0, 1}


@pytest.mark.parametrize(
    ("code", "decoded"),
    [
        ("c4 e2 78 49 07", ("ldtilecfg", 5)),
        ("c4 e2 78 49 05 00 00 00 00", ("ldtilecfg", 9)),  # rip-relative
        ("c4 e2 79 49 06", ("sttilecfg", 5)),
        ("c4 e2 78 49 c0", ("tilerelease", 5)),
        ("c4 e2 7b 49 e8", ("tilezero", 5)),
        ("c4 e2 7b 4b 1c 10", ("tileloadd", 6)),
        ("c4 e2 79 4b 1c 10", ("tileloaddt1", 6)),
        ("c4 82 7a 4b 1c 90", ("tilestored", 6)),
        ("c4 e2 7b 4b 1c 20", ("tileloadd", 6)),  # without an index: an error when executed
        ("c4 e2 62 5c ca", ("tdpbf16ps", 5)),
        ("c4 a2 62 5c ca", ("tdpbf16ps", 5)),  # X, which a register operand does not use
        ("c4 e2 63 5e ca", ("tdpbssd", 5)),
        ("c4 e2 62 5e ca", ("tdpbsud", 5)),
        ("c4 e2 61 5e ca", ("tdpbusd", 5)),
        ("c4 e2 60 5e ca", ("tdpbuud", 5)),
        # W1; L1; tiles beyond 7 in R, B, vvvv
        ("c4 e2 e2 5c ca", None),
        ("c4 e2 66 5c ca", None),
        ("c4 62 62 5c ca", None),
        ("c4 c2 62 5c ca", None),
        ("c4 e2 22 5c ca", None),
        ("c4 e2 63 5c ca", None),  # TDPFP16PS
        ("c4 e2 60 5c ca", None),  # no prefix; 66
        ("c4 e2 61 5c ca", None),
        ("c4 e2 62 5c 0a", None),  # memory
        ("c4 e1 62 5c ca", None),  # another map; a reserved one
        ("c4 f2 62 5c ca", None),
        # LDTILECFG and STTILECFG: W1, L1, vvvv, ModRM.reg, prefix, register
        ("c4 e2 f8 49 07", None),
        ("c4 e2 7c 49 07", None),
        ("c4 e2 70 49 07", None),
        ("c4 e2 78 49 0f", None),
        ("c4 e2 79 49 0e", None),
        ("c4 e2 7a 49 07", None),
        ("c4 e2 7b 49 07", None),
        ("c4 e2 79 49 c0", None),
        # TILERELEASE with registers; TILEZERO: rm, tile 13, vvvv, W1, L1
        ("c4 e2 78 49 c1", None),
        ("c4 e2 78 49 c8", None),
        ("c4 e2 7b 49 e9", None),
        ("c4 62 7b 49 e8", None),
        ("c4 e2 73 49 e8", None),
        ("c4 e2 fb 49 e8", None),
        ("c4 e2 7f 49 e8", None),
        # TILELOADD: no SIB, no prefix, vvvv, tile 11, W1, L1, register
        ("c4 e2 7b 4b 18", None),
        ("c4 e2 7b 4b 1d 00 00 00 00", None),
        ("c4 e2 78 4b 1c 10", None),
        ("c4 e2 3b 4b 1c 10", None),
        ("c4 62 7b 4b 1c 10", None),
        ("c4 e2 fb 4b 1c 10", None),
        ("c4 e2 7f 4b 1c 10", None),
        ("c4 e2 7b 4b dc", None),
        ("c5 fb 49 e8", None),  # the two-byte prefix
        ("c5 7b 4b 1c 10", None),
    ],
)
def test_decodes_only_what_a_cpu_accepts(code, decoded):
    assert emulator.decode(bytes.fromhex(code)) == decoded


# --- numbers ---


@pytest.mark.parametrize("kind", golden.KINDS)
def test_bf16_numbers(tile_program, way, kind):
    rng = np.random.default_rng(5)
    for m, n, k in golden.SHAPES * 8:
        c, a, b = golden.inputs(kind, rng, m, n, k)
        c = c.view(np.float32)
        result = tile_program.dot(way, "tdpbf16ps", c, a, b)
        np.testing.assert_array_equal(model.bits(result), model.bits(model.tdpbf16ps(c, a, b)))


def test_bf16_inputs_tell_the_order():
    """Other orders of the sums give other numbers for them, and the extremes do occur."""
    rng = np.random.default_rng(6)
    results = []
    for kind in golden.KINDS:
        c, a, b = golden.inputs(kind, rng, 16, 16, 16)
        c = c.view(np.float32)
        results.append(model.tdpbf16ps(c, a, b))
        if kind not in ("cancelling", "ordinary"):
            continue
        into_c = c
        for k in range(16):
            pairs = [np.ascontiguousarray(x).view(np.uint32) for x in (a[:, 2 * k : 2 * k + 2], b[k])]
            into_c = model.dot_pairs(into_c, pairs[0], pairs[1][None, :])
        assert np.any(model.bits(into_c) != model.bits(results[-1]))  # as VDPBF16PS does it
        descending = np.flip(a.reshape(16, 16, 2), 1).reshape(16, 32), np.flip(b, 0)
        assert np.any(model.bits(model.tdpbf16ps(c, *descending)) != model.bits(results[-1]))
    results = np.concatenate(results)
    assert np.isinf(results).any()
    assert np.isnan(results).any()
    assert (results == 0).any()


def test_bf16_special_values(tile_program, way):
    """Every special a, b and c with each other, in both places of the pair: NaN priority, infinities, denormals."""
    values = np.concatenate([model.SPECIAL, model.SPECIAL | 0x8000])
    for place in (0, 1):
        for other in (0, 0x3F80):
            for c in values:
                for left in (values[:16], values[16:]):
                    a = np.full((16, 2), other, np.uint16)
                    a[:, place] = left
                    for right in (values[:16], values[16:]):
                        b = np.full((1, 32), other, np.uint16)
                        b[0, place::2] = right
                        start = np.full((16, 16), np.uint32(c) << 16).view(np.float32)
                        result = tile_program.dot(way, "tdpbf16ps", start, a, b)
                        np.testing.assert_array_equal(model.bits(result), model.bits(model.tdpbf16ps(start, a, b)))


def test_bf16_as_recorded(tile_program, way):
    for c, a, b, result in golden.load():
        np.testing.assert_array_equal(model.bits(tile_program.dot(way, "tdpbf16ps", c, a, b)), result)


def test_the_model_is_as_recorded():
    kinds = 0
    for c, a, b, result in golden.load():
        np.testing.assert_array_equal(model.bits(model.tdpbf16ps(c, a, b)), result)
        kinds += 1
    assert kinds == len(golden.KINDS) * len(golden.SHAPES)


@pytest.mark.parametrize("op", SIGNED)
def test_int8_numbers(tile_program, way, op):
    """Random bytes, the extremes alone, and sums that wrap around."""
    rng = np.random.default_rng(7)
    left, right = (TYPE[letter] for letter in SIGNED[op])
    for m, n, k in golden.SHAPES * 8:
        for extreme in (False, True):
            c = rng.integers(-(1 << 31), 1 << 31, (m, n)).astype(np.int32)
            a, b = rng.integers(0, 256, (m, 4 * k), dtype=np.uint8), rng.integers(0, 256, (k, 4 * n), dtype=np.uint8)
            if extreme:
                a, b = (rng.choice(np.array([0, 127, 128, 255], np.uint8), x.shape) for x in (a, b))
                c = rng.choice(np.array([-(1 << 31), (1 << 31) - 1], np.int32), c.shape)
            result = tile_program.dot(way, op, c, a, b)
            np.testing.assert_array_equal(result, model.tdpb(c, a.view(left), b.view(right)))
