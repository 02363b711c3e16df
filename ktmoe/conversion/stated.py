"""config.json of a converted checkpoint: quantization_config says what the experts are, and that nothing else is quantized."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable
from typing import Any

from ktmoe.conversion.storage import DEEPSEEK_V4, Storage
from ktmoe.loaders.tensor_file import TensorInfo

_STEMS = "gate_proj|up_proj|down_proj|w1|w2|w3"
#: What the name of a module within an expert has behind the experts' own.
_EXPERT = re.compile(r"(?<=[.]experts)[.][0-9]+[.].*")
#: What is said where the rest of a model keeps a quantization of another method.
MIXED = (
    "config.json still says how the other weights are quantized, since one quantization_config cannot say both: "
    "ktmoe reads these experts, other engines do not"
)
#: The quantization_config of gpt-oss's own config.json.
_GPT_OSS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def config(
    original: dict[str, Any], stored: Storage | None, layers: Collection[int | str], partly: bool, rest: Iterable[TensorInfo]
) -> tuple[dict[str, Any], str]:
    """config.json of the result, and what is to be known of it, or "".

    original: the source's. stored: how experts are stored; None: as gpt-oss has MXFP4. layers: that are converted; partly:
    whether there are others. rest: the tensors that are copied.
    """
    made, rest = copy.deepcopy(original), list(rest)
    nested = made.get("text_config")
    place = nested if isinstance(nested, dict) and "quantization_config" in nested else made
    if stored is DEEPSEEK_V4:
        made["expert_dtype"] = "fp4"
        return made, ""
    found: Any = place.get("quantization_config")
    if any(map(quantized, rest)):
        method = found.get("quant_method") if isinstance(found, dict) else None
        if stored is None or stored.method != "compressed-tensors" or method != stored.method:
            return made, MIXED
        place["quantization_config"] = _added(found, stored, layers, partly)
        return made, ""
    place.pop("quantization_config", None)
    made.pop("quantization", None)  # of Mistral's params.json
    if stored is None:
        made["quantization_config"] = copy.deepcopy(_GPT_OSS)
        return made, ""
    made["quantization_config"] = _fresh(stored, layers, partly, rest)
    return made, stored.note


def without(original: dict[str, Any]) -> dict[str, Any]:
    """config.json of the same model with nothing quantized."""
    made = copy.deepcopy(original)
    nested = made.get("text_config")
    for place in (made, nested if isinstance(nested, dict) else {}):
        for key in ("quantization_config", "quantization", "expert_dtype"):
            place.pop(key, None)
    return made


def _fresh(stored: Storage, layers: Collection[int | str], partly: bool, rest: list[TensorInfo]) -> dict[str, Any]:
    ignored = _modules(rest)
    if stored.method != "compressed-tensors":
        return {"quant_method": stored.method, **stored.stated, stored.ignored: ignored}
    return {
        "quant_method": stored.method,
        "quantization_status": "compressed",
        "format": stored.format,
        "config_groups": {"group_0": _group(stored, layers, partly)},
        "ignore": ignored,
        "kv_cache_scheme": None,
    }


def _added(found: dict[str, Any], stored: Storage, layers: Collection[int | str], partly: bool) -> dict[str, Any]:
    """A quantization_config of compressed-tensors with one group more, which comes first, for the experts."""
    groups = found.get("config_groups")
    groups = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    before = {f"group_{number}": {"format": found.get("format"), **group} for number, group in enumerate(groups, 1)}
    mine = _group(stored, layers, partly)
    pattern = mine["targets"][0].removeprefix("re:")
    example = next((f"model.layers.{layer}.mlp.experts.0.gate_proj" for layer in layers if isinstance(layer, int)), "")
    ignored = found.get("ignore")
    kept = [name for name in ignored if not _ignores(name, example, pattern)] if isinstance(ignored, list) else []
    return found | {"format": "mixed-precision", "config_groups": {"group_0": mine, **before}, "ignore": kept}


def _ignores(entry: object, example: str, pattern: str) -> bool:
    """Whether an entry of ignore is for the experts that are converted: by name, or by a pattern after "re:".

    A pattern that would take long stays.
    """
    if not isinstance(entry, str):
        return False
    if not entry.startswith("re:"):
        return re.match(pattern, entry) is not None
    try:
        return _quick(entry) and re.match(entry.removeprefix("re:"), example) is not None
    except (re.error, OverflowError, RecursionError):  # no pattern, or none that can be compiled
        return False


def _quick(pattern: str) -> bool:
    """Whether matching takes little time for certain: a config may hold a pattern that takes years."""
    repeats, groups = sum(map(pattern.count, "*+?{")), pattern.count("(")
    return len(pattern) <= 1000 and repeats <= 4 and groups <= 2 and not re.search(r"[)][*+{]", pattern)


def _group(stored: Storage, layers: Collection[int | str], partly: bool) -> dict[str, Any]:
    where = ""
    if partly:
        names = [f"layers[.]{layer}" if isinstance(layer, int) else re.escape(layer) for layer in layers]
        where = rf"({'|'.join(names)})[.](.*[.])?"
    return {
        "targets": [rf"re:(.*[.])?{where}experts[.][0-9]+[.]({_STEMS})$"],
        "weights": dict(stored.weights),
        "input_activations": dict(stored.activations) if stored.activations else None,
        "output_activations": None,
        "format": stored.format,
    }


def _modules(rest: list[TensorInfo]) -> list[str]:
    """The modules that are not quantized: whose weight has rows and columns, and the output layer, which may have none.

    Of experts that stay as they are, the module of all.
    """
    found = {info.name.removesuffix(".weight") for info in rest if info.name.endswith(".weight") and len(info.shape) > 1}
    return sorted({_EXPERT.sub("", name) for name in found} | {"lm_head"})


def quantized(info: TensorInfo) -> bool:
    """Whether a tensor is, or scales, a quantized weight, by its dtype and name."""
    return (
        info.dtype.startswith(("F4", "F6", "F8")) or info.dtype in ("I8", "U8") or info.name.endswith((".qweight", "_packed"))
    )
