"""The process in which calls on files fail, or kill it: each operation that reads or writes files, and what must be true then.

Asked {"operation", "kinds", "at", "how", "error", "lasting"}, it answers {"calls", "hit", "error", "message", "state",
"faults"}.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tomllib
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from adapter_files import QWEN
from cached import outputs, write_model
from converting import tree
from failing_calls import Library, serve

from ktmoe import MoELayer, MoEModel, synthetic
from ktmoe.adapters import export_adapter, import_adapter, merge_adapter
from ktmoe.cache.packing import pack
from ktmoe.cli import results
from ktmoe.conversion import convert
from ktmoe.errors import KtmoeError
from ktmoe.loaders.base import load_experts
from ktmoe.training.lora import Lora

LIBRARY = Library()
BASE = Path(sys.argv[1])
CASE = BASE / "case"
SIZES = {"num_experts": 2, "hidden": 64, "intermediate": 64}


@dataclass
class Operation:
    """run: what it does in CASE; returns arrays, if it is about them. loads: arrays of what is in CASE, as a user reads it; it
    raises KtmoeError where nothing whole is there. before: what is in CASE before.

    whole: the files of CASE, and right: the arrays, once it is done. old: the arrays of before, None where there were none.
    """

    run: Callable[[], list[np.ndarray] | None]
    loads: Callable[[], list[np.ndarray]]
    before: Callable[[], object] = lambda: None
    whole: dict[str, bytes] | None = None
    right: list[np.ndarray] | None = None
    old: list[np.ndarray] | None = None

    def prepare(self) -> None:
        """Find what is right, and keep what was there before."""
        remove(CASE)
        CASE.mkdir()
        self.before()
        remove(BASE / self.kept)
        shutil.copytree(CASE, BASE / self.kept)
        self.old = attempt(self.loads)
        given = self.run()
        self.whole, self.right = tree(CASE), self.loads()
        assert given is None or same(given, self.right)

    @property
    def kept(self) -> str:
        return f"before {id(self)}"

    def start(self) -> None:
        remove(CASE)
        shutil.copytree(BASE / self.kept, CASE)

    def state(self) -> str:
        """What is there: "new", "old", "refused", or what is wrong."""
        try:
            found = self.loads()
        except KtmoeError:
            return "refused"
        return "new" if same(found, self.right) else "old" if self.old is not None and same(found, self.old) else "wrong bits"


def remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def attempt(loads) -> list[np.ndarray] | None:
    try:
        return loads()
    except KtmoeError:
        return None


def same(found, expected) -> bool:
    as_bytes = ([array.reshape(-1).view(np.uint8) for array in arrays] for arrays in (found, expected))
    return len(found) == len(expected) and all(np.array_equal(*pair) for pair in zip(*as_bytes, strict=True))


MODEL, CACHE = write_model(BASE, layers=2)
PLAIN, GGUF = BASE / "plain", BASE / "gguf"
synthetic.write_qwen3(PLAIN, layers=2, **SIZES)
synthetic.write_gguf(GGUF, types="Q8_0", layers=1, **SIZES)
ADAPTER = BASE / "adapter"


def adapter(seed: int, rank: int = 2, alpha: float = 3.0) -> Lora:
    rng = np.random.default_rng(seed)
    shapes = ((2, rank, 64), (2, 64, rank))
    return Lora({p: tuple(rng.standard_normal(s, np.float32) for s in shapes) for p in ("gate", "up", "down")}, alpha)


OLD, NEW = adapter(1), adapter(2, alpha=5.0)
export_adapter(ADAPTER, {0: NEW}, QWEN)


def out() -> Path:
    return CASE / "out"


def matrices(folder: Path, layer: int = 0) -> list[np.ndarray]:
    experts = load_experts(folder, layer)
    found = [experts.matrix(expert, projection) for expert in range(experts.num_experts) for projection in ("gate", "down")]
    return [array for matrix in found for array in matrix.stored.values()]


def converted() -> list[np.ndarray]:
    return matrices(out()) + matrices(out(), 1)


def cached() -> list[np.ndarray]:
    with MoEModel.from_checkpoint(MODEL, cache=out()) as model:
        return [outputs(model[layer]) for layer in (0, 1)]


def cached_layer() -> list[np.ndarray]:
    with MoELayer.from_checkpoint(MODEL, 0, cache=CACHE) as layer:
        return [outputs(layer)]


def first_layer() -> list[np.ndarray]:
    with MoELayer.from_checkpoint(MODEL, 0, cache=out()) as layer:
        return [outputs(layer)]


def of_adapter(folder: Path) -> list[np.ndarray]:
    (found,) = import_adapter(folder, QWEN).values()
    return [np.array([found.scale]), *(array for pair in found.pairs.values() for array in pair)]


def saved_results() -> list[np.ndarray]:
    return [np.array(tomllib.loads((CASE / "results.toml").read_text())["numbers"])]


def half() -> None:
    """A conversion that was interrupted after its first file."""

    def stop(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        to_mxfp4(progress=stop)


def to_mxfp4(**options) -> None:
    convert(PLAIN, out(), "mxfp4", shard_bytes=8_000, **options)


def read(loads) -> Operation:
    return Operation(loads, loads)


OPERATIONS = {
    "load": read(lambda: matrices(MODEL)),
    "load gguf": read(lambda: matrices(GGUF)),
    "load a packed cache": read(cached_layer),
    "import an adapter": read(lambda: of_adapter(ADAPTER)),
    "pack": Operation(lambda: pack(MODEL, out()) and None, cached),
    "pack one more layer": Operation(lambda: pack(MODEL, out()) and None, cached, lambda: pack(MODEL, out(), [0])),
    "convert": Operation(to_mxfp4, converted),
    "convert the rest": Operation(to_mxfp4, converted, half),
    "merge": Operation(lambda: merge_adapter(PLAIN, {0: NEW}, out(), shard_bytes=8_000) and None, converted),
    "export an adapter": Operation(lambda: export_adapter(out(), {0: NEW}, QWEN), lambda: of_adapter(out())),
    "replace an adapter": Operation(
        lambda: export_adapter(out(), {0: NEW}, QWEN, overwrite=True),
        lambda: of_adapter(out()),
        lambda: export_adapter(out(), {0: OLD}, QWEN),
    ),
    "results of bench": Operation(
        lambda: results.write(CASE / "results.toml", {"numbers": [1.5, 2.5] * 500}),
        saved_results,
        lambda: results.write(CASE / "results.toml", {"numbers": [3.5] * 1000}),
    ),
}


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def left_over() -> list[str]:
    return [name for name in tree(CASE) if name.endswith((".part", ".lock"))]


def answer(operation: str, kinds: list[str], at: int, how: str = "fail", **more) -> dict:
    one = OPERATIONS[operation]
    if one.whole is None:
        one.prepare()
    one.start()
    faults, before = [], descriptors()
    if how == "kill":
        found = killed(one, kinds, at)
    else:
        found = failed(one, kinds, at, how, faults, **more)
        if (after := descriptors()) != before:
            faults.append(f"descriptors: {before} before, {after} after")
    found["state"] = state = one.state()
    if state == "wrong bits" or (state == "old" and not found["error"]):
        faults.append(f"{state} are read")
    if operation == "pack one more layer" and not same(first_layer(), one.right[:1]):
        faults.append("the layer that was there gives other bits")
    if state != "new" or operation in ("pack", "pack one more layer", "replace an adapter"):
        try:
            one.run()
        except Exception as error:
            traceback.print_exception(error)
            faults.append(f"the next run: {type(error).__name__}: {error}")
    # who is killed, or may not unlink, leaves its lock; and there is no next run of what is done
    if state == "new" and (how == "kill" or found["hit"] == "unlink" or more.get("lasting")):
        for name in left_over():
            (CASE / name).unlink()
    if tree(CASE) != one.whole:
        faults.append(f"files after the next run: {sorted(tree(CASE))}, expected {sorted(one.whole)}, or other bytes")
    return found | {"faults": faults}


def failed(one: Operation, kinds: list[str], at: int, how: str, faults: list[str], **more) -> dict:
    """Run it, with a call that fails."""
    failure = None
    LIBRARY.begin(kinds, at, how, **more)
    try:
        given = one.run()
    except BaseException as error:
        calls = LIBRARY.end()
        failure = type(error).__name__, str(error)
        if not isinstance(error, KtmoeError | MemoryError):
            traceback.print_exception(error)
            faults.append("no error of ktmoe")
        elif str(BASE) not in str(error):
            faults.append("the error names no file")
    else:
        calls = LIBRARY.end()
        if given is not None and not same(given, one.right):
            faults.append("other bits were read")
    unsure = LIBRARY.hit in ("stat", "lstat", "fstat", "flock", "unlink", "rmdir") or ("name" in kinds and more.get("lasting"))
    if not unsure and (left := left_over()):  # else what is there may be another's, or cannot be removed
        faults.append(f"left over: {left}")
    error, message = failure or ("", "")
    return {"calls": calls, "hit": LIBRARY.hit, "error": error, "message": message}


def killed(one: Operation, kinds: list[str], at: int) -> dict:
    """Run it in a fork, which is killed at that call; "error" is empty if it has fewer."""
    child = os.fork()
    if not child:
        try:
            LIBRARY.begin(kinds, at, "kill")
            one.run()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return {"calls": 0, "hit": "", "error": "killed" if os.WIFSIGNALED(status) else "", "message": ""}


def main() -> None:
    LIBRARY.folder(BASE)
    gc.collect()
    gc.freeze()
    serve(answer)


if __name__ == "__main__":
    main()
