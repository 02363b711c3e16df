"""Environment variables and settings: strict, read when needed; and memory that is refused before it runs out."""

import gc
import re
from pathlib import Path

import numpy as np
import pytest
from helpers import random_batch, random_experts, same_bits

from ktmoe import (
    ExpertWeights,
    MoELayer,
    backends,
    config,
    get_num_threads,
    loaders,
    memory,
    set_num_threads,
    show_config,
    threads,
)
from ktmoe._native import core
from ktmoe.backends import native
from ktmoe.backends.base import choose
from ktmoe.errors import InputError, OutOfMemoryError, UnavailableError, UnknownNameError


@pytest.fixture
def experts():
    return random_experts(np.random.default_rng(1), 2, 64, 64)


# KTMOE_BACKEND


def test_backend_override(monkeypatch, experts):
    monkeypatch.setenv("KTMOE_BACKEND", "fp32_lut")
    assert choose("auto") == ("fp32_lut", "KTMOE_BACKEND")
    with MoELayer(experts) as layer:
        assert layer.backend == "fp32_lut"


def test_backend_override_does_not_override_a_name(backend, monkeypatch, experts):
    monkeypatch.setenv("KTMOE_BACKEND", next(name for name in backends.names() if name != backend))
    with MoELayer(experts, backend) as layer:
        assert layer.backend == backend


@pytest.mark.parametrize("make", [choose, lambda: choose("auto")])
def test_an_unknown_override_is_refused(monkeypatch, make):
    monkeypatch.setenv("KTMOE_BACKEND", "avx3")
    with pytest.raises(UnknownNameError, match=r"unknown backend 'avx3'.*avx512_bf16.*fp32_lut") as caught:
        make()
    assert "KTMOE_BACKEND" in str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))


@pytest.mark.parametrize("by", ["name", "KTMOE_BACKEND"])
def test_a_backend_that_this_cpu_lacks_is_refused(monkeypatch, experts, by):
    monkeypatch.setattr(native, "missing_features", lambda isa: [] if isa == "portable" else ["avx512_bf16"])
    if by == "KTMOE_BACKEND":
        monkeypatch.setenv("KTMOE_BACKEND", "avx512_bf16")
    why = "asked for by name" if by == "name" else by
    message = rf"'avx512_bf16' \({why}\) cannot be used: this CPU lacks avx512_bf16.*Available: fp32_lut"
    with pytest.raises(UnavailableError, match=message):
        MoELayer(experts, "avx512_bf16" if by == "name" else "auto")
    monkeypatch.delenv("KTMOE_BACKEND", raising=False)
    with MoELayer(experts) as layer:
        assert layer.backend == "fp32_lut"


# Numbers

NUMBERS = [
    ("KTMOE_NUM_THREADS", config.num_threads, ["0", "-1", "4097", "two", "", "nan", "inf", "2.5", "1e400", " ", "+2", "٢"]),
    ("KTMOE_SPIN_US", config.spin_us, ["-1", "1000001", "soon", "", "nan", "1.5"]),
    ("KTMOE_SCRATCH_MB", config.scratch_bytes, ["0", "-5", "1048577", "1 GB", "", "nan", "0.5"]),
]


@pytest.mark.parametrize(
    ("name", "read", "text"), [(name, read, text) for name, read, texts in NUMBERS for text in texts], ids=repr
)
def test_malformed_numbers_are_refused(monkeypatch, experts, name, read, text):
    monkeypatch.setenv(name, text)
    message = rf"environment variable {name} must be a whole number from .* to .*, found {re.escape(repr(text))}"
    with pytest.raises(InputError, match=message):
        read()
    with pytest.raises(InputError, match=message):
        MoELayer(experts, "fp32_lut")


def test_numbers(monkeypatch, experts):
    monkeypatch.setenv("KTMOE_NUM_THREADS", "3")
    monkeypatch.setenv("KTMOE_SPIN_US", "12")
    monkeypatch.setenv("KTMOE_SCRATCH_MB", "2")
    assert (config.num_threads(), config.spin_us(), config.scratch_bytes()) == (3, 12, 2 << 20)
    with MoELayer(experts, "fp32_lut"):
        assert core.pool_threads() == get_num_threads() == 3
        assert core.tune()["scratch_bytes"] == 2 << 20
    set_num_threads(2)  # beats the environment
    assert core.pool_threads() == get_num_threads() == 2


def test_set_num_threads_takes_any_integer_type():
    set_num_threads(np.int64(2))
    assert get_num_threads() == core.pool_threads() == 2


@pytest.mark.parametrize("n", [0, -1, 4097, 2.0, "2", None, 2**64 + 1])
def test_set_num_threads(n):
    set_num_threads(2)
    with pytest.raises(InputError, match=rf"number of threads must be a whole number from 1 to 4096, found {n!r}"):
        set_num_threads(n)
    assert get_num_threads() == core.pool_threads() == 2


