"""Activation modes of MX formats: their names, who serves them, and that all ways through a layer give the same bits."""

import numpy as np
import pytest
import ways
from cpus import ALL_FEATURES, experts_of
from helpers import B16, BF16, MANY_THREADS, random_batch, random_experts, same_bits

from ktmoe import MXFP4, MoELayer, backends, fp8, set_num_threads
from ktmoe._native import core
from ktmoe.backends.base import Found
from ktmoe.backends.native import NativeBackend
from ktmoe.errors import ClosedError, InputError, UnavailableError
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
    ["", "auto", "mxfp6", "bf16:ceil", "int8/int8", "int8/mxfp4", "mxfp4/", "mxfp4/mxfp4/mxfp4", "MXFP4", None, 4, ["bf16"]],
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
    of_int8 = {"avx512_bf16": "avx512_vnni", "fp32_lut": "avx512_vnni", "avx2": "avx_vnni"}
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
    assert not isinstance(own.lookup(experts_of(MXFP4), "int5"), Found)  # a name that is no table's form
    assert own.lookup(activations="int5").form == "int5"


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


# Bits

SIDES = ("mxfp4", "mxfp8", "mxfp8/mxfp4:even", "mxfp4/bf16", "bf16/mxfp8:compressed-tensors")


@pytest.fixture
def in_its_form(request, backend, monkeypatch):
    """The backend, whose kernels for a mode of E2M1 are those of the form that it is here for."""
    monkeypatch.setattr(backends.get(backend), "forms", (ways.SUBJECTS[request.node.callspec.params["backend"]].activations,))
    return backend


