"""A copy of the tree in which a mistake is planted: its files, what a build has left, and the tests that run there.

Of a C file, only objects that are made of it are compiled again, by the very commands of setup.py. Then all are linked.
A header of kernels is part of up to a hundred objects, and some take a minute. The mistake is planted in a few of them, each of
another instruction set as far as there are several. What tests find in these, they would find in all. If it lives, all get it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parents[1]
NATIVE, OBJECTS = "ktmoe/_native", "build/native"
MODULE = f"{NATIVE}/core{sysconfig.get_config_var('EXT_SUFFIX')}"
#: So many objects get the mistake, of so many that are compiled: not each has the line. Those of a middling size come first:
#: they are compiled in seconds, and have most uses of a header.
FEW, TRIED, MIDDLE_BYTES = 2, 6, 60_000
#: A run ends after so many seconds of a process's CPU time, or so many on the clock: a loop, or waiting for a lock, is endless.
CPU_SECONDS, SECONDS = 90, 300
UNUSED = ("cacheprovider", "xdist", "hypothesispytest")
#: Of pytest: two plugins that no test needs take half of the time until the first test runs.
OPTIONS = ("-q", "--no-header", "--tb=line", *(word for name in UNUSED for word in ("-p", f"no:{name}")))
#: Environment variables of the tests that may have started this.
NOT_PASSED = ("KTMOE_", "PYTEST_ADDOPTS", "PYTEST_CURRENT_TEST", "PYTEST_XDIST")
#: Where a mistake takes all memory, Linux ends these tests first. A limit of memory would turn sanitizers off.
LIMITED = 'echo 1000 >/proc/self/oom_score_adj; ulimit -t "$1" && ulimit -c 0 && shift && exec nice -n 15 "$@"'


class NotCompiled(Exception):
    """The compiler refuses the mistake, or makes the same machine code of it."""


def files(root: Path) -> list[str]:
    """The files of a checkout, those that git does not know yet included."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode()
    return [name for name in listed.split("\0") if name and (root / name).is_file()]


def objects(root: Path) -> list[str]:
    """The objects that make the module, below OBJECTS."""
    isa = runpy.run_path(str(root / NATIVE / "isa.py"))
    found = [f"python/{sysconfig.get_config_var('SOABI')}/python/core.o", "driver/kernels/isas.o"]
    found += [f"driver/{room}/{file.stem}.o" for room in isa["DRIVER"] for file in sorted((root / NATIVE / room).glob("*.c"))]
    known = [name for name in isa["ISAS"] if (root / OBJECTS / name / "kernels/table.o").exists()]
    return found + [f"{name}/kernels/{source}.o" for name in known for source in isa["sources"](name)]


