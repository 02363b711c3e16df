"""Distributed layers where something is wrong: on one rank, or with what was asked for."""

import copy
import os
import pickle
import threading

import numpy as np
import pytest
from distributed_layers import EXPERTS, HIDDEN, batch_of, made
from helpers import bits, in_child
from ranks import Threads, raised

from ktmoe import ExpertWeights, MoELayer
from ktmoe.distributed import DistributedLayer, Distribution, Division, together
from ktmoe.distributed.sums import All
from ktmoe.errors import ClosedError, InputError, NotCopyableError
from ktmoe.synthetic import write_qwen3


@pytest.mark.parametrize("tokens", ["same", "own"])
@pytest.mark.parametrize("count", [1, 20])
def test_a_rank_that_raises_tells_the_others(tokens, count):
    """Before and while it computes; all can go on afterwards."""
    experts = made()
    batch = batch_of(experts, count)

    def on(communicator):
        layer = DistributedLayer(experts, Distribution(communicator, tokens=tokens))
        said = []
        x = batch[0] if communicator.rank else batch[0][:, :50]
        try:
            layer.forward(x, *batch[1:])
        except Exception as error:
            said += raised([error])
        real = layer.layers[0].forward
        if communicator.rank == 2:
            layer.layers[0].forward = lambda *_: 1 / 0
        try:
            layer.forward(*batch)
        except Exception as error:
            said += raised([error])
        layer.layers[0].forward = real
        return said, layer.forward(*batch)

    results = Threads(3).run(on)
    input_error = f"InputError: x must have shape [any, {HIDDEN}], found [{count}, 50]"
    division = "ZeroDivisionError: division by zero"
    assert results[0][0] == [input_error, f"RankError: experts: rank 2 raised {division}"]
    assert results[1][0] == [
        f"RankError: experts: rank 0 raised {input_error}",
        f"RankError: experts: rank 2 raised {division}",
    ]
    assert results[2][0] == [f"RankError: experts: rank 0 raised {input_error}", division]
    for _, y in results[1:]:
        np.testing.assert_array_equal(bits(y), bits(results[0][1]))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda x, ids, weights: (x[:-1], ids[:-1], weights[:-1]), "19 tokens where rank {} has 20"),
        (lambda x, ids, weights: (x, ids[:, 1:], weights[:, 1:]), "3 experts a token where rank {} has 4"),
        (lambda x, ids, weights: (x, ids, -weights), "other numbers in x, expert_ids or expert_weights"),
        (lambda x, ids, weights: (x, ids[:, ::-1].copy(), weights), "other numbers in x, expert_ids or expert_weights"),
    ],
)
def test_ranks_with_other_arguments(change, what):
    """Their sums would be of different things: greedy tokens drift apart like this where CPUs or threads differ."""
    experts = made()
    batch = batch_of(experts, 20)

    def on(communicator):
        layer = DistributedLayer(experts, Distribution(communicator))
        return layer.forward(*(batch if communicator.rank == 0 else change(*batch)))

    first, second = raised(Threads(2).run(on))
    assert f'tokens="same" needs the same arguments on all ranks, and rank 1 has {what.format(0)}' in first
    assert 'tokens="same" needs the same arguments on all ranks, and rank 0 has' in second


def test_ranks_that_call_different_layers():
    experts = made()
    others = ExpertWeights(EXPERTS, HIDDEN, experts.intermediate, experts.matrix, experts.formats, name="others")
    batch = batch_of(experts, 1)

    def on(communicator):
        distribution = Distribution(communicator)
        layers = [DistributedLayer(of, distribution) for of in (experts, others)]
        return layers[communicator.rank].forward(*batch)

    first, second = raised(Threads(2).run(on))
    assert first.startswith("RankError: experts: rank 1 calls another layer than rank 0, or has another checkpoint, or a ")
    assert second.startswith("RankError: others: rank 0 calls another layer than rank 1, or ")


@pytest.mark.parametrize("tokens", ["same", "own"])
def test_ranks_that_divide_otherwise(tokens):
    """Their rows would be added in wrong places."""
    experts = made()
    batch = batch_of(experts, 3)

    def on(communicator):
        homes = [0, 0, 0, 0, 1, 1, 1, 1] if communicator.rank else [0, 1] * 4
        distribution = Distribution(communicator, homes=homes, tokens=tokens, replicas={None: {0: [1]}})
        return DistributedLayer(experts, distribution).forward(*batch)

    for said in raised(Threads(2).run(on)):
        assert "or a Distribution with other options" in said


def test_an_error_between_two_messages(monkeypatch):
    """The others would take what comes next for what they wait for, so the communicator is of no more use."""
    experts, group = made(), Threads(2)
    batch = batch_of(experts, 20)
    real = All.run

    def failing(self, parts, tokens):
        if threading.current_thread().name == "rank 1":
            raise MemoryError
        return real(self, parts, tokens)

    monkeypatch.setattr(All, "run", failing)
    monkeypatch.setattr("ranks.PATIENCE", 1)

    def on(communicator):
        threading.current_thread().name = f"rank {communicator.rank}"
        return DistributedLayer(experts, Distribution(communicator)).forward(*batch)

    assert raised(group.run(on)) == ["RankError: a rank did not come", "MemoryError: "]
    assert group.failed == {0, 1}


