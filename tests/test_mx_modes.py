"""MX modes: their names, who serves them, the bound of their results, batches."""

import numpy as np
import pytest
from cpus import ALL_FEATURES, experts_of
from helpers import B16, BF16, DEEPSEEK, KINDS, MANY_THREADS, assert_right, random_batch, random_experts, same_bits

from ktmoe import MXFP4, MoELayer, backends, fp8, set_num_threads
from ktmoe._native import core
from ktmoe.backends.base import Missing
from ktmoe.backends.native import NativeBackend
from ktmoe.errors import InputError, UnavailableError
from ktmoe.experts import ROUTER_WEIGHTS
from ktmoe.modes import MODES, mode_of
from ktmoe.quantization import RULES

CEIL_4, EVEN_4, CEIL_8 = RULES["mxfp4", "ceil"], RULES["mxfp4", "even"], RULES["mxfp8", "ceil"]

#: Names of modes: the shortest one, the rules of x and of h, the forms of rows.
NAMES = {
    "bf16": ("bf16", None, None, ("bf16",)),
    "bf16/bf16": ("bf16", None, None, ("bf16",)),
    "int16": ("int16", None, None, ("int16",)),
    "int8": ("int8", None, None, ("int8",)),
    "mxfp4": ("mxfp4", CEIL_4, CEIL_4, ("bf16", "int16", "int8")),
    "mxfp4:ceil": ("mxfp4", CEIL_4, CEIL_4, ("bf16", "int16", "int8")),
    "mxfp4/mxfp4:ceil": ("mxfp4", CEIL_4, CEIL_4, ("bf16", "int16", "int8")),
    "mxfp4:even": ("mxfp4:even", EVEN_4, EVEN_4, ("bf16", "int16", "int8")),
    "mxfp4:even/mxfp4:even": ("mxfp4:even", EVEN_4, EVEN_4, ("bf16", "int16", "int8")),
    "mxfp4/mxfp4:even": ("mxfp4/mxfp4:even", CEIL_4, EVEN_4, ("bf16", "int16", "int8")),
    "mxfp8": ("mxfp8", CEIL_8, CEIL_8, ("bf16",)),
    "mxfp8/mxfp4:even": ("mxfp8/mxfp4:even", CEIL_8, EVEN_4, ("bf16",)),
    "mxfp4:ceil/bf16": ("mxfp4/bf16", CEIL_4, None, ("bf16",)),
    "bf16/mxfp8": ("bf16/mxfp8", None, CEIL_8, ("bf16",)),
}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_name_means(name):
    mode = mode_of(name)
    assert (mode.name, mode.x, mode.h, mode.forms) == NAMES[name]
    assert mode_of(mode.name) == mode


def test_every_rule_of_both_formats_makes_a_mode():
    rules = [rule for rule in RULES.values() if rule.target in ("mxfp4", "mxfp8")]
    assert len(rules) == 12
    for x in rules:
        assert mode_of(f"{x.target}:{x.name}").x is x
        for h in rules:
            mode = mode_of(f"{x.target}:{x.name}/{h.target}:{h.name}")
            assert (mode.x, mode.h) == (x, h)


def test_the_modes_of_lists_have_those_names():
    assert [mode_of(name).name for name in MODES] == list(MODES)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "auto",
        "mxfp6",
        "bf16:ceil",
        "int8/int8",
        "int8/mxfp4",
        "mxfp4/",
        "mxfp4/mxfp4/mxfp4",
        "MXFP4",
        None,
        4,
        ["bf16"],
        np.zeros(2),
    ],
)
def test_a_name_that_is_none(name):
    with pytest.raises(InputError, match=r"activations must be one of bf16, int16, int8, mxfp8, mxfp4, or X/H.*found"):
        mode_of(name)


@pytest.mark.parametrize("name", ["mxfp8:gguf", "mxfp8:", "mxfp4/mxfp8:quark"])
def test_a_rule_that_the_format_does_not_have(name):
    with pytest.raises(InputError, match="rules of mxfp8 are ceil, round, floor, even, compressed-tensors, found"):
        mode_of(name)


# Who serves them


def test_which_form_serves_a_mode(cpu):
    """int8 has E2M1 of both sides exactly, and is taken where it is faster; all else is bf16."""
    cpu(*ALL_FEATURES)
    of_bf16 = {"amx": "amx", "avx512_bf16": "avx512_bf16", "fp32_lut": "avx512f", "avx2": "avx2"}
    of_int8 = {"fp32_lut": "avx512_vnni", "avx2": "avx_vnni"}
    for name in backends.names():
        find = backends.get(name).lookup
        for mode in ("mxfp8", "mxfp4/mxfp8", "mxfp4/bf16", "bf16/mxfp8:even"):
            found = find(experts_of(MXFP4), mode)
            assert (found.activations, found.form, found.table.name) == (mode, "bf16", of_bf16[name])
        for mode in ("mxfp4", "mxfp4:even"):
            found = find(experts_of(MXFP4), mode)
            expected = ("int8", of_int8[name]) if name in of_int8 else ("bf16", of_bf16[name])
            assert (found.form, found.table.name) == expected
            assert find(experts_of(B16), mode).form == "bf16"  # weights for which int8 has no kernel
        assert find(experts_of(MXFP4), "mxfp4/mxfp4:ceil").activations == "mxfp4"
        assert find(experts_of(fp8("fp32", (128, 128))), "mxfp4").form == "bf16"


