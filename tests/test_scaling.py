"""The cost model of bench/: counts against simulation, times against sums by hand, and the data that it reads."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from bench import cost_model
from bench.cpus import cpus
from bench.models import Model, models
from bench.scaling import document, fit, points, report
from ktmoe import measure
from ktmoe._native import core

SHAPE = Model("a model", "MXFP4", hidden=4096, intermediate=2048, experts=64, top_k=6)
#: Nothing decoded, all of the peak, all hidden: times are limits.
IDEAL = cost_model.Kernel(tile_rows=1, pass_rows=192, x_bytes=2, x_by_slot=False)
MACHINE = cost_model.Machine(threads=2, read=30e9, peak=400e9, hertz=3e9)
WEIGHTS = 3 * 4096 * 2048


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(64, 6, 1), (64, 6, 16), (256, 6, 64), (8, 2, 3), (8, 8, 5)])
def test_experts_and_rows_are_those_of_random_routing(experts, top_k, tokens):
    """Against batches as the benchmarks make them, within six standard errors."""
    batches = list(itertools.islice(measure.random_batches(tokens, top_k, experts, 1), 400))
    rows = np.array([np.bincount(batch.ids.ravel(), minlength=experts) for batch in batches])
    m, expected = cost_model.expert_rows(experts, top_k, tokens)
    assert expected @ m == pytest.approx(tokens * top_k)
    assert expected.sum() == pytest.approx(cost_model.distinct_experts(experts, top_k, tokens))
    for i, count in zip(m.tolist(), expected.tolist(), strict=True):
        found = (rows == i).sum(axis=1)
        assert abs(found.mean() - count) <= 6 * found.std() / 20 + 0.02
    used = np.array([len(batch.experts) for batch in batches])
    assert abs(used.mean() - expected.sum()) <= 6 * used.std() / 20 + 1e-9


def test_limits_of_distinct_experts():
    assert cost_model.distinct_experts(256, 6, 1) == pytest.approx(6)
    assert cost_model.distinct_experts(256, 6, 2) == pytest.approx(12 - 36 / 256)
    assert cost_model.distinct_experts(256, 6, 10**6) == pytest.approx(256)
    assert cost_model.distinct_experts(8, 8, 1) == 8
    used = [cost_model.distinct_experts(256, 6, tokens) for tokens in range(1, 400)]
    assert all(a < b < 256 for a, b in itertools.pairwise(used))


@pytest.mark.parametrize(("weights", "bits"), [("MXFP4", 4.25), ("MXFP4, biases", 4.25), ("INT4", 4.5), ("BF16", 16)])
def test_bytes_are_those_of_the_weights(weights, bits):
    """Biases are not counted."""
    model = replace(SHAPE, weights=weights, experts=3, top_k=1, layers=5)
    assert model.expert_bytes == WEIGHTS * bits / 8
    assert model.nbytes == 15 * model.expert_bytes


def test_one_token_is_its_experts_bytes():
    read = 6 * WEIGHTS * 17 / 32 / 30e9
    rows = (4 * 4096 + 6 * (4096 + 2 * 2048) * 2) / 30e9
    assert cost_model.seconds(SHAPE, 1, IDEAL, MACHINE) == pytest.approx(read + rows)


def test_many_tokens_are_their_flops():
    slots = 4096 * 6
    compute = slots * 2 * WEIGHTS / 400e9
    took = cost_model.seconds(SHAPE, 4096, IDEAL, MACHINE)
    assert took == pytest.approx(compute, rel=0.02)  # x and h are the rest
    half = cost_model.seconds(SHAPE, 4096, replace(IDEAL, efficiency=0.5), MACHINE)
    assert half - took == pytest.approx(compute)


def test_without_overlap_times_add_up():
    multiply = 6 * 2 * WEIGHTS / 400e9
    kernel = replace(IDEAL, overlap=0.0, decode_cycles=0.1)
    decode = 6 * WEIGHTS * 17 / 32 * 0.1 / (2 * 3e9)
    ideal = cost_model.seconds(SHAPE, 1, IDEAL, MACHINE)
    assert cost_model.seconds(SHAPE, 1, kernel, MACHINE) == pytest.approx(ideal + multiply + decode)
    halfway = replace(kernel, overlap=0.5)
    assert cost_model.seconds(SHAPE, 1, halfway, MACHINE) == pytest.approx(
        ideal + multiply + decode - 0.5 * (multiply + decode)
    )


def test_tiles_and_passes_are_steps():
    """Of one expert that all tokens use."""
    shape = replace(SHAPE, experts=1, top_k=1)
    slow = replace(MACHINE, peak=1e9)  # nothing but computing
    row = 2 * WEIGHTS / 1e9
    tiles = cost_model.Kernel(tile_rows=16, pass_rows=48, x_bytes=2, x_by_slot=True)
    for tokens, padded in ((1, 16), (16, 16), (17, 32), (48, 48), (49, 64)):
        assert cost_model.seconds(shape, tokens, tiles, slow) == pytest.approx(padded * row, rel=1e-3)
    decode = 0.25 * WEIGHTS * 17 / 32 / (2 * 3e9)
    for tokens, passes in ((48, 1), (49, 2), (96, 2), (97, 3)):
        with_decode = cost_model.seconds(shape, tokens, replace(tiles, decode_cycles=0.25), slow)
        assert with_decode - cost_model.seconds(shape, tokens, tiles, slow) == pytest.approx(passes * decode)
    bf16 = replace(shape, weights="BF16")
    assert cost_model.seconds(bf16, 5, replace(tiles, decode_cycles=0.25), slow) == cost_model.seconds(bf16, 5, tiles, slow)


def test_more_work_never_costs_less():
    kernel = replace(IDEAL, decode_cycles=0.2, efficiency=0.8, overlap=0.7)

    def took(**changed):
        return cost_model.seconds(replace(SHAPE, **changed), 32, kernel, MACHINE)

    assert took() < took(hidden=8192) < took(hidden=8192, intermediate=4096)
    assert took(hidden=8192) == pytest.approx(2 * took(), rel=0.01)
    assert took() < took(experts=128) < took(experts=256)
    times = [cost_model.seconds(SHAPE, tokens, kernel, MACHINE) for tokens in range(1, 600)]
    assert all(a < b for a, b in itertools.pairwise(times))
    per_token = [time / tokens for tokens, time in enumerate(times, 1)]
    assert per_token[-1] < per_token[63] < per_token[0]


def test_threads_that_items_do_not_divide_into():
    assert cost_model.imbalance(64, 2) == 1
    assert cost_model.imbalance(64, 96) == 1.5
    assert cost_model.imbalance(1, 4) == 4
    assert cost_model.imbalance(191.6, 96) == 1
    slow = replace(MACHINE, peak=1e9)
    shape = replace(SHAPE, experts=1, top_k=1)
    even, odd = (cost_model.seconds(shape, 300, IDEAL, replace(slow, threads=threads)) for threads in (32, 48))
    assert odd / even == pytest.approx(2 / 3 * 1.5 + 1 / 3 * 1.5, rel=1e-3)  # A: 32 panels of h on 48, B: 64 of y


def test_what_is_known_of_the_driver():
    tuning = core.tune()
    assert (tuning["scratch_bytes"], tuning["reduce_slots"]) == (cost_model.SCRATCH_BYTES, cost_model.FEW_SLOTS)


def test_scratch_memory_cuts_a_batch():
    most = cost_model.chunk_tokens(SHAPE, 1 << 16, IDEAL, 2)
    row = 6 * 2 * 2048 + 2 * 4096 + 2 * 8 * 256
    assert most == (1 << 16) // 16
    assert most * row <= cost_model.SCRATCH_BYTES < 2 * most * row
    assert cost_model.chunk_tokens(SHAPE, 100, IDEAL, 2) == 100
    assert cost_model.chunk_tokens(SHAPE, 1 << 16, replace(IDEAL, x_by_slot=True), 2) < most
    whole = cost_model.seconds(SHAPE, most, IDEAL, replace(MACHINE, call=1.0)) - 1
    assert cost_model.seconds(SHAPE, 3 * most, IDEAL, replace(MACHINE, call=1.0)) == pytest.approx(3 * whole + 1, rel=0.3)


def test_nodes():
    """Each reads its own share; what is added is their outputs."""
    two = replace(MACHINE, nodes=2, link=20e9)
    added = cost_model.seconds(SHAPE, 64, IDEAL, two) - cost_model.seconds(SHAPE, 64, IDEAL, MACHINE)
    assert added == pytest.approx(64 * 4096 * 4 / 20e9)


def test_crossover_is_where_both_take_as_long():
    rows = cost_model.crossover(SHAPE, IDEAL, MACHINE)
    assert rows * 2 * WEIGHTS / 400e9 == pytest.approx(WEIGHTS * 17 / 32 / 30e9)


@pytest.mark.parametrize("true", [(0.25, 0.75, 0.9), (0.1, 1.05, 0.6)])
def test_fit_finds_the_numbers_that_made_the_samples(true):
    kernel = replace(IDEAL, **dict(zip(fit.RANGES, true, strict=True)))
    tokens = (1, 4, 16, 64, 128, 1024)
    samples = [(SHAPE, t, MACHINE, cost_model.seconds(SHAPE, t, kernel, MACHINE)) for t in tokens]
    found = fit.fit(IDEAL, samples)
    for t, took in ((t, took) for _, t, _, took in samples):
        assert cost_model.seconds(SHAPE, t, found, MACHINE) == pytest.approx(took, rel=0.02)
    assert found.efficiency == pytest.approx(true[1], rel=0.03)


def test_models():
    shapes = models()
    assert set(report.MODELS) <= set(shapes)
    for shape in shapes.values():
        assert shape.hidden % 32 == shape.intermediate % 32 == 0
    assert shapes["V4-Flash"].nbytes == 43 * 256 * WEIGHTS * 17 / 32
    assert all(shape in points.SHAPES for _, shape, _, _ in points.FITS + points.CHECKS)
    assert not set(points.FITS) & set(points.CHECKS)


def test_cpus():
    found = cpus()
    assert len(found) >= 10
    for name, cpu in found.items():
        assert cpu.backend in points.KERNELS, name
        assert cpu.source, name
        assert (cpu.sockets > 1) == (cpu.link_gb_s < math.inf), name
    machine = found["2 x EPYC 9654"].machine(0.8, 10e-6, 0.1e-6)
    assert machine.threads == 192
    assert machine.read == pytest.approx(2 * 12 * 4800e6 * 8 * 0.8)
    assert machine.peak == pytest.approx(2 * 96 * 2.4e9 * 64)
    assert machine.call == pytest.approx(29.2e-6)
    both_kinds = found["Core i9-14900K"].machine(0.8, 0, 0)
    assert both_kinds.peak == pytest.approx(8 * 3.2e9 * 32 + 16 * 2.4e9 * 16)
    assert both_kinds.threads * both_kinds.hertz == pytest.approx(8 * 3.2e9 + 16 * 2.4e9)
    assert found["Ryzen AI Max+ 395"].machine(0.8, 0, 0).read == 128e9


CPU = """
["A"]
backend = "avx2"
cores = [{ count = 8, ghz = 3.0, flops_per_cycle = 32 }]
channels = 2
mega_transfers = 5600
memory_gb = 64
source = "a page"
"""


@pytest.mark.parametrize(
    ("line", "other", "message"),
    [
        ("channels = 2\n", "", r"cpus.toml \[A\]: unknown fields \[\], missing fields \['channels'\]"),
        ("channels = 2", "chanels = 2", r"unknown fields \['chanels'\], missing fields \['channels'\]"),
        ("ghz = 3.0", "mhz = 3000", r"cpus.toml \[A\] cores: unknown fields \['mhz'\], missing fields \['ghz'\]"),
        ("memory_gb = 64", "memory_gb = -64", r"\[A\]: memory_gb: expected more than 0, found -64"),
    ],
)
def test_bad_cpus(tmp_path, line, other, message):
    file = tmp_path / "cpus.toml"
    file.write_text(CPU)
    assert cpus(file)["A"].channels == 2
    file.write_text(CPU.replace(line, other))
    with pytest.raises(ValueError, match=message):
        cpus(file)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"weights": "FP7"}, "weights 'FP7' are unknown; known are 'MXFP4'"),
        ({"hidden": 0}, "hidden: expected a whole number of at least 1, found 0"),
        ({"experts": 2.5}, "experts: expected a whole number of at least 1, found 2.5"),
        ({"top_k": 65}, "top_k: expected at most the 64 experts, found 65"),
    ],
)
def test_bad_shapes(wrong, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        replace(SHAPE, **wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"read": 0}, "read: expected more than 0, found 0"), ({"call": -1}, "call: expected at least 0, found -1")],
)
def test_bad_machines(wrong, message):
    with pytest.raises(ValueError, match=message):
        replace(MACHINE, **wrong)


def test_no_tokens():
    with pytest.raises(ValueError, match="tokens: expected at least 1, found 0"):
        cost_model.seconds(SHAPE, 0, IDEAL, MACHINE)


def _measured():
    """What a machine would measure that is exactly as the model says."""
    kernel = replace(points.KERNELS["avx2"][0], decode_cycles=0.2, efficiency=1.0, overlap=0.8)
    made = []
    for case in [case for case in points.FITS + points.CHECKS if case[0] == "avx2"]:
        machine = points.Point(*case, 0.0, 30e9, 220e9).machine(10e-6)
        took = cost_model.seconds(points.SHAPES[case[1]], case[3], kernel, machine)
        made.append(points.Point(*case, took, 30e9, 220e9))
    return points.Measured("a CPU", 10e-6, tuple(made))


def test_tables():
    measured = _measured()
    kernels = fit.fits(measured)
    assert list(kernels) == ["avx2"]
    rows = fit.compare(measured, kernels)
    assert [row.fitted for row in rows].count(True) == 5
    assert all(row.ratio == pytest.approx(1, abs=0.05) for row in rows)
    predicted = report.prediction_table(cpus(), kernels, measured.call)
    assert {row[1] for row in predicted.rows} == {"`avx2`"}
    assert all(len(row) == len(predicted.heads) for row in predicted.rows)
    epyc = next(row for row in predicted.rows if row[0] == "EPYC 7763")
    decode = float(epyc[predicted.heads.index("V4-Flash")].split(" / ")[0])
    assert decode < 164e9 / (43 * 6 * WEIGHTS * 17 / 32)  # what memory allows
    assert next(row for row in predicted.rows if row[0] == "Core i9-14900K")[predicted.heads.index("V4-Pro")] == "-"
    table = document.markdown_table(report.check_table(rows))
    assert table.splitlines()[1] == "| --- | --- | --- | --- | --: | --: |"
    assert document.markdown_table(predicted).splitlines()[1].startswith("| --- | --- | --: |")


def test_a_backend_is_measured_with_the_instruction_set_that_its_numbers_are_of():
    assert set(points.ISAS) == set(points.KERNELS)
    experts = SHAPE.make(1)
    ways = list(points._ways(points.KERNELS, experts))
    assert [way.backend for way in ways] == [name for name in points.KERNELS if name in [way.backend for way in ways]]
    for way in ways:
        with way.table(experts) as table:
            assert table.name == points.ISAS[way.backend]


def test_a_backend_whose_numbers_cannot_be_found_is_left_out():
    """Its calls of the shape that they are found with did not fit into memory."""
    measured = _measured()
    checks = tuple(p for p in measured.points if p.case in points.CHECKS)
    assert checks
    assert fit.fits(replace(measured, points=checks)) == {}
    assert fit.compare(replace(measured, points=checks), {}) == []


def test_points_are_saved_as_they_are(tmp_path):
    measured = _measured()
    points.save(measured, tmp_path / "new" / "scaling.json")
    assert points.load(tmp_path / "new" / "scaling.json") == measured


def test_tables_replace_what_stands_between_marks():
    text = "before\n<!-- scaling: a -->\nold\n<!-- end of a -->\nafter"
    assert document.replace_part(text, "a", "new\n") == text.replace("old", "new")
    for broken in ("no marks", "<!-- scaling: a -->\nno end"):
        with pytest.raises(ValueError, match="expected the marks '<!-- scaling: a -->' and '<!-- end of a -->'"):
            document.replace_part(broken, "a", "new\n")
