"""load() and pack(): a model whose routed experts and dense matrices ktmoe computes."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ktmoe.backends.base import Progress
from ktmoe.distributed.layer import Distribution
from ktmoe.errors import UnavailableError
from ktmoe.progress_bar import bytes_done
from ktmoe.transformers import quantizer  # noqa: F401  registers itself
from ktmoe.transformers.config import Config, stated
from ktmoe.transformers.dense_packing import pack_parameters, packable_nbytes
from ktmoe.transformers.distributed import distribution_of, together_loaded
from ktmoe.transformers.folder import check_numbers, is_folder, is_gguf_model, model_folder, read_config
from ktmoe.transformers.function import NAME, check_packable, pack_module
from ktmoe.transformers.idle_threads import warn_of_spinning
from ktmoe.transformers.modules import find
from ktmoe.transformers.options import Options, on_cpu
from ktmoe.transformers.place import put
from ktmoe.transformers.step import prepare

#: Arguments of from_pretrained() that say where config.json is.
_WHERE = (
    "cache_dir",
    "force_download",
    "local_files_only",
    "token",
    "revision",
    "subfolder",
    "trust_remote_code",
    "code_revision",
)


def load(
    path: str | os.PathLike[str],
    *,
    backend: str = "auto",
    activations: str = "auto",
    rounding: str = "exact",
    tuned_for: str = "decode",
    threads: int | None = None,
    numa_nodes: Sequence[int] | None = None,
    gpu_experts: np.ndarray | Sequence[Any] | int | None = None,
    progress: Any = None,
    source: str = "auto",
    cache: str | os.PathLike[str] | None = None,
    dense: str = "packed",
    experts: str | os.PathLike[str] | None = None,
    distributed: Distribution | bool | None = None,
    **from_pretrained: Any,
) -> PreTrainedModel:
    """A checkpoint as a transformers model that ktmoe computes, straight from the checkpoint's own weights.

    path: a folder, an id of the Hugging Face Hub, or a .gguf file, of a split model any of them. The class is the one that
    config.json names in "architectures".
    backend, activations, rounding, tuned_for, numa_nodes: as MoELayer has them. threads: of ktmoe in this process; None leaves
    them.
    gpu_experts: which experts torch computes on the device of their layer, dequantized, while ktmoe computes the others. A
    number: the first so many of each layer. bool [experts], or [layers, experts] with a row for each layer that has experts, or
    for all layers of the model: True is on the GPU. Arrays, torch tensors or nested lists. place() changes it at run time.
    progress: called with (done_bytes, total_bytes) of the weights that ktmoe packs, from threads, one at a time. True: a bar on
    stderr, which needs rich.
    source: "checkpoint": ktmoe's loaders read the experts while transformers loads the rest; experts are never torch tensors.
    "parameters": transformers reads them, and ktmoe packs them layer by layer; only for unquantized checkpoints. "auto": the
    first, and the second where no loader reads an unquantized checkpoint.
    cache: a folder that `ktmoe pack` has made of this checkpoint. Experts are mapped from there, and dense matrices if it has
    them (docs/packed-caches.md).
    dense: who computes the other matrices: of attention, dense MLPs, shared experts, and the output layer. "packed": ktmoe, and
    no weight is rounded. It reads the checkpoint's own bytes where a loader has their scheme, else bfloat16 parameters.
    "torch": torch, as transformers reads them. A target of ktmoe.quantize, such as "int8" (a scale for 32 weights) or "mxfp8":
    ktmoe, and matrices of 16 bits and more are rounded to that format. Torch always computes routers, norms and tiny matrices,
    and unquantized matrices in another dtype than bfloat16.
    experts: another checkpoint of the same model, such as a .gguf file: the routed experts are read from there, with ktmoe's
    loaders, and the rest from path. cache is then of that checkpoint.
    distributed: True: the experts are divided among the processes that torchrun started. A ktmoe.distributed.Distribution says
    how. Each process packs its part of them, has all other weights, and computes the same text. All get one seed of torch.
    Where loading raises on one process, it raises on all. It excludes gpu_experts and cache.
    from_pretrained: more arguments for transformers' from_pretrained(), such as dtype, which is "auto" by default.

    The model is frozen: it has no parameter that requires grad. Raises UnavailableError for a model that ktmoe cannot serve,
    CheckpointError for a path that is no model's, and what MoEModel.from_checkpoint and from_pretrained() raise.

    Examples:
        >>> model = ktmoe.transformers.load("Qwen3-30B-A3B")
        >>> tokenizer = ktmoe.transformers.load_tokenizer("Qwen3-30B-A3B")
        >>> ids = model.generate(**tokenizer("Hello", return_tensors="pt"), max_new_tokens=8)
        >>> text = tokenizer.decode(ids[0])
    """
    distribution = distribution_of(distributed)
    named = functools.partial(
        Config,
        backend=backend,
        activations=activations,
        rounding=rounding,
        tuned_for=tuned_for,
        threads=threads,
        numa_nodes=numa_nodes,
        gpu_experts=gpu_experts,
        source=source,
        cache=cache,
        dense=dense,
        distributed=distribution,
        experts=None if experts is None else os.path.expanduser(experts),
    )
    with together_loaded(distribution):
        if not is_gguf_model(path):
            return _load(path, named, progress, from_pretrained)
        everything = dense == "torch" or not on_cpu(from_pretrained.get("device_map"))
        with model_folder(path, everything=everything) as folder:
            model = _load(folder, named, progress, from_pretrained)
        model.name_or_path = model.config._name_or_path = os.fspath(path)
        return model


def _load(
    path: str | os.PathLike[str],
    named: Callable[..., Config],
    progress: Progress | bool | None,
    from_pretrained: dict[str, Any],
) -> PreTrainedModel:
    """A folder's model, or one of the Hub. named: Config, without path and inner."""
    here = is_folder(path)
    path = os.path.expanduser(path) if here else path
    config = from_pretrained.pop("config", None)
    if config is None:
        if here:
            read_config(Path(path, from_pretrained.get("subfolder") or ""))  # before transformers builds anything of it
        where = {name: from_pretrained[name] for name in _WHERE if name in from_pretrained}
        config = AutoConfig.from_pretrained(path, **where)
    else:
        config = copy.deepcopy(config)
    check_numbers(config.to_dict(), type(config).__name__)
    ours = named(**_stated(config))
    model_class = _model_class(config)
    with _ended_by_errors(progress) as report:
        config.quantization_config = ours.to_dict() | {"progress": report, "distributed": ours.options.distributed}
        return model_class.from_pretrained(path, config=config, **{"dtype": "auto"} | from_pretrained)


