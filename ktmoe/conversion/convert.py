"""convert(): writes a checkpoint whose routed experts are rounded, file by file; what was interrupted goes on."""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from pathlib import Path

from ktmoe.conversion.journal import Journal
from ktmoe.conversion.parts import CHUNK_BYTES, Made, Part
from ktmoe.conversion.plan import Plan, Shard, plan
from ktmoe.conversion.source import Source
from ktmoe.errors import CheckpointError, InputError, OutOfSpaceError, OutputError
from ktmoe.files.atomic import AtomicFile, write_json
from ktmoe.files.lock import exclusive
from ktmoe.files.safetensors_writer import SafetensorsWriter
from ktmoe.machine.threads import get_num_threads
from ktmoe.quantization import Error, Quantizer
from ktmoe.version import installed_version

#: Most bytes of tensors in a file, unless one that must stay whole has more.
SHARD_BYTES = 4_000_000_000
#: In the result, beside config.json: what was rounded, how, and the errors.
REPORT_NAME = "ktmoe_convert.json"
#: Where it is not the quantizer's own default: compressed-tensors has names for what this rule gives.
DEFAULT_RULES = {"nvfp4": "compressed-tensors"}
#: Free space that is left alone beside the result.
_SPARE_BYTES = 1 << 20

#: Called with (bytes of the source that are done, bytes in all).
Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Report:
    """What a conversion did.

    path: of the result. to, rule, format: what experts were rounded to, the rule's name, the format in words.
    layers: what rounding changed of each layer. source_nbytes, nbytes: of all tensors before and after. note: what is to be
    known of config.json, or "". kept: files that were finished before this run.
    """

    path: str
    to: str
    rule: str
    format: str
    layers: dict[int | str, Error]
    source_nbytes: int
    nbytes: int
    note: str = ""
    kept: list[str] = field(default_factory=list)


