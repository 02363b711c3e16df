"""Weights in records on the way to the kernels and back: packed bytes are those of rows, an export is the records again."""

from dataclasses import replace

import numpy as np
import pytest
from ggml_records import IN_RECORDS, random_codes, random_experts
from helpers import assert_right, integers, random_batch, same_bits

from ktmoe import ExpertWeights, Matrix, MoELayer, Scale, WeightFormat
from ktmoe._native import core, isa
from ktmoe.backends import native
from ktmoe.backends.base import Plan
from ktmoe.errors import FormatError
from ktmoe.experts import PROJECTIONS
from ktmoe.weights.elements import INT4, INT8
from ktmoe.weights.ggml import GGML
from ktmoe.weights.order import ROWS
from ktmoe.weights.records import Field, Piece, Plane, Records, plain
from ktmoe.weights.scales import Factor

BACKEND = "fp32_lut"
PER_ROW = Factor(per_row=True)
#: Records of no checkpoint: runs of every length; numbers whose bits are scattered; bits that mean nothing.
OTHERS = {
    "one code after another": WeightFormat(INT4, factor=PER_ROW, order=Records("a", 24, 6, 4, (Plane(0, 2, 1),))),
    "runs of four": WeightFormat(INT8, factor=PER_ROW, order=Records("b", 8, 9, 8, (Plane(1, 4, 4), Plane(5, 4, 2, 4)))),
    "single bits": WeightFormat(
        INT8, factor=PER_ROW, order=Records("c", 16, 6, 8, (Plane(0, 1, 1), Plane(2, 1, 2, 3), Plane(4, 1, 1, 7)))
    ),
    "runs of words": WeightFormat(INT8, factor=PER_ROW, order=Records("d", 64, 24, 8, (Plane(0, 2, 8), Plane(16, 1, 8, 5)))),
    "five bits in three planes": WeightFormat(
        integers(5, 9),
        Scale("fp16", (1, 32)),
        order=Records("g", 32, 22, 8, (Plane(0, 1, 4, 4), Plane(4, 2, 2, 2), Plane(12, 2, 8)), scales=plain(20, 1, 2)),
    ),
    "runs of 24": WeightFormat(INT4, factor=PER_ROW, order=Records("e", 96, 50, 4, (Plane(1, 4, 24),))),
    "scattered scales": WeightFormat(
        INT4,
        Scale("fp16", (1, 32)),
        order=Records(
            "f",
            64,
            38,
            4,
            (Plane(3, 4, 32),),
            scales=Field(
                (
                    (Piece(0, 0, 8, 4), Piece(1, 0, 4), Piece(2, 4, 3, 12), Piece(2, 7, 1, 15)),
                    (Piece(35, 2, 6), Piece(36, 0, 8, 6), Piece(37, 0, 1, 14), Piece(37, 5, 1, 15)),
                )
            ),
        ),
    ),
}
ALL = IN_RECORDS | OTHERS


def stored_of(rng, weight_format, n, k):
    stored = {"codes": random_codes(rng, weight_format, 1, n, k)[0]}
    return stored | ({"factor": np.ones(weight_format.factor.shape(n), np.float32)} if weight_format.factor else {})


