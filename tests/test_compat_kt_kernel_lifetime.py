"""KTMoEWrapper on numpy arrays: its errors, buffers, threads, and what close() gives back."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from helpers import BF16, in_child, same_bits
from kt_wrappers import EXPERTS, HIDDEN, INTERMEDIATE, REVERSED, WRITERS, arguments, batch, wrapper

from ktmoe import MoELayer
from ktmoe.compat import weights
from ktmoe.compat.engine import ENGINE
from ktmoe.compat.kt_kernel import KTMoEWrapper
from ktmoe.errors import ClosedError, FormatError, InputError, MissingTensorError

pytestmark = pytest.mark.usefixtures("nothing_is_left")

METHODS = tuple(WRITERS)


# What goes wrong with weights and calls


def test_weights_that_do_not_fit(checkpoint, tmp_path):
    method, folder = checkpoint
    other = METHODS[METHODS.index(method) - 1]
    with pytest.raises(FormatError, match=f"method '{other}' expects .*, found (E2M1 with|INT4 with|BF16)"):
        wrapper(folder, method=other)
    with pytest.raises(InputError, match=r"sizes? must be \(256, 128\) as given, found \(128, 128\)"):
        wrapper(folder, method=method, hidden_size=256)
    with pytest.raises(MissingTensorError):
        wrapper(folder, 9, method=method)
    for physical, message in (
        (np.arange(7), r"must be integers \[8\], one per expert of the layer, found int64 \[7\]"),
        (np.arange(8.0), r"must be integers \[8\].*found float64"),
        (np.full(8, 8), r"must be in \[0, 8\), the checkpoint's experts; found 8"),
        (np.full(8, -1), "must be in .*found -1"),
    ):
        with pytest.raises(InputError, match=f"physical_to_logical_map {message}"):
            wrapper(folder, physical=physical, method=method)
    with pytest.raises(InputError, match="load_weights needs weight_path"):
        wrapper("", method=method)
    assert weights.Lease.leased == {}  # a load that failed keeps nothing


def test_tensors_that_do_not_fit():
    good = np.zeros((EXPERTS, INTERMEDIATE, HIDDEN), BF16)
    w = KTMoEWrapper(**arguments(method="BF16"))
    with pytest.raises(InputError, match="up_proj must be bfloat16, found a float32 array"):
        w.load_weights_from_tensors(good, good.astype(np.float32), good)
    with pytest.raises(FormatError, match="must hold 8 experts, found 7"):
        w.load_weights_from_tensors(good, good[:7], good)
    with pytest.raises(InputError, match=r"method must be one of BF16, AMXINT4, .* found 'MXFP4'"):
        KTMoEWrapper(**arguments()).load_weights_from_tensors(good, good, good)


def test_wrong_calls(folder):
    x, ids, scores = batch()
    with wrapper(folder) as w:
        for call, message in (
            ((x[:, 1:], ids, scores), r"hidden_states must have shape \[tokens, 128\], found \[5, 127\]"),
            ((x[0], ids, scores), r"hidden_states must have shape \[tokens, 128\], found \[128\]"),
            (([0], ids, scores), "hidden_states must be a numpy array or a torch tensor, found list"),
            ((x.astype(int), ids, scores), "hidden_states must be floating-point numbers, found int64"),
            ((x, ids[:4], scores), r"topk_ids must have shape \[5, top_k\], found \[4, 4\]"),
            ((x, ids, scores[:, :3]), r"topk_weights must have shape \[5, top_k\], found \[5, 3\]"),
            ((x, ids.astype(float), scores), "topk_ids must be integers, found float64"),
            ((x, ids, ids), "topk_weights must be floating-point numbers, found int64"),
        ):
            with pytest.raises(InputError, match=message):
                w.forward(*call)
        with pytest.raises(InputError, match="sync_forward needs a submit_forward before it"):
            w.sync_forward(x)
        assert len(ENGINE.pool.last) <= 1  # what failed took no buffers with it
    with pytest.raises(InputError, match=r"load_weights\(\) must come first"):
        KTMoEWrapper(**arguments()).forward(x, ids, scores)


def test_an_error_of_a_task_is_raised_by_sync(folder, monkeypatch):
    x, ids, scores = batch()
    with wrapper(folder) as w:
        expected = w.forward(x, ids, scores)
        with monkeypatch.context() as patch:
            patch.setattr(MoELayer, "forward", lambda *_, **__: 1 / 0)
            w.submit_forward(x, ids, scores)
            with pytest.raises(ZeroDivisionError):
                w.sync_forward(x)
        assert same_bits(w.forward(x, ids, scores), expected)


# Buffers


def test_arguments_may_change_after_submit(folder):
    x, ids, scores = batch()
    with wrapper(folder) as w:
        expected = w.forward(x, ids, scores)
        w.submit_forward(x, ids, scores)
        x[...], ids[...], scores[...] = 0, 0, 0
        assert same_bits(w.sync_forward(x), expected)


def test_results_are_the_callers(folder):
    """Unless their size is captured: then a slot has one."""
    x, ids, scores = batch()
    with wrapper(folder) as w:
        first = w.forward(x, ids, scores)
        kept = first.copy()
        w.forward(np.negative(x), ids, scores)
        assert same_bits(first, kept)


def address(array):
    return array.__array_interface__["data"][0]


def test_captured_sizes_keep_their_buffers(folder):
    KTMoEWrapper.set_capture_batch_sizes([5, 2])
    assert KTMoEWrapper.get_capture_batch_sizes() == [5, 2]
    with wrapper(folder, 0) as even, wrapper(folder, 1) as odd, wrapper(folder, 2) as next_even:
        places = {}
        for turn in range(3):
            for tokens in (5, 2, 7, 3):  # the others come and go
                x, ids, scores = batch(turn, tokens)
                for w in (even, odd, next_even):
                    places.setdefault((tokens, w.layer_idx), set()).add(address(w.forward(x, ids, scores)))
        for tokens in (5, 2):
            assert len(places[tokens, 0]) == len(places[tokens, 1]) == 1
            assert places[tokens, 0] == places[tokens, 2] != places[tokens, 1]
        assert {key.tokens for key in ENGINE.pool.kept} == {5, 2}
        assert {key.tokens for key in ENGINE.pool.last} == {3}
    KTMoEWrapper.clear_buffer_cache()
    assert not ENGINE.pool.kept
    assert not ENGINE.pool.last
    with pytest.raises(InputError, match="capture_bs must be a whole number, 1 or more, found 0"):
        KTMoEWrapper.set_capture_batch_sizes([1, 0])


# Threads


def test_many_threads(folder):
    """forward() from several threads, on one layer and on several; submit and sync beside it."""
    KTMoEWrapper.set_capture_batch_sizes([3])
    layers = [wrapper(folder, layer) for layer in range(3)]
    cases = [(w, batch(seed, tokens)) for seed, tokens in enumerate((1, 3, 3, 6)) for w in layers]
    expected = [w.forward(*case).copy() for w, case in cases]
    barrier = threading.Barrier(4)

    def work(first):
        barrier.wait()
        for turn in range(12):
            which = (first + turn) % len(cases)
            w, case = cases[which]
            if case[0].shape[0] == 3:
                continue  # a captured size's result is overwritten by the next call
            assert same_bits(w.forward(*case), expected[which])

    with ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(work, 3 * number) for number in range(4)]:
            job.result()
    for w in layers:
        w.close()


def test_layers_submitted_before_one_is_asked_for(folder):
    """Of the same slot, too: none overwrites another's buffers."""
    layers = [wrapper(folder, layer) for layer in range(3)]
    cases = [batch(seed) for seed in range(3)]
    expected = [w.forward(*case) for w, case in zip(layers, cases, strict=True)]
    for w, case in zip(layers, cases, strict=True):
        w.submit_forward(*case)
    for w, case, y in zip(layers, cases, expected, strict=True):
        assert same_bits(w.sync_forward(case[0]), y)
        w.close()


