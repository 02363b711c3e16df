"""The emulator's handler: installing it, threads, counts, and signals that are not its own. It builds, and knows the CPU.

What the instructions do is tested in test_emulator_avx512.py and test_emulator_amx.py.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from pathlib import Path

import emulator
import numpy as np
import pytest
from emulator import assembly, features
from emulator.avx512 import BF16, OPS, loop
from emulator.machine import aligned, in_process
from emulator.model import bf16_values, bits, dot_pairs

pytestmark = pytest.mark.skipif(emulator.unavailable() is not None, reason=str(emulator.unavailable()))


def test_one_trap_for_instructions_in_a_row(program, emulated, trapping):
    a = aligned(160, np.uint32)
    acc = aligned(160, np.float32)
    loop(program, "run", acc, a, a)
    assert emulator.traps() == (10 if trapping else 0)
    counts = emulator.counts()
    assert {op: n for op, n in counts.items() if n} == (dict.fromkeys(BF16, 10 * assembly.RUN_LENGTH // 3) if trapping else {})
    assert set(OPS) < set(counts)


def test_threads_older_and_younger_than_the_handler(program, emulator_folder):
    """All get right results at once, and the counts lose nothing."""
    rng = np.random.default_rng(5)
    count, repeats, go, wrong = 1 << 12, 4, threading.Event(), []
    inputs = [aligned(count, np.uint32) for _ in "ab"]
    for x in inputs:
        x[:] = bf16_values(rng, 2 * count).view(np.uint32)
    expected = dot_pairs(np.zeros(count, np.float32), *inputs)

    def work():
        go.wait()
        for _ in range(repeats):
            acc = aligned(count, np.float32)
            loop(program, "dot", acc, *inputs)
            if np.any(bits(acc) != bits(expected)):
                wrong.append(threading.get_ident())

    older = [threading.Thread(target=work) for _ in range(4)]
    for thread in older:
        thread.start()
    with emulator.installed(emulator_folder):
        emulator.reset()
        younger = [threading.Thread(target=work) for _ in range(4)]
        for thread in younger:
            thread.start()
        go.set()
        for thread in older + younger:
            thread.join()
    assert not wrong
    assert emulator.counts()["vdpbf16ps"] in (0, 8 * repeats * count // 16)


def test_installs_nest(emulator_folder):
    with emulator.installed(emulator_folder):
        with emulator.installed(emulator_folder):
            pass
        assert emulator._depth == 1
    with pytest.raises(RuntimeError, match="not installed"):
        emulator.uninstall()


def test_features(monkeypatch):
    flags = frozenset({"avx2", "avx512_bf16", "amx_tile", "amx_bf16"})
    monkeypatch.setattr(features, "cpu_flags", lambda: flags)
    monkeypatch.setattr(features, "_forced", False)
    monkeypatch.setattr(emulator, "unavailable", lambda: None)
    monkeypatch.setattr(features, "permitted", lambda: True)
    assert emulator.native("avx512_bf16", "amx_bf16")
    assert emulator.native("avx2")
    assert not emulator.native("amx_tile", "amx_int8")
    assert not emulator.native()
    assert emulator.needed("amx_int8")
    assert emulator.needed()
    assert not emulator.needed("amx_tile")
    with pytest.raises(ValueError, match="not emulated: avx2"):
        emulator.needed("avx2", "amx_tile")
    with pytest.raises(RuntimeError, match="may use AMX on the CPU already"):
        emulator.force()
    assert not emulator.forced()
    monkeypatch.setattr(features, "permitted", lambda: False)
    emulator.force()
    assert emulator.forced()
    assert emulator.needed("amx_tile")
    assert not emulator.native("amx_tile", "avx512_bf16")
    assert emulator.native("avx512_bf16")
    assert emulator.needed("avx512vbmi")
    with pytest.raises(RuntimeError, match="forced"):
        emulator.permit()


def test_permission(program, emulator_folder):
    """Asking gives what the kernel says, and cannot be undone by forcing."""
    script = """
assert not emulator.permitted()
granted = emulator.permit()
assert granted == emulator.permitted()
try:
    emulator.force()
except RuntimeError:
    assert granted
else:
    assert not granted
emulator.features._forced = True  # as if somebody else had asked behind force()
try:
    INSTALL
except RuntimeError:
    assert granted
else:
    assert not granted