def pack(weight_format, n, k, stored):
    experts = ExpertWeights(1, k, n, None, weight_format)
    layer = core.PackedLayer(native.load_table("portable"), experts, Plan(), [(0, n)], 1)
    layer.pack(0, {"gate": Matrix("w", weight_format, (n, k), **stored)})
    return layer


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("n", "records"), [(1, 1), (65, 2), (70, 11)])
def test_packed_bytes_are_those_of_rows_and_records_come_back(name, n, records):
    """By numpy's reading of the records."""
    weight_format = ALL[name]
    k = records * weight_format.order.weights
    stored = stored_of(np.random.default_rng(n), weight_format, n, k)
    packed = pack(weight_format, n, k, stored)
    if weight_format.order.packed:  # byte by byte, 64 columns side by side
        panels = np.zeros((-(-n // 64) * 64, stored["codes"].shape[1]), np.uint8)
        panels[:n] = stored["codes"]
        expected = panels.reshape(-1, 64, panels.shape[1]).transpose(0, 2, 1)
    else:
        rows = {label: np.ascontiguousarray(array) for label, array in weight_format.rows(stored, n, k).items()}
        expected = pack(replace(weight_format, order=ROWS), n, k, rows).packed_bytes(0, "gate")
    assert packed.packed_bytes(0, "gate").tobytes() == expected.tobytes()
    back = core.unpack(packed, 0, "gate")
    assert back.keys() == stored.keys()
    assert all(np.array_equal(back[label], stored[label]) for label in stored)


def test_bits_of_a_scale_that_no_piece_has_are_0(monkeypatch):
    """Records that have the upper byte of each scale. New arrays have what was in their memory before."""
    scales = Field(((Piece(0, 0, 8, 8),),))
    weight_format = WeightFormat(INT4, Scale("fp16", (1, 32)), order=Records("h", 32, 17, 4, (Plane(1, 4, 16),), scales=scales))
    stored = stored_of(np.random.default_rng(5), weight_format, 70, 64)
    in_rows = replace(weight_format, order=ROWS)
    rows = pack(in_rows, 70, 64, weight_format.rows(stored, 70, 64)).packed_bytes(0, "gate")
    empty = np.empty

    def used(shape, dtype):
        array = empty(shape, dtype)
        array.view(np.uint8)[...] = 0x5A
        return array

    monkeypatch.setattr(np, "empty", used)
    packed = pack(weight_format, 70, 64, stored)
    assert np.array_equal(packed.packed_bytes(0, "gate"), rows)
    assert np.array_equal(core.unpack(packed, 0, "gate")["codes"], stored["codes"])


@pytest.mark.parametrize("name", IN_RECORDS)
@pytest.mark.parametrize("nodes", [[0], [0, 1, 2]], ids=str)
@pytest.mark.usefixtures("three_nodes")
def test_any_cut_of_any_split_is_the_records(name, nodes):
    unit = max(32, IN_RECORDS[name].order.weights)
    experts = random_experts(np.random.default_rng(1), 2, 256, 12 * unit, name)
    of_record = IN_RECORDS[name].order.nbytes * (12 * unit // IN_RECORDS[name].order.weights)  # of a row of down
    with MoELayer(experts, BACKEND, numa_nodes=nodes) as layer:
        for expert in range(2):
            for parts in (1, 3, 4, 12):
                size, nbytes = experts.intermediate // parts, of_record // parts
                for i, part in enumerate(layer.export_expert(expert, parts)):
                    for projection in ("gate", "up"):
                        own = experts.matrix(expert, projection).codes[i * size : (i + 1) * size]
                        assert np.array_equal(part[projection].codes, own)
                    own = experts.matrix(expert, "down").codes[:, i * nbytes : (i + 1) * nbytes]
                    assert np.array_equal(part["down"].codes, own)


@pytest.mark.cover("values")
@pytest.mark.parametrize("name", GGML)
def test_forward(backend, name):
    """One token and many, against the reference, which numpy reads for; a replaced expert is as if it had always been there."""
    rng = np.random.default_rng(2)
    experts, others = (random_experts(rng, 2, 512, 256, name) for _ in range(2))
    batches = [random_batch(rng, experts, tokens, 2, np.float32) for tokens in (1, 20)]
    with MoELayer(experts, backend) as layer, MoELayer(others, backend) as fresh:
        for batch in batches:
            assert_right(layer, experts, *batch)
        for expert in range(2):
            layer.replace_expert(expert, {p: others.matrix(expert, p) for p in PROJECTIONS})
        assert same_bits(layer.forward(*batches[1]), fresh.forward(*batches[1]))


def test_projections_of_different_types(backend):
    """As llama.cpp mixes them: Q4_K_M."""
    rng = np.random.default_rng(3)
    experts = random_experts(rng, 3, 256, 512, {"gate": "Q4_K", "up": "Q4_K", "down": "Q6_K"})
    with MoELayer(experts, backend) as layer:
        assert_right(layer, experts, *random_batch(rng, experts, 7, 2, np.float32))


@pytest.mark.parametrize("name", GGML)
def test_every_instruction_set_has_the_type(name):
    served = [native.load_table(row).serves(GGML[name], "bf16") for row in isa.ISAS]
    wanted = [native.load_table(row).serves(GGML["BF16"], "bf16") for row in isa.ISAS]
    assert served == wanted


#: A byte of a record, what it becomes, and what the message says.
WRONG = {
    "Q4_K": (1, 0x7C, r"super_scale \[70, 1\] is inf"),
    "Q5_1": (3, 0xFE, r"offset \[70, 1\] is nan"),
    "Q6_K": (209, 0xFC, r"super_scale \[70, 1\] is "),
    "MXFP4": (0, 255, r"scale \[70, 1\] is byte 255"),
    "NVFP4": (1, 0x81, r"record \[70, 1\] has bits that mean nothing in byte 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_number_is_refused_while_it_is_packed(name):
    weight_format, (byte, wrong, message) = GGML[name], WRONG[name]
    weights, nbytes = weight_format.order.weights, weight_format.order.nbytes
    stored = stored_of(np.random.default_rng(4), weight_format, 80, 3 * weights)
    if name == "Q5_1":
        stored["codes"][70, nbytes + 2] = 1  # else it would be infinite
    if name in ("Q4_K", "Q6_K"):
        stored["codes"][70, nbytes + byte - 1] = 0
    stored["codes"][70, nbytes + byte] = wrong
    with pytest.raises(FormatError, match=rf"^w: {message}"):
        pack(weight_format, 80, 3 * weights, stored)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"planes": tuple(Plane(i, 1, 1, i) for i in range(5)), "nbytes": 5}, "5 planes; the packed layout takes at most 4"),
        ({"weights": 2048, "planes": (Plane(0, 4, 16),), "nbytes": 1024}, "2048 weights; .* at most 1024"),
        ({"nbytes": 5000}, "5000 bytes; .* at most 4096"),
        ({"nbytes": 200}, "[0-9]+ pieces that mean nothing; .* at most 16"),
    ],
)
def test_records_that_the_packed_layout_does_not_take(change, message):
    made = {"name": "mine", "weights": 8, "nbytes": 2, "code_bits": 8, "planes": (Plane(0, 1, 1),)} | change
    experts = ExpertWeights(1, 2048, 2048, None, WeightFormat(INT8, factor=PER_ROW, order=Records(**made)))
    with pytest.raises(FormatError, match=f"mine records have {message}"):
        core.expert_nbytes(experts, [(0, 2048)])
