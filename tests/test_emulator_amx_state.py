"""AMX: what a thread's tiles and configuration are, and what becomes of code that a CPU would refuse.

In both ways of test_emulator_amx.py, except for what would end the process on a CPU: that in made-up frames alone.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
import threading
import time

import emulator
import numpy as np
import pytest
from emulator import amx
from emulator.amx_assembly import BEFORE, DOTS
from emulator.machine import Frame, in_process

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason=str(emulator.unavailable()))


def vex(prefix, opcode, modrm, vvvv=0):
    return bytes([0xC4, 0xE2, 0x78 - 8 * vvvv | prefix, opcode, modrm])


def tdp(c, a, b):
    return vex(2, 0x5C, 0xC0 | c << 3 | a, b)


LOAD = vex(3, 0x4B, 0x04)  # of tmm0; SIB follows
RELEASED = np.zeros(64, np.uint8)


# --- state ---


def test_start_row(tile_program, way):
    """Loads and stores begin there, and set it to 0."""
    rng = np.random.default_rng(8)
    for start_row in (0, 1, 4):
        config, tiles = amx.config({0: (5, 20)}, start_row), amx.random_tiles(rng)
        for name in ("start_load", "start_store"):
            state = amx.new_state(config, tiles)
            amx.after(state)[0][:] = 0x55
            tile_program.call(way, name, state)
            tiles_after, config_after = amx.after(state)
            expected = np.full((16, 64), 0x55, np.uint8)
            expected[(0 if name == "start_load" else start_row) : 5, :20] = 0
            if name == "start_load":
                expected[start_row:5, :20] = tiles[0, start_row:5, :20]
            np.testing.assert_array_equal(tiles_after[0], expected)
            np.testing.assert_array_equal(config_after, amx.config({0: (5, 20)}))


def test_release(tile_program, way):
    state = amx.new_state(amx.config())
    amx.after(state)[1][:] = 0x55
    tile_program.call(way, "release", state)
    assert not amx.after(state)[1].any()


def test_palette_0_releases(tile_program, way):
    """Whatever else the configuration holds."""
    state = amx.new_state(amx.config())
    config = amx.random_config(np.random.default_rng(9))
    config[[0, 5]] = 0, 1
    state[BEFORE : BEFORE + 64] = config
    amx.after(state)[1][:] = 0x55
    tile_program.call(way, "reload", state)
    assert not amx.after(state)[1].any()


def test_the_same_configuration_again(tile_program, tiles_trap):
    """It zeroes the tiles, also where LDTILECFG does not trap."""
    state = amx.new_state(amx.config(), amx.random_tiles(np.random.default_rng(10)))
    amx.after(state)[0][0] = 0x55
    tile_program.call(amx.EXECUTED, "again", state)
    assert not amx.after(state)[0].any()
    assert not emulator.errors()


@pytest.fixture
def page_end():
    """The last page of memory that can be touched."""
    page, readable = mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE
    memory = np.frombuffer(mmap.mmap(-1, 2 * page), np.uint8)
    beyond = ctypes.c_void_p(memory.ctypes.data + page)
    protect = ctypes.CDLL(None).mprotect
    assert protect(beyond, ctypes.c_size_t(page), 0) == 0
    yield memory[:page]
    assert protect(beyond, ctypes.c_size_t(page), readable) == 0


def test_a_tile_at_the_end_of_memory(tile_program, way, page_end):
    """No byte beyond the shape is read or written."""
    rng = np.random.default_rng(11)
    rows, size = 3, 20
    start = page_end.size - 2 * 64 - size  # rows are 64 bytes apart
    page_end[:] = rng.integers(1, 256, page_end.size)
    expected, tile = page_end.copy(), np.zeros((16, 64), np.uint8)
    for r in range(rows):
        row = slice(start + 64 * r, start + 64 * r + size)
        tile[r, :size], expected[row] = expected[row], 0
    state = amx.new_state(amx.config({0: (rows, size), 1: (rows, size)}))
    tile_program.call(way, "edge", state, page_end.ctypes.data + start)
    np.testing.assert_array_equal(page_end, expected)
    np.testing.assert_array_equal(amx.after(state)[0][0], tile)


def test_threads_have_tiles_of_their_own(tile_program, tiles_trap, emulator_folder):
    """Threads older and younger than the handler, with other shapes and contents, all between load and store at once."""
    count, rounds, wrong = 4, 20, []
    start, meet = threading.Event(), threading.Barrier(2 * count)

    def work(way, seed):
        rng = np.random.default_rng(seed)
        start.wait()
        for _ in range(rounds):
            config, tiles = amx.random_config(rng), amx.random_tiles(rng)
            state = amx.new_state(config, tiles)
            tile_program.call(way, "load", state)
            meet.wait()
            tile_program.call(way, "store", state)
            tiles_after, config_after = amx.after(state)
            if np.any(tiles_after != amx.visible(tiles, config)) or np.any(config_after != config):
                wrong.append((way, seed))

    emulator.uninstall()  # the fixture's, for a moment
    older = [threading.Thread(target=work, args=(amx.WAYS[seed % 2], seed)) for seed in range(count)]
    for thread in older:
        thread.start()
    emulator.install(emulator_folder)
    younger = [threading.Thread(target=work, args=(amx.WAYS[seed % 2], seed)) for seed in range(count, 2 * count)]
    for thread in younger:
        thread.start()
    start.set()
    for thread in older + younger:
        thread.join()
    assert not wrong
    assert not emulator.errors()


def test_ended_threads_leave_their_memory_to_others(tile_program, tiles_trap):
    """A thread begins without a configuration, whosever memory it takes over."""

    def work():
        config = np.full(64, 0x55, np.uint8)
        assert Frame.of(vex(1, 0x49, 0x07), {"rdi": config.ctypes.data}).emulate()
        configs.append(config)
        for way in amx.WAYS:
            tile_program.call(way, "load", amx.new_state(amx.config()))

    configs = []
    before = emulator.library().kt_emulator_tile_states()
    for _ in range(50):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    # The kernel may not have ended the former thread yet when the next one looks for memory.
    assert emulator.library().kt_emulator_tile_states() <= before + 10
    assert len(configs) == 50
    assert not np.any(configs)


def test_counts(tile_program, emulated):
    """Each instruction by its name, also what the handler of a CPU with AMX never sees."""
    state = amx.new_state(amx.config())
    for name in ("load", "store", "release", "wrong"):
        tile_program.call(amx.MADE_UP, name, state)
    expected = {
        "ldtilecfg": 3,
        "sttilecfg": 2,
        "tilerelease": 3,
        "tilezero": 2,
        "tileloadd": 9,
        "tilestored": 8,
        "tdpbf16ps": 1,
    }
    assert {op: n for op, n in emulator.counts().items() if n} == expected
    assert {*expected, "tileloadd", "tileloaddt1", *DOTS} <= set(emulator.counts())
    assert not emulator.errors()


# --- faults ---


@pytest.mark.parametrize(
    ("code", "config", "error"),
    [
        (tdp(0, 1, 2), RELEASED, "no tiles are configured"),
        (vex(3, 0x49, 0xC0), RELEASED, "no tiles are configured"),
        (LOAD + b"\x07", RELEASED, "no tiles are configured"),
        (vex(3, 0x49, 0xE8), amx.config({5: (0, 0)}), "tmm5 is not configured"),
        (LOAD + b"\x07", amx.config({0: (0, 0)}), "tmm0 is not configured"),
        (tdp(3, 1, 2), amx.config({3: (0, 0)}), "tmm3 is not configured"),
        (tdp(3, 1, 2), amx.config({1: (0, 0)}), "tmm1 is not configured"),
        (tdp(3, 1, 2), amx.config({2: (0, 0)}), "tmm2 is not configured"),
        (LOAD + b"\x07", amx.config({0: (3, 6)}), "tmm0 has rows of 6 bytes, not a multiple of 4"),
        (vex(2, 0x4B, 0x04) + b"\x07", amx.config({0: (3, 6)}), "tmm0 has rows of 6 bytes, not a multiple of 4"),
        (tdp(0, 1, 2), amx.config({0: (16, 6), 2: (16, 6)}), "tmm0 has rows of 6 bytes, not a multiple of 4"),
        (tdp(0, 1, 2), amx.config({1: (16, 6), 2: (1, 64)}), "tmm1 has rows of 6 bytes, not a multiple of 4"),
        (tdp(1, 1, 2), amx.config(), "tmm1 is two operands"),
        (tdp(1, 2, 2), amx.config(), "tmm2 is two operands"),
        (tdp(1, 2, 1), amx.config(), "tmm1 is two operands"),
        (vex(3, 0x5E, 0xC9, 2), amx.config(), "tmm1 is two operands"),
        (tdp(0, 1, 2), amx.config({1: (16, 60)}), "A has rows of 60 bytes, but B 16 rows"),
        (tdp(0, 1, 2), amx.config({0: (16, 32)}), "C has rows of 32 bytes, but B of 64"),
        (tdp(0, 1, 2), amx.config({0: (15, 64)}), "C has 15 rows, but A 16"),
        (LOAD + b"\x27", amx.config(), "the address has no index register"),
        (LOAD + b"\x07", amx.config({0: (3, 64)}, start_row=3), "start_row is 3, but tmm0 has 3 rows"),
        (vex(2, 0x4B, 0x04) + b"\x07", amx.config(start_row=20), "start_row is 20, but tmm0 has 16 rows"),
    ],
)
def test_faults_are_errors_with_an_address(emulated, code, config, error):
    """The instruction is passed over; the error says where and what."""
    memory = np.zeros(1 << 13, np.uint8)
    configure = Frame.of(vex(0, 0x49, 0x07), {"rdi": config.ctypes.data})
    assert configure.emulate()
    frame = Frame.of(code, {"rdi": memory.ctypes.data, "rax": 64})
    assert frame.emulate()
    assert frame.rip == frame.machine_code.ctypes.data + len(code)
    (found,) = emulator.errors()
    assert f" at {frame.machine_code.ctypes.data:#x}" in found
    assert error in found
    assert not memory.any()
    stored = np.zeros(64, np.uint8)
    assert Frame.of(vex(1, 0x49, 0x07), {"rdi": stored.ctypes.data}).emulate()
    np.testing.assert_array_equal(stored, config)
    emulator.reset()
    assert not emulator.errors()


def test_a_fault_has_no_effect(tile_program, emulated):
    """On tiles; and what follows is executed."""
    tiles = amx.random_tiles(np.random.default_rng(12))
    state = amx.new_state(amx.config({0: (15, 64)}), tiles)
    tile_program.call(amx.MADE_UP, "load", state)
    frame = Frame.of(tdp(0, 1, 2) + vex(3, 0x49, 0xC0 | 7 << 3))  # and TILEZERO tmm7
    assert frame.emulate()
    assert frame.rip == frame.machine_code.ctypes.data + 10
    tile_program.call(amx.MADE_UP, "store", state)
    tiles[0, 15], tiles[7] = 0, 0
    np.testing.assert_array_equal(amx.after(state)[0], tiles)
    assert len(emulator.errors()) == 1


@pytest.mark.parametrize(
    ("place", "value", "error"),
    [
        (0, 2, "palette 2 does not exist"),
        (2, 1, "byte 2 is reserved, but 1"),
        (15, 9, "byte 15 is reserved, but 9"),
        (32, 4, "tmm8 does not exist, but has 0 rows of 4 bytes"),
        (47, 1, "tmm15 does not exist, but has 0 rows of 256 bytes"),
        (56, 1, "tmm8 does not exist, but has 1 rows of 0 bytes"),
        (16, 65, "tmm0 has 16 rows of 65 bytes, more than 16 or 64"),
        (19, 1, "tmm1 has 16 rows of 320 bytes, more than 16 or 64"),
        (55, 17, "tmm7 has 17 rows of 64 bytes, more than 16 or 64"),
        (48, 0, "tmm0 has 0 rows of 64 bytes"),
        (16, 0, "tmm0 has 16 rows of 0 bytes"),
    ],
)
def test_wrong_configurations(tile_program, emulated, place, value, error):
    """They leave the configuration and the tiles before."""
    tiles = amx.random_tiles(np.random.default_rng(13))
    state = amx.new_state(amx.config(), tiles)
    tile_program.call(amx.MADE_UP, "load", state)
    wrong = amx.config()
    wrong[place] = value
    assert Frame.of(vex(0, 0x49, 0x07), {"rdi": wrong.ctypes.data}).emulate()
    assert emulator.errors()[0].startswith("ldtilecfg at 0x")
    assert emulator.errors()[0].endswith(f": {error}")
    tile_program.call(amx.MADE_UP, "store", state)
    np.testing.assert_array_equal(amx.after(state)[0], tiles)
    np.testing.assert_array_equal(amx.after(state)[1], amx.config())


@pytest.mark.parametrize("way", amx.WAYS)
def test_an_error_names_library_and_symbol(tile_program, tiles_trap, way):
    """And equal ones are one entry."""
    if way == amx.EXECUTED and not tiles_trap:
        pytest.skip("this CPU has the instructions")
    for _ in range(3):
        tile_program.call(way, "wrong", amx.new_state(amx.config({1: (16, 60)})))
    (error,) = emulator.errors()
    address = tile_program.address("tile_wrong") + 10  # behind LDTILECFG and TILEZERO
    assert error.startswith(f"tdpbf16ps at {address:#x}, amx.so+0x")
    offset = address - tile_program.address("wrong")
    assert error.endswith(f", wrong+{offset:#x}: A has rows of 60 bytes, but B 16 rows (3 times)")


def test_more_errors_than_the_list_holds(emulated):
    frames = [Frame.of(vex(3, 0x49, 0xC0)) for _ in range(100)]
    Frame.of(vex(0, 0x49, 0xC0)).emulate()
    for frame in frames:
        frame.emulate()
    *errors, more = emulator.errors()
    assert len(errors) == 64
    assert more == "and 36 more"


def test_a_bad_address_faults(program, tile_program, emulator_folder):
    """The process gets the SIGSEGV that it would get from a CPU; this one never asks for AMX, so that it is the emulator's."""
    script = f"""
from emulator import amx
INSTALL
tiles = ctypes.CDLL({str(tile_program.path)!r})
state = amx.new_state(amx.config({{0: (2, 64), 1: (2, 64)}}))
tiles.edge(ctypes.c_void_p(state.ctypes.data), ctypes.c_void_p(state.ctypes.data + {BEFORE}))
assert emulator.counts()["tilestored"] == 2, emulator.counts()
print("so far", flush=True)
tiles.edge(ctypes.c_void_p(state.ctypes.data), ctypes.c_void_p(64))
"""
    done = in_process(program.path, emulator_folder, script)
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert "so far" in done.stdout


