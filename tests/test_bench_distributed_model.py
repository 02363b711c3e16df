"""bench/distributed: the model's arithmetic, the forecast, and what becomes of a made-up result."""

from __future__ import annotations

import numpy as np
import pytest
from rich.console import Console

from bench import document, publish, results_file
from bench.distributed import __main__ as command
from bench.distributed import forecast, model, report, session, traffic
from bench.models import Model
from bench.peers.processes import WorkerError

NETWORK = model.Network.measured({1000: 100e-6, 10_000: 190e-6, 1_000_000: 2e-3}, 3)


def test_a_round_takes_what_was_measured():
    """Bytes are those to both other ranks. Between sizes a straight line, beyond them the last bandwidth."""
    assert [NETWORK.round_seconds(n) for n in (0, 2000, 20_000, 2_000_000)] == pytest.approx([100e-6, 100e-6, 190e-6, 2e-3])
    assert NETWORK.round_seconds(11_000) == pytest.approx(145e-6)
    assert NETWORK.latency == 100e-6
    assert NETWORK.bandwidth == pytest.approx(1_998_000 / 1.9e-3)
    assert NETWORK.round_seconds(2_000_000 + 1_998_000) == pytest.approx(2e-3 + 1.9e-3)
    assumed = model.Network.assumed(30e-6, 1e9)
    for nbytes in (0, 1, 5_000, 3_000_000_000):
        assert assumed.round_seconds(nbytes) == pytest.approx(30e-6 + nbytes / 1e9)


def test_a_call_is_its_slowest_stretches_and_its_rounds():
    edges = [[0.0, 1.0, 2.5, 7.5, 8.5, 8.5], [0.0, 2.0, 3.0, 4.0, 9.0, 9.5]]
    assert model.compute_seconds(edges) == 2 + 5 + 0.5
    assert model.messages_seconds(edges) == (3.0 - 2.0) + (9.0 - 7.5)
    assert model.call_seconds(edges) == 9.5
    assert (model.compute_seconds([[0.0, 3.0]]), model.messages_seconds([[0.0, 3.0]])) == (3, 0)
    rounds = [np.array([[9, 1, 2], [4, 9, 1], [5, 0, 9]]), np.full((3, 3), 500_000)]
    assert [traffic.most_bytes(sent) for sent in rounds] == [9, 1_000_000]  # rank 0 receives most, then all send alike
    assumed = model.Network.assumed(1.0, 1e6)
    assert model.exchange_seconds(assumed, rounds) == pytest.approx(2 * 1.0 + 9e-6 + 1)


HOST = forecast.Host(1e-3, 1e-9)
SHAPE = Model("a model", "MXFP4", hidden=256, intermediate=128, experts=64, top_k=4, layers=10)


def test_one_machine_reads_its_experts_or_multiplies():
    reads, multiplies = forecast.Machine(1e9, 1e18), forecast.Machine(1e18, 1e12)
    nothing = model.Network.assumed(99.0, 1.0)
    took = forecast.layer_seconds(SHAPE, 1, 1, reads, nothing, HOST)
    assert took == pytest.approx(4 * SHAPE.expert_bytes / 1e9)
    took = forecast.layer_seconds(SHAPE, 512, 1, multiplies, nothing, HOST)
    assert took == pytest.approx(512 * 4 * SHAPE.slot_flops / 1e12)