def test_without_the_cpu_for_int8_it_is_bf16(cpu):
    cpu(*(feature for feature in ALL_FEATURES if "vnni" not in feature))
    forms = {name: backends.get(name).lookup(experts_of(MXFP4), "mxfp4").form for name in backends.names()}
    assert forms == {"amx": "bf16", "avx512_bf16": "bf16", "fp32_lut": "bf16", "avx2": "int8"}


def test_a_backend_of_bf16_alone_has_them(cpu):
    """A plugin's, as every other; and a mode of its own by its own name."""
    cpu(*ALL_FEATURES)
    plain = NativeBackend({"bf16": ("avx2",)})
    assert plain.modes == ("bf16", "mxfp8", "mxfp4")
    assert plain.lookup(experts_of(MXFP4), "mxfp4:even/mxfp8").form == "bf16"
    assert plain.lookup(experts_of(MXFP4)).activations == "bf16"
    own = NativeBackend({"bf16": ("avx2",), "int5": ("avx2",)})
    assert "int5" in own.modes
    none = "it has no activation mode 'int5' for these weights, only bf16, mxfp8, mxfp4"
    assert own.lookup(experts_of(MXFP4), "int5") == Missing(none)  # a name that is no table's form
    assert own.lookup(activations="int5").form == "int5"
    backends.register("own", own)
    try:
        with pytest.raises(UnavailableError, match=f"no backend can be used: .*own: {none}(;|$)"):
            MoELayer(experts_of(MXFP4), activations="int5")
    finally:
        backends.unregister("own")


def test_a_refusal_names_what_there_is():
    experts = experts_of(MXFP4)
    for name in backends.available():
        for mode, what in (
            ("mxfp6", r"activations must be one of .*'mxfp6'"),
            ("mxfp4:odd", r"rules of mxfp4 are ceil, round, floor, even, quark, modelopt, gguf, found 'odd'"),
        ):
            match = rf"'{name}' .*no activation mode '{mode}' for these weights, only .*bf16.* mxfp8, mxfp4 \(.*{what}"
            with pytest.raises(UnavailableError, match=match):
                MoELayer(experts, name, mode)


def test_a_mode_that_is_no_text_is_refused_as_any_other():
    for backend in ("auto", *backends.available()):
        for mode in (["bf16"], {}, None):
            with pytest.raises(UnavailableError, match=r"activations must be one of bf16, .*found"):
                MoELayer(experts_of(MXFP4), backend, mode)


# Results


@pytest.mark.cover("values")
@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "mxfp4:quark", "mxfp8/mxfp4:gguf", "mxfp4:even/bf16", "bf16/mxfp8:floor"])
@pytest.mark.parametrize("weights", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
@pytest.mark.parametrize("shape", [(100, 80), (256, 96)], ids=str)
def test_layers_are_within_the_bound(backend, is_emulated, mode, weights, router_weight, shape):
    """In every form of rows."""
    rng = np.random.default_rng(2)
    experts = random_experts(rng, 3, *shape, biases=True, activation=DEEPSEEK, **weights)
    with MoELayer(experts, backend, mode, router_weight=router_weight) as layer:
        assert layer.activations == mode
        for dtype in (BF16, np.float32):
            x, ids, weights = random_batch(rng, experts, 2 if is_emulated else 9, 2, dtype)
            x[0] *= np.exp2(rng.integers(-9, 9, x.shape[1])).astype(dtype)
            assert_right(layer, experts, x, ids, weights)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8"])
@pytest.mark.parametrize("power", [-126, -110, 60])
def test_x_at_the_ends_of_the_range(backend, mode, power):
    rng = np.random.default_rng(3)
    experts = random_experts(rng, 2, 64, 64, scales=(120, 124))
    x, ids, weights = random_batch(rng, experts, 3, 2, np.float32)
    with MoELayer(experts, backend, mode) as layer:
        assert_right(layer, experts, (x * 2.0**power).astype(np.float32), ids, weights)


@pytest.mark.cover("values")
@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "mxfp4/mxfp8"])
def test_a_batch_changes_no_bit(backend, is_emulated, mode):
    rng = np.random.default_rng(4)
    experts = random_experts(rng, 4, 100, 80, biases=True)
    batch = random_batch(rng, experts, 8 if is_emulated else 30, 3)
    with MoELayer(experts, backend, mode) as layer:
        set_num_threads(1)
        alone = np.concatenate([layer.forward(*(part[token : token + 1] for part in batch)) for token in range(len(batch[0]))])
        for threads, settings in ((1, {}), (2, {"only_many": True}), (MANY_THREADS, {"uneven": 3, "reduce_slots": 0})):
            set_num_threads(threads)
            core.tune(**settings)
            assert same_bits(layer.forward(*batch), alone)
            some = [5, 2, 2, 7]
            assert same_bits(layer.forward(*(part[some] for part in batch)), alone[some])


def test_a_block_that_is_not_finite_stays_with_its_token(backend):
    """NaN for all of its own outputs, in every form."""
    rng = np.random.default_rng(5)
    experts = random_experts(rng, 2, 96, 64)
    x, ids, weights = random_batch(rng, experts, 3, 2)
    for mode in ("mxfp4", "mxfp8"):
        with MoELayer(experts, backend, mode) as layer:
            clean = layer.forward(x, ids, weights)
            for word in (0x7F80, 0x7FC1):
                bits = x.view(np.uint16).copy()
                bits[1, 40] = word
                y = layer.forward(bits.view(BF16), ids, weights)
                assert np.isnan(y[1].astype(float)).all()
                assert same_bits(y[[0, 2]], clean[[0, 2]])
