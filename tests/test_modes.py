"""Which formats and activation modes each kernel table, backend and CPU serves, and what a refusal names."""

import re

import numpy as np
import pytest
from cpus import ALL_FEATURES, BEST, CPUS, OF_MODES, experts_of
from helpers import B16, FORMATS, GROUPS, WHOLE, integers, minima_of, random_experts, super_scaled

from ktmoe import MXFP4, MoELayer, Scale, WeightFormat, backends, int4
from ktmoe._native import core, isa
from ktmoe.backends import native
from ktmoe.backends.base import Found, Missing, select
from ktmoe.backends.choice import choose_backend
from ktmoe.errors import UnavailableError
from ktmoe.weights.elements import E2M1, E4M3, E5M2, INT4, INT8, UINT4, Element
from ktmoe.weights.offsets import Minimum, ZeroPoint

#: A codebook that integers of at most 16 cannot stand for.
UNEVEN = WeightFormat(
    Element("uneven", "q4", tuple(v * 0.0625 + (v > 0) * 2.0**-8 for v in range(-8, 8))), Scale("bf16", (1, 64))
)


def modes_of(backend, experts):
    """The modes in which it can run these weights here."""
    return [mode for mode in backend.modes if isinstance(backend.lookup(experts, mode), Found)]


@pytest.mark.parametrize("row", isa.ISAS)
def test_what_a_table_serves(row):
    """All formats in bf16; those of 4 bits and integers in int16 and int8 where those exist; folded scales where weights
    are bfloat16, of amx rounded ones and sums of two, too. Or integers alone."""
    table = native.load_table(row)
    keys = core.kernels(table)
    modes = OF_MODES.get(row) or (["bf16", "int16", "int8"] if row == "avx2" else ["bf16"])
    longest = GROUPS[-1]
    of_4_bits = {("none", 0), ("ue8m0", 32), ("e4m3", 16), ("bf16", longest), ("fp16", longest)}
    expected = {("q4", *scale, mode, False, "none") for mode in modes for scale in of_4_bits}
    expected |= {("q4", kind, longest, mode, False, "zero_point") for mode in modes for kind in ("bf16", "fp16")}
    of_integers = {("none", 0), ("bf16", longest), ("fp16", longest)}
    expected |= {("int", *scale, mode, False, "none") for mode in modes for scale in of_integers}
    super_scaled = {("q4", "int8", 32, offset) for offset in ("none", "minimum")}
    super_scaled |= {("int", "int8", 16, "none"), ("int", "int8", 32, "minimum"), ("int", "int6", 16, "none")}
    super_scaled |= {("int", "uint4", 16, "minimum"), ("int", "fp16", 256, "none")}
    super_scaled |= {("grid", "odd", 16, "none"), ("grid", "odd", 32, "none"), ("ternary", "fp16", 256, "none")}
    of_16_bits = {("q4", "fp16", 32, "minimum"), ("int", "fp16", 32, "minimum"), ("int", "fp16", 32, "none")}
    expected |= {(*scale, mode, False, offset) for mode in modes for *scale, offset in super_scaled | of_16_bits}
    wide = {("q4", "fp16", 32, mode, False, "none") for mode in modes if mode != "bf16"}  # IQ4's values, of two kinds of scales
    expected |= wide
    if "bf16" in modes:
        expected |= {("f8", *scale, "bf16", False, "none") for scale in (("none", 0), ("ue8m0", 32), ("panel", longest))}
        expected |= {("int", "panel", longest, "bf16", False, "none")}
        expected |= {(family, "none", 0, "bf16", False, "none") for family in ("b16", "f16", "f32")}
    if row in ("avx512_bf16", "amx"):
        expected |= {(family, "ue8m0", 32, "bf16", True, "none") for family in ("q4", "f8")}
    if row == "amx":
        expected |= {("q4", *scale, "bf16", True, "none") for scale in (("bf16", longest), ("fp16", longest), ("e4m3", 16))}
        expected |= {("q4", "bf16", longest, "bf16", 2, "none")}
    assert set(keys) == expected
    # int8 without scales: on tiles and, as int_f32 has them, in fp32. int8 scales of super-scales: of values up to 16, and 127.
    assert len(keys) == len(expected) + (row == "amx") + len(wide)
    for weight_format in FORMATS.values():
        assert table.serves(weight_format, "bf16") == ("bf16" in modes)
        for mode in ("int16", "int8"):
            assert table.serves(weight_format, mode) == (mode in modes and has_integers(weight_format))
        assert not table.serves(weight_format, "int4")
    assert table.serves(UNEVEN, "bf16") == ("bf16" in modes)
    for mode in ("int16", "int8"):
        assert not table.serves(UNEVEN, mode)


