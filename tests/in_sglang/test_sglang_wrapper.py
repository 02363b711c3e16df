"""SGLang's own layer for experts on GPU and CPU, upstream's or the fork's, unchanged, on ktmoe: every --kt-method."""

from __future__ import annotations

import numpy as np
import pytest
from sglang_checkpoints import WRITERS, experts
from sglang_wheel import EXPERTS, LAYERS, Layer, batch

from ktmoe import GatedActivation
from ktmoe.compat.methods import MISSING, SERVED
from ktmoe.errors import CheckpointError, FormatError, InputError, UnavailableError

#: The fork gives a limit to these alone, and no limit to the others.
CLAMPED = ("MXFP4", "MXFP8")


@pytest.fixture
def layers(wheel, checkpoint):
    """Makes layers, which are closed in the end. kt_num_gpu_experts: upstream has the first ones on the GPU, the fork any."""
    made = []

    def make(method, numbers=range(LAYERS), kt_num_gpu_experts=3, seed=1, of=None, **options):
        rng = np.random.default_rng(seed)
        for number in numbers:
            slots = rng.permutation(EXPERTS)
            on_gpu = np.arange(EXPERTS) < kt_num_gpu_experts
            if wheel.fork:
                on_gpu = rng.permutation(on_gpu)
            folder = checkpoint(of or method)
            found = experts(folder, of or method, number).take(slots)
            if wheel.fork and method not in CLAMPED:
                found = found.with_activation(GatedActivation())
            made.append(Layer(wheel, number, found, on_gpu, slots, method=method, weight_path=str(folder), **options))
        return made

    yield make
    for layer in made:
        layer.close()


def run(layers, tokens: int, seed=2) -> None:
    """A pass through all layers."""
    rng, before = np.random.default_rng(seed), None
    for layer in layers:
        x, ids, weights = batch(rng, tokens)
        y = layer.apply(x, ids, weights)
        before = layer.check(x, ids, weights, y.astype(np.float64), before)


@pytest.mark.smoke
@pytest.mark.parametrize("method", SERVED)
def test_a_method(layers, method):
    """Prefill and decode, from a checkpoint whose experts are in other slots."""
    made = layers(method, numbers=(1,))
    for tokens in (17, 1, 2):
        run(made, tokens)


def test_every_method_has_a_checkpoint():
    assert WRITERS.keys() == SERVED.keys()


@pytest.mark.smoke("one")
@pytest.mark.parametrize("method", ["MXFP4", "RAWINT4"])
@pytest.mark.parametrize("deferred", [1, 2])
def test_experts_that_are_deferred(layers, method, deferred):
    """To the next layer; the last one defers none."""
    made = layers(method, max_deferred_experts_per_token=deferred)
    for tokens in (5, 1, 1, 2):
        run(made, tokens, seed=tokens)


@pytest.mark.parametrize("number", [0, EXPERTS])
def test_all_experts_on_one_side(layers, number):
    made = layers("MXFP4", kt_num_gpu_experts=number)
    run(made, 3)


@pytest.mark.parametrize("method", MISSING)
def test_a_method_that_is_not_served(layers, method):
    with pytest.raises(
        UnavailableError, match=rf"^method '{method}': .*; what works in mode 'inference' is method BF16, MXFP4"
    ):
        layers(method, of="BF16")


def test_no_such_method(layers):
    with pytest.raises(InputError, match=r"^method must be one of AMXINT4, .* in mode 'inference', found 'int4'$"):
        layers("int4", of="BF16")


def test_another_checkpoint_than_the_method_says(layers):
    with pytest.raises(FormatError, match=r"method 'FP8' expects E4M3 with a scale per 128 x 128, found BF16 \(gate\)$"):
        layers("FP8", of="BF16")


def test_no_checkpoint(wheel, checkpoint, tmp_path):
    """The folder's name is in the message."""
    found = experts(checkpoint("BF16"), "BF16", 0)
    with pytest.raises(CheckpointError, match=f"^{tmp_path}/none: expected a folder, .*, found nothing of that name$"):
        Layer(wheel, 0, found, np.arange(EXPERTS) < 2, np.arange(EXPERTS), method="BF16", weight_path=str(tmp_path / "none"))