def _model_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that config.json names first in "architectures", if that is a model's."""
    named = config.architectures
    first = named[0] if isinstance(named, list) and named else None
    found = getattr(transformers, first, None) if isinstance(first, str) else None
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else AutoModelForCausalLM


@contextmanager
def _ended_by_errors(progress: Progress | bool | None) -> Iterator[Progress]:
    """What loading reports to: progress, or a bar if it is True. After an error in the block it ends loading in the background.

    It is a function, since transformers copies it deeply, which most other callables do not survive.
    """
    failed = False
    with bytes_done("loading") if progress is True else nullcontext(progress or None) as draw:

        def report(done: int, total: int) -> None:
            if failed:
                raise UnavailableError("loading was ended by an error elsewhere")
            if draw:
                draw(done, total)

        try:
            yield report
        except BaseException:
            failed = True
            raise


def _stated(config: PreTrainedConfig) -> dict[str, Any]:
    """Config's path and inner: what config.json says of the checkpoint's own quantization."""
    found = getattr(config, "quantization_config", None)
    found = getattr(config.get_text_config(decoder=True), "quantization_config", None) if found is None else found
    return stated({"quantization_config": found if found is None or isinstance(found, dict) else found.to_dict()})


def pack(
    model: PreTrainedModel,
    *,
    backend: str = "auto",
    activations: str = "auto",
    rounding: str = "exact",
    tuned_for: str = "decode",
    threads: int | None = None,
    numa_nodes: Sequence[int] | None = None,
    gpu_experts: np.ndarray | Sequence[Any] | int | None = None,
    progress: Any = None,
    dense: str = "packed",
) -> PreTrainedModel:
    """The same model, whose bfloat16 weights are packed in place, layer by layer; their parameters are freed.

    The arguments are those of load(). Dense matrices on a GPU stay there. model.set_experts_implementation("ktmoe") packs
    experts alone, without options, when a layer is first called. The model is frozen afterwards, and cannot be saved.
    Raises UnavailableError, before anything is packed, for a model that ktmoe cannot serve.

    Examples:
        >>> model = transformers.AutoModelForCausalLM.from_pretrained("Qwen3-30B-A3B", dtype="auto")
        >>> ktmoe.transformers.pack(model) is model
        True
    """
    options = Options(backend, activations, rounding, tuned_for, threads, numa_nodes, gpu_experts, progress, None, dense)
    found = find(model)
    for experts in found:
        if elsewhere := [name for name in experts.parameters if experts.module.get_parameter(name).is_meta]:
            raise UnavailableError(
                f"{experts.title}: expected {', '.join(elsewhere)} in memory, found the device meta, as after offloading; "
                "ktmoe.transformers.load() takes experts from the checkpoint"
            )
    check_packable(found, options)
    on_gpu = options.on_gpu(found, model)
    options.set_threads()
    warn_of_spinning()
    experts_nbytes = sum(experts.nbytes for experts in found)
    with options.reporting(experts_nbytes + packable_nbytes(model, options)) as report:
        for experts in found:
            pack_module(experts, options, report)
        pack_parameters(model, options, report)
    model.set_experts_implementation(NAME)
    prepare(model)
    model.requires_grad_(False)
    put(model, {experts.name: experts.module for experts in found}, on_gpu)  # last: if it fails, the model works on the CPU
    return model
