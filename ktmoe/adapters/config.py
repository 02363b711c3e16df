"""adapter_config.json of PEFT: what it must say of an adapter, and the rank and alpha that it gives each of its targets."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from ktmoe.adapters.patterns import Patterns, endings
from ktmoe.errors import CheckpointError, FormatError
from ktmoe.loaders import unchanged
from ktmoe.loaders.safetensors_file import read_json
from ktmoe.messages import show

CONFIG_NAME = "adapter_config.json"
#: The version of PEFT whose format is written.
PEFT_VERSION = "0.21.2"
#: The first version that has inputs and outputs of an experts' parameter the right way round.
_FIRST = (0, 19)
#: Keys that must be absent, null, false, empty or this value, since they change what the matrices mean or what is trained.
_REFUSED = {
    "use_dora": False,
    "lora_bias": False,
    "fan_in_fan_out": False,
    "use_qalora": False,
    "use_bdlora": None,
    "layer_replication": None,
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "kasa_config": None,
    "monteclora_config": None,
    "velora_config": None,
}
#: First numbers of A and B that leave the model's own weights alone.
_INITS = (True, False, None, "gaussian", "eva")


@dataclass(frozen=True)
class AdapterTarget:
    """What PEFT has of a parameter, or of one projection's modules of all experts: its rank and alpha.

    pattern: the regular expression that is all of the parameter's name, or of each module's. name: the parameter's.
    """

    pattern: str
    rank: int
    alpha: float
    name: str = ""


def made(targets: list[AdapterTarget], parameters: bool, model: str | None) -> dict[str, object]:
    """adapter_config.json. parameters: whether targets are parameters, else modules. model: base_model_name_or_path."""
    ranks, alphas = (Counter(getattr(each, label) for each in targets).most_common(1)[0][0] for label in ("rank", "alpha"))
    return {
        "alpha_pattern": {each.pattern: _number(each.alpha) for each in targets if each.alpha != alphas},
        "base_model_name_or_path": model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": _number(alphas),
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "peft_version": PEFT_VERSION,
        "r": ranks,
        "rank_pattern": {each.pattern: each.rank for each in targets if each.rank != ranks},
        "revision": None,
        "target_modules": [] if parameters else "|".join(each.pattern for each in targets),
        "target_parameters": [each.name for each in targets] if parameters else None,
        "task_type": "CAUSAL_LM",
        "use_rslora": False,
    }


class AdapterConfig:
    """adapter_config.json of a folder.

    Raises CheckpointError for a file that cannot be read or values of another kind, FormatError for an adapter that is not
    plain LoRA, or has dropout, which experts cannot have.
    """

    def __init__(self, folder: Path):
        self.path = folder / CONFIG_NAME
        self._values, self._status = read_json(self.path)
        if (kind := self._values.get("peft_type")) != "LORA":
            raise FormatError(f"{self.path}: peft_type: expected 'LORA', found {show(kind)}")
        for key, usual in _REFUSED.items():
            if found := self._values.get(key):
                raise FormatError(f"{self.path}: {key}: expected {show(usual)} for experts, found {show(found)}")
        if (bias := self._values.get("bias")) not in (None, "none"):
            raise FormatError(f"{self.path}: bias: expected 'none', found {show(bias)}")
        if (init := self._values.get("init_lora_weights", True)) not in _INITS:
            raise FormatError(f"{self.path}: init_lora_weights: {show(init)} changes the model's own weights, too")
        if dropout := self._number("lora_dropout", 0.0):
            raise FormatError(
                f"{self.path}: lora_dropout: experts have none, as in PEFT, found {dropout}; it acts in training alone, so "
                "that 0 is right here for an adapter whose training is done"
            )
        self._rslora = self._values.get("use_rslora") or False
        if type(self._rslora) is not bool:
            raise self._wrong("use_rslora", "true or false", self._rslora)
        self._ranks, self._alphas = (
            Patterns(f"{self.path}: {key}", self._values.get(key) or {}) for key in ("rank_pattern", "alpha_pattern")
        )
        parameters = self._values.get("target_parameters") or []
        if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
            raise self._wrong("target_parameters", "a list of names", parameters)
        self._parameters = frozenset(parameters)

    def check_version(self) -> None:
        """Raise FormatError if PEFT's own version was too old for adapters of parameters."""
        found = self._values.get("peft_version")
        numbers = re.match(r"([0-9]{1,4})\.([0-9]{1,4})(?:\.|$)", found) if isinstance(found, str) else None
        if numbers is None or (int(numbers[1]), int(numbers[2])) < _FIRST:
            raise FormatError(
                f"{self.path}: peft_version: expected 0.19 or newer for adapters of experts' parameters, since older ones take "
                f"inputs for outputs, found {show(found)}"
            )

    def targets(self, module: str, parameter: str) -> bool:
        """Whether a module's parameter has an adapter."""
        return not self._parameters.isdisjoint(endings([*module.split("."), parameter]))

    def rank_and_scale(self, name: str) -> tuple[int, float]:
        """The rank of a parameter's or a module's adapter, and what multiplies B A x. Raises CheckpointError for values that
        there cannot be."""
        rank = self._ranks.value(name, self._values.get("r", 8))
        alpha = self._alphas.value(name, self._values.get("lora_alpha", 8))
        if type(rank) is not int or not 1 <= rank < 2**31:
            raise self._wrong("r", "a rank of at least 1", rank)
        if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) < 1e300:
            raise self._wrong("lora_alpha", "a finite number", alpha)
        return rank, alpha / (math.sqrt(rank) if self._rslora else rank)

    def _number(self, key: str, usual: float) -> float:
        found = self._values.get(key, usual)
        if type(found) not in (int, float) or not 0 <= found < 1e300:
            raise self._wrong(key, "a number of 0 or more", found)
        return float(found)

    def check_unchanged(self) -> None:
        """Raise CheckpointError unless the folder still has the file that was read: a new adapter's tensors have a new one."""
        unchanged.check(self.path, self._status, unchanged.look(self.path))

    def _wrong(self, label: str, expected: str, found: object) -> CheckpointError:
        return CheckpointError(f"{self.path}: {label}: expected {expected}, found {show(found)}")


def _number(value: float) -> float:
    """The value, as an int where it is a whole number: so PEFT writes it."""
    return int(value) if float(value).is_integer() else value
