"""convert(): writes a checkpoint whose routed experts are rounded, file by file; what was interrupted goes on."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from ktmoe.conversion.plan import plan
from ktmoe.conversion.source import Source
from ktmoe.conversion.stated import MIXED
from ktmoe.conversion.writing import Progress, Task, version, write
from ktmoe.errors import InputError, memory_for
from ktmoe.files.output import output_folder
from ktmoe.quantization import Error, Quantizer

#: The most bytes of tensors in a file, unless one that must stay whole has more.
SHARD_BYTES = 4_000_000_000
#: The default rules that are not the quantizer's own, by target: compressed-tensors has names for what this rule gives.
DEFAULT_RULES = {"nvfp4": "compressed-tensors"}


@dataclass(frozen=True)
class Report:
    """What a conversion did.

    path: of the result. to, rule, format: what experts were rounded to, the rule's name, the format in words.
    layers: what rounding changed of each layer. source_nbytes, nbytes: of all tensors before and after. note: what is to be
    known of config.json, or "". kept: files that were finished before this run. left_out: files and folders of the source that
    were not copied, the latter with a "/" in the end.

    Examples:
        >>> report = ktmoe.convert("Qwen3-30B-A3B", "Qwen3-30B-A3B-MXFP4", "mxfp4")
        >>> report.rule, report.nbytes < report.source_nbytes
        ('ceil', True)
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
    left_out: list[str] = field(default_factory=list)


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
    is written; OutOfMemoryError; CheckpointError also for a file that changes meanwhile; FormatError for experts that are not
    to be converted; InputError for options that do not exist, and for formats that no backend computes; UnavailableError if a
    thread cannot be started, as when the interpreter exits.

    Examples:
        >>> report = ktmoe.convert("Qwen3-30B-A3B", "Qwen3-30B-A3B-INT8", "int8", layers=[0])
        >>> list(report.layers), report.format
        ([0], 'INT8 with an fp32 factor per row')
    """
    if shard_bytes < 1:
        raise InputError(f"shard_bytes: expected at least 1, found {shard_bytes}")
    rule = DEFAULT_RULES.get(to) if rule is None else rule
    quantizer = Quantizer(to, rule=rule, group=group, scales=scales, symmetric=symmetric)
    folder = output_folder(out)
    with memory_for(f"{path}: converting"), Source(path, folder) as source:
        made = plan(source, quantizer, layers, requantize, shard_bytes)
        dropped = [] if made.note == MIXED else source.quantized  # else it is of the weights that stay as they are
        task = Task(
            "convert",
            "conversion",
            made.shards,
            made.config,
            source.others + ([] if dropped else source.quantized),
            {
                "options": [
                    to,
                    quantizer.rule.name,
                    quantizer.format.description,
                    list(made.layers),
                    requantize,
                    shard_bytes,
                ]
            },
            made.layers,
            lambda errors: _data(quantizer, made.note, errors),
        )
        written = write(source, task, folder, progress)
        before = sum(info.nbytes for info in source.infos)
    rule, words = quantizer.rule.name, quantizer.format.description
    left_out = sorted(source.left_out + dropped)
    return Report(str(folder), to, rule, words, written.errors, before, written.nbytes, made.note, written.kept, left_out)


def _data(quantizer: Quantizer, note: str, errors: dict[int | str, Error]) -> dict[str, Any]:
    """The report as it is kept beside the weights: the same whether the conversion was interrupted or not."""
    return {
        "ktmoe": version(),
        "to": quantizer.to,
        "rule": quantizer.rule.name,
        "format": quantizer.format.description,
        "relative_rms_error": {str(layer): error.relative for layer, error in errors.items()},
        "note": note or None,
    }
