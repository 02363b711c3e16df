"""What data parallel ranks exchange, exactly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from exchanging import SIZES

SCRIPT = Path(__file__).with_name("exchanging.py")
#: The six rows of the sum, of which the last is twice the others.
SUMS = [[258.0]] * 5 + [[516.0]]


@pytest.mark.smoke
def test_ranks_with_unequal_numbers_of_tokens(tmp_path):
    """Rows come in the ranks' order, and sums are rounded once."""
    commands = [[sys.executable, SCRIPT, tmp_path / "store", str(rank)] for rank in range(len(SIZES))]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    found = [json.loads(rank.communicate(timeout=300)[0].splitlines()[-1]) for rank in ranks]
    first = 0
    for rank, each in enumerate(found):
        assert each["dtypes"] == ["torch.bfloat16", "torch.int64", "torch.bfloat16"]
        assert each["values"][0] == [[1.0] * 2, *[[2.0] * 2] * 2, *[[3.0] * 2] * 3]
        assert each["values"][1] == [0, 10, 11, 20, 21, 22]
        assert each["values"][2] == SUMS[first : first + SIZES[rank]]
        first += SIZES[rank]


@pytest.mark.parametrize(
    ("sizes", "rank", "elsewhere"),
    [
        ((2, 1, 1), 1, [0]),  # of all processes, of one host's share of a data parallel rank, of a host's data parallel ranks
        ((8, 4, 1), 1, [4, 5, 6, 7]),
        ((8, 2, 2), 6, [0, 1, 2, 3]),
        ((4, 4, 1), 2, []),
    ],
)
def test_which_processes_are_on_other_hosts(sizes, rank, elsewhere):
    from ktmoe.vllm import hosts  # not before: vLLM warns

    names = ("world_size_across_dp", "local_world_size", "data_parallel_size_local")
    assert hosts.ranks_elsewhere(SimpleNamespace(**dict(zip(names, sizes, strict=True))), rank) == elsewhere