def test_several_machines_share_and_talk():
    """Of many tokens, a machine has about its share; a call takes its rounds and what no kernel takes, too."""
    machine, fast = forecast.Machine(1e9, 1e18), model.Network.assumed(0.0, 1e18)
    none = forecast.Host(0.0, 0.0)
    one, four = (forecast.layer_seconds(SHAPE, 512, count, machine, fast, none) for count in (1, 4))
    assert four == pytest.approx(one / 4)  # of all experts
    few = [forecast.layer_seconds(SHAPE, 1, count, machine, fast, none) for count in (1, 8)]
    assert few[0] / 4 <= few[1] < few[0]  # at best one of a token's four experts is on each
    slow = model.Network.assumed(1.0, 1e18)
    assert forecast.layer_seconds(SHAPE, 1, 2, machine, slow, none) == pytest.approx(1.0, abs=1e-2)
    assert forecast.layer_seconds(SHAPE, 16, 2, machine, slow, none) == pytest.approx(3.0, abs=1e-2)
    with_host = forecast.layer_seconds(SHAPE, 16, 2, machine, slow, HOST)
    without = forecast.layer_seconds(SHAPE, 16, 2, machine, slow, none)
    assert with_host - without == pytest.approx(1e-3 + 16 * 256 * 4 * 5 * 1e-9)


def test_machines_that_are_needed():
    kimi = next(shape for shape in forecast.MODELS if shape.name == "Kimi-K2")
    assert kimi.nbytes == 60 * 384 * 3 * 7168 * 2048 * 9 // 16
    assert [forecast.machines_needed(kimi, memory) for memory in (128, 256, 512)] == [6, 3, 2]


def test_what_no_kernel_takes_follows_from_two_calls():
    """With 8 shards, each of 2 ranks adds sums of 4 shards for all tokens, and of both ranks for half of them."""
    call = {"tokens": "same", "count": 1, "host_ms": 1e3 * (HOST.call + HOST.byte * 4 * 256 * 5)}
    many = {"tokens": "same", "count": 512, "host_ms": 1e3 * (HOST.call + HOST.byte * 512 * 4 * 256 * 5)}
    group = {"ranks": 2, "shared": False, "call": [many, {**call, "tokens": "own", "host_ms": 9.0}, call]}
    section = {"hidden": 256, "shards": 8, "group": [{**group, "ranks": 4}, group]}
    found = forecast.host_of(section)
    assert (found.call, found.byte) == pytest.approx((HOST.call, HOST.byte))
    assert forecast.host_of({**section, "group": [{**group, "shared": True}]}) is None


#: A call of 2 ranks that sent two rounds.
ROUNDS = [[[7, 1000], [1000, 7]], [[7, 3000], [1000, 7]]]
EDGES = [[0.0, 4e-3, 6e-3, 7e-3, 9e-3, 9e-3], [0.0, 5e-3, 7e-3, 7.5e-3, 9e-3, 10e-3]]
REPLAYED = [[0.0, 4e-3, 4e-3, 5e-3, 5e-3, 5e-3], [0.0, 5e-3, 5e-3, 5.5e-3, 5.5e-3, 5.5e-3]]
CALL = {"edges": EDGES, "replayed": REPLAYED, "experts": 4e-3, "alone": 12e-3, "rounds": ROUNDS}
LONG = {**CALL, "edges": [[0.0, 0.03, 0.03, 0.03, 0.03, 0.04]] * 2, "replayed": [[0.0, *[0.021] * 5]] * 2}
SAVED = {
    "date": "2026-11-27",
    "commit": "0123456789",
    "ktmoe": "0.1.0",
    "cpu": {"name": "a CPU", "family": 1, "model": 2, "threads": 2},
    "model": {"name": "a model", "weights": "MXFP4", "hidden": 256, "intermediate": 64, "experts": 8, "top_k": 2, "layers": 1},
    "shards": 8,
    "absent": {"1gbit": "network namespaces need root"},
    "groups": [
        {
            "network": "loopback",
            "communicator": "gloo",
            "ranks": 2,
            "cpus": 1,
            "shared": False,
            "nbytes": 2 * 10**9,
            "exchange": {"500": [1e-3, 1e-3, 9e-3], "2500": [3e-3] * 3},
            "points": [
                {"tokens": "same", "count": 1, "calls": [CALL] * 3},
                {"tokens": "same", "count": 512, "calls": [LONG] * 3},
                {"tokens": "own", "count": 4, "calls": [CALL]},
            ],
        }
    ],
}