def test_the_last_submission_counts(folder):
    """A pass may be broken off between submit and sync."""
    with wrapper(folder) as w:
        w.submit_forward(*batch(1))
        w.submit_forward(*batch(2, 7))
        y = w.sync_forward()
        assert same_bits(y, w.forward(*batch(2, 7)))
        with pytest.raises(InputError, match="needs a submit_forward"):
            w.sync_forward()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_fork(folder):
    """The child has neither the worker nor what it was to do: its passes are its own, and ours go on."""
    first, second = (wrapper(folder, layer, max_deferred_experts_per_token=2 - 2 * layer) for layer in range(2))
    case = batch(0, 2)

    def both(w):
        w.submit_forward(*case)
        return w.forward(*case).tobytes(), w.sync_forward().tobytes()

    alone = both(second)
    first.forward(*case)
    assert in_child(lambda: both(second)) == alone
    with_deferred, after = both(second)[::-1]
    assert after == alone[0] != with_deferred
    first.close()
    second.close()


# What is shared, and given back


def test_one_checkpoint_for_all_layers(folder, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(folder)
    layers = [wrapper(folder, 0), wrapper(link, 1), wrapper(f"{folder}/.", 2)]
    (shared,) = weights.Lease.leased.values()
    layers[0].close()
    layers[1].close()
    assert list(weights.Lease.leased.values()) == [shared]
    layers[2].close()
    layers[2].close()
    assert not weights.Lease.leased
    with pytest.raises(ClosedError):
        shared.checkpoint.info(next(iter(shared.checkpoint.names())))


def test_close(folder):
    x, ids, scores = batch()
    w = wrapper(folder)
    w.submit_forward(x, ids, scores)
    w.close()
    w.close()
    for call in (lambda: w.forward(x, ids, scores), w.load_weights):
        with pytest.raises(ClosedError, match="close"):
            call()
    with pytest.raises(ClosedError, match="close"):
        w.submit_write_weight_scale_to_buffer(1, 0, [1], [1], [1], [1])


def test_loading_again_replaces(folder):
    x, ids, scores = batch()
    with wrapper(folder, physical=REVERSED) as w, MoELayer.from_checkpoint(folder, 0) as layer:
        w.load_weights()
        assert same_bits(w.forward(x, ids, scores), layer.forward(x, ids, scores))
        (shared,) = weights.Lease.leased.values()
        assert shared.leases == 1


def test_a_dropped_wrapper_gives_everything_back(folder):
    w = wrapper(folder)
    w.forward(*batch())
    gone = weakref.ref(w), weakref.ref(w.moe)
    del w
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert not weights.Lease.leased


def test_a_dropped_wrapper_waits_for_nobody(folder):
    """A finalizer runs wherever the garbage collector does: in a thread that has locks which others wait for."""
    w, held, go = wrapper(folder), threading.Event(), threading.Event()

    def hold():
        with ENGINE.lock, weights.Lease.lock:
            held.set()
            assert go.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    gives_up = threading.Timer(10, go.set)
    gives_up.start()
    del w
    gc.collect()
    assert not go.is_set()
    gives_up.cancel()
    assert weights.Lease.leased
    go.set()
    holder.join()
    assert not weights.Lease.leased
    assert not ENGINE.passes.layers


def test_a_dropped_wrapper_changes_nothing_under_its_thread(folder):
    w = wrapper(folder)
    with ENGINE.lock, weights.Lease.lock:
        del w
        gc.collect()
        assert weights.Lease.leased
        assert ENGINE.passes.layers
    assert not weights.Lease.leased
    assert not ENGINE.passes.layers