def test_forced_emulation(program, tile_program, emulator_folder):
    """On any CPU: nothing is native, everything right, and a kernel's faults are found."""
    script = f"""
from emulator import amx, golden, model
emulator.force()
INSTALL
assert emulator.forced() and emulator.needed("amx_tile", "amx_bf16") and not emulator.permitted()
tiles = amx.Program({str(emulator_folder)!r})
for c, a, b, result in golden.load():
    np.testing.assert_array_equal(model.bits(tiles.dot(amx.EXECUTED, "tdpbf16ps", c, a, b)), result)
assert emulator.counts()["tdpbf16ps"] > 0 and not emulator.errors()
state = amx.new_state(amx.config(), np.full((8, 16, 64), 7, np.uint8))
tiles.call(amx.EXECUTED, "again", state)
assert not amx.after(state)[0].any()
tiles.call(amx.EXECUTED, "wrong", amx.new_state(amx.config({{0: (4, 64)}})))
print(*emulator.errors())
"""
    done = in_process(program.path, emulator_folder, script)
    assert done.returncode == 0, done.stderr
    assert "wrong+0x" in done.stdout
    assert "C has 4 rows, but A 16" in done.stdout


def test_cost(tile_program, tiles_trap, record_property):
    """A trap, and a TDPBF16PS of full size that follows directly."""
    if not tiles_trap:
        pytest.skip("this CPU has the instructions")
    count, state = 2000, amx.new_state(amx.config())
    tile_program.call(amx.EXECUTED, "load", state)
    seconds = {}
    for name in ("cost", "cost_of_traps"):
        start = time.perf_counter()
        tile_program.call(amx.EXECUTED, name, state, count)
        seconds[name] = (time.perf_counter() - start) / count
    tile_program.call(amx.EXECUTED, "store", state)
    dot = seconds["cost"] - seconds["cost_of_traps"]
    print(f"\n{seconds['cost_of_traps'] * 1e6:.2f} us a trap with a TILELOADD, {dot * 1e6:.3f} us a TDPBF16PS behind it")
    record_property("trap_us", seconds["cost_of_traps"] * 1e6)
    assert seconds["cost"] < 1e-3
