"""Where pages of a packed cache lie. Of a file on a disk, each shard's threads read their own arena into their node's memory,
unless somebody has read it before; a file that lies in memory stays where it was written."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from nodes_of_pages import nodes_by_shard

from ktmoe import MoELayer, synthetic
from ktmoe._native import core
from ktmoe.cache.packing import pack

EXPERTS = 4
#: A disk that tools/numa_guest.py makes.
DISK = Path("/tmp/disk")
#: Bytes from an arena's beginning on that whoever reads the end of the arena before it may read, too: Linux reads ahead.
READ_AHEAD = 2 * core.HUGE_PAGE_BYTES


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    synthetic.write_deepseek_v4(folder, layers=1, num_experts=EXPERTS, hidden=512, intermediate=10240)
    return folder


@pytest.fixture
def on_disk(guest, model, tmp_path, several_nodes):
    """A cache for all nodes. `ktmoe pack` lets the page cache forget what it has written."""
    folder = DISK / tmp_path.name
    pack(model, folder)
    yield folder
    shutil.rmtree(folder)


def touched(model, cache, nodes):
    """The nodes of each shard's pages beyond READ_AHEAD, after a call that reads all experts."""
    with MoELayer.from_checkpoint(model, 0, cache=cache, numa_nodes=nodes) as layer:
        before = nodes_by_shard(core.packed_at(layer.packed))
        assert before == {shard: {None} for shard in range(len(nodes))}  # mapped, and nothing was read
        ids = np.arange(EXPERTS).reshape(1, EXPERTS)
        layer.forward(np.ones((1, layer.hidden), np.float32), ids, np.ones(ids.shape, np.float32))
        ranges = core.packed_at(layer.packed)
        begin = {shard: min(address for of, address, _ in ranges if of == shard) for shard in before}
        return nodes_by_shard(one for one in ranges if one[1] >= begin[one[0]] + READ_AHEAD)


def test_a_file_on_a_disk(model, on_disk, several_nodes):
    """The first start places the pages, for other processes and other orders of nodes, too."""
    nodes = list(several_nodes)[::-1]
    expected = {shard: {node} for shard, node in enumerate(nodes)}
    assert touched(model, on_disk, nodes) == expected
    assert touched(model, on_disk, nodes) == expected
    assert touched(model, on_disk, nodes[::-1]) == expected


def test_a_file_that_another_program_has_read(model, on_disk, several_nodes):
    """Its pages are on that program's node."""
    *_, last = several_nodes
    files = [str(file) for file in on_disk.iterdir()]
    code = f"import os, sys; os.sched_setaffinity(0, {set(several_nodes[last])}); [open(f, 'rb').read() for f in sys.argv[1:]]"
    subprocess.run([sys.executable, "-c", code, *files], check=True)
    assert touched(model, on_disk, list(several_nodes)) == {shard: {last} for shard in range(len(several_nodes))}


@pytest.mark.usefixtures("guest")
def test_a_file_in_memory(model, tmp_path, several_nodes):
    """It was written by one thread, which here is kept to the last node."""
    own, (*_, last) = os.sched_getaffinity(0), several_nodes
    try:
        os.sched_setaffinity(0, several_nodes[last])
        pack(model, tmp_path / "cache", numa_nodes=[last])
    finally:
        os.sched_setaffinity(0, own)
    first = [next(iter(several_nodes))]
    assert touched(model, tmp_path / "cache", first) == {0: {last}}
    with MoELayer.from_checkpoint(model, 0, cache=tmp_path / "cache", numa_nodes=first) as layer:
        before = core.packed_at(layer.packed)
        layer.replace_expert(1, layer.export_expert(0)[0])
        moved = set(core.packed_at(layer.packed)) - set(before)
        assert len(moved) == 3
        assert nodes_by_shard(moved) == {0: set(first)}  # it is memory of this process
