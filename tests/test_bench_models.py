"""What the benchmarks pack of a model, by the machine's caches and memory; and what models.toml may say."""

from __future__ import annotations

import sys

import pytest

from bench import footprints, machine
from bench.models import Model, models
from ktmoe.machine import memory

LAYERS, EXPERTS = 3, 64
MODEL = Model("a model", "MXFP4", hidden=4096, intermediate=2048, experts=EXPERTS, top_k=6, layers=LAYERS)
LAYER = EXPERTS * MODEL.expert_bytes


@pytest.fixture
def footprint(monkeypatch):
    """(experts, layers) with a cache and memory of so many bytes."""

    def found(*, cache, available, full=False):
        monkeypatch.setattr(machine, "last_cache_bytes", lambda: cache)
        monkeypatch.setattr(memory, "available_bytes", lambda: available)
        size = footprints.footprint(MODEL, full=full)
        return size.experts, size.layers

    return found


def test_all_of_a_layer_where_it_fits(footprint):
    assert footprint(cache=1 << 20, available=64 << 30) == (EXPERTS, 1)


def test_layers_take_turns_where_one_is_small(footprint):
    """Until they are four caches, or all that the model has."""
    assert footprint(cache=LAYER // 3, available=64 << 30) == (EXPERTS, 2)
    assert footprint(cache=10 * LAYER, available=640 << 30) == (EXPERTS, LAYERS)


@pytest.mark.parametrize("full", [False, True])
def test_half_of_the_memory_is_not_exceeded(footprint, full):
    assert footprint(cache=10 * LAYER, available=2 * LAYER + 1, full=full) == (EXPERTS, 1)
    assert footprint(cache=10 * LAYER, available=LAYER, full=full) == (EXPERTS // 2, 1)
    assert footprint(cache=10 * LAYER, available=0, full=full) == (MODEL.top_k, 1)


@pytest.mark.parametrize("full", [False, True])
def test_a_system_that_does_not_say_what_memory_it_has(footprint, full):
    assert footprint(cache=1 << 20, available=None, full=full) == (EXPERTS, 1)
    assert machine.usable_bytes(0.5) == sys.maxsize


def test_experts_are_left_out_by_default(footprint, monkeypatch):
    monkeypatch.setattr(footprints, "DEFAULT_BYTES", LAYER // 2)
    assert footprint(cache=1 << 20, available=64 << 30) == (EXPERTS // 2, 1)
    assert footprint(cache=1 << 20, available=64 << 30, full=True) == (EXPERTS, 1)


def test_caches_as_linux_has_them(tmp_path):
    for number, (level, kind, size) in enumerate([(1, "Data", "48K"), (1, "Instruction", "64K"), (2, "Unified", "2048K")]):
        folder = tmp_path / f"index{number}"
        folder.mkdir()
        for name, value in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{value}\n")
    assert machine.cache_sizes(tmp_path) == {1: 48 << 10, 2: 2 << 20}
    assert machine.cache_sizes(tmp_path / "nothing") == machine.ASSUMED_CACHES


@pytest.mark.parametrize(
    ("line", "other", "message"),
    [
        ("top_k = 2\n", "", r"models.toml \[A\]: .*missing 1 required positional argument: 'top_k'"),
        ("top_k = 2", "top = 2", r"models.toml \[A\]: .*unexpected keyword argument 'top'"),
        ("top_k = 2", "top_k = 9", "A: top_k: expected at most the 8 experts, found 9"),
        ('"BF16"', '"BF17"', "A: weights 'BF17' are unknown; known are 'MXFP4'"),
    ],
)
def test_bad_models(tmp_path, line, other, message):
    text = '["A"]\nweights = "BF16"\nhidden = 64\nintermediate = 64\nexperts = 8\ntop_k = 2\n'
    good, bad = tmp_path / "good" / "models.toml", tmp_path / "bad" / "models.toml"
    for path, content in ((good, text), (bad, text.replace(line, other))):
        path.parent.mkdir()
        path.write_text(content)
    assert models(good)["A"].layers == 1
    with pytest.raises(ValueError, match=message):
        models(bad)