def test_figures():
    found = report.published(SAVED)
    (group,) = found["group"]
    assert (group["latency_us"], group["gb_s"], group["packed_gb"]) == (1000, 1e-3, 2)
    call = group["call"][0]
    expected = {
        "ms": 10,
        "messages_ms": 3.5,
        "compute_ms": 6,
        "host_ms": 2,
        "alone_ms": 12,
        "ratio": 1.2,
        "rounds": 2,
        "bytes": 4000,
    }
    assert {name: call[name] for name in expected} == expected
    assert call["model_ms"] == 6 + 1.5 + 3.5  # rounds of 1000 and 3000 bytes, which rank 0 sends or rank 1 receives
    assert report.error(call) == pytest.approx(0.1)


def test_tables_and_the_file(tmp_path):
    results = publish.distributed_alone(SAVED, tmp_path)
    path = publish.write(results, tmp_path)
    assert results_file.read(path).data["distributed"]["group"][0]["call"][1]["count"] == 512
    heads, rows = report.calls([results])
    cells = dict(zip(heads, rows[0], strict=True))
    expected = {"ranks": "2, 1 CPU each", "call": "10 ms", "ratio": "1.20 x", "model": "11 ms", "its error": "+10 %"}
    assert {name: cells[name] for name in expected} == expected
    assert (cells["a rank sends"], cells["of it outside of kernels"]) == ("4 kB", "2 ms")
    assert rows[2][3] == "4 for each rank"
    heads, rows = report.gains([results])
    assert heads == ("CPU", "network", "ranks", "1 token", "512 tokens")
    assert [row[:4] for row in rows] == [("a 1-2", "loopback", "2", "1.20 x")]
    heads, rows = report.networks([results])
    assert rows == [("a 1-2", "loopback", "2, 1 CPU each", "1000 µs", "0.008 Gbit/s", "1000 µs", "3000 µs")]
    assert heads[-2:] == ("500 B", "2.5 kB")
    heads, rows = forecast.table([results])
    assert len(rows) == len(forecast.MODELS) * len(forecast.MACHINES) * len(forecast.NETWORKS)
    assert all(len(row) == len(heads) and row[-1].count(" / ") == 3 for row in rows)
    heads, rows = forecast.page_table([results])
    assert not {"network", "machines"} & set(heads)
    assert [row[:2] for row in rows[::2]] == [(shape.name, f"{shape.nbytes / 1e9:.0f} GB") for shape in forecast.MODELS]
    assert rows == [row[:4] + row[6:] for row in forecast.table([results])[1] if row[4] == "25 GbE"]
    assert [row[2] for row in forecast.assumptions([results])[1]][-2:] == [
        "measured, 1 token on 2 ranks",
        "measured, 512 tokens on 2 ranks",
    ]


def test_without_results_tables_are_empty():
    for make in document.PAGES[document.DISTRIBUTED].values():
        assert make([]) == (make([])[0], [])


def test_what_is_printed():
    console = Console(width=250, record=True)
    report.show(SAVED, console)
    text = console.export_text()
    assert "the model is off by -35%: loopback, 2 ranks, same 512: messages 0 ms, expected 5 ms" in text
    assert "off by +10%" not in text
    assert "out: 1gbit: network namespaces need root" in text


def test_the_command_saves_and_shows(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(session, "measure", lambda networks, ranks, rounds, folder, progress: SAVED)
    assert command.main(["--save", str(tmp_path / "a" / "saved.json"), "--networks", "loopback"]) == 0
    capsys.readouterr()
    assert command.main(["--show", str(tmp_path / "a" / "saved.json")]) == 0
    assert "loopback" in capsys.readouterr().out

    def fail(*arguments):
        raise WorkerError("no rank")

    monkeypatch.setattr(session, "measure", fail)
    assert command.main(["--save", str(tmp_path / "b.json")]) == 1
    assert capsys.readouterr().err.endswith("distributed: no rank\n")
