"""ktmoe.training.Training: what it takes, gives and refuses. tests/test_backward.py has its numbers for all formats."""

from __future__ import annotations

import copy

import numpy as np
import pytest
from helpers import BF16, random_batch, random_experts, same_bits

from ktmoe import MoELayer, backends
from ktmoe.backends.base import Backend, Packed
from ktmoe.backends.choice import Found
from ktmoe.errors import ClosedError, InputError, UnavailableError
from ktmoe.experts import PROJECTIONS
from ktmoe.reference.gradients import ReferenceTraining
from ktmoe.training import Lora, SavedStack, Training, saved_nbytes

EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, TOP_K, RANK = 6, 96, 64, 13, 3, 4
#: Of norms, beside float64 without roundings: x, h and the gradients of y, g and u are rounded to bfloat16, by 2^-9 each.
NEAR = 2.0**-6


@pytest.fixture(scope="module")
def weights():
    return random_experts(np.random.default_rng(1), EXPERTS, HIDDEN, INTERMEDIATE, biases=True)


@pytest.fixture(scope="module")
def layer(weights):
    with MoELayer(weights, activations="bf16") as layer:
        yield layer


@pytest.fixture
def lora(weights):
    return adapter(weights.spec)


def adapter(spec, projections=PROJECTIONS, rank=RANK, seed=2):
    """With a B that is not zero, which Lora.initial() has."""
    lora, rng = Lora.initial(spec, rank, 8, projections, seed), np.random.default_rng(seed)
    for _, b in lora.pairs.values():
        b[...] = rng.standard_normal(b.shape) / 4
    return lora


def batch(weights, tokens=TOKENS, dtype=BF16, seed=3):
    """Some ids are of no expert."""
    x, ids, router = random_batch(np.random.default_rng(seed), weights, tokens, TOP_K, dtype)
    ids[::5, 0] = -1
    return x, ids, router


def of_y(weights, tokens=TOKENS, dtype=BF16):
    return np.random.default_rng(4).standard_normal((tokens, weights.hidden)).astype(dtype)


def arrays_of(gradients):
    return {"x": gradients.x, "weights": gradients.weights} | {
        f"{p}.{name}": array for p, pair in (gradients.lora or {}).items() for name, array in zip("ab", pair, strict=True)
    }


