"""ktmoe as a quantization method of transformers: the routed experts of a model that is loaded go to ktmoe, nothing else."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ktmoe.errors import CheckpointError, InputError, KtmoeError, UnavailableError
from ktmoe.layer import MoELayer
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.messages import show
from ktmoe.model import MoEModel
from ktmoe.transformers.function import NAME, GpuExperts, adopt, attach, pack_tensors
from ktmoe.transformers.modules import Experts, check_dtypes, check_same, find
from ktmoe.transformers.options import Options

#: Where the experts are taken from.
SOURCES = ("auto", "checkpoint", "parameters")


@register_quantization_config(NAME)
class Config(QuantizationConfigMixin):
    """A quantization_config for from_pretrained(): ktmoe computes the routed experts.

    backend, activations, rounding, threads, numa_nodes, gpu_experts_mask, progress: as ktmoe.transformers.load() has them.
    source: "checkpoint": ktmoe's loaders read the experts' own weights from the checkpoint's files. "parameters": transformers
    reads them in any naming that it knows, layer by layer, and ktmoe packs them; they must be bfloat16. "auto": the first, and
    the second where no loader reads an unquantized checkpoint.
    path: the checkpoint's folder; None: where transformers finds its files. inner: the checkpoint's own quantization_config,
    by which transformers reads the rest of the model. Those two are for a config.json that names ktmoe as its quant_method.
    Raises InputError.
    """

    def __init__(
        self,
        *,
        backend: str = "auto",
        activations: str = "auto",
        rounding: str = "exact",
        threads: int | None = None,
        numa_nodes: Sequence[int] | None = None,
        gpu_experts_mask: np.ndarray | Sequence | None = None,
        progress=None,
        source: str = "auto",
        path: str | os.PathLike | None = None,
        inner: dict | None = None,
        quant_method: str = NAME,
    ):
        if source not in SOURCES:
            raise InputError(f"source must be one of {SOURCES}, found {show(source)}")
        self.quant_method = quant_method
        self.options = Options(backend, activations, rounding, threads, numa_nodes, gpu_experts_mask, progress)
        self.source = source
        self.path = path
        self.inner = inner

    def to_dict(self) -> dict[str, Any]:
        """What JSON can hold: all but progress."""
        options = dict(vars(self.options))
        del options["progress"]
        for name in ("numa_nodes", "gpu_experts_mask"):
            options[name] = None if options[name] is None else np.asarray(options[name]).tolist()
        path = None if self.path is None else os.fspath(self.path)
        own = {"quant_method": self.quant_method, "source": self.source, "path": path, "inner": self.inner}
        return copy.deepcopy(options | own)

    def __deepcopy__(self, memo: dict) -> Config:
        """Itself, since nothing changes it: transformers copies configs, and a progress bar cannot be copied."""
        return self


@register_quantizer(NAME)
class Quantizer(HfQuantizer):
    """Takes the experts out of a model that transformers loads, and gives them to ktmoe.

    Whatever concerns the rest of the model is asked of the quantizer of the checkpoint's own quantization_config.
    """

    quantization_config: Config

    def __init__(self, quantization_config: Config, **kwargs):
        super().__init__(quantization_config, **kwargs)
        self._rest = _quantizer_of_the_rest(quantization_config.inner)
        self._found: list[Experts] = []
        self._on_gpu: list[np.ndarray] = []
        self._loading: MoEModel | None = None  # where the experts are read from the checkpoint
        self._refused: KtmoeError | None = None  # why they are not
        self._packing: Packing | None = None  # where transformers reads them

    def validate_environment(self, **kwargs) -> None:
        if self._rest:
            with _rest_needs(self.quantization_config.inner):
                self._rest.validate_environment(**kwargs)

    def update_dtype(self, dtype):
        return self._rest.update_dtype(dtype) if self._rest else dtype

    def update_device_map(self, device_map):
        return self._rest.update_device_map(device_map) if self._rest else device_map

    def update_attn_implementation(self, config):
        return self._rest.update_attn_implementation(config) if self._rest else config

    def adjust_max_memory(self, max_memory):
        return self._rest.adjust_max_memory(max_memory) if self._rest else max_memory

    def update_weight_conversions(self, weight_conversions, model):
        return self._rest.update_weight_conversions(weight_conversions, model) if self._rest else weight_conversions

    def get_new_dtype(self, converter, param, dtype):
        return (self._rest or super()).get_new_dtype(converter, param, dtype)

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs) -> bool:
        mine = self._packing is not None and self._packing.wants(param_name)
        return mine or (self._rest is not None and self._rest.param_needs_quantization(model, param_name, **kwargs))

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        if self._packing is not None and self._packing.wants(param_name):
            return 0  # of a GPU's memory
        return (self._rest or super()).param_element_size(model, param_name, param)

    def get_quantize_ops(self) -> ConversionOps:
        return self._packing

    def preprocess_model(self, model: PreTrainedModel, dtype=None, *, checkpoint_files=None, **kwargs) -> None:
        """Everything that can be refused is refused here, before any weight is read."""
        config, options = self.quantization_config, self.quantization_config.options
        self._found = find(model)
        self._on_gpu = options.on_gpu(self._found)
        options.set_threads()
        if self._rest:
            with _without_experts(model, self._found):
                self._rest.preprocess_model(model, dtype=dtype, checkpoint_files=checkpoint_files, **kwargs)
        model.is_quantized, model.quantization_method = True, NAME
        model.set_experts_implementation(NAME)
        path = config.path or _folder(checkpoint_files)
        if self._loaders_read(path):
            self._loading = MoEModel.from_checkpoint(
                path, [experts.layer for experts in self._found], **options.packing, progress=options.progress, wait=False
            )
            for experts in self._found:
                adopt(experts)
            # the experts' tensors now fit no parameter: transformers neither reads them nor is to warn of them
            model._keys_to_ignore_on_load_unexpected = {
                *(model._keys_to_ignore_on_load_unexpected or ()),
                *(pattern for experts in self._found for pattern in _names(experts)),
            }
        else:
            check_dtypes(self._found)
            self._packing = Packing(self._found, self._on_gpu, options, self._refused)
        # if not, transformers asks what to do with each parameter, and reads them one after the other
        self.pre_quantized = self._packing is None

    def _loaders_read(self, path: str | os.PathLike) -> bool:
        """Whether ktmoe's loaders read the experts. Raises their error where transformers cannot read them for ktmoe either."""
        source, inner = self.quantization_config.source, self.quantization_config.inner
        if source == "parameters":
            if inner is not None:
                found = f"quant_method {show(inner.get('quant_method'))}"
                raise UnavailableError(f'{path}: source="parameters": expected an unquantized checkpoint, found {found}')
            return False
        try:
            _check_layers(path, self._found)
        except KtmoeError as error:
            if source == "checkpoint" or inner is not None:
                raise
            self._refused = error
            return False
        return True

    def postprocess_model(self, model: PreTrainedModel, **kwargs) -> None:
        """Wait until all experts are packed, and attach them."""
        if self._rest:
            self._rest._process_model_after_weight_loading(model, **kwargs)
        if self._packing is not None:
            self._packing.finish()
        else:
            self._loading.wait()
            self._attach(model)
        model.config.quantization_config = self.quantization_config
        model.requires_grad_(False)

    def _attach(self, model: PreTrainedModel) -> None:
        for experts, on_gpu in zip(self._found, self._on_gpu, strict=True):
            stay = None
            if on_gpu.size:
                with Checkpoint(self._loading.path) as checkpoint:
                    weights = find_loader(checkpoint, layer=experts.layer).load(checkpoint, experts.layer)
                    tensors = experts.tensors(weights, on_gpu, model.dtype)
                parent = model.get_submodule(experts.name.rpartition(".")[0])
                device = next(parent.parameters()).device
                stay = GpuExperts(experts, {name: tensor.to(device) for name, tensor in tensors.items()}, on_gpu)
            attach(experts, self._loading[experts.layer], stay)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


