"""A checkpoint's layers on several ranks."""

import numpy as np
import pytest
from helpers import bits
from loading_models import EXPERTS, LAYERS, batch, write_model
from ranks import Threads, raised

from ktmoe import MoEModel
from ktmoe.distributed import Distribution
from ktmoe.errors import InputError, OutOfMemoryError
from ktmoe.machine import memory


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


def test_layers(folder):
    """Each rank has its part of each layer, and all give what one process gives. Copies are of the layer that they name."""
    shards = EXPERTS  # groups of one expert

    def on(communicator):
        replicas = {1: {0: [1]}} if communicator.size > 1 else {}
        distribution = Distribution(communicator, shards=shards, replicas=replicas)
        with MoEModel.from_checkpoint(folder, distribution=distribution) as model:
            sizes = [model[name].nbytes for name in (0, 1)]
            return sizes, [bits(model[name].forward(*batch(model[name]))) for name in model]

    (alone,) = Threads(1).run(on)
    results = Threads(2).run(on)
    assert not any(raised(results)), raised(results)
    for _, outputs in results:
        for y, expected in zip(outputs, alone[1], strict=True):
            np.testing.assert_array_equal(y, expected)
    whole = alone[0][0]
    assert [sizes for sizes, _ in results] == [[whole / 2, whole / 2], [whole / 2, whole / 2 + whole / EXPERTS]]


def test_memory_is_asked_for_the_own_part(folder, monkeypatch):
    whole = MoEModel.from_checkpoint(folder).nbytes
    monkeypatch.setattr(memory, "available_bytes", lambda: int(whole * 1.2))  # what is read ahead takes half of whole
    with pytest.raises(OutOfMemoryError):
        MoEModel.from_checkpoint(folder)

    def on(communicator):
        distribution = Distribution(communicator, shards=EXPERTS)
        return MoEModel.from_checkpoint(folder, distribution=distribution).loaded

    results = Threads(2).run(on)
    assert not any(raised(results)), raised(results)


def test_an_error_on_one_rank_is_one_on_all(folder):
    def on(communicator):
        layers = [LAYERS + 5] if communicator.rank else None
        return MoEModel.from_checkpoint(folder, layers, distribution=Distribution(communicator, shards=EXPERTS))

    first, second = raised(Threads(2).run(on))
    assert first.startswith("RankError: loading: rank 1 raised MissingTensorError: ")
    assert second.startswith("MissingTensorError: ")


def test_copies_of_a_layer_that_there_is_not(folder):
    with pytest.raises(InputError, match=r"replicas must be of .*, found '1'"):
        MoEModel.from_checkpoint(folder, distribution=Distribution(shards=EXPERTS, replicas={"1": {0: [0]}}))


def test_a_cache_is_refused(folder, tmp_path):
    with pytest.raises(InputError, match="cache must be None with a distribution: a packed cache has whole layers"):
        MoEModel.from_checkpoint(folder, cache=tmp_path, distribution=Distribution())
