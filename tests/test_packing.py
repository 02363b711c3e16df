"""The packed layouts: their addressing formulas, golden bytes, exact inverses, sizes, and what is refused."""

import gc
import json
import os
from pathlib import Path

import numpy as np
import pytest
from helpers import B16, BF16, FORMATS, LONGEST, MIXED, WEIGHTS, bits, random_bfloat16, random_experts, reading

from ktmoe import MXFP4, SILU, ExpertWeights, Matrix, MoELayer, backends, int4, set_num_threads
from ktmoe._native import core
from ktmoe.backends import native
from ktmoe.backends.base import Plan
from ktmoe.errors import FormatError
from ktmoe.weights.formats import Scale, WeightFormat

GOLDEN = Path(__file__).parent / "golden"
PANEL, BLOCK = 64, 32


def pack(codes, scales, weight_format=MXFP4):
    """A layer of one expert whose gate is the matrix [n, k] of those bytes."""
    n, k = codes.shape[0], weight_format.codes_per_item * codes.shape[1]
    formats = dict.fromkeys(("gate", "up", "down"), weight_format)
    experts = ExpertWeights(1, k, n, None, formats, SILU)
    layer = core.PackedLayer(native.load_table("portable"), experts, Plan(), [(0, n)], 1)
    layer.pack(0, {"gate": Matrix("w", weight_format, (n, k), codes, scales)})
    return layer


