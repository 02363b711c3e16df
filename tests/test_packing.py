"""The packed q4 layout: its addressing formula, its golden bytes, its exact inverse, its size, and what it refuses."""

import gc
import json
import os
from pathlib import Path

import numpy as np
import pytest
from helpers import random_experts

from ktmoe import MXFP4, SILU, ExpertWeights, Matrix, MoELayer, backends, set_num_threads
from ktmoe._native import core
from ktmoe.backends import native
from ktmoe.errors import FormatError
from ktmoe.formats import Scale, WeightFormat

GOLDEN = Path(__file__).parent / "golden"
PANEL, GROUP = 64, 32
SUPERBLOCK = PANEL + PANEL * GROUP // 2


def pack(codes, scales, weight_format=MXFP4):
    """A layer of one expert whose gate is the matrix [n, k] of those bytes."""
    n, k = codes.shape[0], 2 * codes.shape[1]
    formats = dict.fromkeys(("gate", "up", "down"), weight_format)
    layer = core.PackedLayer(native.load_table("portable"), 1, k, n, formats, SILU, "down_output", "bf16")
    layer.pack(0, "gate", Matrix("w", weight_format, (n, k), codes, scales))
    return layer


def by_formula(codes, scales, zero_code=0):
    """The packed bytes, nibble by nibble, from the addressing formula in pack_q4.c's LAYOUT."""
    n, k = codes.shape[0], 2 * codes.shape[1]
    panels, groups = -(-n // PANEL), -(-k // GROUP)
    packed = np.zeros((panels, groups * SUPERBLOCK), np.uint8)
    bit = {0: 0, 2: 4, 4: 8, 6: 12, 1: 16, 3: 20, 5: 24, 7: 28}  # of k % 8 in its column's dword
    for column in range(panels * PANEL):
        panel, c = divmod(column, PANEL)
        for g in range(groups):
            packed[panel, g * SUPERBLOCK + c] = scales[column, g] if column < n else 127
            for kk in range(GROUP):
                at = g * GROUP + kk
                code = codes[column, at // 2] >> 4 * (at % 2) & 15 if column < n and at < k else zero_code
                dword = g * SUPERBLOCK + 64 + (c // 16) * 256 + (kk // 8) * 64 + (c % 16) * 4
                packed[panel, dword + bit[kk % 8] // 8] |= code << bit[kk % 8] % 8
    return packed


def random_bytes(rng, n, k):
    return rng.integers(0, 256, (n, k // 2), dtype=np.uint8), rng.integers(0, 255, (n, -(-k // GROUP)), dtype=np.uint8)


SHAPES = [(1, 2), (64, 32), (63, 32), (65, 34), (1, 258), (100, 100), (66, 288), (130, 62), (3, 320), (68, 512)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layout(shape):
    codes, scales = random_bytes(np.random.default_rng(shape), *shape)
    assert np.array_equal(pack(codes, scales).packed_bytes(0, "gate"), by_formula(codes, scales))


def golden_source():
    """[65, 66]: tails of panel, group and octet; every code and 195 scale bytes. Free of any random generator."""
    i = np.arange(65 * 33)
    return (i * 89 % 256).astype(np.uint8).reshape(65, 33), (np.arange(65 * 3) * 37 % 255).astype(np.uint8).reshape(65, 3)


def test_golden_bytes():
    """A layout that changes needs a new KT_Q4_LAYOUT_VERSION and a new file beside the old one."""
    golden = json.loads((GOLDEN / f"q4_layout_v{core.LAYOUT_VERSIONS['q4']}.json").read_text())
    codes, scales = golden_source()
    assert (golden["n"], golden["k"]) == (65, 66)
    assert codes.tobytes().hex() == golden["codes"]
    assert scales.tobytes().hex() == golden["scales"]
    packed = pack(codes, scales).packed_bytes(0, "gate")
    assert [row.tobytes().hex() for row in packed] == golden["packed"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_unpacking_gives_the_checkpoints_bytes(shape):
    rng = np.random.default_rng(shape)
    codes, scales = random_bytes(rng, *shape)
    unpacked = pack(codes, scales).unpack(0, "gate")
    assert np.array_equal(unpacked[0], codes)
    assert np.array_equal(unpacked[1], scales)


def test_every_code_byte_with_every_scale_byte_comes_back():
    """Row b: all 256 code bytes, all its scales b."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (255, 1))
    scales = np.repeat(np.arange(255, dtype=np.uint8)[:, None], 16, axis=1)
    unpacked = pack(codes, scales).unpack(0, "gate")
    assert np.array_equal(unpacked[0], codes)
    assert np.array_equal(unpacked[1], scales)


def test_every_expert_and_projection_has_its_own_place():
    experts = random_experts(np.random.default_rng(1), 3, 100, 72)
    for threads in (1, 3):
        set_num_threads(threads)
        with MoELayer(experts, "fp32_lut") as layer:
            for expert in range(3):
                for projection in ("gate", "up", "down"):
                    matrix = experts.matrix(expert, projection)
                    codes, scales = layer._packed.unpack(expert, projection)
                    assert np.array_equal(codes, matrix.codes)
                    assert np.array_equal(scales, matrix.scales)


def test_padding_is_the_code_of_zero():
    """A codebook may have zero anywhere."""
    rotated = WeightFormat("q4", tuple(np.roll(MXFP4.codebook, 5)), MXFP4.scale)
    codes, scales = random_bytes(np.random.default_rng(2), 65, 34)
    assert np.array_equal(pack(codes, scales, rotated).packed_bytes(0, "gate"), by_formula(codes, scales, zero_code=5))


@pytest.mark.parametrize("at", [(0, 0), (64, 2), (37, 1)])
def test_the_nan_scale_is_refused_by_name_and_position(backend, at):
    experts = random_experts(np.random.default_rng(3), 2, 66, 68)
    experts._read(1, "up").scales[at] = 255
    with pytest.raises(FormatError, match=rf"experts\.1\.up: scale \[{at[0]}, {at[1]}\] is byte 255.*expected 0 to 254"):
        MoELayer(experts, backend)


# Memory


@pytest.mark.parametrize(
    ("hidden", "intermediate"), [(4096, 2048), (7168, 3072), (2880, 2880), (5120, 1536)], ids=["V4-Flash", "V4-Pro", "x", "y"]
)
def test_packed_weights_take_at_most_one_percent_more_than_the_checkpoints(backend, hidden, intermediate):
    read = {(n, k): Matrix("w", MXFP4, (n, k), np.zeros((n, k // 2), np.uint8), np.full((n, k // 32), 120, np.uint8))
            for n, k in ((intermediate, hidden), (hidden, intermediate))}  # fmt: skip
    shapes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
    experts = ExpertWeights(1, hidden, intermediate, lambda _, projection: read[shapes[projection]])
    checkpoint = 3 * hidden * intermediate * 17 // 32  # 4 bits a weight and 8 bits for 32
    assert experts.nbytes == checkpoint
    with MoELayer(experts, backend) as layer:
        assert layer.nbytes <= 1.01 * checkpoint


def memory_bytes():
    """(mapped, resident) bytes of this process."""
    pages = [int(field) for field in Path("/proc/self/statm").read_text().split()[:2]]
    return np.array(pages) * os.sysconf("SC_PAGE_SIZE")


def big_experts(fail_at=None, error=None):
    """16 experts of 13 MB each; reading expert fail_at raises error, or gives a NaN scale where error is None."""
    good = random_experts(np.random.default_rng(4), 1, 2048, 2048)
    scales = np.full((2048, 64), 255, np.uint8)

    def read(expert, projection):
        matrix = good.matrix(0, projection)
        if expert != fail_at:
            return matrix
        if error:
            raise error
        return Matrix("bad", MXFP4, matrix.shape, matrix.codes, scales)

    return ExpertWeights(16, 2048, 2048, read)


class Cancelled(Exception):
    pass


@pytest.mark.parametrize("how", ["read", "NaN scale", "progress", "close", "garbage"])
def test_memory_is_given_back(backend, how):
    """Whether a layer's making fails, or it is closed, or dropped: eight of them leave less behind than one holds."""

    def cancel(done, total):
        if done > total * 0.8:
            raise Cancelled

    def attempt():
        if how == "read":
            with pytest.raises(OSError, match="torn"):
                MoELayer(big_experts(14, OSError("torn")), backend)
        elif how == "NaN scale":
            with pytest.raises(FormatError, match="bad: scale"):
                MoELayer(big_experts(14), backend)
        elif how == "progress":
            with pytest.raises(Cancelled):
                MoELayer(big_experts(), backend, progress=cancel)
        elif how == "close":
            layer = MoELayer(big_experts(), backend)
            layer.close()
            attempt.kept.append(layer)  # closed, though not dropped
        else:
            MoELayer(big_experts(), backend)

    attempt.kept = []
    attempt()
    gc.collect()
    before = memory_bytes()
    for _ in range(8):
        attempt()
    gc.collect()
    layer_bytes = big_experts().nbytes
    mapped, resident = memory_bytes() - before
    assert resident < layer_bytes / 2
    assert mapped < 2 * layer_bytes  # an idle thread's heap maps more than it holds


def test_progress_counts_the_checkpoints_bytes(backend):
    experts = random_experts(np.random.default_rng(5), 3, 64, 64)
    calls = []
    with MoELayer(experts, backend, progress=lambda *done_and_total: calls.append(done_and_total)):
        pass
    assert calls == [(experts.nbytes * n // 3, experts.nbytes) for n in (1, 2, 3)]


def test_matrices_are_read_once_each():
    experts, asked = random_experts(np.random.default_rng(6), 4, 64, 64), []
    read = experts._read
    experts._read = lambda *key: (asked.append(key), read(*key))[1]
    with MoELayer(experts, "fp32_lut"):
        pass
    assert sorted(asked) == sorted((e, p) for e in range(4) for p in ("gate", "up", "down"))


def test_an_unknown_format_is_refused_before_anything_is_read():
    weight_format = WeightFormat("q4", MXFP4.codebook, Scale("ue8m0", (1, 16)))
    experts = ExpertWeights(1, 64, 64, lambda *_: pytest.fail("was read"), weight_format)
    assert "ue8m0 scales per 1x16" in backends.get("fp32_lut").unsupported(experts)
