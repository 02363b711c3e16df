"""Environment variables and settings: strict, read when needed; and memory that is refused before it runs out."""

import errno
import gc
import mmap
import os
import re
import resource
import threading
import traceback
import tracemalloc
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from checkpoints import SCHEMES, write
from helpers import in_child, random_batch, random_experts, same_bits

from ktmoe import (
    BF16,
    MXFP4,
    ExpertWeights,
    Matrix,
    MoELayer,
    MoEModel,
    backends,
    get_num_threads,
    int4,
    loaders,
    set_num_threads,
    show_config,
)
from ktmoe import layer as layer_module
from ktmoe._native import core
from ktmoe.backends import native
from ktmoe.backends.base import Plan
from ktmoe.backends.choice import choose_backend
from ktmoe.background.worker import Worker
from ktmoe.errors import InputError, OutOfMemoryError, UnavailableError, UnknownNameError
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.machine import environment, memory, threads


@pytest.fixture
def experts():
    return random_experts(np.random.default_rng(1), 2, 64, 64)


# KTMOE_BACKEND


def test_backend_override(monkeypatch, experts):
    monkeypatch.setenv("KTMOE_BACKEND", "fp32_lut")
    assert choose_backend("auto")[:2] == ("fp32_lut", "KTMOE_BACKEND")
    with MoELayer(experts) as layer:
        assert layer.backend == "fp32_lut"


def test_backend_override_does_not_override_a_name(backend, monkeypatch, experts):
    monkeypatch.setenv("KTMOE_BACKEND", next(name for name in backends.names() if name != backend))
    with MoELayer(experts, backend) as layer:
        assert layer.backend == backend


@pytest.mark.parametrize("make", [choose_backend, lambda: choose_backend("auto")])
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
    (
        "KTMOE_NUM_THREADS",
        environment.num_threads,
        ["0", "-1", "4097", "two", "", "nan", "inf", "2.5", "1e400", " ", "+2", "٢"],
    ),
    ("KTMOE_SPIN_US", environment.spin_us, ["-1", "1000001", "soon", "", "nan", "1.5"]),
    ("KTMOE_SCRATCH_MB", environment.scratch_bytes, ["0", "-5", "1048577", "1 GB", "", "nan", "0.5"]),
]


@pytest.mark.parametrize(
    ("name", "read", "text"),
    [(name, read, text) for name, read, texts in NUMBERS for text in texts],
    ids=lambda value: getattr(value, "__name__", repr(value)),
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
    assert (environment.num_threads(), environment.spin_us(), environment.scratch_bytes()) == (3, 12, 2 << 20)
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
    core.release()  # what gradients took, which have a bound of their own
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
    """One needs most of it for x, the other for h: what the first needed is not kept beside what the second needs. Nor is
    what a call needed under a larger bound."""
    core.release()
    rng = np.random.default_rng(3)
    set_num_threads(1)
    shapes = ((8192, 32), (32, 8192))
    experts = random_experts(rng, 2, 64, 64)
    with MoELayer(experts, "fp32_lut") as layer:
        layer.forward(*random_batch(rng, experts, 20_000, 2, np.float32))
    assert core.scratch_bytes() > 4 << 20
    monkeypatch.setenv("KTMOE_SCRATCH_MB", "4")
    for hidden, intermediate in shapes * 2:
        experts = random_experts(rng, 2, hidden, intermediate)
        with MoELayer(experts, "fp32_lut") as layer:
            layer.forward(*random_batch(rng, experts, 200, 2, np.float32))
        assert 2 << 20 < core.scratch_bytes() <= 4 << 20


def test_scratch_is_bounded_with_128_threads():
    """Each has its own: the rest of what a call may use is so much less, and a large batch goes in more chunks."""
    rng = np.random.default_rng(4)
    experts = random_experts(rng, 2, 256, 128)
    x, ids, weights = random_batch(rng, experts, 20_000, 2, np.float32)
    with MoELayer(experts, "fp32_lut") as layer:
        set_num_threads(1)
        y = layer.forward(x, ids, weights)
        set_num_threads(128)
        core.release()
        layer.forward(x[:1], ids[:1], weights[:1])
        own, bound = core.scratch_bytes(), 24 << 20
        assert own < bound
        core.tune(scratch_bytes=bound)
        assert same_bits(layer.forward(x, ids, weights), y)
        assert own < core.scratch_bytes() <= bound


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


def test_sizes_are_checked_before_anything_is_allocated(monkeypatch):
    """As many experts as may be: nothing is made for each of them."""
    experts = ExpertWeights(2**28, 64, 64, lambda *_: pytest.fail("was read"))
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**40)
    tracemalloc.start()
    try:
        with pytest.raises(OutOfMemoryError, match=r"packing 268435456 experts needs \d+\.\d\d GiB of memory, 1024\.00 GiB is"):
            MoELayer(experts, "fp32_lut")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("weight_format", [MXFP4, int4(32), int4(128, "fp16"), BF16], ids=lambda f: f.description)
