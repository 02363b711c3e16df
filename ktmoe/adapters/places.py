"""Where a model of transformers has its routed experts, which names of PEFT's tensors begin with."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from ktmoe.errors import InputError
from ktmoe.loaders import naming
from ktmoe.loaders.safetensors_file import read_json_object
from ktmoe.messages import show

#: What stands for a layer's number in the names of modules.
_LAYER = "{layer}"
#: Where a causal language model has its experts: transformers 5.23 with AutoModelForCausalLM, and exceptions by model_type.
_USUAL = "model.layers.{layer}.mlp.experts"
_OTHERS = dict.fromkeys(
    ("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"),
    "model.layers.{layer}.block_sparse_moe.experts",
) | dict.fromkeys(("jamba", "lfm2_moe"), "model.layers.{layer}.feed_forward.experts")
#: The model_types whose gate and up rows alternate in one parameter.
_INTERLEAVED = ("gpt_oss",)
#: The model_types of whose experts PEFT takes the inputs for the outputs, since their parameters are [experts, inputs, outputs]
#: and do not say so.
_UNKNOWN_TO_PEFT = ("llama4", "llama4_text")
#: The model_types in which each expert has modules of its own, called by its number.
_NUMBERED = ("mixtral", "minimax_m2", "phimoe")

#: A model's folder, or what its config.json says.
Model = str | os.PathLike[str] | Mapping[str, object]


class Places:
    """model: a folder with config.json, or its keys. modules: the name of a layer's module of experts, with "{layer}" for its
    number; None: that of the causal language model of this model_type.

    interleaved: whether rows of gate and up alternate in one parameter. stems: of an expert's own modules, by projection.
    folder: the model's, or None.
    Raises CheckpointError for a config.json that cannot be read, InputError for a model or a name that does not serve.
    """

    def __init__(self, model: Model, modules: str | None = None):
        self.folder = None
        if not isinstance(model, Mapping):
            self.folder = Path(model)
            model = read_json_object(self.folder / "config.json")
        self._type = model.get("model_type")
        if not isinstance(self._type, str):
            raise InputError(f"model: expected a model_type in config.json, found {show(self._type)}")
        if self._type in _UNKNOWN_TO_PEFT:
            raise InputError(
                f"model: PEFT takes inputs of {self._type}'s experts for outputs, so that no adapter can be theirs"
            )
        if modules is not None and (
            modules.count(_LAYER) != 1 or not re.fullmatch(r"[A-Za-z0-9_.]{1,200}", modules.replace(_LAYER, "0"))
        ):
            raise InputError(f"modules: expected a name with {_LAYER} for the layer's number, found {show(modules)}")
        nested = isinstance(model.get("text_config"), Mapping)  # such a model has classes with other names, too
        self._modules = modules or (None if nested else _OTHERS.get(self._type, _USUAL))
        self.interleaved = self._type in _INTERLEAVED
        self.stems = naming.NUMBERED_STEMS if self._type in _NUMBERED else naming.PROJ_STEMS

    def module(self, layer: int) -> str:
        """The name of a layer's module of experts. Raises InputError if it is not known."""
        if self._modules is None:
            raise InputError(
                f"modules: the classes of {show(self._type)} have other names each: expected such a name as "
                "'model.language_model.layers.{layer}.mlp.experts', found none"
            )
        return self._modules.replace(_LAYER, str(layer))