"""
    done = in_process(program.path, emulator_folder, script)
    assert done.returncode == 0, done.stderr


def test_compiles_once(emulator_folder):
    first = emulator.build(emulator_folder)
    stamp = first.stat().st_mtime_ns
    assert emulator.build(emulator_folder) == first
    assert first.stat().st_mtime_ns == stamp
    assert not list(emulator_folder.glob("emulator-*.so.*"))


def test_sources_compile_without_warnings(emulator_folder):
    sources = [str(path) for path in Path(emulator.__file__).parent.glob("*.c")]
    subprocess.run(
        [*emulator.compiler(), *emulator.FLAGS, "-Werror", "-o", str(emulator_folder / "strict.so"), *sources], check=True
    )


# --- signals that are not ours: each in a process of its own, as most of them end it ---


@pytest.mark.parametrize(
    ("script", "status", "output"),
    [
        pytest.param("INSTALL; execute('illegal')", -signal.SIGILL, "", id="default"),
        pytest.param(
            "signal.signal(signal.SIGILL, signal.SIG_IGN); INSTALL; execute('illegal')", -signal.SIGILL, "", id="ignored"
        ),
        pytest.param("INSTALL; send()", -signal.SIGILL, "", id="sent"),
        pytest.param(
            "signal.signal(signal.SIGILL, signal.SIG_IGN); INSTALL; send(); print('alive')",
            0,
            "alive",
            id="sent-ignored",
        ),
        pytest.param(
            "signal.signal(signal.SIGILL, lambda *_: print('seen')); INSTALL; send(); print('alive')",
            0,
            "seen\nalive",
            id="sent-python-handler",
        ),
        pytest.param(
            "faulthandler.enable(); INSTALL; execute('illegal')", -signal.SIGILL, "Illegal instruction", id="faulthandler"
        ),
        pytest.param(
            "handle_in_c(SIGINFO); INSTALL; execute('mixed'); print(skipped.value)",
            0,
            "2",
            id="c-handler",
        ),
        pytest.param(
            "handle_in_c(SIGINFO | NODEFER); INSTALL; execute('mixed'); print(skipped.value)",
            0,
            "2",
            id="c-handler-nodefer",
        ),
        pytest.param(
            "handle_in_c(SIGINFO); INSTALL; execute('mixed_tiles'); print(skipped.value, emulator.counts()['tilezero'])",
            0,
            "2 3",
            id="c-handler-amx",
        ),
        pytest.param("handle_in_c(SIGINFO | RESETHAND); INSTALL; execute('mixed')", -signal.SIGILL, "", id="c-handler-once"),
        pytest.param(
            "handle_in_c(SIGINFO); INSTALL; emulator.uninstall(); execute('illegal'); print('alive')", 0, "alive", id="restored"
        ),
        pytest.param(
            "INSTALL; handle_in_c(SIGINFO)\ntry:\n    emulator.uninstall()\nexcept RuntimeError as error:\n    print(error)",
            0,
            "another SIGILL handler",
            id="covered",
        ),
    ],
)
def test_foreign_signals_are_passed_on(program, emulator_folder, script, status, output):
    done = in_process(program.path, emulator_folder, script)
    assert done.returncode == status, done.stderr
    assert output in done.stdout + done.stderr


def test_without_the_emulator_the_instruction_kills(program, emulator_folder, trapping):
    if not trapping:
        pytest.skip("this CPU has the instructions")
    done = in_process(
        program.path, emulator_folder, "INSTALL; execute('initial_zero'); emulator.uninstall(); print('so far', flush=True)"
    )
    assert done.returncode == 0, done.stderr
    done = in_process(program.path, emulator_folder, "INSTALL; emulator.uninstall(); execute('initial_zero')")
    assert done.returncode == -signal.SIGILL


def test_without_the_emulator_an_amx_instruction_kills(program, emulator_folder):
    """Also on a CPU that has AMX, which this process did not ask for."""
    done = in_process(
        program.path, emulator_folder, "INSTALL; library.tilezero(); emulator.uninstall(); print('so far', flush=True)"
    )
    assert (done.returncode, done.stdout) == (0, "so far\n"), done.stderr
    done = in_process(program.path, emulator_folder, "INSTALL; emulator.uninstall(); library.tilezero()")
    assert done.returncode == -signal.SIGILL


@pytest.mark.parametrize("op", ["vcvtne2ps2bf16", "vpmultishiftqb", "vpermb", "vgf2p8affineqb"])
def test_a_bad_address_faults(program, emulator_folder, op):
    """These do not spare masked-out elements; the process gets the SIGSEGV it would get from a CPU."""
    script = f"""
area = mmap.mmap(-1, 2 * mmap.PAGESIZE)
start = np.frombuffer(area, np.uint8).ctypes.data + mmap.PAGESIZE
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
INSTALL
execute('masked_vdpbf16ps', start - 4)
print('so far', flush=True)
execute('masked_{op}', start - 4)
"""
    done = in_process(program.path, emulator_folder, script)
    assert done.returncode == -signal.SIGSEGV, done.stderr
    assert "so far" in done.stdout


@pytest.mark.parametrize("routine", ["initial_zero", "tilezero"])
def test_faulthandler_sees_nothing_of_ours(program, emulator_folder, routine):
    done = in_process(program.path, emulator_folder, f"faulthandler.enable(); INSTALL; execute('{routine}'); print('alive')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")


def test_cost(program, emulated, trapping, record_property):
    """A trap alone and an instruction that follows one, in nanoseconds, for whoever plans a test's size."""
    if not trapping:
        pytest.skip("this CPU has the instructions")
    x, acc = aligned(16 * 2000, np.uint32), aligned(16 * 2000, np.float32)
    seconds = {}
    for name in ("dot", "run"):
        loop(program, name, acc, x, x)
        start = time.perf_counter()
        loop(program, name, acc, x, x)
        seconds[name] = (time.perf_counter() - start) / 2000
    following = (seconds["run"] - seconds["dot"]) / (assembly.RUN_LENGTH - 1)
    print(f"\n{seconds['dot'] * 1e6:.2f} us a trap, {following * 1e6:.3f} us each instruction that follows directly")
    record_property("trap_us", seconds["dot"] * 1e6)
    assert seconds["dot"] < 1e-3
