"""ktmoe as a quantization method of transformers: the experts and dense matrices of a model that is loaded go to ktmoe."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import HfQuantizer, register_quantizer
from transformers.quantizers.auto import AutoHfQuantizer

from ktmoe.errors import CheckpointError, KtmoeError, MissingTensorError, UnavailableError
from ktmoe.messages import show
from ktmoe.transformers.config import Config
from ktmoe.transformers.dense_from_checkpoint import DenseFromCheckpoint
from ktmoe.transformers.dense_modules import find_dense, without
from ktmoe.transformers.dense_packing import pack_parameters
from ktmoe.transformers.files import check_parameters, check_size, folder_of_files, gguf_files, has_files
from ktmoe.transformers.from_checkpoint import FromCheckpoint, readable
from ktmoe.transformers.from_parameters import FromParameters
from ktmoe.transformers.function import NAME
from ktmoe.transformers.idle_threads import warn_of_spinning
from ktmoe.transformers.joined_progress import JoinedProgress
from ktmoe.transformers.modules import Experts, check_same, find
from ktmoe.transformers.options import on_cpu
from ktmoe.transformers.place import put
from ktmoe.transformers.step import prepare


@register_quantizer(NAME)
class KtmoeHfQuantizer(HfQuantizer):
    """Takes the experts and the dense matrices out of a model that transformers loads, and gives them to ktmoe.

    Whatever concerns the rest of the model is asked of the quantizer of the checkpoint's own quantization_config. If ktmoe
    reads all that is quantized, there is none, and no package of its is needed.
    """

    quantization_config: Config

    def __init__(self, quantization_config: Config, **kwargs: Any):
        super().__init__(quantization_config, **kwargs)
        dense = quantization_config.options.dense
        self._rest = _quantizer_of_the_rest(quantization_config.inner) if dense == "torch" else None
        self._found: list[Experts] = []
        self._dense: DenseFromCheckpoint | None = None
        self._attention_chosen = False
        self._on_gpu: list[np.ndarray] = []
        self._source: FromCheckpoint | FromParameters | None = None
        self._dtype: torch.dtype | None = None

    def validate_environment(self, **kwargs: Any) -> None:
        if self._rest:
            with _rest_needs(self.quantization_config.inner):
                self._rest.validate_environment(**kwargs)

    def update_dtype(self, dtype: Any) -> Any:
        self._dtype = dtype
        return self._rest.update_dtype(dtype) if self._rest else dtype

    def update_device_map(self, device_map: Any) -> Any:
        return self._rest.update_device_map(device_map) if self._rest else device_map

    def update_attn_implementation(self, config: Any) -> Any:
        self._attention_chosen = config._attn_implementation is not None
        return self._rest.update_attn_implementation(config) if self._rest else config

    def adjust_max_memory(self, max_memory: Any) -> Any:
        return self._rest.adjust_max_memory(max_memory) if self._rest else max_memory

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> Any:
        return self._rest.update_weight_conversions(weight_conversions, model) if self._rest else weight_conversions

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        return (self._rest or super()).get_new_dtype(converter, param, dtype)

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs: Any) -> bool:
        rest = self._rest is not None and self._rest.param_needs_quantization(model, param_name, **kwargs)
        return rest or self._packs(param_name)

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: torch.Tensor) -> float:
        if self._packs(param_name):
            return 0  # of a GPU's memory
        return (self._rest or super()).param_element_size(model, param_name, param)

    def get_quantize_ops(self) -> ConversionOps:
        return self._source

    def _packs(self, parameter: str) -> bool:
        """Whether transformers reads this parameter of an expert, for ktmoe to pack it."""
        return isinstance(self._source, FromParameters) and self._source.wants(parameter)

    def preprocess_model(
        self, model: PreTrainedModel, dtype: Any = None, *, device_map: Any = None, checkpoint_files: Any = None, **kwargs: Any
    ) -> None:
        """Refuse everything that can be refused, before any weight is read."""
        options = self.quantization_config.options
        self._found = find(model)
        files = [*(checkpoint_files or ()), *gguf_files(self.quantization_config.path)]
        check_size(model, self._found, files)
        self._on_gpu = options.on_gpu(self._found, model)
        options.set_threads()
        warn_of_spinning()
        self._progress = JoinedProgress(options.progress)
        with ExitStack() as resources:
            if options.dense != "torch":
                self._find_dense(model, dtype, device_map, checkpoint_files)
                if self._dense:
                    resources.callback(self._dense.close)
            if len(files) > len(checkpoint_files or ()):
                taken = [*(each.name for each in self._found), *(self._dense.names if self._dense else ())]
                check_parameters(self.quantization_config.path, model, checkpoint_files, taken)
            if self._rest:
                apart = {experts.name: experts.module for experts in self._found}
                apart |= {name: model.get_submodule(name) for name in (self._dense.names if self._dense else ())}
                with without(model, apart):
                    self._rest.preprocess_model(
                        model, dtype=dtype, device_map=device_map, checkpoint_files=checkpoint_files, **kwargs
                    )
            model.is_quantized, model.quantization_method = True, NAME
            model.set_experts_implementation(NAME)
            dense_progress = self._progress.part(self._dense.nbytes) if self._dense else None
            self._source = self._take_from(checkpoint_files)
            resources.pop_all()
        if isinstance(self._source, FromCheckpoint):
            self._source.start(model)
        if self._dense:
            self._dense.start(model, dense_progress)
        # if not, transformers asks what to do with each parameter, and reads them one after the other
        self.pre_quantized = not isinstance(self._source, FromParameters)

    def _find_dense(self, model: PreTrainedModel, dtype: Any, device_map: Any, checkpoint_files: Sequence[str] | None) -> None:
        """Find out which dense matrices ktmoe reads. Others may need the checkpoint's own quantization method."""
        config = self.quantization_config
        path, elsewhere = self._where(checkpoint_files)
        found = find_dense(model) if on_cpu(device_map) else []
        refused, needed, cached = None, True, config.options.cache is not None and config.experts is None
        try:
            self._dense = DenseFromCheckpoint(path, model, found, config.options, dtype, cached)
            refused, needed = self._dense.refused, self._dense.needs_quantizer
        except MissingTensorError:  # the scheme is known, and something is missing
            raise
        except CheckpointError as error:  # transformers reads it all, or says what is wrong
            if elsewhere:
                raise
            refused = error
        if config.inner is not None and needed:
            try:
                self._rest = _quantizer_of_the_rest(config.inner)
                with _rest_needs(config.inner):
                    self._rest.validate_environment(device_map=device_map)
            except UnavailableError as error:
                raise error from refused

    def _where(self, checkpoint_files: Sequence[str] | None) -> tuple[str | os.PathLike[str], bool]:
        """Where ktmoe reads weights, and whether transformers reads other files."""
        path = self.quantization_config.path
        if path is None:
            return folder_of_files(checkpoint_files), False
        return path, not has_files(path, checkpoint_files)

    def _take_from(self, checkpoint_files: Sequence[str] | None) -> FromCheckpoint | FromParameters:
        """Where the experts come from. Raises why they cannot."""
        config, refused = self.quantization_config, None
        # transformers reads its own files: experts of others come from ktmoe's loaders, or not at all
        read, elsewhere = self._where(checkpoint_files)
        if config.experts is not None:
            read, elsewhere = config.experts, True
        if config.source == "parameters":
            if config.options.cache is not None:
                raise UnavailableError(f'{read}: a packed cache is for source="checkpoint", found source="parameters"')
            if config.inner is not None:
                found = f"quant_method {show(config.inner.get('quant_method'))}"
                raise UnavailableError(f'{read}: source="parameters": expected an unquantized checkpoint, found {found}')
            if elsewhere:
                expected = "expected the folder that transformers reads, found another"
                raise UnavailableError(f'{read}: source="parameters": {expected}')
        else:
            try:
                weights = readable(read, self._found)
            except MissingTensorError:  # the names are known, and something is missing
                raise
            except KtmoeError as error:
                named = elsewhere or config.options.cache is not None
                if config.source == "checkpoint" or config.inner is not None or named:
                    raise
                refused = error
            else:
                for experts, of_layer in zip(self._found, weights, strict=True):
                    check_same(experts, of_layer)
                progress = self._progress.part(sum(of_layer.nbytes for of_layer in weights))
                return FromCheckpoint(read, self._found, config.options, progress)
        progress = self._progress.part(sum(experts.nbytes for experts in self._found))
        return FromParameters(self._found, replace(config.options, progress=progress), refused)

    def postprocess_model(self, model: PreTrainedModel, **kwargs: Any) -> None:
        """Wait until all is packed, put it into the model, and put some experts on the GPU."""
        options = self.quantization_config.options
        if self._rest:
            self._rest._process_model_after_weight_loading(model, **kwargs)
        self._source.finish()
        if self._dense:
            self._dense.finish(model)
        with replace(options, progress=None).reporting(0) as report:
            pack_parameters(model, options, report)
        self._progress.close()
        prepare(model, attend=not self._attention_chosen)
        _warn_of_other_dtypes(model, self._dtype)
        put(model, {experts.name: experts.module for experts in self._found}, self._on_gpu)
        model.config.quantization_config = Config(**self.quantization_config.to_dict())  # without progress, which is over
        model.requires_grad_(False)

    def is_serializable(self) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        """Gradients flow through the packed experts."""
        return True

    @property
    def is_qat_trainable(self) -> bool:
        """True, so that transformers' Trainer trains what ktmoe.torch.add_lora() adds, without peft."""
        return True


def _quantizer_of_the_rest(inner: dict[str, Any] | None) -> HfQuantizer | None:
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
def _rest_needs(inner: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        method = inner.get("quant_method")
        raise UnavailableError(
            f"the rest of the model is quantized ({method}), for which a package is missing: {error}"
        ) from error


def _warn_of_other_dtypes(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Warn of parameters that are not of the dtype that was asked for. transformers keeps some in float32 on purpose."""
    usual = {torch.float16, torch.bfloat16} - {dtype}
    parameters = dict(model.named_parameters())
    if other := [name for name, parameter in parameters.items() if parameter.dtype in usual]:
        expected, found = (str(each).removeprefix("torch.") for each in (dtype, parameters[other[0]].dtype))
        warnings.warn(
            f"expected parameters of {expected}, found {len(other)} of {len(parameters)} in {found}, such as {other[0]}: "
            "transformers reads this checkpoint so; load it with dtype='auto'",
            RuntimeWarning,
            stacklevel=2,
        )
