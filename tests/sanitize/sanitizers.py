"""Native code compiled with sanitizers, beside the module that is used: all of it, or one object with a fault in its source."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from environments import COMPILER, ROOT

from ktmoe._native.isa import ISAS

HERE = Path(__file__).parent
NATIVE = ROOT / "ktmoe" / "_native"
BUILD = ROOT / "build" / "sanitize"
#: Checks of pointers, NULL or far from their array, take half of the time to compile. AddressSanitizer sees what is read.
LEFT_OUT = ("null", "pointer-overflow", "object-size", "nonnull-attribute", "returns-nonnull-attribute")
#: Python's own flags have -fwrapv, which makes overflow defined. Checks are calls: inline ones take several times as long to
#: compile.
ADDRESS = (
    *("-O1", "-g1", "-fno-wrapv", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    *(f"-fno-sanitize={','.join(LEFT_OUT)}", "--param=asan-instrumentation-with-call-threshold=0"),
)
THREAD = ("-O1", "-g1", "-fsanitize=thread")
#: Python itself is no subject: what it never frees is no leak of ours.
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:allocator_may_return_null=1:symbolize=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}


def works(sanitizer: str, folder: Path) -> bool:
    """Whether the compiler has it, and what it makes runs here."""
    (folder / "probe.c").write_text("int main(void) { return 0; }\n")
    command = [*COMPILER, f"-fsanitize={sanitizer}", folder / "probe.c", "-o", folder / "probe"]
    done = subprocess.run(command, capture_output=True)
    return done.returncode == 0 and subprocess.run([folder / "probe"], capture_output=True).returncode == 0


def build() -> Path:
    """The module under AddressSanitizer and UBSan; only what changed is compiled."""
    folders = ["--objects", BUILD / "objects", "--build-temp", BUILD / "temp", "--build-lib", BUILD / "lib"]
    environment = {name: value for name, value in os.environ.items() if name != "CFLAGS"}
    command = [sys.executable, "setup.py", "-q", "build_ext", *folders, f"--last-flags={shlex.join(ADDRESS)}"]
    if "KTMOE_TEST_SANITIZE_ISAS" in os.environ:
        command += ["--isas", os.environ["KTMOE_TEST_SANITIZE_ISAS"]]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    (module,) = (BUILD / "lib").rglob("core.*.so")
    return module


def built_objects() -> list[Path]:
    """The objects of build()'s module; others may lie beside them, of rows that were left out or of sources that are gone."""
    rows = os.environ.get("KTMOE_TEST_SANITIZE_ISAS", ",".join(ISAS)).split(",")
    objects = [file for folder in ("python", "driver", *rows) for file in sorted((BUILD / "objects" / folder).rglob("*.o"))]
    commands = {file: json.loads(file.with_suffix(".json").read_text())["command"] for file in objects}
    return [file for file, command in commands.items() if (ROOT / command[command.index("-c") + 1]).exists()]


@dataclass(frozen=True)
class Fault:
    """Text to replace in a file of the native sources, and the object that is compiled anew.

    object: its folder and name below those of all objects. reported: what the sanitizer has to say, and what it has to name.
    """

    file: str
    old: str
    new: str
    object: str
    reported: tuple[str, ...]
    calls: str = "fp32_lut-portable"  # of tests/ways.py

    def patched(self, folder: Path) -> Path:
        """A copy of the native sources with the fault."""
        copy = folder / "ktmoe" / "_native"
        shutil.copytree(NATIVE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        text = (copy / self.file).read_text()
        assert text.count(self.old) == 1, f"{self.file} has {text.count(self.old)} times: {self.old}"
        (copy / self.file).write_text(text.replace(self.old, self.new))
        return copy

    def module(self, folder: Path) -> Path:
        """build()'s module, but for this object."""
        self.patched(folder)
        whole = BUILD / "objects" / self.object
        command = json.loads(whole.with_suffix(".json").read_text())["command"]
        made = folder / "faulty.o"
        command[command.index("-o") + 1] = str(made)
        command[command.index("-MF") + 1] = str(folder / "faulty.d")
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)  # whose paths are relative
        assert done.returncode == 0, done.stderr
        objects = [made if other == whole else other for other in built_objects()]
        target = folder / "core.so"
        subprocess.run([*COMPILER, "-shared", "-pthread", *ADDRESS, *objects, "-o", target], check=True)
        return target


def run_cases(module: Path | None, *arguments: object, seconds: float = 600) -> subprocess.CompletedProcess:
    """run_cases.py in a new process, with a module or with the normal one."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1"}
    if module:
        found = [
            subprocess.check_output([*COMPILER, f"-print-file-name=lib{name}.so"], text=True).strip()
            for name in ("asan", "ubsan")
        ]
        environment |= OPTIONS | {"LD_PRELOAD": " ".join(found), "PYTHONMALLOC": "malloc"}
    command = [sys.executable, HERE / "run_cases.py", module or "-", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)


def threads_program(sources: Path, folder: Path, reuse: Path | None = None, only: str = "") -> Path:
    """threads.c under ThreadSanitizer, with the driver and portable kernels for bfloat16 weights. reuse: a folder of an earlier
    call, all of whose objects but `only` are taken."""
    isa = runpy.run_path(str(sources / "isa.py"))
    row = isa["ISAS"]["portable"]
    object.__setattr__(row, "kernels", ("b16_f32", "f32_f32"))
    jobs = {
        f"kernels-{name}": (sources / f"kernels/{name}.c", isa["definitions"]("portable", name))
        for name in isa["sources"]("portable")
    }
    jobs["kernels-isas"] = sources / "kernels/isas.c", ("-DKT_ISAS=X(portable)",)
    jobs |= {f"{room}-{file.stem}": (file, ()) for room in isa["DRIVER"] for file in sorted((sources / room).glob("*.c"))}
    jobs["threads"] = HERE / "threads.c", ()
    objects, running = [], []
    for name, (source, definitions) in jobs.items():
        objects.append(folder / f"{name}.o" if not reuse or name == only else reuse / f"{name}.o")
        if objects[-1].parent != folder:
            continue
        command = [*COMPILER, "-std=c11", "-ffp-contract=off", "-pthread", *THREAD, f"-I{sources}", *definitions]
        running.append(subprocess.Popen([*command, "-c", source, "-o", objects[-1]]))
        if len(running) == 2:
            assert running.pop(0).wait() == 0
    assert all(one.wait() == 0 for one in running)
    subprocess.run([*COMPILER, "-pthread", *THREAD, *objects, "-o", folder / "threads"], check=True)
    return folder / "threads"


def run_threads(program: Path, rounds: int, shards: int, seed: int = 0) -> subprocess.CompletedProcess:
    return subprocess.run(
        [program, str(rounds), str(shards), str(seed)], env=os.environ | OPTIONS, capture_output=True, text=True, timeout=600
    )