def has_integers(weight_format):
    """Whether the modes of integers have these weights."""
    if weight_format.family == "int":
        return weight_format.scale is None or weight_format.scale.kind in ("bf16", "fp16", *WHOLE)
    return weight_format.family == "q4"


#: Formats that no kernel has, and the component that a refusal names.
UNSERVED = {
    "ue8m0 per 16": (WeightFormat(E2M1, Scale("ue8m0", (1, 16))), "scale groups of 16"),
    "ue8m0 per 64": (WeightFormat(E2M1, Scale("ue8m0", (1, 64))), "scale groups of 64"),
    "two rows": (WeightFormat(E2M1, Scale("ue8m0", (2, 32))), "scales shared by 2 rows, only by 1 row or by multiples of 64"),
    "bf16 per 16": (WeightFormat(INT4, Scale("bf16", (1, 16))), "scale groups of 16"),
    "bf16 per 48": (WeightFormat(INT4, Scale("bf16", (1, 48))), "scale groups of 48, only of 16, 32, 64 and 128"),
    "bf16 per 256": (WeightFormat(INT4, Scale("bf16", (1, 256))), "scale groups of 256, only of 16, 32, 64 and 128"),
    "blocks of q4": (WeightFormat(INT4, Scale("bf16", (128, 128))), "scales shared by 64 rows or more"),
    "fp32 a row": (WeightFormat(INT4, Scale("fp32", (1, 32))), "fp32 scales"),
    "e4m3 per 32": (WeightFormat(E2M1, Scale("e4m3", (1, 32))), "scale groups of 32"),
    "f8 with bf16 per 32": (WeightFormat(E4M3, Scale("bf16", (1, 32))), "bf16 scales"),
    "int8 with ue8m0": (WeightFormat(INT8, Scale("ue8m0", (1, 32))), "ue8m0 scales"),
    "int8 per 16": (WeightFormat(INT8, Scale("bf16", (1, 16))), "scale groups of 16"),
    "E5M2": (WeightFormat(E5M2, Scale("ue8m0", (1, 32))), "element E5M2"),
    "fp16 times fp16": (WeightFormat(INT4, Scale("fp16", (1, 32)), Scale("fp16", (1, 256))), "fp16 super-scales"),
    "int8 times fp32": (WeightFormat(INT4, Scale("int8", (1, 32)), Scale("fp32", (1, 256))), "fp32 super-scales"),
    "int8 alone": (WeightFormat(INT4, Scale("int8", (1, 32))), "scales without super-scales"),
    "supers of 128": (WeightFormat(INT4, Scale("int8", (1, 32)), Scale("fp16", (1, 128))), "only per 1x256"),
    "supers of rows": (WeightFormat(INT4, Scale("int8", (1, 32)), Scale("fp16", (2, 256))), "only per 1x256"),
    "super-scaled rows": (
        WeightFormat(INT8, Scale("fp32", (128, 128)), Scale("fp16", (1, 256))),
        "super-scales with scales shared by 128 rows",
    ),
    "supers of 16, of q4": (super_scaled(INT4, 16), "scale groups of 16"),
    "supers and minima of 16, of q4": (super_scaled(UINT4, 16, True), "scale groups of 16"),
    "int6 scales of q4": (super_scaled(INT4, 16, kind="int6"), "int6 scales"),
    "fp16 per 256 of q4": (WeightFormat(INT4, Scale("fp16", (1, 256))), "scale groups of 256"),
    "int8 with supers": (super_scaled(INT8, 32), "int8 scales"),
    "int8 with fp16 minima": (minima_of(INT8), "minima"),
    "int6 alone": (WeightFormat(integers(6, 32)), "weights without scales"),
    "int6 with fp16": (WeightFormat(integers(6, 32), Scale("fp16", (1, 32))), "fp16 scales"),
    "int6, supers of 32": (super_scaled(integers(6, 32), 32), "scale groups of 32"),
    "int6, supers of 16 and minima": (super_scaled(integers(6, 0), 16, True), "minima"),
    "int5 with bf16": (WeightFormat(integers(5, 16), Scale("bf16", (1, 32))), "bf16 scales"),
    "int5, fp16 per 64": (WeightFormat(integers(5, 16), Scale("fp16", (1, 64))), "scale groups of 64"),
    "int5, supers without minima": (super_scaled(integers(5, 0), 32), "weights without zero points or minima"),
    "int3, int8 scales": (super_scaled(integers(3, 4), 16), "int8 scales"),
    "int3, supers of 32": (super_scaled(integers(3, 4), 32, kind="int6"), "int6 scales per 1x32, only int6 scales per 1x16"),
    "int3, int6 scales alone": (
        WeightFormat(integers(3, 4), Scale("int6", (1, 16))),
        "int6 scales per 1x16 with super",
    ),
    "int2, supers without minima": (super_scaled(integers(2, 0), 16, kind="uint4"), "weights without zero points or minima"),
    "int2, supers of 32": (
        super_scaled(integers(2, 0), 32, True, "uint4"),
        "uint4 scales per 1x32, only uint4",
    ),
    "int3, int6 minima": (super_scaled(integers(3, 0), 16, True, "int6"), "minima beside int6 scales"),
    "int2, fp16 per 128": (WeightFormat(integers(2, 1), Scale("fp16", (1, 128))), "scale groups of 128"),
    "int2, fp16 per 256 and minima": (
        WeightFormat(integers(2, 1), Scale("fp16", (1, 256)), offset=Minimum(Scale("fp16", (1, 256)))),
        "scale groups of 256, only of 16, 32, 64 and 128 along k, or fp16 ones of 256 alone",
    ),
    "int2, fp16 per 256 of two rows": (WeightFormat(integers(2, 1), Scale("fp16", (2, 256))), "scale groups of 256"),
    "minima of 64": (WeightFormat(UINT4, Scale("fp16", (1, 64)), offset=Minimum(Scale("fp16", (1, 64)))), "minima"),
    "bf16 minima": (WeightFormat(UINT4, Scale("bf16", (1, 32)), offset=Minimum(Scale("bf16", (1, 32)))), "minima"),
    "minima alone": (WeightFormat(UINT4, offset=Minimum(Scale("fp16", (1, 32)))), "minima without scales"),
    "other minima": (
        WeightFormat(UINT4, Scale("fp16", (1, 32)), offset=Minimum(Scale("bf16", (1, 32)))),
        "minima that are stored in another way than the scales",
    ),
    "minima without the super-scales": (
        WeightFormat(UINT4, Scale("int8", (1, 32)), Scale("fp16", (1, 256)), Minimum(Scale("int8", (1, 32)))),
        "minima that are stored in another way than the scales",
    ),
    "zero points alone": (WeightFormat(UINT4, offset=ZeroPoint((1, 32))), "zero points without scales"),
    "other groups": (WeightFormat(UINT4, Scale("fp16", (1, 32)), offset=ZeroPoint((1, 64))), "zero points for other groups"),
    "zero points of -8 to 7": (
        WeightFormat(INT4, Scale("fp16", (1, 32)), offset=ZeroPoint((1, 32))),
        "zero points of other integers",
    ),
    "zero points and ue8m0": (WeightFormat(UINT4, Scale("ue8m0", (1, 32)), offset=ZeroPoint((1, 32))), "zero points"),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_what_no_table_serves(name):
    """A layer is refused before anything is read, and the message names the component."""
    weight_format, lacking = UNSERVED[name]
    for row in isa.ISAS:
        for mode in ("bf16", "int16", "int8"):
            assert not native.load_table(row).serves(weight_format, mode)
    for backend in backends.available():
        expected = (
            rf"no kernels for {re.escape(weight_format.description)}: .*{re.escape(lacking)}.*; no instruction set has them"
        )
        with pytest.raises(UnavailableError, match=expected):
            MoELayer(experts_of(weight_format), backend)


#: What the formats of gate, up and down are, and backend avx2's modes for them.
AVX2_MODES = [
    (MXFP4, ["int16", "bf16", "int8"]),
    *(
        (weight_format, ["int16", "bf16", "int8"] if has_integers(weight_format) else ["bf16"])
        for weight_format in FORMATS.values()
    ),
    (UNEVEN, ["bf16"]),
    ({"gate": MXFP4, "up": int4(64), "down": int4(32)}, ["int16", "bf16", "int8"]),
    ({"gate": B16, "up": MXFP4, "down": MXFP4}, ["bf16"]),
    ({"gate": MXFP4, "up": B16, "down": MXFP4}, ["bf16"]),
    ({"gate": MXFP4, "up": MXFP4, "down": B16}, ["bf16"]),
    ({"gate": MXFP4, "up": MXFP4, "down": UNEVEN}, ["bf16"]),
]


@pytest.mark.parametrize(("formats", "modes"), AVX2_MODES, ids=range(len(AVX2_MODES)))
def test_modes(cpu, formats, modes):
    """Those of a backend for some weights, the one that "auto" means first."""
    cpu(*ALL_FEATURES)
    experts = experts_of(formats)
    for name in backends.names():
        expected = [mode for mode in (*modes, "mxfp8", "mxfp4") if name == "avx2" or mode != "int16"]
        backend = backends.get(name)
        assert modes_of(backend, experts) == expected
        found = backend.lookup(experts)
        assert (found.activations, found.table.name) == (expected[0], backend.isas[expected[0]][0])


def test_a_layer_says_its_mode():
    """On the CPU that this is, with the kernels that it has."""
    for name in backends.available():
        for formats, modes in AVX2_MODES:
            experts = random_experts(np.random.default_rng(1), 1, 64, 64, formats=formats)
            with MoELayer(experts, name) as layer:
                assert layer.activations == (modes[0] if name == "avx2" else "bf16")
            with MoELayer(experts, name, "bf16") as layer:
                assert layer.activations == "bf16"
            for mode in ("int16", "int8"):
                if mode not in modes or (mode == "int16" and name != "avx2"):
                    match = rf"'{name}' .* no activation mode '{mode}' for these weights, only bf16[,. ]"
                    with pytest.raises(UnavailableError, match=match):
                        MoELayer(experts, name, mode)


@pytest.mark.parametrize("mode", ["int16", "int8"])
def test_auto_takes_a_backend_that_has_the_mode_asked_for(mode):
    experts = random_experts(np.random.default_rng(1), 1, 64, 64)
    able = [name for name in backends.available() if mode in modes_of(backends.get(name), experts)]
    if able:
        with MoELayer(experts, activations=mode) as layer:
            assert (layer.backend, layer.activations) == (able[0], mode)
    else:
        with pytest.raises(UnavailableError, match=rf"no backend can be used: .*'{mode}'"):
            MoELayer(experts, activations=mode)


@pytest.mark.parametrize("name", CPUS)
def test_int8_where_an_instruction_set_has_it(cpu, name):
    """Served by its own table, and nobody's choice unless asked for. Cascade Lake and Ice Lake are avx512_vnni here."""
    cpu(*CPUS[name])
    experts = experts_of(MXFP4)
    for usable in BEST[name]:
        served_by = {"avx2": "avx_vnni" if "avx_vnni" in CPUS[name] else "avx2"}.get(
            usable, "avx512_vnni" if "avx512_vnni" in CPUS[name] else None
        )
        backend = backends.get(usable)
        assert ("int8" in modes_of(backend, experts)) == (served_by is not None)
        assert backend.lookup(experts).activations != "int8"
        if served_by:
            assert choose_backend(usable, experts, "int8") == (usable, "asked for by name", "int8")
            assert backend.lookup(experts, "int8").table.name == served_by
    able = [usable for usable in BEST[name] if usable == "avx2" or "avx512_vnni" in CPUS[name]]
    if able:
        assert choose_backend("auto", experts, "int8").name == able[0]


def test_a_mode_that_the_cpu_lacks_says_so(cpu):
    """And not that it is because of the weights; for those that no kernel of the mode serves there is no more to say."""
    cpu(*(feature for feature in ALL_FEATURES if feature != "avx512_vnni"))
    lacks = "it has no activation mode 'int8' for these weights, only bf16, mxfp8, mxfp4"
    for name in ("fp32_lut", "avx512_bf16", "amx"):
        message = rf"'{name}' .*{lacks} \(this CPU lacks avx512_vnni \(needed by avx512_vnni\)\)\. Available"
        with pytest.raises(UnavailableError, match=message):
            choose_backend(name, experts_of(MXFP4), "int8")
    name, why, _ = choose_backend("auto", experts_of(MXFP4), "int8")
    assert name == "avx2"
    assert f"amx: {lacks} (this CPU lacks avx512_vnni (needed by avx512_vnni))" in why
    cpu(*ALL_FEATURES)
    with pytest.raises(UnavailableError, match=rf"'amx' .*{lacks}\. Available"):
        choose_backend("amx", experts_of(B16), "int8")


def test_only_what_a_mode_needs_is_asked_for(cpu, monkeypatch):
    """Not tiles, for int8 on backend amx; and what other instruction sets of a mode need, also where it is refused."""
    cpu(*ALL_FEATURES)
    asked = []
    monkeypatch.setattr(native, "refusal", asked.append)
    experts = experts_of(MXFP4)
    assert choose_backend("auto", experts, "int8").name == "amx"
    assert asked == ["avx512_vnni"]
    assert choose_backend("auto", experts).name == "amx"
    assert asked[1:] == ["amx"]
    monkeypatch.setattr(native, "refusal", lambda isa: "no" if isa == "avx512_vnni" else None)
    assert choose_backend("auto", experts, "int8").name == "avx2"
    assert backends.get("amx").lookup(experts, "int8") == Missing(
        "it has no activation mode 'int8' for these weights, only bf16, mxfp8, mxfp4 (no)"
    )
    assert backends.get("amx").lookup(activations="int8") == Missing(
        "it has no activation mode 'int8', only bf16, mxfp8, mxfp4 (no)"
    )
    assert choose_backend("auto", experts).name == "amx"


def test_a_mode_whose_instruction_set_was_not_compiled(cpu, uncompiled):
    cpu(*ALL_FEATURES)
    uncompiled("avx512_vnni", "avx_vnni")
    experts = experts_of(MXFP4)
    assert "(avx512_vnni was not compiled into this build" in backends.get("fp32_lut").lookup(experts, "int8").reason
    assert choose_backend("auto", experts, "int8").name == "avx2"
    assert backends.get("avx2").lookup(experts, "int8").table.name == "avx2"
    assert modes_of(backends.get("fp32_lut"), experts) == ["bf16", "mxfp8", "mxfp4"]
    assert set(backends.available()) == set(backends.names())


def test_auto_never_means_int8(cpu):
    """Wherever it stands, and if there is nothing else."""
    cpu(*ALL_FEATURES)
    experts = experts_of(MXFP4)
    first = native.NativeBackend({"int8": ("avx2",), "bf16": ("avx2",)})
    assert first.lookup(experts).activations == first.lookup().activations == "bf16"
    assert first.lookup(experts, "int8").activations == "int8"
    alone = native.NativeBackend({"int8": ("avx512_vnni",), "bf16": ("avx512_vnni",)})  # which has none for bf16
    assert alone.lookup(experts) == Missing('it has no activation mode that "auto" may mean for these weights, only int8')
    assert alone.lookup(experts, "int8").activations == "int8"
    assert select({"int8": Found("int8")}, None, "auto") == Missing('it has no activation mode that "auto" may mean, only int8')
    assert select({"int8": Found("int8"), "bf16": Found("bf16")}, None, "auto") == Found("bf16")


def test_weights_that_no_kernel_serves(cpu):
    cpu(*ALL_FEATURES)
    for weight_format in (
        WeightFormat(MXFP4.element, Scale("ue8m0", (1, 16))),
        WeightFormat(MXFP4.element, Scale("bf16", (1, 2 * GROUPS[-1]))),
    ):
        experts = experts_of({"gate": MXFP4, "up": weight_format, "down": MXFP4})
        for name in backends.ranked():
            assert modes_of(backends.get(name), experts) == []
            message = rf"'{name}' .* it has no kernels for .*{weight_format.description}"
            with pytest.raises(UnavailableError, match=message):
                choose_backend(name, experts)
        with pytest.raises(UnavailableError, match="no backend can be used"):
            choose_backend("auto", experts)
