"""Distributed layers and models over the real communicators: gloo as torchrun starts it, and MPI."""

import signal
import time

import distributed_layers as given
import numpy as np
import processes
import pytest
import torch
import torch.distributed as dist
from helpers import bits

import ktmoe.transformers
from ktmoe.distributed import Alone, DistributedLayer, Distribution
from ktmoe.distributed.gloo import GlooCommunicator
from ktmoe.errors import InputError


@pytest.mark.smoke
@pytest.mark.parametrize(("communicator", "size"), [("gloo", 2), ("mpi", 2), ("gloo", 3)])
def test_layers(communicator, size):
    """Bits as one process gives them. A rank that raises is an error on all, and they go on."""
    experts, found = given.made(), processes.run(size, communicator, "layers")
    assert found.keys() == set(range(size))
    calls = {rank: iter(said) for rank, said in found.items()}
    for cut in (1, 2):
        for count in (1, 30):
            batch = given.batch_of(experts, count)
            with DistributedLayer(experts, Distribution(Alone(), cut=cut), activations="bf16") as layer:
                expected = bits(layer.forward(*batch))
            for rank, said in calls.items():
                np.testing.assert_array_equal(next(said), expected)
                error = f"InputError: x must have shape [any, {given.HIDDEN}], found [{count}, {given.HIDDEN - (rank or 1)}]"
                assert next(said) == (error if rank else f"RankError: experts: rank 1 raised {error}")
                np.testing.assert_array_equal(np.reshape(next(said), (-1, given.HIDDEN)), expected[rank::size])


@pytest.mark.smoke
def test_a_killed_rank():
    found = processes.run(2, "gloo", "lost", "SIGKILL")
    _, (seconds, first), then = found[0]
    assert seconds < 5
    assert first.startswith("RankError: rank 0 of 2: another rank is gone, or did not answer within 60 s: ")
    assert then == first


def test_a_stopped_rank(monkeypatch):
    """It is noticed after the communicator's timeout."""
    monkeypatch.setenv("TIMEOUT", "3")
    ranks = processes.start(2, "gloo", "lost", "SIGSTOP")
    ranks[0].wait(processes.PATIENCE)
    ranks[1].send_signal(signal.SIGKILL)
    _, (seconds, first), _ = processes.found(ranks)[0]
    assert 2.5 < seconds < 10
    assert first.startswith("RankError: rank 0 of 2: another rank is gone, or did not answer within 3 s: ")


def test_mpiexec_ends_all_when_a_rank_is_killed():
    (mpiexec,) = processes.start(2, "mpi", "lost", "SIGKILL")
    begun = time.monotonic()
    mpiexec.communicate(timeout=processes.PATIENCE)
    assert mpiexec.returncode
    assert time.monotonic() - begun < 30


def test_an_exception_outside_of_ktmoe_ends_all():
    """By mpi4py's own way to start: MPI alone would wait for the others at the end."""
    (mpiexec,) = processes.start(2, "mpi", "outside")
    _, said = mpiexec.communicate(timeout=processes.PATIENCE)
    assert mpiexec.returncode
    assert "ZeroDivisionError" in said


@pytest.mark.smoke
@pytest.mark.parametrize(("name", "source"), [("qwen3_moe", "parameters"), ("gpt-oss MXFP4", "checkpoint")])
def test_text(checkpoint, name, source):
    """Tokens on two ranks are those of one, greedy ones and drawn ones. Each has half of the experts."""
    folder = checkpoint(name)
    found = processes.run(2, "gloo", "text", folder, source)
    model = ktmoe.transformers.load(folder, source=source, distributed=Distribution(Alone()))
    ids = torch.tensor([[1, 7, 5, 9, 3]])
    greedy = model.generate(ids, max_new_tokens=24, pad_token_id=0, do_sample=False)[0].tolist()
    nbytes = sum(module.ktmoe_layer.nbytes for module in model.modules() if hasattr(module, "ktmoe_layer"))
    assert found[0][0] == found[1][0] == greedy
    assert found[0][1] == found[1][1]
    assert found[0][1] != greedy
    assert found[0][2] == found[1][2] == nbytes / 2
    assert found[0][3] == "RankError"
    assert found[1][3] != "RankError"


def test_one_process_exchanges_with_itself(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        communicator, sent = GlooCommunicator(), np.arange(5, dtype=np.uint8)
        (received,) = communicator.exchange([sent], [5])
        np.testing.assert_array_equal(received, sent)
        communicator.close()
    finally:
        dist.destroy_process_group()


def test_nothing_says_which_processes_there_are(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    missing = "WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set: start the processes with torchrun$"
    with pytest.raises(InputError, match=missing):
        GlooCommunicator()
    with pytest.raises(InputError, match="timeout must be a number of seconds above 0, found 0"):
        GlooCommunicator(timeout=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"distributed": Distribution(tokens="own")},
            "distributed must be a Distribution with tokens=.same., found",
        ),
        ({"distributed": 3}, "distributed must be True, None or a Distribution, found 3"),
        ({"distributed": Distribution(), "gpu_experts": 2}, "gpu_experts must be None for a distributed model, found 2"),
        ({"distributed": Distribution(), "cache": "x"}, "cache must be None for a distributed model, found 'x'"),
    ],
)
def test_refused(checkpoint, options, message):
    with pytest.raises(InputError, match=message):
        ktmoe.transformers.load(checkpoint("qwen3_moe"), **options)
