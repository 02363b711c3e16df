"""write_transformers_dense.py FOLDER: save_pretrained() of dense models, and what a layer's matrices give in float64."""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
import writing

#: Of hidden states, and of heads; q, k and v have different numbers of rows.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 32,
    "pad_token_id": 0,
}
MODELS = {
    "phi3": {},
    "glm4": {"attention_bias": True},
    "qwen2": {"use_sliding_window": False},
}


def write(folder: Path, model_type: str, changes: dict) -> dict[str, np.ndarray]:
    """x; q, k and v as the layer's attention has them before it rotates them; mlp: of the same x."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(model_type, **(SIZES | changes))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    layer = model.double().model.layers[0]
    x, _, _ = writing.routed(SIZES["hidden_size"], writing.TOP_K)
    found = {"x": x}
    given = torch.from_numpy(x)[None]
    with torch.no_grad():
        found["mlp"] = layer.mlp(given)[0].numpy()
        attention = layer.self_attn
        module = sys.modules[type(attention).__module__]
        rotate, attend = module.apply_rotary_pos_emb, module.eager_attention_forward

        def before_rotation(q, k, *rest, **others):
            found["q"], found["k"] = flat(q), flat(k)
            return rotate(q, k, *rest, **others)

        def before_attention(owner, query, key, value, *rest, **others):
            found["v"] = flat(value)
            return attend(owner, query, key, value, *rest, **others)

        module.apply_rotary_pos_emb, module.eager_attention_forward = before_rotation, before_attention
        try:
            attention(given, model.model.rotary_emb(given, torch.arange(len(x))[None]), None)
        finally:
            module.apply_rotary_pos_emb, module.eager_attention_forward = rotate, attend
    return found


def flat(states: torch.Tensor) -> np.ndarray:
    """[1, heads, tokens, size of a head] as [tokens, rows]."""
    return states[0].transpose(0, 1).flatten(1).numpy().copy()


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    writing.main({name: partial(write, model_type=name, changes=changes) for name, changes in MODELS.items()})