def test_bytes_of_the_largest_experts_are_counted_right(monkeypatch, weight_format):
    """They do not fit into 64 bits, all together; one by one they do."""
    experts = ExpertWeights(2**28, 2**28, 2**28, lambda *_: pytest.fail("was read"), weight_format)
    spans = [(0, 2**27), (2**27, 2**28)]
    assert core.expert_nbytes(experts, spans) == experts.nbytes // 2**28  # whole groups, so that nothing is padded
    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    with pytest.raises(OutOfMemoryError, match=rf"need {experts.nbytes} bytes; the system refused"):
        core.PackedLayer(native.load_table("portable"), experts, Plan(), [(0, 2**28)], 1)


def thread_refused(monkeypatch, prefix, after=0):
    """Refuse threads named so, but for the first few, as the system does when it has no memory or no number for another."""
    start, refused = threading.Thread.start, []

    def start_or_not(thread):
        if thread.name.startswith(prefix):
            refused.append(thread)
            if len(refused) > after:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_not)


def open_files():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("prefix", ["ktmoe-read", "ktmoe-load"])
def test_a_thread_that_reads_cannot_be_started(tmp_path, monkeypatch, prefix, after):
    scheme = SCHEMES["gpt_oss"]
    tensors = {}
    for layer in range(4):
        tensors |= scheme.layer(f"model.layers.{layer}")
    write(tmp_path, tensors).close()
    before = open_files(), threading.active_count()
    with monkeypatch.context() as patch:
        thread_refused(patch, prefix, after)
        with pytest.raises(UnavailableError, match=r"start.*thread.*can't start new thread") as caught:
            MoEModel.from_checkpoint(tmp_path, backend="fp32_lut")
        if prefix == "ktmoe-read":
            with pytest.raises(UnavailableError, match="thread to read expert"):
                MoELayer.from_checkpoint(tmp_path, 0, "fp32_lut")
    assert isinstance(caught.value, RuntimeError)
    assert (open_files(), threading.active_count()) == before
    with MoEModel.from_checkpoint(tmp_path, backend="fp32_lut") as model:
        assert len(model) == 4


def test_a_job_whose_thread_cannot_be_started_is_never_run(monkeypatch, experts):
    """It is not left in a queue, to write into `out` when the next one is submitted."""
    monkeypatch.setattr(layer_module, "jobs", Worker("ktmoe-submit"))
    arguments = random_batch(np.random.default_rng(5), experts, 3, 2)
    with MoELayer(experts, "fp32_lut") as layer:
        out = np.zeros_like(arguments[0])
        with monkeypatch.context() as patch:
            thread_refused(patch, "ktmoe-submit")
            with pytest.raises(UnavailableError, match="starting thread ktmoe-submit: can't start new thread"):
                layer.submit(*arguments, out=out)
        assert same_bits(layer.submit(*arguments).result(), layer.forward(*arguments))
        assert not out.any()


def test_a_job_that_is_refused_takes_no_other_with_it(monkeypatch):
    """Those that were queued before run, and in order."""
    worker, gate, done = Worker("ktmoe-test"), threading.Event(), []
    jobs = [worker.submit(gate.wait), worker.submit(done.append, 1)]
    with monkeypatch.context() as patch:
        patch.setattr(ThreadPoolExecutor, "submit", lambda *_: worker.nothing)
        with pytest.raises(AttributeError):
            worker.submit(done.append, 2)
    jobs.append(worker.submit(done.append, 3))
    gate.set()
    assert [job.result() for job in jobs] == [True, None, None]
    assert done == [1, 3]