class Copy:
    """A copy of a checkout. root: the checkout. folder: where the copy is made. native: whether it has what was built."""

    def __init__(self, root: Path, folder: Path, native: bool = True):
        self.folder, self.objects, self.process, self.ended = folder, [], None, False
        (folder / "tmp").mkdir(parents=True)  # what a killed test leaves
        for name in files(root):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name, follow_symlinks=False)
        if native:
            self.objects = objects(root)
            for name in self.objects:
                for ending in (".o", ".d", ".json"):
                    source = (root / OBJECTS / name).with_suffix(ending)
                    target = (folder / OBJECTS / name).with_suffix(ending)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(source, target)
            self.link(folder / "clean.so")  # not the module that was built: it tells whether these objects go together
            self.replace(folder / "clean.so")

    def plant(self, name: str, text: str, everywhere: bool = False) -> bool:
        """Give a file a text, and build what is made of it. Returns whether all of it is. Raises NotCompiled."""
        file = self.folder / name
        self.before = file, file.read_text(), file.stat().st_mtime_ns
        file.write_text(text)
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()  # its time and size may be those of the file as it is now
        if name.startswith(NATIVE) and file.suffix in (".c", ".h"):
            return self.build(name, everywhere)
        return True

    def restore(self) -> None:
        """The copy as it was before plant()."""
        file, text, time = self.before
        file.write_text(text)
        os.utime(file, ns=(time, time))
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
            compiled.unlink()
        if (self.folder / "clean.so").exists():
            self.replace(self.folder / "clean.so")

    def replace(self, module: Path) -> None:
        (self.folder / MODULE).unlink(missing_ok=True)
        shutil.copy2(module, self.folder / MODULE)

    def made_of(self, name: str) -> list[str]:
        """The objects that a source or a header is part of: of each instruction set the one next to MIDDLE_BYTES first."""
        rounds = {}
        for made in self.objects:
            needs = (self.folder / OBJECTS / made).with_suffix(".d").read_text()
            if name in needs.replace("\\\n", " ").split():
                away = abs((self.folder / OBJECTS / made).stat().st_size - MIDDLE_BYTES)
                rounds.setdefault(made.partition("/")[0], []).append((away, made))
        turns = itertools.zip_longest(*map(sorted, rounds.values()))
        return [made for turn in turns for _, made in sorted(filter(None, turn))]

    def build(self, name: str, everywhere: bool) -> bool:
        changed, made = {}, self.made_of(name)
        for one in made if everywhere else made[:TRIED]:
            command = json.loads((self.folder / OBJECTS / one).with_suffix(".json").read_text())["command"]
            target = self.folder / "build" / "mutant" / one
            target.parent.mkdir(parents=True, exist_ok=True)
            at = command.index("-MMD")
            command = [*command[:at], *command[at + 3 : -1], str(target)]
            if self.run(["nice", "-n", "15", *command], SECONDS):
                raise NotCompiled(f"the compiler refuses {name}")
            if target.read_bytes() != (self.folder / OBJECTS / one).read_bytes():
                changed[one] = str(target)
            if len(changed) == FEW and not everywhere:
                break
        if not changed:
            raise NotCompiled(f"{name} is compiled to the same machine code")
        linked = self.folder / "build" / "mutant" / "core.so"
        self.link(linked, changed)
        self.replace(linked)
        return everywhere or len(made) <= len(changed)

    def link(self, module: Path, changed: Mapping[str, str] = MappingProxyType({})) -> None:
        """Make a module of all objects. changed: those that are elsewhere."""
        linker = [*shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC")), "-shared", "-pthread", "-Wl,-s"]
        parts = [changed.get(one, str(self.folder / OBJECTS / one)) for one in self.objects]
        if self.run([*linker, *parts, "-o", str(module)], SECONDS):
            raise NotCompiled("the linker refuses the objects")

    def run(self, command: list[str], seconds: float) -> int:
        """A command's exit status, as subprocess has it. What it printed is in the file printed."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(NOT_PASSED)}
        environment |= {"PYTHONPATH": str(self.folder), "TMPDIR": str(self.folder / "tmp")}
        with (self.folder / "printed").open("w") as file:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            if self.ended:
                self.stop()
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return -signal.SIGXCPU
        finally:
            self.stop()

    def end(self) -> None:
        """End what runs, and what may start after this."""
        self.ended = True
        self.stop()

    def stop(self) -> None:
        """End what runs, and what it started."""
        if self.process:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def test(self, arguments: list[str], *more: str) -> tuple[str, list[str], str]:
        """How the tests end: "passed", "failed", "crashed" or "timeout"; the names of those that failed; what was printed."""
        temporary = self.folder / "temporary"
        command = [sys.executable, "-m", "pytest", *OPTIONS, f"--basetemp={temporary}", *more, *arguments]
        code = self.run(["sh", "-c", LIMITED, "sh", str(CPU_SECONDS), *command], SECONDS)
        text = (self.folder / "printed").read_text(errors="replace")
        shutil.rmtree(temporary, ignore_errors=True)
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.*?)?)(?: - .*)?$", text, re.MULTILINE)
        if code == 0:
            return "passed", [], text
        if code in (-signal.SIGXCPU, -signal.SIGKILL):
            return "timeout", failed, text
        return ("failed" if failed else "crashed"), failed, text