@pytest.mark.parametrize("tokens", ["same", "own"])
def test_infinities_raise_nowhere(tokens):
    """As in a layer of one process: a rank that raised of them would leave the others alone."""
    experts = made()
    x, ids, weights = batch_of(experts, 20)
    weights[5] = np.array([3e38, -3e38, 3e38, -3e38], np.float32)

    def on(communicator):
        with np.errstate(all="raise"):
            return DistributedLayer(experts, Distribution(communicator, tokens=tokens)).forward(x, ids, weights)

    results = Threads(2).run(on)
    assert not any(raised(results)), raised(results)
    assert not np.isfinite(results[0][5].astype(np.float32)).all()
    assert np.isfinite(results[0][6].astype(np.float32)).all()


def test_other_dtypes_of_y():
    experts = made()
    x, ids, weights = batch_of(experts, 20)

    def on(communicator):
        of_rank = x.astype(np.float32) if communicator.rank else x
        return DistributedLayer(experts, Distribution(communicator)).forward(of_rank, ids, weights)

    first, second = raised(Threads(2).run(on))
    assert "rank 1 has 4 bytes a number of y where rank 0 has 2" in first
    assert "rank 0 has 2 bytes a number of y where rank 1 has 4" in second


def test_a_checkpoint_that_one_rank_cannot_read(tmp_path):
    for name in ("whole", "damaged"):
        write_qwen3(tmp_path / name, num_experts=8, hidden=64, intermediate=64)
    os.truncate(tmp_path / "damaged" / "model.safetensors", 5000)

    def on(communicator):
        folder = tmp_path / ("damaged" if communicator.rank == 1 else "whole")
        return DistributedLayer.from_checkpoint(folder, 0, Distribution(communicator))

    first, second = raised(Threads(2).run(on))
    assert first == f"RankError: layer 0: rank 1 raised {second}"[: len(first)]
    assert second.startswith("CheckpointError: ")


def test_together():
    def on(communicator):
        with together(communicator, "it"):
            if communicator.rank == 1:
                raise KeyError("x")
        return "done"

    told = "RankError: it: rank 1 raised KeyError: 'x'"
    assert raised(Threads(3).run(on)) == [told, "KeyError: 'x'", told]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"shards": 0}, "shards must be 1 to 64, found 0"),
        ({"shards": 65}, "shards must be 1 to 64, found 65"),
        ({"cut": 3}, "cut must divide shards, 8, found 3"),
        ({"cut": 0}, "cut must divide shards, 8, found 0"),
        ({"ranks": 9}, "shards must be at least the number of processes, 9, found 8"),
        ({"num_experts": 7}, "7 experts cannot form 8 groups; shards / cut must be at most their number"),
        ({"replicas": {16: [0]}}, r"replicas must be of experts in \[0, 16\), found 16"),
        ({"homes": [0] * 8}, "homes must name a rank for each of 8 shards, and each of 2 ranks, found .*"),
        ({"homes": [0, 1]}, r"homes must name a rank for each of 8 shards, and each of 2 ranks, found \[0, 1\]"),
        ({"replicas": {0: [2]}}, r"replicas of expert 0 must be on ranks in \[0, 2\), found 2"),
    ],
)
def test_what_cannot_be_divided(given, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        Division(**{"num_experts": EXPERTS, "shards": 8, "cut": 1, "ranks": 2, "replicas": {}} | given)


def test_too_many_pieces():
    with pytest.raises(InputError, match="can be cut at multiples of 32 into 1 to 8 shards, found 16"):
        DistributedLayer(made(), Distribution(shards=16, cut=16))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens": "all"}, r"tokens must be one of \('same', 'own'\), found 'all'"),
        ({"gathered": -1}, "gathered must be 0 to 512, found -1"),
        ({"gathered": 513}, "gathered must be 0 to 512, found 513"),
        ({"gathered": 1.5}, "gathered must be a whole number, found 1.5"),
        ({"shards": "8"}, "shards must be a whole number, found '8'"),
        ({"tokens": ["same"]}, r"tokens must be one of \('same', 'own'\), found \['same'\]"),
    ],
)
def test_options(given, message):
    with pytest.raises(InputError, match=f"^{message}$"):
        Distribution(**given)


def test_life():
    layer = DistributedLayer(made(), Distribution())
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(NotCopyableError, match=r"^experts: a DistributedLayer cannot be copied or pickled"):
            copied(layer)
    assert isinstance(layer.layers[0], MoELayer)
    layer.close()
    layer.close()
    assert layer.layers == ()
    with pytest.raises(ClosedError, match=r"^experts: forward after close"):
        layer.forward(*batch_of(layer.spec, 1))


def test_a_forked_child():
    """It has no connections. A layer of one process goes on in it, even if a thread of the parent was calling it."""
    experts = made()
    batch = batch_of(experts, 1)

    def on(communicator):
        layer = DistributedLayer(experts, Distribution(communicator))

        def in_the_child():
            with pytest.raises(ClosedError, match=r"^experts: forward in a forked child, which has no connection to"):
                layer.forward(*batch)

        in_child(in_the_child)
        return layer.forward(*batch)

    assert not any(raised(Threads(2).run(on)))
    alone = DistributedLayer(experts, Distribution())
    expected = alone.forward(*batch)
    with alone.distribution.lock:
        in_child(lambda: np.testing.assert_array_equal(bits(alone.forward(*batch)), bits(expected)))


def test_packing_that_fails_leaves_nothing():
    experts = made()
    seen = []

    def progress(done, total):
        seen.append((done, total))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        DistributedLayer(experts, Distribution(), progress=progress)
    assert seen == [(experts.nbytes // EXPERTS, experts.nbytes)]