class Packing(ConversionOps):
    """Packs a layer's experts as soon as transformers has read its last parameter, and keeps no parameter."""

    def __init__(self, found: list[Experts], on_gpu: list[np.ndarray], options: Options, refused: KtmoeError | None):
        self._options = options
        self._refused = refused
        self._experts = {experts.name: (experts, ids) for experts, ids in zip(found, on_gpu, strict=True)}
        self._resources = ExitStack()
        self._report = self._resources.enter_context(options.reporting(sum(experts.nbytes for experts in found)))
        self._read: dict[str, dict[str, torch.Tensor]] = {experts.name: {} for experts in found}
        self._packed: list[tuple[Experts, MoELayer, GpuExperts | None]] = []
        self._error: Exception | None = None

    def wants(self, parameter: str) -> bool:
        """Whether this is the name of an expert's parameter in the model."""
        module, _, name = parameter.rpartition(".")
        return module in self._experts and name in self._experts[module][0].parameters

    def convert(self, input_dict: dict[str, Any], *, missing_keys: set[str] | None = None, **kwargs) -> dict:
        for parameter, tensor in input_dict.items():
            tensor = tensor[0] if isinstance(tensor, list) else tensor
            if missing_keys is not None:
                missing_keys.discard(parameter)
            if self._error is None:
                try:
                    self._take(parameter, tensor)
                except Exception as error:  # transformers would only log it
                    self._error = error
                    self._read.clear()
        return {}

    def _take(self, parameter: str, tensor: torch.Tensor) -> None:
        name, _, own = parameter.rpartition(".")
        experts, on_gpu = self._experts[name]
        expected, found = experts.parameters[own], tuple(tensor.shape)
        if found != expected:
            raise CheckpointError(f"{experts.title}: {own}: expected shape {list(expected)}, found {list(found)}")
        self._read[name][own] = tensor
        if self._read[name].keys() == experts.parameters.keys():
            packed = pack_tensors(experts, self._read.pop(name), self._options, on_gpu, self._report)
            adopt(experts)
            self._packed.append((experts, *packed))

    def finish(self) -> None:
        """Attach what was packed. Raises what went wrong, and CheckpointError if a parameter was not in the checkpoint."""
        self._resources.close()
        if self._error is not None:
            raise self._error from self._refused
        for name, read in self._read.items():
            experts, _ = self._experts[name]
            missing = [parameter for parameter in experts.parameters if parameter not in read]
            raise CheckpointError(
                f"{experts.title}: expected {', '.join(missing)} in the checkpoint, found no such tensor"
            ) from self._refused
        # not before: transformers would clear the buffers of modules that come while it loads
        for packed in self._packed:
            attach(*packed)


