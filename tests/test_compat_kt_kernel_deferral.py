"""Deferred experts: what KTMoEWrapper gives, layer by layer, against a small model of kt-kernel's rule, in plain Python."""

import gc

import ml_dtypes
import numpy as np
import pytest
from helpers import BF16, same_bits
from kt_wrappers import EXPERTS, TOP_K, batch, wrapper, write

from ktmoe import MoELayer
from ktmoe.compat.deferral import split
from ktmoe.compat.kt_kernel import KTMoEWrapper

pytestmark = pytest.mark.usefixtures("nothing_is_left")

LAYERS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write("MXFP4", tmp_path_factory.mktemp("mxfp4"), layers=LAYERS)


@pytest.fixture(scope="module")
def layers(folder):
    made = [MoELayer.from_checkpoint(folder, layer) for layer in range(LAYERS)]
    yield made
    for layer in made:
        layer.close()


def stack(folder, deferred, indices=range(LAYERS), **more):
    """Wrappers; deferred: of each, or of all."""
    each = deferred if isinstance(deferred, tuple) else (deferred,) * len(indices)
    return [wrapper(folder, layer, max_deferred_experts_per_token=d, **more) for layer, d in zip(indices, each, strict=True)]


def chosen(ids, scores, deferred, skipped):
    """(now, later): sets of (token, slot) that run, by the rule."""
    protected, now, later = set(), set(), set()
    for token in range(len(ids)):
        slots = sorted(range(len(ids[token])), key=lambda slot: (-scores[token][slot], slot))
        protected |= {ids[token][slot] for slot in slots[: max(len(slots) - deferred, 0)]}
    for token in range(len(ids)):
        for slot, expert in enumerate(ids[token]):
            if 0 <= expert < EXPERTS and expert not in skipped:
                (now if expert in protected else later).add((token, slot))
    return now, later


def only(ids, slots):
    kept = np.full_like(ids, -1)
    for place in slots:
        kept[place] = ids[place]
    return kept


class Model:
    """Layers of one forward pass: what each gives, with what the one before deferred."""

    def __init__(self, layers):
        self.layers = layers
        self.deferred = None

    def step(self, layer, case, deferred, skipped=()):
        x, ids, scores = case
        now, later = chosen(ids.tolist(), scores.tolist(), deferred, skipped)
        y = self.layers[layer].forward(x.astype(np.float32), only(ids, now), scores)
        if self.deferred is not None:
            y = y + self.deferred.astype(np.float32)
        self.deferred = self.layers[layer].forward(x, only(ids, later), scores) if later else None
        return y.astype(BF16)


