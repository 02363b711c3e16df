"""ktmoe's own wheel: what is in it, and one that a compiler built which does not know the best instruction set."""

import contextlib
import io
import re
import shlex
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from environments import COMPILER, NEEDS_COMPILER, ROOT, Environment, run
from helpers import assert_right, random_batch, random_experts

import ktmoe
from ktmoe import MoELayer, backends
from ktmoe._native.isa import ISAS, compile_flags, sources
from ktmoe.backends import native
from ktmoe.backends.choice import choose_backend
from ktmoe.errors import UnavailableError

pytestmark = [NEEDS_COMPILER, pytest.mark.exhaustive]  # a build of everything
#: The instruction set that the compiler lacks, the backend that cannot do without it, and the flag that gives it away.
LACKING = max(ISAS, key=lambda name: ISAS[name].rank)
BACKEND = next(name for name in backends.names() if getattr(backends.get(name), "isas", {}).get("bf16") == (LACKING,))
FLAG = next(flag for flag in ISAS[LACKING].flags if not any(flag in compile_flags(name) for name in ISAS if name != LACKING))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, what its build printed, and an environment that it is installed in.

    Built from a copy of the tree. The compiler optimises less than it is told, since only what is compiled matters here.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "ktmoe", source / "ktmoe", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    (source / "tools").mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "tools/check_machine.sh"):
        shutil.copy(ROOT / name, source / name)
    compiler = folder / "compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        f'case " $* " in *" {FLAG} "*) echo "unrecognized option {FLAG}" >&2; exit 1;; *) o=-O0;; esac\n'
        f'exec {shlex.join(COMPILER)} "$@" $o\n'
    )
    compiler.chmod(0o755)
    environment = Environment(folder / "environment")
    printed = environment.wheel(source, folder, CC=str(compiler))
    (path,) = folder.glob("*.whl")
    environment.install(path)
    return path, printed, environment


def test_the_build_says_what_it_left_out(wheel):
    assert re.findall("built WITHOUT (.*)", wheel[1]) == [LACKING]


#: A kernel's file, a header of kernels, and one of the driver that the Cython module includes, too.
EDITS = ["kernels/q4_int8.c", "kernels/common/exp.h", "forward/schedule.h"]


@pytest.mark.parametrize(
    "edited",
    [name if name == "kernels/common/exp.h" else pytest.param(name, marks=pytest.mark.exhaustive) for name in EDITS],
)
def test_an_edit_compiles_what_it_concerns(wheel, tmp_path, edited):
    """A kernel's file, for each instruction set that has it; a header, for the files that include it; and nothing else."""
    path, _, environment = wheel
    source = path.parent / "source" / "ktmoe" / "_native"
    rows = [name for name in ISAS if name != LACKING]
    expected = {
        "kernels/q4_int8.c": ["kernels/q4_int8"] * sum("q4_int8" in sources(name) for name in rows),
        "kernels/common/exp.h": ["kernels/activation"] * sum("activation" in sources(name) for name in rows),
        "forward/schedule.h": [
            *(
                f"forward/{name}"
                for name in (
                    *("deal", "linear", "low_rank", "moe", "phase_a", "phase_b", "phases", "runs", "schedule", "scratch"),
                    "staging",
                )
            ),
            "python/core",
        ],
    }

    def compiled():
        printed = environment.wheel(path.parent / "source", tmp_path, CC=str(path.parent / "compiler"))
        return sorted(re.findall(r" -c (?:build/cython/)?ktmoe/_native/(\S+)\.c ", printed))

    assert compiled() == []
    file = source / edited
    file.write_text(file.read_text() + "\n")
    assert compiled() == expected[edited]