def rounded(rule, bits):
    """What a rule of a mode makes of bits [rows, k]: blocks of 32, the last one padded with zeros."""
    if rule is None:
        return bits
    padded = np.zeros((len(bits), -(-bits.shape[1] // 32) * 32), np.uint16)
    padded[:, : bits.shape[1]] = bits
    return np.ascontiguousarray(rule.round(padded)[:, : bits.shape[1]])


class Stages:
    """Two stages of a layer for a batch, by hand: gate_up(), what its mode makes of h, down()."""

    def __init__(self, layer, x, ids, weights):
        self.packed, self.tokens = layer.packed, len(x)
        self.mask = layer.expert_mask.view(np.uint8)
        self.pairs = np.ascontiguousarray(ids, np.int64), weights, self.mask
        rng = np.random.default_rng(7)
        self.rows = rng.permutation(ids.size + 3)[: ids.size].reshape(ids.shape)
        self.shape = ids.size + 3, layer.intermediate
        self.used = self.rows[
            (ids >= 0) & (ids < layer.num_experts) & layer.expert_mask[np.clip(ids, 0, layer.num_experts - 1)]
        ]

    def gate_up(self, x, **more):
        h = np.full(self.shape, 0xABCD, np.uint16)
        self.packed.gate_up(x, *self.pairs, self.rows, h, **more)
        untouched = np.delete(np.arange(len(h)), self.used)
        assert (h[untouched] == 0xABCD).all()
        h[untouched] = 0x7FC0  # a NaN that nobody may read
        return h

    def down(self, h, like):
        y = np.full((self.tokens, like.shape[1]), 0xAB).astype(like.dtype)
        self.packed.down(h, *self.pairs, self.rows, y)
        return y


@pytest.mark.cover("values")
@pytest.mark.parametrize("router_weight", ROUTER_WEIGHTS)
@pytest.mark.parametrize("mode", SIDES)
@pytest.mark.parametrize("shape", [(96, 160), (70, 98), (32, 64)], ids=str)
@pytest.mark.parametrize(("tokens", "dtype"), [(1, BF16), (9, np.float32), (40, BF16)], ids=str)
def test_the_stages_are_the_layer(in_its_form, router_weight, mode, shape, tokens, dtype):
    """forward(x) is down(round_h(gate_up(x))), bit for bit; where the kernels take bfloat16, so are the stages of a layer that
    rounds nothing, with x and h rounded by hand."""
    rng = np.random.default_rng(tokens)
    experts = random_experts(rng, 5, *shape, biases=True)
    x, ids, weights = random_batch(rng, experts, tokens, 3, dtype)
    ids[::4, 1] = -1
    ids[::5, 2] = 9
    modes = mode_of(mode).block_rules()
    with MoELayer(experts, in_its_form, mode, router_weight=router_weight) as layer:
        layer.expert_mask[3] = False
        y = layer.forward(x, ids, weights)
        own = Stages(layer, x, ids, weights)
        bits = x.view(np.uint16) if dtype == BF16 else x
        h = own.gate_up(bits)
        like = y.view(bits.dtype)
        assert same_bits(own.down(rounded(modes[1], h), like), like)
        by_hand = rounded(modes[0], x.astype(BF16).view(np.uint16))
        if router_weight != "expert_input" or modes[0] is None:
            assert same_bits(own.gate_up(by_hand, rounded=True), h)
        else:
            with pytest.raises(InputError, match="x cannot be rounded already: the layer multiplies it by router weights"):
                own.gate_up(by_hand, rounded=True)
        if router_weight == "expert_input" or backends.get(in_its_form).lookup(experts, mode).form != "bf16":
            return
    with MoELayer(experts, in_its_form, "bf16", router_weight=router_weight) as layer:
        layer.expert_mask[3] = False
        plain = Stages(layer, x, ids, weights)
        assert same_bits(plain.gate_up(by_hand), h)
        assert same_bits(plain.down(rounded(modes[1], h), like), like)


@pytest.mark.cover("values")
@pytest.mark.parametrize("mode", ["bf16", "mxfp4", "mxfp8"])
def test_stages_of_shards_and_chunks(in_its_form, three_nodes, is_emulated, mode):
    rng = np.random.default_rng(3)
    experts = random_experts(rng, 4, 96, 224)
    x, ids, weights = random_batch(rng, experts, 5 if is_emulated else 50, 2)
    rule = mode_of(mode).block_rules()[1]
    with MoELayer(experts, in_its_form, mode, numa_nodes=[1, 0, 2]) as layer:
        y = layer.forward(x, ids, weights).view(np.uint16)
        for settings in ({}, {"scratch_bytes": 1 << 17}, {"reduce_slots": 0}, {"halves": 2}, {"halves": 1, "uneven": 5}):
            core.tune(**settings)
            own = Stages(layer, x, ids, weights)
            assert same_bits(own.down(rounded(rule, own.gate_up(x.view(np.uint16))), y), y)


@pytest.mark.cover("values")
@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "mxfp4/mxfp8"])
def test_a_batch_changes_no_bit(in_its_form, is_emulated, mode):
    rng = np.random.default_rng(4)
    experts = random_experts(rng, 4, 100, 80, biases=True)
    batch = random_batch(rng, experts, 8 if is_emulated else 30, 3)
    with MoELayer(experts, in_its_form, mode) as layer:
        set_num_threads(1)
        alone = np.concatenate([layer.forward(*(part[token : token + 1] for part in batch)) for token in range(len(batch[0]))])
        for threads, settings in ((1, {}), (2, {"only_many": True}), (MANY_THREADS, {"uneven": 3, "reduce_slots": 0})):
            set_num_threads(threads)
            core.tune(**settings)
            assert same_bits(layer.forward(*batch), alone)
            some = [5, 2, 2, 7]
            assert same_bits(layer.forward(*(part[some] for part in batch)), alone[some])


def test_a_block_that_is_not_finite_stays_with_its_token(in_its_form):
    """NaN for all of its own outputs, in every form."""
    rng = np.random.default_rng(5)
    experts = random_experts(rng, 2, 96, 64)
    x, ids, weights = random_batch(rng, experts, 3, 2)
    for mode in ("mxfp4", "mxfp8"):
        with MoELayer(experts, in_its_form, mode) as layer:
            clean = layer.forward(x, ids, weights)
            for word in (0x7F80, 0x7FC1):
                bits = x.view(np.uint16).copy()
                bits[1, 40] = word
                y = layer.forward(bits.view(BF16), ids, weights)
                assert np.isnan(y[1].astype(float)).all()
                assert same_bits(y[[0, 2]], clean[[0, 2]])


# What stages refuse


@pytest.fixture(scope="module")
def layer():
    experts = random_experts(np.random.default_rng(6), 3, 64, 96)
    with MoELayer(experts, "fp32_lut", "mxfp8") as made:
        yield made


def arguments(tokens=2, top_k=2):
    """x, ids, weights, mask, rows, h of gate_up()."""
    ids, rows = np.zeros((tokens, top_k), np.int64), np.arange(tokens * top_k, dtype=np.uint32).reshape(tokens, top_k)
    weights, h = np.ones((tokens, top_k), np.float32), np.zeros((tokens * top_k, 96), np.uint16)
    return {
        "x": np.zeros((tokens, 64), np.uint16),
        "ids": ids,
        "weights": weights,
        "mask": np.ones(3, np.uint8),
        "rows": rows,
        "h": h,
    }


WRONG = {
    "x": (np.zeros((3, 64), np.uint16), r"x must be \[2, 64\], found \[3, 64\]"),
    "weights": (np.zeros((2, 1), np.float32), r"weights and mask must be \[2, 2\] and \[3\], found \[2, 1\] and \[3\]"),
    "mask": (np.zeros(4, np.uint8), r"weights and mask must be \[2, 2\] and \[3\], found \[2, 2\] and \[4\]"),
    "h": (np.zeros((4, 64), np.uint16), r"h must be \[rows, 96\], found \[4, 64\]"),
    "rows of other shape": (np.zeros((2, 3), int), r"rows must be integers \[2, 2\], found int64 \[2, 3\]"),
    "rows of other dtype": (np.zeros((2, 2)), r"rows must be integers \[2, 2\], found float64"),
    "rows beyond h": (np.array([[0, 1], [2, 4]]), r"rows\[1, 1\] must be a row of h, of 4, found 4"),
    "rows before h": (np.array([[0, -1], [2, 3]]), r"rows\[0, 1\] must be a row of h, of 4, found -1"),
    "rows with one twice": (np.array([[0, 1], [2, 1]]), "rows must be distinct, found 1 more than once"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_a_stage_refuses(layer, name):
    wrong, message = WRONG[name]
    args = arguments() | {name.partition(" ")[0]: wrong}
    with pytest.raises(InputError, match=message):
        layer.packed.gate_up(*args.values())
    out = np.zeros((2, 64), np.uint16)
    if name not in ("x", "rows with one twice"):
        with pytest.raises(InputError, match=message):
            layer.packed.down(*(args[part] for part in ("h", "ids", "weights", "mask", "rows")), out)


def test_rows_of_no_expert_are_not_looked_at(layer):
    args = arguments()
    args["ids"][:] = [[-1, 3], [0, 1]]
    args["rows"] = np.array([[-5, 99], [0, 3]])
    layer.packed.gate_up(*args.values())


def test_stages_without_pairs(layer):
    """No tokens, no slots; y is zeros."""
    for tokens, top_k in ((0, 2), (2, 0), (0, 0)):
        args = arguments(tokens, top_k)
        layer.packed.gate_up(*args.values())
        y = np.ones((tokens, 64), np.float32)
        layer.packed.down(*(args[part] for part in ("h", "ids", "weights", "mask", "rows")), y)
        assert not y.any()


def test_stages_of_a_closed_layer():
    with MoELayer(random_experts(np.random.default_rng(6), 3, 64, 96), "fp32_lut") as closed:
        packed = closed.packed
    for args in (arguments(), arguments(0)):
        with pytest.raises(ClosedError):
            packed.gate_up(*args.values())
        with pytest.raises(ClosedError):
            packed.down(
                *(args[part] for part in ("h", "ids", "weights", "mask", "rows")), np.zeros((len(args["x"]), 64), np.uint16)
            )