@pytest.mark.parametrize("deferred", [1, 2, 3, 4, 9, (0, 2, 0, 0), (2, 0, 3, 0), (1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 6])
def test_a_pass(folder, layers, deferred, tokens):
    wrappers = stack(folder, deferred)
    each = [w.max_deferred_experts_per_token for w in wrappers]
    each[-1] = 0  # nothing follows the last one
    model, moved = Model(layers), 0
    for turn in range(2):
        for index, w in enumerate(wrappers):
            case = batch(10 * turn + index, tokens)
            expected = model.step(index, case, each[index])
            moved += model.deferred is not None
            assert same_bits(w.forward(*case), expected)
        assert model.deferred is None
    assert moved or not any(each[:-1]) or tokens == 6  # in a larger batch all experts may be protected
    for w in wrappers:
        w.close()


def test_the_rule_moves_something_in_larger_batches(folder, layers):
    """Tokens that agree on what counts most leave others to be deferred."""
    wrappers = stack(folder, (2, 0), (0, 1))
    x, ids, scores = batch(0, 16)
    ids[:] = np.arange(TOP_K)
    scores[:, :2] += 2
    model = Model(layers)
    for index, w in enumerate(wrappers):
        expected = model.step(index, (x, ids, scores), 2 - 2 * index)
        assert (model.deferred is None) == bool(index)
        assert same_bits(w.forward(x, ids, scores), expected)
        w.close()


@pytest.mark.parametrize("seed", range(30))
def test_split(seed):
    rng = np.random.default_rng(seed)
    tokens, top_k = rng.integers(1, 6), rng.integers(1, 7)
    ids = rng.integers(-1, EXPERTS + 1, (tokens, top_k))  # some repeat, some are none
    scores = rng.integers(-1, 3, (tokens, top_k)).astype(np.float32)  # with ties
    on_gpu = rng.random(EXPERTS) < 0.3
    for protected in range(-1, top_k + 2):
        now, later = split(ids, scores, protected, on_gpu)
        wanted = chosen(ids.tolist(), scores.tolist(), top_k - protected, set(np.flatnonzero(on_gpu)))
        assert np.array_equal(now, only(ids, wanted[0]))
        assert (later is None) == (not wanted[1])
        if later is not None:
            assert np.array_equal(later, only(ids, wanted[1]))


def test_experts_on_the_gpu_count_but_are_skipped(folder, layers):
    wrappers = stack(folder, 2, num_gpu_experts=3)
    model = Model(layers)
    for index, w in enumerate(wrappers):
        case = batch(index, 2)
        expected = model.step(index, case, 2 if index < LAYERS - 1 else 0, {0, 1, 2})
        assert same_bits(w.forward(*case), expected)
        w.close()


def test_nothing_is_lost(folder, layers):
    """Over a pass, what all layers give is what they give without deferral, but for rounding; by the last layer's result."""
    wrappers = stack(folder, (3, 0), (0, 1))
    cases = [batch(0, 3), batch(1, 3)]
    deferred = sum(w.forward(*case).astype(np.float64) for w, case in zip(wrappers, cases, strict=True))
    plain = [layer.forward(*case).astype(np.float64) for layer, case in zip(layers, cases, strict=False)]
    # Each term is rounded to bfloat16 once, here and there, and what is deferred once more: half a unit of each magnitude.
    bound = 4 * float(ml_dtypes.finfo(BF16).eps) * (np.abs(plain[0]).max() + np.abs(plain[1]).max())
    assert np.abs(deferred - sum(plain)).max() <= bound
    for w in wrappers:
        w.close()


def test_no_layer_after_the_last_one_loaded(folder, layers):
    """A pipeline's stage, whose caller does not know that it is the last here."""
    (w,) = stack(folder, 3, (1,))
    case = batch()
    for _ in range(2):
        assert same_bits(w.forward(*case), layers[1].forward(*case))
    (successor,) = stack(folder, 0, (2,))
    assert not same_bits(w.forward(*batch(1, 1)), layers[1].forward(*batch(1, 1)))  # now one follows
    successor.close()
    assert same_bits(w.forward(*case), layers[1].forward(*case))
    w.close()


def test_layers_need_not_be_adjacent(folder, layers):
    """Models with dense layers between: the next one loaded takes it."""
    wrappers = stack(folder, 2, (0, 2, 3))
    model = Model(layers)
    for index, w, deferred in zip((0, 2, 3), wrappers, (2, 2, 0), strict=True):
        case = batch(index, 2)
        assert same_bits(w.forward(*case), model.step(index, case, deferred))
        w.close()


@pytest.mark.parametrize("way", ["the same layer", "an earlier layer", "a later layer", "another batch", "a cleared cache"])
def test_a_pass_that_is_broken_off(folder, layers, way):
    """What it deferred is nobody's."""
    wrappers = stack(folder, 2)
    Model(layers)
    wrappers[0].forward(*batch(0, 2))
    wrappers[1].forward(*batch(1, 2))  # the pending one is for layer 2, for 2 tokens
    index, tokens = {"the same layer": (1, 2), "an earlier layer": (0, 2), "a later layer": (3, 2)}.get(way, (2, 2))
    if way == "another batch":
        tokens = 3
    if way == "a cleared cache":
        KTMoEWrapper.clear_buffer_cache()
    case = batch(7, tokens)
    fresh = Model(layers)
    assert same_bits(wrappers[index].forward(*case), fresh.step(index, case, 2 if index < LAYERS - 1 else 0))
    if index < LAYERS - 1:  # and the pass that began goes on
        case = batch(8, tokens)
        following = fresh.step(index + 1, case, 2 if index + 1 < LAYERS - 1 else 0)
        assert same_bits(wrappers[index + 1].forward(*case), following)
    for w in wrappers:
        w.close()


def test_it_is_taken_once(folder, layers):
    first, second = stack(folder, (2, 0), (0, 1))
    case = batch(0, 2)
    first.forward(*case)
    with_it = second.forward(*case)
    assert same_bits(second.forward(*case), layers[1].forward(*case))
    assert not same_bits(with_it, layers[1].forward(*case))
    first.close()
    second.close()


def test_two_models(folder, layers, tmp_path):
    """Passes of models that run in turns do not mix."""
    other = write("MXFP4", tmp_path, layers=2, seed=5)
    others = [MoELayer.from_checkpoint(other, layer) for layer in range(2)]
    wrappers = [stack(folder, (2, 0), (0, 1)), stack(other, (2, 0), (0, 1))]
    models = [Model(layers), Model(others)]
    for index in range(2):
        for w, model in zip(wrappers, models, strict=True):
            case = batch(index, 2)
            assert same_bits(w[index].forward(*case), model.step(index, case, 2 - 2 * index))
    for layer in (*others, *wrappers[0], *wrappers[1]):
        layer.close()


@pytest.mark.parametrize("captured", [[], [2]])
def test_submit_and_sync(folder, layers, captured):
    """The deferred task of a layer may still run when the next one is submitted; arguments are the caller's again at once."""
    KTMoEWrapper.set_capture_batch_sizes(captured)
    wrappers = stack(folder, 2)
    for turn in range(3):
        model = Model(layers)
        for index, w in enumerate(wrappers):
            x, ids, scores = batch(index + turn, 2)
            expected = model.step(index, (x, ids, scores), 2 if index < LAYERS - 1 else 0)
            w.submit_forward(x, ids, scores)
            x[...], ids[...], scores[...] = 1, 0, 0
            assert same_bits(w.sync_forward(x), expected)
    for w in wrappers:
        w.close()


def test_an_error_of_deferred_experts_is_the_next_layers(folder, layers, monkeypatch):
    first, second = stack(folder, (2, 0), (0, 1))
    case, forward, calls = batch(0, 2), MoELayer.forward, []

    def fails_later(*arguments, **named):
        calls.append(arguments)
        if len(calls) == 2:
            raise ZeroDivisionError
        return forward(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(MoELayer, "forward", fails_later)
        first.forward(*case)
        with pytest.raises(ZeroDivisionError):
            second.forward(*case)
    assert same_bits(second.forward(*case), layers[1].forward(*case))
    first.close()
    second.close()


def test_a_wrapper_that_goes_with_something_pending(folder, layers):
    first, second = stack(folder, (2, 0), (0, 1))
    case = batch(0, 2)
    first.forward(*case)
    del first
    gc.collect()
    expected = Model(layers)
    expected.step(0, case, 2)
    assert same_bits(second.forward(*case), expected.step(1, case, 0))  # its task was queued, and counts
    second.close()
