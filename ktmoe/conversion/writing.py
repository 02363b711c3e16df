"""Writing a checkpoint file by file from a plan; what was interrupted goes on."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

from ktmoe.conversion.jobs import CHUNK_BYTES, Job, Made
from ktmoe.conversion.journal import Journal
from ktmoe.conversion.plan import Shard
from ktmoe.conversion.source import Source
from ktmoe.errors import OutOfSpaceError, OutputError, thread_for
from ktmoe.files.atomic import AtomicFile, sync_folder, write_json
from ktmoe.files.lock import exclusive
from ktmoe.files.output import free_bytes
from ktmoe.files.safetensors_writer import SafetensorsWriter
from ktmoe.machine.threads import get_num_threads
from ktmoe.quantization import Error
from ktmoe.version import installed_version

#: Free space that is left alone beside the result.
_SPARE_BYTES = 1 << 20

#: Called with (bytes of the source that are done, bytes in all).
Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Task:
    """What is to be written.

    command, noun: Journal's. shards: the files of tensors. config: of the result. copied: names of other files of the source.
    identity: Journal's, without the source's files and ktmoe's version. layers: in the order of the report.
    report: what is kept beside the weights, in ktmoe_{command}.json, by the errors of the layers.
    """

    command: str
    noun: str
    shards: list[Shard]
    config: dict[str, Any]
    copied: list[str]
    identity: Mapping[str, object]
    layers: Collection[int | str]
    report: Callable[[dict[int | str, Error]], dict[str, Any]]


@dataclass(frozen=True)
class Written:
    """errors: by layer. nbytes: of all tensors. kept: files that were finished before this run."""

    errors: dict[int | str, Error]
    nbytes: int
    kept: list[str]


def write(source: Source, task: Task, folder: Path, progress: Progress | None) -> Written:
    """Write a checkpoint into a new or empty folder, or one in which the same was interrupted. The index is written last.

    Raises OutputError: the folder has other files, another process writes it, the disk is full; OutOfSpaceError before anything
    is written; CheckpointError also for a file that changes meanwhile; what jobs raise.
    """
    identity: dict[str, Any] = {"source": source.identity, **task.identity, "version of ktmoe": version()}
    with _made(folder), exclusive(folder):
        journal = Journal(folder, identity, task.command, task.noun)
        kept = [shard.name for shard in task.shards if _kept(journal, folder, shard)]
        left = [shard for shard in task.shards if shard.name not in kept]
        copies = [identity["source"][name][0] for name in task.copied if not os.path.exists(folder / name)]
        _check_space(folder, sum(shard.nbytes for shard in left) + sum(copies))
        journal.begin()
        count = Counter(progress or (lambda done, total: None), task.shards, kept)
        with Workers(task.command) as workers:
            for shard in left:
                journal.add(shard.name, _write_shard(source, shard, folder, workers, count))
        for name in task.copied:
            _copy(source, name, folder)
        source.check()
        finished = [journal.finished[shard.name] for shard in task.shards]
        errors = {layer: sum((of.get(layer, Error()) for of in finished), Error()) for layer in task.layers}
        nbytes = sum(shard.nbytes for shard in task.shards)
        write_json(folder / f"ktmoe_{task.command}.json", task.report(errors), overwrite=True)
        write_json(folder / source.config_name, task.config, overwrite=True)
        journal.close({each.name: shard.name for shard in task.shards for each in shard.tensors}, nbytes)
    return Written(errors, nbytes, kept)


def version() -> str | None:
    """The version of ktmoe; None in a tree that is not installed."""
    try:
        return installed_version()
    except PackageNotFoundError:
        return None


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder, and remove it if it is empty after an error."""
    _make(folder, parents=True)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # it has files
            folder.rmdir()
        raise


def _make(folder: Path, parents: bool = False) -> None:
    try:
        folder.mkdir(parents=parents, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        found = error.strerror if isinstance(error, OSError) else error
        raise OutputError(f"{folder}: expected a folder that can be written, found {found}") from error


def _kept(journal: Journal, folder: Path, shard: Shard) -> bool:
    return journal.keep(folder, shard.name, {each.name: (each.dtype, each.shape) for each in shard.tensors})


def _check_space(folder: Path, needed: int) -> None:
    free = free_bytes(folder)
    if free < needed + _SPARE_BYTES:
        raise OutOfSpaceError(f"{folder}: expected {needed + _SPARE_BYTES} bytes of free space, found {free}")


class Counter:
    """Tells progress: bytes of the source, those of files that were finished before among them."""

    def __init__(self, progress: Progress, shards: list[Shard], kept: Collection[str]):
        sizes = {shard.name: sum(job.nbytes for unit in shard.units for job in unit.jobs) for shard in shards}
        self._progress, self._total = progress, sum(sizes.values())
        self._done = sum(sizes[name] for name in kept)
        progress(self._done, self._total)

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(self._done, self._total)


class Workers:
    """Threads that run jobs ahead of whoever writes their bytes: as many as ktmoe has, and one job more than threads."""

    def __init__(self, command: str):
        self._threads = get_num_threads()
        self._name = f"ktmoe-{command}"
        self._pool = ThreadPoolExecutor(self._threads, self._name)

    def in_order(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, Made]]:
        """Raises UnavailableError if a thread cannot be started; what jobs raise."""
        ahead: deque[tuple[Job, Future[Made]]] = deque()
        try:
            for job in jobs:
                with thread_for(f"starting thread {self._name}"):
                    future = self._pool.submit(job.make)
                ahead.append((job, future))
                if len(ahead) > self._threads:
                    job, future = ahead.popleft()
                    yield job, future.result()
            while ahead:
                job, future = ahead.popleft()
                yield job, future.result()
        finally:
            for _, future in ahead:
                future.cancel()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def _write_shard(source: Source, shard: Shard, folder: Path, workers: Workers, count: Counter) -> dict[int | str, Error]:
    """Write a file; returns what rounding changed of each layer in it."""
    errors: dict[int | str, Error] = {}
    tensors = [(each.name, each.dtype, each.shape) for each in shard.tensors]
    source.check()
    with SafetensorsWriter(folder / shard.name, tensors, {"format": "pt"}, overwrite=True) as writer:
        for job, result in workers.in_order(job for unit in shard.units for job in unit.jobs):
            for name, array in result.arrays.items():
                writer.write(array, name)
            if job.layer is not None:
                errors[job.layer] = errors.get(job.layer, Error()) + result.error
            count.add(job.nbytes)
        source.check()
    return errors


def _copy(source: Source, name: str, folder: Path) -> None:
    """Copy a file that lies beside the weights."""
    copy = folder / name
    for parent in reversed(Path(name).parents[:-1]):
        _make(folder / parent)
        sync_folder((folder / parent).parent)
    with source.open(name) as file, AtomicFile(copy, overwrite=True) as written:
        while data := file.read(CHUNK_BYTES):
            written.write(data)
