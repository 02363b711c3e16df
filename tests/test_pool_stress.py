"""The pool's C sources by themselves, most under sanitizers: tasks, meetings, gates, callers, forks, threads that are refused.

pool/stress.c says what is wrong. Made-up L3 caches make groups; all threads run on the CPUs that there are, often more than
there are, and spin or sleep at once.
"""

import subprocess

import pytest
from environments import COMPILER, ROOT

NATIVE = ROOT / "ktmoe" / "_native"
BASE = ("cpu", "event", "os", "pool", "teams")
SOURCES = [ROOT / "tests" / "pool" / "stress.c", *(NATIVE / "base" / f"{name}.c" for name in BASE)]
#: By the sanitizer that knows what they could get wrong. Neither follows a fork: their own locks do not survive one.
MODES = {
    "thread": ("tasks", "meetings", "gates", "callers", "refusals"),
    "address,undefined": ("gates", "refusals"),
    "": ("forks",),
}
#: Threads, rounds, cores: one group, groups of three shards, more groups than one is large, fewer threads than shards.
SIZES = {
    "one": (2, 50, ("8",)),
    "groups": (19, 40, ("8,8", "4,4", "2")),
    "many": (257, 4, ("64", "64")),
    "few": (2, 50, ("8",) * 5),
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """One for each sanitizer that works here, made when it is asked for."""
    folder, made = tmp_path_factory.mktemp("pool"), {}

    def program(sanitizer):
        if sanitizer not in made:
            target = folder / f"stress {sanitizer}"
            flags = ["-std=c11", "-O1", "-g", "-pthread", "-Wl,--wrap=pthread_create", f"-I{NATIVE}"]
            flags += [f"-fsanitize={sanitizer}"] * bool(sanitizer)
            done = subprocess.run([*COMPILER, *flags, *SOURCES, "-o", target], capture_output=True, text=True)
            works = done.returncode == 0 and subprocess.run([target, "tasks", "2", "1", "0", "8"], capture_output=True)
            made[sanitizer] = target if works and works.returncode == 0 else None
        return made[sanitizer]

    return program


@pytest.mark.cover("values")
@pytest.mark.parametrize("spin_us", [0, 50])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("sanitizer", "mode"), [(name, mode) for name, modes in MODES.items() for mode in modes])
def test_stress(programs, sanitizer, mode, size, spin_us):
    program = programs(sanitizer)
    if not program:
        pytest.skip(f"the compiler has no -fsanitize={sanitizer} that works here")
    threads, rounds, cores = SIZES[size]
    command = [program, mode, str(threads), str(rounds), str(spin_us), *cores]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