def by_formula(codes, scales, weight_format=MXFP4):
    """The packed bytes, number by number, from the addressing formulas in LAYOUT of pack/q4.c and pack/b16.c."""
    if weight_format == B16:
        return b16_by_formula(codes.view(np.uint16))
    n, k = codes.shape[0], 2 * codes.shape[1]
    scale_bytes, group = weight_format.scale.dtype.itemsize, weight_format.scale.extent[1]
    panels, blocks, groups = -(-n // PANEL), -(-k // BLOCK), -(-k // group)
    padding = weight_format.codebook.index(0)
    whole = np.full((panels * PANEL, blocks * BLOCK), padding, np.uint8)
    whole[:n, :k:2], whole[:n, 1:k:2] = codes & 15, codes >> 4
    packed = np.zeros((panels, blocks * 1024 + groups * 64 * scale_bytes), np.uint8)
    bit = np.array([0, 16, 4, 20, 8, 24, 12, 28])  # of k % 8 in its column's dword: k0 k2 k4 k6 | k1 k3 k5 k7
    one = np.array([{1: 127, 2: 1.0}[scale_bytes]], weight_format.scale.dtype).view(np.uint8)
    stored = np.ascontiguousarray(scales).view(np.uint8).reshape(n, groups, scale_bytes)
    for column in range(panels * PANEL):
        panel, c = divmod(column, PANEL)
        for g in range(groups):
            at = g * (64 * scale_bytes + group // 32 * 1024) + c * scale_bytes
            packed[panel, at : at + scale_bytes] = stored[column, g] if column < n else one
        kk = np.arange(blocks * BLOCK)
        b = kk // 32
        block = b * 1024 + (b // (group // 32) + 1) * 64 * scale_bytes
        dword = block + (c // 16) * 256 + (kk % 32 // 8) * 64 + (c % 16) * 4
        np.bitwise_or.at(packed[panel], dword + bit[kk % 8] // 8, whole[column] << bit[kk % 8] % 8)
    return packed


def b16_by_formula(words):
    n, k = words.shape
    packed = np.zeros((-(-n // PANEL), -(-k // BLOCK) * BLOCK * PANEL * 2), np.uint8)
    for column in range(n):
        panel, c = divmod(column, PANEL)
        for kk in range(k):
            at = (kk // 2) * 256 + c * 4 + (kk % 2) * 2
            packed[panel, at], packed[panel, at + 1] = words[column, kk] & 255, words[column, kk] >> 8
    return packed


def random_bytes(rng, n, k, weight_format=MXFP4):
    """(codes, scales): any that are no NaN and not infinite."""
    if weight_format == B16:
        return random_bfloat16(rng, (n, k), 0, 254), None
    shape = weight_format.scale.shape(n, k)
    ue8m0 = weight_format.scale.kind == "ue8m0"
    scales = rng.integers(0, 255, shape, dtype=np.uint8) if ue8m0 else random_bfloat16(rng, shape, 0, 254)
    return rng.integers(0, 256, weight_format.codes_shape(n, k), dtype=np.uint8), scales


def same_stored(a, b):
    return a is b is None or (a.dtype == b.dtype and np.array_equal(bits(a), bits(b)))


SHAPES = [(1, 2), (64, 32), (63, 32), (65, 34), (1, 258), (100, 100), (66, 288), (130, 62), (3, 320), (68, 512)]
ODD_SHAPES = [(1, 1), (65, 33), (3, 7), (64, 31), (5, 289)]
CASES = [(shape, weight_format) for weight_format in FORMATS.values() for shape in SHAPES] + [(s, B16) for s in ODD_SHAPES]
every_case = pytest.mark.parametrize(
    ("shape", "weight_format"), CASES, ids=[f"{w.description}-{shape}".replace(" ", "_") for shape, w in CASES]
)


@every_case
def test_layout(shape, weight_format):
    codes, scales = random_bytes(np.random.default_rng(shape), *shape, weight_format)
    packed = pack(codes, scales, weight_format).packed_bytes(0, "gate")
    assert np.array_equal(packed, by_formula(codes, scales, weight_format))


def golden_source(weight_format):
    """Free of any random generator. For q4 [65, 66]: tails of panel, group and octet; every code and 195 scale bytes. Scales of
    bfloat16 per 64: two groups, the second cut short; b16 [65, 35]: an odd k."""
    if weight_format == B16:
        words = (np.arange(65 * 35) * 28657 % 65536).astype(np.uint16).reshape(65, 35)
        return np.where(words & 0x7F80 == 0x7F80, 0x3F80, words).astype(np.uint16).view(BF16), None
    codes = (np.arange(65 * 33) * 89 % 256).astype(np.uint8).reshape(65, 33)
    if weight_format == MXFP4:
        return codes, (np.arange(65 * 3) * 37 % 255).astype(np.uint8).reshape(65, 3)
    words = (np.arange(65 * 2) * 28657 % 65536).astype(np.uint16).reshape(65, 2)
    return codes, np.where(words & 0x7F80 == 0x7F80, 0x3F80, words).astype(np.uint16).view(BF16)


@pytest.mark.parametrize(
    ("name", "family", "weight_format", "k"),
    [("q4", "q4", MXFP4, 66), ("q4_bf16", "q4", int4(64), 66), ("b16", "b16", B16, 35)],
    ids=["q4", "q4_bf16", "b16"],
)
def test_golden_bytes(name, family, weight_format, k):
    """A layout that changes needs a new KT_Q4_LAYOUT_VERSION or KT_B16_LAYOUT_VERSION and a new file beside the old one."""
    golden = json.loads((GOLDEN / f"{name}_layout_v{core.LAYOUT_VERSIONS[family]}.json").read_text())
    codes, scales = golden_source(weight_format)
    assert (golden["n"], golden["k"]) == (65, k)
    assert codes.tobytes().hex() == golden["codes"]
    assert (scales is None) == ("scales" not in golden)
    if scales is not None:
        assert scales.tobytes().hex() == golden["scales"]
    packed = pack(codes, scales, weight_format).packed_bytes(0, "gate")
    assert [row.tobytes().hex() for row in packed] == golden["packed"]


def test_layout_versions():
    """One of each family, and a golden file of each version that there was."""
    assert {weight_format.family for weight_format in FORMATS.values()} == set(core.LAYOUT_VERSIONS)
    for family, version in core.LAYOUT_VERSIONS.items():
        assert all((GOLDEN / f"{family}_layout_v{v}.json").exists() for v in range(1, version + 1))


@every_case
def test_unpacking_gives_the_checkpoints_bytes(shape, weight_format):
    rng = np.random.default_rng(shape)
    stored = random_bytes(rng, *shape, weight_format)
    for unpacked, original in zip(pack(*stored, weight_format).unpack(0, "gate"), stored, strict=True):
        assert same_stored(unpacked, original)


def test_every_code_byte_with_every_scale_byte_comes_back():
    """Row b: all 256 code bytes, all its scales b."""
    codes = np.tile(np.arange(256, dtype=np.uint8), (255, 1))
    scales = np.repeat(np.arange(255, dtype=np.uint8)[:, None], 16, axis=1)
    unpacked = pack(codes, scales).unpack(0, "gate")
    assert np.array_equal(unpacked[0], codes)
    assert np.array_equal(unpacked[1], scales)


def test_every_finite_bfloat16_comes_back():
    """As a scale and as a weight, zeros of both signs and denormals included."""
    words = np.arange(1 << 16, dtype=np.uint16)
    words = words[words & 0x7F80 != 0x7F80].reshape(255, 256)
    codes, _ = pack(words.view(BF16), None, B16).unpack(0, "gate")
    assert np.array_equal(codes.view(np.uint16), words)
    scales = words.reshape(-1, 32)
    _, unpacked = pack(np.zeros((len(scales), 16 * 32), np.uint8), scales.view(BF16), int4(32)).unpack(0, "gate")
    assert np.array_equal(unpacked.view(np.uint16), scales)


@pytest.mark.parametrize("weights", [*WEIGHTS.values(), *MIXED.values()], ids=[*WEIGHTS, *MIXED])
def test_every_expert_and_projection_has_its_own_place(weights):
    experts = random_experts(np.random.default_rng(1), 3, 100, 72, **weights)
    for threads in (1, 3):
        set_num_threads(threads)
        with MoELayer(experts, "fp32_lut") as layer:
            for expert in range(3):
                for projection in ("gate", "up", "down"):
                    matrix = experts.matrix(expert, projection)
                    codes, scales = layer.packed.unpack(expert, projection)
                    assert same_stored(codes, matrix.codes)
                    assert same_stored(scales, matrix.scales)


@pytest.mark.parametrize("scale", [MXFP4.scale, int4(128).scale], ids=["ue8m0", "bf16"])
def test_padding_is_the_code_of_zero(scale):
    """A codebook may have zero anywhere."""
    rotated = WeightFormat("q4", tuple(np.roll(MXFP4.codebook, 5).tolist()), scale)
    codes, scales = random_bytes(np.random.default_rng(2), 65, 34, rotated)
    packed = pack(codes, scales, rotated).packed_bytes(0, "gate")
    assert np.array_equal(packed, by_formula(codes, scales, rotated))
    assert (packed[1, -4:] == 0x55).all()  # the last column's


@pytest.mark.parametrize("at", [(0, 0), (64, 2), (37, 1)])
def test_the_nan_scale_is_refused_by_name_and_position(backend, at):
    experts = random_experts(np.random.default_rng(3), 2, 66, 68)
    experts.matrix(1, "up").scales[at] = 255
    with pytest.raises(FormatError, match=rf"experts\.1\.up: scale \[{at[0]}, {at[1]}\] is byte 255.*expected 0 to 254"):
        MoELayer(experts, backend)


BAD_WORDS = {"nan": 0x7FC0, "-nan": 0xFF81, "inf": 0x7F80, "-inf": 0xFF80}


@pytest.mark.parametrize("word", BAD_WORDS.values(), ids=BAD_WORDS)
def test_a_bfloat16_that_is_not_finite_is_refused_by_name_and_position(backend, word):
    """In whole blocks and in tails of panel, group and k."""
    name = r"(nan|-?inf)"
    for weight_format, places in (
        (int4(32), ((0, 0), (37, 1), (65, 2))),
        (LONGEST, ((0, 0), (64, 0))),
        (B16, ((0, 0), (37, 33), (64, 66), (65, 65), (3, 64))),
    ):
        for at in places:
            k = 67 if weight_format == B16 else 68
            experts = random_experts(np.random.default_rng(3), 2, k, 66, formats=weight_format)
            matrix = experts.matrix(1, "up")
            spoilt = matrix.codes if weight_format == B16 else matrix.scales
            spoilt.view(np.uint16)[at] = word
            what = "weight" if weight_format == B16 else "scale"
            message = rf"experts\.1\.up: {what} \[{at[0]}, {at[1]}\] is {name}; expected a finite number"
            with pytest.raises(FormatError, match=message):
                MoELayer(experts, backend)


@pytest.mark.parametrize("weight_format", [MXFP4, int4(32), B16], ids=["mxfp4", "int4", "b16"])
def test_every_scale_and_every_weight_is_looked_at(weight_format):
    """Each in turn is the only one that is wrong."""
    shape = (7, 67) if weight_format == B16 else (67, 102)
    codes, scales = random_bytes(np.random.default_rng(8), *shape, weight_format)
    looked_at = codes if weight_format == B16 else scales
    pack(codes, scales, weight_format)
    for at in np.ndindex(looked_at.shape):
        kept = looked_at[at].copy()
        looked_at[at] = 255 if weight_format == MXFP4 else np.inf
        with pytest.raises(FormatError, match=rf"^w: (scale|weight) \[{at[0]}, {at[1]}\] is "):
            pack(codes, scales, weight_format)
        looked_at[at] = kept


def test_the_greatest_bfloat16_numbers_are_taken(backend):
    """Finite, by one bit."""
    for weight_format in (int4(64), B16):
        experts = random_experts(np.random.default_rng(3), 1, 68, 66, formats=weight_format)
        matrix = experts.matrix(0, "down")
        (matrix.codes if weight_format == B16 else matrix.scales).view(np.uint16)[:] = 0xFF7F
        with MoELayer(experts, backend) as layer:
            for stored, original in zip(layer.packed.unpack(0, "down"), (matrix.codes, matrix.scales), strict=True):
                assert same_stored(stored, original)


# Memory

MODELS = {
    "DeepSeek V4-Flash": (4096, 2048, MXFP4, 17 / 32),  # bytes a weight: 4 bits, and a scale byte for 32
    "DeepSeek V4-Pro": (7168, 3072, MXFP4, 17 / 32),
    "gpt-oss": (2880, 2880, MXFP4, 17 / 32),
    "Kimi-K2": (7168, 2048, int4(32), 18 / 32),
    "groups of 128": (5120, 1536, int4(128), 66 / 128),
    "Qwen3-30B": (2048, 768, B16, 2),
    "gpt-oss in b16": (2880, 2880, B16, 2),
}


@pytest.mark.parametrize(("hidden", "intermediate", "weight_format", "bytes_a_weight"), MODELS.values(), ids=MODELS)
def test_packed_weights_take_at_most_one_percent_more_than_the_checkpoints(
    backend, hidden, intermediate, weight_format, bytes_a_weight
):
    shapes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
    one = {"ue8m0": 127, "bf16": 1, None: None}[weight_format.scale and weight_format.scale.kind]

    def matrix(n, k):
        scale = weight_format.scale
        scales = None if scale is None else np.full(scale.shape(n, k), one, scale.dtype)
        return Matrix("w", weight_format, (n, k), np.zeros(weight_format.codes_shape(n, k), weight_format.codes_dtype), scales)

    read = {shape: matrix(*shape) for shape in set(shapes.values())}
    experts = ExpertWeights(1, hidden, intermediate, lambda _, projection: read[shapes[projection]], weight_format)
    checkpoint = 3 * hidden * intermediate * bytes_a_weight
    assert experts.nbytes == checkpoint
    with MoELayer(experts, backend) as layer:
        assert layer.nbytes <= 1.01 * checkpoint


def memory_bytes():
    """(mapped, resident) bytes of this process."""
    pages = [int(field) for field in Path("/proc/self/statm").read_text().split()[:2]]
    return np.array(pages) * os.sysconf("SC_PAGE_SIZE")


def big_experts(fail_at=None, error=None):
    """16 experts of 3 MB each; reading expert fail_at raises error, or gives a NaN scale where error is None."""
    good = random_experts(np.random.default_rng(4), 1, 1024, 1024)
    scales = np.full((1024, 32), 255, np.uint8)

    def read(expert, projection):
        matrix = good.matrix(0, projection)
        if expert != fail_at:
            return matrix
        if error:
            raise error
        return Matrix("bad", MXFP4, matrix.shape, matrix.codes, scales)

    return ExpertWeights(16, 1024, 1024, read)


class Cancelled(Exception):
    pass


@pytest.mark.cover("values")
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
    with MoELayer(reading(experts, lambda *key: (asked.append(key), experts.matrix(*key))[1]), "fp32_lut"):
        pass
    assert sorted(asked) == sorted((e, p) for e in range(4) for p in ("gate", "up", "down"))


def test_an_unknown_format_is_refused_before_anything_is_read():
    weight_format = WeightFormat("q4", MXFP4.codebook, Scale("ue8m0", (1, 16)))
    experts = ExpertWeights(1, 64, 64, lambda *_: pytest.fail("was read"), weight_format)
    assert "ue8m0 scales per 1x16" in backends.get("fp32_lut").lookup(experts).reason