def _quantizer_of_the_rest(inner: dict | None) -> HfQuantizer | None:
    """The quantizer of a checkpoint's own quantization_config.

    Raises UnavailableError if transformers has none, or if a package that it needs is missing.
    """
    if inner is None:
        return None
    if not AutoHfQuantizer.supports_quant_method(inner):
        raise UnavailableError(
            f"quant_method {show(inner.get('quant_method'))} of config.json: expected one that transformers knows, since it "
            "reads the rest of the model"
        )
    with _rest_needs(inner):
        return AutoHfQuantizer.from_config(inner, pre_quantized=True)


@contextmanager
def _rest_needs(inner: dict) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        method = inner.get("quant_method")
        raise UnavailableError(
            f"the rest of the model is quantized ({method}), for which a package is missing: {error}"
        ) from error


@contextmanager
def _without_experts(model: torch.nn.Module, found: list[Experts]) -> Iterator[None]:
    """The model with nothing in the places of its experts."""
    for experts in found:
        model.set_submodule(experts.name, torch.nn.Identity())
    try:
        yield
    finally:
        for experts in found:
            model.set_submodule(experts.name, experts.module)


def _folder(checkpoint_files: Sequence[str] | None) -> str:
    """Where transformers found the checkpoint."""
    if not checkpoint_files:
        raise UnavailableError("expected a checkpoint's files, found a state_dict or none")
    return os.path.dirname(checkpoint_files[0])


def _check_layers(path: str | os.PathLike, found: list[Experts]) -> None:
    """Raise a KtmoeError if no loader reads the weights of these modules, by their layers' numbers, or if they are others."""
    layers = [experts.layer for experts in found]
    if None in layers or len(set(layers)) < len(layers):
        names = ", ".join(experts.name for experts in found)
        raise UnavailableError(f"{path}: expected one module of experts in each layer, found {names}")
    with Checkpoint(path) as checkpoint:
        for experts in found:
            check_same(experts, find_loader(checkpoint, layer=experts.layer).load(checkpoint, experts.layer))


def _names(experts: Experts) -> tuple[str, str]:
    """Regular expressions of the names that these experts' tensors may have, as transformers renames them and as they are."""
    return rf"^{re.escape(experts.name)}\.", rf"(^|\.)layers\.{experts.layer}\.(.*\.)?experts\."
