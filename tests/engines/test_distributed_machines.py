"""Distributed layers on two machines, which are network namespaces of this one with a slow network between them."""

import distributed_layers as given
import numpy as np
import processes
import pytest
from helpers import bits

from bench.namespaces import Machines, UnavailableError
from ktmoe.distributed import Alone, DistributedLayer, Distribution


@pytest.fixture
def machines():
    try:
        with Machines(2, "1gbit") as made:
            yield made
    except UnavailableError as error:
        pytest.skip(f"there can be no network namespaces here: {error}")


@pytest.mark.smoke("all")
@pytest.mark.parametrize("communicator", ["gloo", "mpi"])
def test_layers(machines, communicator, tmp_path):
    """mpiexec starts the second rank by what stands for ssh."""
    found = processes.run(2, communicator, "layers", machines=machines, folder=tmp_path)
    experts = given.made()
    for at, (cut, count) in enumerate(((1, 1), (1, 30), (2, 1), (2, 30))):
        with DistributedLayer(experts, Distribution(Alone(), cut=cut), activations="bf16") as layer:
            expected = bits(layer.forward(*given.batch_of(experts, count)))
        for rank in range(2):
            np.testing.assert_array_equal(found[rank][3 * at], expected)
            np.testing.assert_array_equal(np.reshape(found[rank][3 * at + 2], (-1, given.HIDDEN)), expected[rank::2])


def test_a_machine_whose_processes_die(machines):
    ranks = processes.start(2, "gloo", "lost", "SIGWINCH", machines=machines)  # a signal that does nothing
    assert "calling" in ranks[0].stdout.readline()
    machines.kill(1)
    (seconds, error), _ = processes.found(ranks)[0]
    assert seconds < 10
    assert error.startswith("RankError: rank 0 of 2: another rank is gone, or did not answer within 60 s: ")