def test_unknown_tuning():
    with pytest.raises(InputError, match=r"unknown tuning \['speed'\]; known are .*uneven"):
        core.tune(speed=11)


def test_scratch_is_bounded():
    """A batch that takes more than what is held already goes in chunks: h alone is over 1 KB a token."""
    rng = np.random.default_rng(2)
    experts = random_experts(rng, 2, 32, 2)
    with MoELayer(experts, "fp32_lut") as layer:
        arguments = random_batch(rng, experts, 40, 8)
        y = layer.forward(*arguments)
        held = core.scratch_bytes()
        times = held // (40 * 8 * 64 * 2) + 1
        core.tune(scratch_bytes=held)
        assert same_bits(layer.forward(*(np.tile(a, (times, 1)) for a in arguments)), np.tile(y, (times, 1)))
        assert core.scratch_bytes() <= held
        core.tune(scratch_bytes=10 * held)
        layer.forward(*(np.tile(a, (times, 1)) for a in arguments))
        assert held < core.scratch_bytes() <= 10 * held  # what the bound was there for


def test_scratch_is_bounded_whatever_shapes_layers_have(monkeypatch):
    """One needs most of it for x, the other for h: what the first needed is not kept beside what the second needs."""
    rng = np.random.default_rng(3)
    set_num_threads(1)
    shapes = ((8192, 32), (32, 8192))
    monkeypatch.setenv("KTMOE_SCRATCH_MB", "4")
    for hidden, intermediate in shapes * 2:
        experts = random_experts(rng, 2, hidden, intermediate)
        with MoELayer(experts, "fp32_lut") as layer:
            layer.forward(*random_batch(rng, experts, 200, 2, np.float32))
        assert 2 << 20 < core.scratch_bytes() <= 4 << 20


# Memory


def test_memory_is_asked_for_before_it_is_taken(monkeypatch, backend, experts):
    class Untouched(type(experts)):
        def matrix(self, *_):
            pytest.fail("was read")

    experts.__class__ = Untouched
    monkeypatch.setattr(memory, "available_bytes", lambda: experts.nbytes - 1)
    message = r"experts: packing 2 experts needs 0\.00 GiB of memory, 0\.00 GiB is available"
    with pytest.raises(OutOfMemoryError, match=message) as caught:
        MoELayer(experts, backend)
    assert isinstance(caught.value, MemoryError)


def test_a_refusal_by_the_system_leaves_nothing_behind(monkeypatch, backend):
    """More than the address space holds: no mapping, no thread, and the next layer works."""

    def mapped():
        return int(Path("/proc/self/statm").read_text().split()[0])

    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    huge = ExpertWeights(1, 64, 1 << 44, lambda *_: pytest.fail("was read"))
    attempts = []
    for _ in range(5):
        with pytest.raises(OutOfMemoryError, match=r"packed weights of 1 experts need \d+ bytes; the system refused"):
            MoELayer(huge, backend)
        gc.collect()
        attempts.append(mapped())
    assert attempts[-1] <= attempts[0] + 256
    with MoELayer(random_experts(np.random.default_rng(4), 1, 64, 64), backend):
        pass


def test_available_memory_is_plausible():
    available = memory.available_bytes()
    total = int(re.search(r"MemTotal: *(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    assert available is None or 0 < available <= total


# show_config


def test_show_config_says_what_was_chosen_and_why(monkeypatch, capsys):
    monkeypatch.setattr(native, "missing_features", lambda isa: [] if isa == "portable" else ["avx512_bf16"])
    show_config()
    printed = capsys.readouterr().out
    assert "avx512_bf16: not available: this CPU lacks avx512_bf16 (needed by avx512_bf16)" in printed
    assert "fp32_lut: available, kernels of portable" in printed
    assert "avx2: not available: this CPU lacks avx512_bf16 (needed by avx2)" in printed
    assert "amx: not available: this CPU lacks avx512_bf16 (needed by amx)" in printed
    assert "chosen: fp32_lut (the best available; amx: this CPU lacks" in printed
    assert f"threads: {get_num_threads()}" in printed
    assert f"loaders: {', '.join(loaders.names())}" in printed


def test_show_config_explains_a_wrong_override(monkeypatch, capsys):
    monkeypatch.setenv("KTMOE_BACKEND", "avx3")
    show_config()
    assert re.search("chosen: none .*unknown backend 'avx3'", capsys.readouterr().out)


def test_where_the_number_of_threads_comes_from(monkeypatch):
    assert "physical cores" in threads.explain_default()
    monkeypatch.setenv("KTMOE_NUM_THREADS", "2")
    assert threads.explain_default() == "KTMOE_NUM_THREADS"
    set_num_threads(2)
    assert "set_num_threads" in threads.explain_default()
