"""What config.json says of a model's experts and dense MLPs: the activation, and what the router weights multiply."""

from __future__ import annotations

from typing import Any

from ktmoe.errors import CheckpointError, FormatError
from ktmoe.loaders import gguf_model
from ktmoe.loaders.checkpoint import Checkpoint
from ktmoe.messages import show
from ktmoe.weights.activation import SILU, GatedActivation

#: The activation of gpt-oss, with its usual numbers.
SWIGLU_OAI = GatedActivation(alpha=1.702, limit=7.0, up_offset=1.0)

#: Values of model_type whose swiglu_limit is clamped_silu()'s, under plain SiLU: DeepSeek-V4, GLM-5's and Hunyuan's next ones.
_CLAMPED = ("deepseek_v4", "glm5_next", "glm5_next_text", "hy_v4")
#: Those of them whose dense MLPs and shared experts have no clamp.
_CLAMPED_EXPERTS_ALONE = ("hy_v4",)
#: Values of model_type whose function is gpt-oss's, whatever hidden_act says: transformers writes "silu" for MiniMax-M3's
#: "swigluoai".
_SWIGLU_OAI_MODELS = ("minimax_m3_vl", "minimax_m3_vl_text")
_ACTIVATION_KEYS = ("hidden_act", "hidden_activation")
_FLOAT32_MAX = (2 - 2**-23) * 2**127


def value(checkpoint: Checkpoint, key: str) -> Any:
    """A value of config.json, at the top or else in text_config; None if it is in neither, or null."""
    found, nested = checkpoint.config.get(key), checkpoint.config.get("text_config")
    return nested.get(key) if found is None and isinstance(nested, dict) else found


def place(checkpoint: Checkpoint, key: str) -> str:
    """Where a checkpoint has a value, for messages: "num_experts of config.json"; GGUF files have keys of their own."""
    if gguf_model.ARCHITECTURE not in checkpoint.config:
        return f"{key} of config.json"
    return f"{gguf_model.key(key, checkpoint.config)} of the GGUF header"


def clamped_silu(checkpoint: Checkpoint) -> GatedActivation:
    """DeepSeek-V4's silu(min(gate, limit)) * clip(up, -limit, limit); SILU if config.json's swiglu_limit is absent, null or 0.

    Raises CheckpointError if it is no float32 number, 0 or more.
    """
    limit = value(checkpoint, "swiglu_limit")
    limit = 0 if limit is None else limit
    if type(limit) not in (int, float) or not 0 <= limit <= _FLOAT32_MAX:
        expected = "a float32 number, 0 or more"
        raise CheckpointError(f"{checkpoint.path}: swiglu_limit of config.json: expected {expected}, found {show(limit)}")
    return GatedActivation(limit=float(limit)) if limit else SILU


def silu(checkpoint: Checkpoint) -> GatedActivation:
    """SILU, with a clamp for the models of which that is known. Raises FormatError, which names the key, for what config.json
    says otherwise.
    """
    for key in _ACTIVATION_KEYS:
        if (found := value(checkpoint, key)) not in (None, "silu", "swish"):
            raise FormatError(f"{checkpoint.path}: {key} of config.json: expected 'silu', found {show(found)}")
    if value(checkpoint, "model_type") in _CLAMPED:
        return clamped_silu(checkpoint)
    for key in ("swiglu_limit", "swiglu_limits", "swiglu_alpha", "situ_beta", "activation_situ_beta"):
        if found := value(checkpoint, key):
            raise FormatError(f"{checkpoint.path}: {key} of config.json: expected none for this scheme, found {show(found)}")
    return SILU


def activation(checkpoint: Checkpoint) -> GatedActivation:
    """What config.json says: silu(), or gpt-oss's function where hidden_act is "swigluoai" (MiniMax-M3). For gate and up that
    are tensors of their own: fused ones may be interleaved. Raises FormatError, CheckpointError.
    """
    oai = value(checkpoint, "hidden_act") == "swigluoai" or value(checkpoint, "model_type") in _SWIGLU_OAI_MODELS
    return swiglu_oai(checkpoint) if oai else silu(checkpoint)


def dense_activation(checkpoint: Checkpoint) -> GatedActivation:
    """What config.json says of dense MLPs and shared experts. The models of transformers make these by hidden_act, as their
    experts; those that clamp them are known.

    Raises FormatError where it says nothing, or something that is not known of such an MLP; CheckpointError.
    """
    model = value(checkpoint, "model_type")
    if model not in (*_CLAMPED, *_SWIGLU_OAI_MODELS) and all(value(checkpoint, key) is None for key in _ACTIVATION_KEYS):
        keys = " or ".join(_ACTIVATION_KEYS)
        raise FormatError(
            f"{checkpoint.path}: config.json: expected {keys}, to know what MLPs compute, found neither: pass activation=..."
        )
    try:
        found = activation(checkpoint)
    except FormatError as error:
        raise FormatError(f"{error}: pass activation=... for a dense MLP") from None
    return SILU if model in _CLAMPED_EXPERTS_ALONE else found


def swiglu_oai(checkpoint: Checkpoint) -> GatedActivation:
    """gpt-oss's function, with config.json's swiglu_alpha and swiglu_limit where it has them. Raises CheckpointError."""
    values = {}
    for key, usual in (("swiglu_alpha", SWIGLU_OAI.alpha), ("swiglu_limit", SWIGLU_OAI.limit)):
        found = value(checkpoint, key)
        values[key] = usual if found is None else found
        if type(found) not in (int, float, type(None)) or not 0 < values[key] <= _FLOAT32_MAX:
            raise CheckpointError(
                f"{checkpoint.path}: {key} of config.json: expected a float32 number above 0, found {show(found)}"
            )
    return GatedActivation(float(values["swiglu_alpha"]), float(values["swiglu_limit"]), SWIGLU_OAI.up_offset)


def router_weight(checkpoint: Checkpoint, base: str) -> str:
    """What the model multiplies a router weight onto: "expert_input" for Llama-4, else "down_output".

    By config.json's model_type; where there is none, by the shared expert that Llama-4 has beside a base feed_forward.experts.
    """
    model = value(checkpoint, "model_type")
    if model is None:
        module = base.removesuffix("experts")
        llama4 = module.endswith(".feed_forward.") and f"{module}shared_expert.down_proj.weight" in checkpoint
    else:
        llama4 = model in ("llama4", "llama4_text")
    return "expert_input" if llama4 else "down_output"