def convert(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: str,
    *,
    rule: str | None = None,
    group: int | tuple[int, int] | str | None = None,
    scales: str | None = None,
    symmetric: bool | None = None,
    layers: Collection[int | str] | None = None,
    requantize: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Report:
    """Write a checkpoint whose routed experts are rounded to another format, and whose other tensors are the same bytes.

    path: a folder, or a .safetensors file. out: a new or empty folder, or one in which this conversion was interrupted: files
    that were finished stay then, if the source, the options and ktmoe are the same.
    to, rule, group, scales, symmetric: ktmoe.quantization.Quantizer's; the rule for nvfp4 is "compressed-tensors" by default.
    layers: numbers, or names such as "mtp.0"; None: all that have routed experts.
    requantize: round also experts that have 4 bits already. shard_bytes: most bytes of tensors in one file.
    progress: called with (done, total) bytes of the source.
    Memory: gate and up of one expert for each thread and one more, as they are, in float32 where that needs to be, and rounded;
    of tensors that are copied, 16 MB for each.

    The index is written last. Until then ktmoe refuses to load the folder.
    Raises OutputError: the folder has other files, another process writes it, the disk is full; OutOfSpaceError before anything
    is written; CheckpointError also for a file that changes meanwhile; FormatError for experts that are not to be converted;
    InputError for options that do not exist.
    """
    if shard_bytes < 1:
        raise InputError(f"shard_bytes: expected at least 1, found {shard_bytes}")
    quantizer = Quantizer(to, rule=rule or DEFAULT_RULES.get(to), group=group, scales=scales, symmetric=symmetric)
    with Source(path) as source:
        made = plan(source, quantizer, layers, requantize, shard_bytes)
        identity = {
            "source": source.identity,
            "options": [
                to,
                quantizer.rule.name,
                quantizer.format.description,
                list(made.layers),
                requantize,
                shard_bytes,
            ],
            "version of ktmoe": _version(),
        }
        return _write(source, made, quantizer, Path(out), identity, progress or (lambda done, total: None))


def _version() -> str | None:
    """None in a tree that is not installed."""
    try:
        return installed_version()
    except PackageNotFoundError:
        return None


def _write(source: Source, made: Plan, quantizer: Quantizer, folder: Path, identity: dict, progress: Progress) -> Report:
    with _made(folder), exclusive(folder):
        journal = Journal(folder, identity)
        kept = [shard.name for shard in made.shards if _kept(journal, folder, shard)]
        left = [shard for shard in made.shards if shard.name not in kept]
        _check_space(folder, sum(shard.nbytes for shard in left))
        journal.begin()
        count = Counter(progress, made, kept)
        with Workers() as workers:
            for shard in left:
                journal.add(shard.name, _write_shard(source, shard, folder, workers, count))
        for name in source.others + (source.quantized if made.note else []):  # of the weights that stay as they are
            _copy(source.folder / name, folder / name)
        source.check()
        report = _report(source, made, quantizer, folder, journal, kept)
        write_json(folder / REPORT_NAME, _data(report), overwrite=True)
        write_json(folder / source.config_name, made.config, overwrite=True)
        journal.close({each.name: shard.name for shard in made.shards for each in shard.tensors}, report.nbytes)
    return report


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Make a folder, and remove it if it is empty after an error."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a name with a NUL
        found = error.strerror if isinstance(error, OSError) else error
        raise OutputError(f"{folder}: expected a folder that can be written, found {found}") from error
    try:
        yield
    except BaseException:
        with suppress(OSError):  # it has files
            folder.rmdir()
        raise


def _kept(journal: Journal, folder: Path, shard: Shard) -> bool:
    return journal.keep(folder, shard.name, {each.name: (each.dtype, each.shape) for each in shard.tensors})


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed + _SPARE_BYTES:
        raise OutOfSpaceError(f"{folder}: expected {needed + _SPARE_BYTES} bytes of free space, found {free}")


class Counter:
    """Tells progress: bytes of the source, those of files that were finished before among them."""

    def __init__(self, progress: Progress, made: Plan, kept: Collection[str]):
        sizes = {shard.name: sum(part.nbytes for unit in shard.units for part in unit.parts) for shard in made.shards}
        self._progress, self._total = progress, sum(sizes.values())
        self._done = sum(sizes[name] for name in kept)
        progress(self._done, self._total)

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(self._done, self._total)


class Workers:
    """Threads that make parts ahead of whoever writes them: as many as ktmoe has, and one part more than threads."""

    def __init__(self):
        self._threads = get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads, "ktmoe-convert")

    def in_order(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Made]]:
        ahead: deque[tuple[Part, Future[Made]]] = deque()
        try:
            for part in parts:
                ahead.append((part, self._pool.submit(part.make)))
                if len(ahead) > self._threads:
                    part, future = ahead.popleft()
                    yield part, future.result()
            while ahead:
                part, future = ahead.popleft()
                yield part, future.result()
        finally:
            for _, future in ahead:
                future.cancel()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def _write_shard(source: Source, shard: Shard, folder: Path, workers: Workers, count: Counter) -> dict[int | str, Error]:
    """A file; what rounding changed of each layer in it."""
    errors: dict[int | str, Error] = {}
    tensors = [(each.name, each.dtype, each.shape) for each in shard.tensors]
    source.check()
    with SafetensorsWriter(folder / shard.name, tensors, {"format": "pt"}, overwrite=True) as writer:
        for part, result in workers.in_order(part for unit in shard.units for part in unit.parts):
            for name, array in result.arrays.items():
                writer.write(array, name)
            if part.layer is not None:
                errors[part.layer] = errors.get(part.layer, Error()) + result.error
            count.add(part.nbytes)
        source.check()
    return errors


def _copy(original: Path, copy: Path) -> None:
    try:
        with original.open("rb") as file, AtomicFile(copy, overwrite=True) as written:
            while data := file.read(CHUNK_BYTES):
                written.write(data)
    except OutputError:
        raise
    except OSError as error:
        raise CheckpointError(f"{original}: expected a readable file, found {error.strerror}") from error
    with suppress(OSError):  # a file system without modes
        shutil.copymode(original, copy)


def _report(source: Source, made: Plan, quantizer: Quantizer, folder: Path, journal: Journal, kept: list[str]) -> Report:
    finished = [journal.finished[shard.name] for shard in made.shards]
    errors = {layer: sum((of.get(layer, Error()) for of in finished), Error()) for layer in made.layers}
    before, after = sum(info.nbytes for info in source.infos), sum(shard.nbytes for shard in made.shards)
    rule, words = quantizer.rule.name, quantizer.format.description
    return Report(str(folder), quantizer.to, rule, words, errors, before, after, made.note, kept)


def _data(report: Report) -> dict:
    """The report as it is kept beside the weights: the same whether the conversion was interrupted or not."""
    return {
        "ktmoe": _version(),
        "to": report.to,
        "rule": report.rule,
        "format": report.format,
        "relative_rms_error": {str(layer): error.relative for layer, error in report.layers.items()},
        "note": report.note or None,
    }