def same(found, expected):
    found, expected = arrays_of(found), arrays_of(expected)
    return found.keys() == expected.keys() and all(same_bits(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [BF16, np.float32])
@pytest.mark.parametrize("projections", [PROJECTIONS, ("up",)], ids="-".join)
def test_beside_float64(layer, weights, projections, dtype):
    """Both passes, without roundings; and of every kind of array."""
    lora, arguments, grad_y = adapter(weights.spec, projections), batch(weights, dtype=dtype), of_y(weights)
    training, reference = Training(layer), ReferenceTraining(weights)
    y, saved = training.forward(*arguments, lora)
    expected_y, of_reference = reference.forward(*arguments, lora)
    found, expected = training.backward(saved, grad_y, lora), reference.backward(of_reference, grad_y, lora)
    assert (y.dtype, found.x.dtype, found.weights.dtype) == (dtype, dtype, np.float32)
    assert set(found.lora) == set(projections)
    for name, one in (arrays_of(expected) | {"y": expected_y}).items():
        own = (arrays_of(found) | {"y": y})[name].astype(np.float64)
        assert np.linalg.norm(own - one) <= NEAR * np.linalg.norm(one), name
    unused = [expert for expert in range(EXPERTS) if expert not in arguments[1]]
    assert not any(array[unused].any() for pair in found.lora.values() for array in pair)


def test_kinds_of_arrays(layer, weights, lora):
    """uint16 that holds bfloat16 bits gives that back; gradients of y may be of another kind than x."""
    training, (x, ids, router), grad_y = Training(layer), batch(weights), of_y(weights)
    y, saved = training.forward(x, ids, router, lora)
    expected = training.backward(saved, grad_y, lora)
    bits_y, of_bits = training.forward(x.view(np.uint16), ids.astype(np.int32), router, lora)
    assert bits_y.dtype == np.uint16
    assert same_bits(bits_y, y.view(np.uint16))
    found = training.backward(of_bits, grad_y.astype(np.float32), lora)
    assert found.x.dtype == np.uint16
    assert same_bits(found.x, expected.x.view(np.uint16))
    strided = training.backward(saved, np.stack([grad_y] * 2, 2)[:, :, 1], lora)
    assert same(strided, expected)


@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_without_an_adapter_it_is_the_layer(layer, weights, dtype):
    arguments = batch(weights, dtype=dtype)
    expected = layer.forward(*arguments)
    for recompute in (False, True):
        y, saved = Training(layer, recompute).forward(*arguments)
        assert same_bits(y, expected)
        gradients = Training(layer).backward(saved, of_y(weights))
        assert gradients.lora is None
        assert gradients.x.any()
    y, saved = Training(layer).forward(*arguments, save=False)
    assert same_bits(y, expected)
    assert saved is None


def test_out(layer, weights, lora):
    training, arguments = Training(layer), batch(weights)
    expected, _ = training.forward(*arguments, lora)
    out = np.full_like(expected, np.nan)
    assert training.forward(*arguments, lora, out=out)[0] is out
    assert same_bits(out, expected)
    x, ids, router = (array.copy() for array in arguments)
    y, saved = training.forward(x, ids, router, lora, out=x)
    assert y is x
    assert same_bits(x, expected)
    assert same(
        training.backward(saved, of_y(weights), lora),
        training.backward(training.forward(*arguments, lora)[1], of_y(weights), lora),
    )
    with pytest.raises(InputError, match="out must be of x's kind"):
        training.forward(*arguments, lora, out=np.empty(out.shape, np.float32))


@pytest.mark.parametrize("recompute", [False, True])
def test_what_is_saved(layer, weights, lora, recompute):
    """Copies, so that a caller may write over its arrays; of the stated size; for one backward pass or more."""
    training, (x, ids, router) = Training(layer, recompute), batch(weights)
    y, saved = training.forward(x, ids, router, lora)
    sizes = {"num_experts": EXPERTS, "hidden": HIDDEN, "intermediate": INTERMEDIATE, "rank": RANK, "recompute": recompute}
    assert saved.nbytes == saved_nbytes(TOKENS, TOP_K, **sizes)
    first = training.backward(saved, of_y(weights), lora)
    x[...], ids[...], router[...] = 0, 0, 0
    assert same(training.backward(saved, of_y(weights), lora), first)
    assert same_bits(training.forward(*batch(weights), lora)[0], y)


def test_recomputing_has_the_same_bits(layer, weights, lora):
    passes = Training(layer), Training(layer, recompute=True)
    found = [each.backward(each.forward(*batch(weights), lora)[1], of_y(weights), lora) for each in passes]
    assert same(*found)


def test_a_stack_of_passes(layer, weights, lora):
    training, stack = Training(layer), SavedStack(2)
    for seed in (5, 6):
        stack.push(training.forward(*batch(weights, seed=seed), lora)[1])
    for seed in (6, 5):
        _, saved = training.forward(*batch(weights, seed=seed), lora)
        assert same(training.backward(stack.pop(), of_y(weights), lora), training.backward(saved, of_y(weights), lora))


def test_gradients_into_arrays(layer, weights, lora):
    """Written over, or added to, and scaled; nothing else of the gradients is scaled."""
    training = Training(layer)
    _, saved = training.forward(*batch(weights), lora)
    plain = training.backward(saved, of_y(weights), lora)
    into = {p: tuple(np.full(array.shape, np.nan, np.float32) for array in pair) for p, pair in lora.pairs.items()}
    written = training.backward(saved, of_y(weights), lora, into=into)
    assert all(written.lora[p][i] is into[p][i] for p in into for i in range(2))
    assert same(written, plain)
    added = training.backward(saved, of_y(weights), lora, into=into, add=True, scale=2)
    assert same_bits(added.x, plain.x)
    assert same_bits(added.weights, plain.weights)
    for projection, pair in plain.lora.items():
        for array, own in zip(pair, into[projection], strict=True):
            np.testing.assert_allclose(own, 3 * array, rtol=2**-20, atol=2**-20 * abs(array).max())


def test_what_is_wanted(layer, weights, lora):
    training = Training(layer)
    _, saved = training.forward(*batch(weights), lora)
    plain = arrays_of(training.backward(saved, of_y(weights), lora))
    for wanted in ([], ["x"], ["weights"], ["lora"], ["lora", "x"]):
        found = training.backward(saved, of_y(weights), lora, wanted=wanted)
        assert [name for name in ("x", "weights", "lora") if getattr(found, name) is not None] == sorted(wanted)[::-1]
        assert all(same_bits(array, plain[name]) for name, array in arrays_of(found).items() if array is not None)


def test_an_adapter_is_read_in_each_call(layer, weights, lora):
    """What changes in place between two steps counts."""
    training, arguments = Training(layer), batch(weights)
    lora.pairs["down"][1][...] *= 2
    y, _ = training.forward(*arguments, lora)
    fresh = Lora({p: tuple(array.copy() for array in pair) for p, pair in lora.pairs.items()}, lora.alpha)
    assert same_bits(training.forward(*arguments, fresh)[0], y)


def test_a_mask_counts_from_the_forward_pass(layer, weights, lora):
    training, (x, ids, router) = Training(layer), batch(weights)
    layer.expert_mask[1] = False
    try:
        y, saved = training.forward(x, ids, router, lora)
    finally:
        layer.expert_mask[1] = True
    other, of_other = training.forward(x, np.where(ids == 1, -1, ids), router, lora)
    assert same_bits(y, other)
    found = training.backward(saved, of_y(weights), lora)
    assert same(found, training.backward(of_other, of_y(weights), lora))
    assert not found.weights[(ids == 1) | (ids < 0)].any()


@pytest.mark.parametrize(("tokens", "top_k"), [(0, TOP_K), (4, 0)])
def test_nothing_to_compute(layer, weights, lora, tokens, top_k):
    x, ids, router = (array[:, : array.shape[1] if i == 0 else top_k] for i, array in enumerate(batch(weights, tokens)))
    training = Training(layer)
    y, saved = training.forward(x, ids, router, lora)
    assert y.shape == (tokens, HIDDEN)
    assert not y.astype(np.float32).any()
    into = {p: tuple(np.ones(array.shape, np.float32) for array in pair) for p, pair in lora.pairs.items()}
    found = training.backward(saved, of_y(weights, tokens), lora, into=into, add=True)
    assert all((array == 1).all() for pair in into.values() for array in pair)
    assert not found.x.astype(np.float32).any()
    training.backward(saved, of_y(weights, tokens), lora, into=into)
    assert not any(array.any() for pair in into.values() for array in pair)


def test_a_copy_shares_the_layer(layer):
    training = Training(layer)
    assert copy.deepcopy(training) is training


@pytest.mark.parametrize("mode", ["int16", "int8", "mxfp8", "mxfp8/mxfp4", "bf16/mxfp4"])
def test_modes_that_round(weights, mode):
    name = next(name for name in backends.available() if isinstance(backends.get(name).lookup(weights, mode), Found))
    with (
        MoELayer(weights, name, mode) as layer,
        pytest.raises(InputError, match=f"needs activations='bf16', found '{mode}', which rounds more"),
    ):
        Training(layer)


class Inference(Backend):
    """A plugin's, that has no training."""

    modes = ("bf16",)

    def lookup(self, experts=None, activations="auto"):
        return backends.get("fp32_lut").lookup(experts, activations)

    def claim(self, experts=None, activations="auto"):
        return backends.get("fp32_lut").claim(experts, activations)

    def pack(self, experts, plan, progress=None):
        packed = backends.get("fp32_lut").pack(experts, plan, progress)

        class Untrained(Packed):
            rounding, nbytes = packed.rounding, packed.nbytes
            forward, close = packed.forward, packed.close

        return Untrained()


def test_a_backend_without_training(weights):
    backends.register("inference", Inference())
    try:
        with (
            MoELayer(weights, "inference") as layer,
            pytest.raises(UnavailableError, match="experts: backend 'inference' has no training"),
        ):
            Training(layer)
    finally:
        backends.unregister("inference")


def test_closed_layers(weights, lora):
    layer = MoELayer(weights, activations="bf16")
    training, arguments = Training(layer), batch(weights)
    _, saved = training.forward(*arguments, lora)
    layer.close()
    for call in (
        lambda: training.forward(*arguments, lora),
        lambda: training.backward(saved, of_y(weights), lora),
        lambda: Training(layer),
    ):
        with pytest.raises(ClosedError, match=r"experts: (forward|backward|training) after close\(\)"):
            call()


def test_what_is_refused(layer, weights, lora):
    with pytest.raises(InputError, match="layer must be a MoELayer, found str"):
        Training("layer")
    training, (x, ids, router), grad_y = Training(layer), batch(weights), of_y(weights)
    wider = random_experts(np.random.default_rng(1), EXPERTS, HIDDEN, INTERMEDIATE + 32)
    double = Lora({"up": tuple(array.astype(np.float64) for array in lora.pairs["up"])}, 1)
    for arguments, message in (
        ((x[:, 1:], ids, router, lora), r"x must have shape \[any, 96\], found \[13, 95\]"),
        ((x, ids.astype(float), router, lora), "expert_ids must be integers, found float64"),
        ((x, ids, router[:, :2], lora), r"expert_weights must have shape \[13, 3\]"),
        ((x, ids, router, lora.pairs), "lora must be a Lora or None, found dict"),
        ((x, ids, router, adapter(wider.spec)), r"gate's b must have shape \[6, 64, 4\], found \[6, 96, 4\]"),
        ((x, ids, router, double), "lora must be of float32 or bfloat16, found float64"),
    ):
        with pytest.raises(InputError, match=message):
            training.forward(*arguments)
    _, saved = training.forward(x, ids, router, lora)
    _, plain = training.forward(x, ids, router)
    targets = {p: tuple(np.zeros(array.shape, np.float32) for array in pair) for p, pair in lora.pairs.items()}

    def changed(projection, *pair):
        return {"lora": lora, "into": targets | {projection: pair}}

    down = targets["down"]
    with MoELayer(weights, activations="bf16") as other:
        _, of_other = Training(other).forward(x, ids, router, lora)
    for given, of, options, message in (
        (None, grad_y, {}, "saved must be of a forward pass of this layer, found None"),
        (of_other, grad_y, {"lora": lora}, "saved must be of a forward pass of this layer, found one of another"),
        (saved, grad_y, {}, "lora must be the adapter of the forward pass, .* found None"),
        (plain, grad_y, {"lora": lora}, "lora must be the adapter of the forward pass, None, found Lora"),
        (saved, grad_y, {"lora": adapter(weights.spec, rank=3)}, "lora must be the adapter of the forward pass"),
        (saved, grad_y[1:], {"lora": lora}, r"grad_y must have shape \[13, 96\], found \[12, 96\]"),
        (saved, grad_y.astype(np.float64), {"lora": lora}, "grad_y must be bfloat16 .* found an array of float64"),
        (saved, grad_y, {"lora": lora, "wanted": ["y"]}, "wanted must be of x, weights, lora, found .*'y'"),
        (saved, grad_y, {"lora": lora, "scale": np.inf}, "scale must be a finite number of float32's range, found inf"),
        (saved, grad_y, {"lora": lora, "scale": 1e39}, "scale must be a finite number of float32's range, found 1e"),
        (saved, grad_y, {"lora": lora, "scale": "a"}, "scale must be a finite number"),
        (saved, grad_y, {"lora": lora, "add": True}, "add needs into"),
        (saved, grad_y, {"lora": lora, "into": targets, "wanted": ["x"]}, "into must be None where no adapter's"),
        (plain, grad_y, {"into": targets}, "into must be None where no adapter's"),
        (saved, grad_y, {"lora": lora, "into": {"up": down}}, r"into must have \(da, db\) for gate, up, down"),
        (saved, grad_y, changed("down", down[0]), r"into: down must be \(da, db\)"),
        (saved, grad_y, changed("down", down[0][1:], down[1]), r"into: down's da must have shape \[6, 4, 64\]"),
        (saved, grad_y, changed("down", down[0], down[1].astype(BF16)), "into: down's db must be float32, found bfloat16"),
        (saved, grad_y, changed("down", down[0][::-1], down[1]), "into: down's da must be C-contiguous, aligned and"),
        (saved, grad_y, changed("down", *lora.pairs["down"]), "into: down's da must not overlap another argument"),
        (saved, grad_y, changed("up", *(array[:] for array in targets["gate"])), "into: up's da must not overlap another"),
        (saved, grad_y, changed("down", [1], down[1]), "into: down's da must be a numpy array or a torch CPU tensor"),
    ):
        with pytest.raises(InputError, match=message):
            training.backward(given, of, **options)