def test_an_error_keeps_nothing_of_what_was_read():
    """Neither its own frames nor its cause's."""
    kept = []

    def read(expert, projection):
        array = np.zeros((64, 32), np.uint8)
        kept.append(weakref.ref(array))
        return np.empty(2**62, np.uint8) if expert else Matrix("", MXFP4, (64, 64), array, np.full((64, 2), 127, np.uint8))

    with pytest.raises(OutOfMemoryError, match=r"reading expert 1: .*refused memory: Unable to allocate") as caught:
        MoELayer(ExpertWeights(2, 64, 64, read), "fp32_lut")
    traceback.clear_frames(caught.value.__traceback__)  # as BackgroundTasks does
    gc.collect()
    assert len(kept) >= 4
    assert [ref() for ref in kept] == [None] * len(kept)


@pytest.mark.parametrize("where", ["a tensor", "a loader"])
def test_memory_is_refused_while_reading(tmp_path, monkeypatch, where):
    write(tmp_path, SCHEMES["deepseek_v4"].layer("layers.0")).close()
    before = open_files(), threading.active_count()
    with monkeypatch.context() as patch:
        if where == "a tensor":

            def refuse(*_, **__):
                raise OSError(errno.ENOMEM, "Cannot allocate memory")

            patch.setattr(mmap, "mmap", refuse)
        else:
            patch.setattr(Checkpoint, "read", lambda *_, **__: bytearray(2**62))
        with pytest.raises(OutOfMemoryError, match=r"reading expert|tensor 'layers.0.*refused memory") as caught:
            MoELayer.from_checkpoint(tmp_path, 0, "fp32_lut")
    assert isinstance(caught.value, MemoryError)
    assert (open_files(), threading.active_count()) == before


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_memory_runs_out_while_reading():
    """For real: once the first of many experts is packed, a child may have 100 MB less than it has then."""

    def child():
        def read(expert, projection):
            n, k = (4096, 20480) if projection == "down" else (20480, 4096)
            codes = np.zeros((n, k // 2), np.uint8)  # 42 MB, which malloc takes from the system each time
            return Matrix(f"{expert}.{projection}", MXFP4, (n, k), codes, np.full((n, k // 32), 127, np.uint8))

        def limit(*_):
            if not limited:
                limited.append(resource.getrlimit(resource.RLIMIT_AS))
                mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                resource.setrlimit(resource.RLIMIT_AS, (mapped - 100_000_000, limited[0][1]))

        limited = []
        try:
            MoELayer(ExpertWeights(8, 4096, 20480, read), "fp32_lut", progress=limit)
        except OutOfMemoryError as error:
            resource.setrlimit(resource.RLIMIT_AS, limited[0])
            said = str(error)
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("ktmoe-read")]
        MoELayer(random_experts(np.random.default_rng(1), 2, 64, 64), "fp32_lut").close()
        return said, names

    said, names = in_child(child)
    assert re.search(r"experts: reading expert \d+: the system refused memory: Unable to allocate", said)
    assert not names


def test_a_refusal_by_the_system_leaves_nothing_behind(monkeypatch, backend):
    """More than the address space holds: no mapping, no thread, and the next layer works."""

    def mapped():
        return int(Path("/proc/self/statm").read_text().split()[0])

    monkeypatch.setattr(memory, "available_bytes", lambda: None)
    huge = ExpertWeights(1, 1 << 24, 1 << 24, lambda *_: pytest.fail("was read"))
    attempts = []
    for _ in range(5):
        with pytest.raises(OutOfMemoryError, match=r"packed weights of 1 expert need \d+ bytes; the system refused"):
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
    monkeypatch.setenv("KTMOE_NUM_THREADS", "1")
    assert threads.explain_default() == "KTMOE_NUM_THREADS"
    set_num_threads(1)
    assert threads.explain_default() == "set by ktmoe.set_num_threads or threadpoolctl"


@pytest.mark.parametrize("by", ["the environment", "argument"])
def test_more_threads_than_cpus_are_slow(monkeypatch, experts, by):
    """A warning has both numbers, and comes once. As many threads as CPUs are no reason for one."""
    cpus = len(os.sched_getaffinity(0))

    def use(number):
        if by == "argument":
            set_num_threads(number)
        else:
            monkeypatch.setenv("KTMOE_NUM_THREADS", str(number))
        for _ in range(2):
            MoELayer(experts, "fp32_lut").close()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        use(cpus)
        assert caught == []
        use(cpus + 3)
    (warning,) = caught
    assert warning.category is RuntimeWarning
    source = "set by ktmoe.set_num_threads or threadpoolctl" if by == "argument" else "KTMOE_NUM_THREADS"
    more = f"more than the {cpus} CPUs that this process may use"
    assert str(warning.message) == f"{cpus + 3} threads make calls slow here: {source}, {more}"