def test_what_the_wheel_holds(wheel):
    """All that runs, what a third party compiles against, types, and nothing beside the package."""
    archive = zipfile.ZipFile(wheel[0])
    names = archive.namelist()
    modules = {Path(name).name.partition(".")[0] for name in names if name.endswith(".so")}
    assert modules == {"core"}
    public = "__init__.py", "core.pyi", "ktmoe.pxd", "ktmoe.h", "pack/layout.h"
    assert {f"ktmoe/_native/{name}" for name in public} <= set(names)
    assert "ktmoe/py.typed" in names  # so that type checkers read the package's annotations
    native = {Path(name).name for name in names if Path(name).suffix in (".c", ".h", ".pyx", ".pxi", ".pxd")}
    assert native == {"ktmoe.h", "ktmoe.pxd", "layout.h"}
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "ktmoe").rglob("*.py")} <= set(names)
    (points,) = [archive.read(name).decode() for name in names if name.endswith(".dist-info/entry_points.txt")]
    assert "[sglang.srt.plugins]\nktmoe = ktmoe.sglang:register\n" in points
    assert {re.match(r"ktmoe(-[^/]*\.dist-info)?/", name)[0].partition("-")[0].rstrip("/") for name in names} == {"ktmoe"}


def test_a_source_distribution_has_all_that_a_build_needs(wheel, tmp_path):
    source = wheel[0].parent / "source"
    run([sys.executable, "setup.py", "sdist", "-d", tmp_path], cwd=source)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    kinds = (".c", ".h", ".pyx", ".pxi", ".pxd", ".pyi", ".py", ".typed")
    needed = {file for file in (source / "ktmoe").rglob("*") if file.suffix in kinds} | {source / "tools/check_machine.sh"}
    assert {str(file.relative_to(source)) for file in needed} - names == set()


def without(why):
    """What the wheel makes of a CPU that would have the instructions; the forward pass on the next best backend is right."""
    detected = native.missing_features
    native.missing_features = lambda isa: [] if isa == LACKING else detected(isa)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        ktmoe.show_config()
    with pytest.raises(UnavailableError) as caught:
        choose_backend("auto" if why == "KTMOE_BACKEND" else BACKEND)
    experts = random_experts(np.random.default_rng(1), 3, 96, 160)
    arguments = random_batch(np.random.default_rng(2), experts, 9, 2)
    for name in backends.available():
        with MoELayer(experts, name, "bf16") as layer:
            assert_right(layer, experts, *arguments)
    return ktmoe.__file__, shown.getvalue(), str(caught.value), backends.available()


@pytest.mark.parametrize("why", ["asked for by name", "KTMOE_BACKEND"])
def test_a_build_without_an_instruction_set(wheel, why):
    variables = {"KTMOE_BACKEND": BACKEND} if why == "KTMOE_BACKEND" else {}
    where, shown, refused, available = wheel[2].call(without, why, **variables)
    assert Path(where).is_relative_to(wheel[2].folder)
    reason = f"{LACKING} was not compiled into this build: its compiler did not know the instructions"
    assert f"\n  {BACKEND}: not available: {reason}\n" in shown
    assert refused == f"backend {BACKEND!r} ({why}) cannot be used: {reason}. Available: {', '.join(available)}"
    assert BACKEND not in available
    assert "fp32_lut" in available
    if why != "KTMOE_BACKEND":
        assert f"\nchosen: {available[0]} (the best available" in shown


def plain_is_right():
    experts = random_experts(np.random.default_rng(1), 2, 64, 64)
    with MoELayer(experts, "plain") as layer:
        assert_right(layer, experts, *random_batch(np.random.default_rng(2), experts, 5, 2))


def test_a_native_plugin_compiles_against_the_installed_wheel(wheel, tmp_path):
    """tests/test_plugins.py has the running interpreter's ktmoe, which may be editable: its headers are the source tree's."""
    environment = wheel[2]
    example, ignored = ROOT / "examples" / "native_backend", shutil.ignore_patterns("build", "*.egg-info")
    project = shutil.copytree(example, tmp_path / "native_backend", ignore=ignored)
    environment.wheel(project, tmp_path)
    environment.install(*tmp_path.glob("*.whl"))
    environment.call(plain_is_right, cwd=project)
    environment.uninstall("ktmoe-plain")
