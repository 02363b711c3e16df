"""Names that a page of documentation takes as given, such as `x`: Python code that makes them before the page's first block.

Every other name must be made by a block of the page. A page that begins with imports needs none.
"""

from __future__ import annotations

from pages import CORE, ENGINES

_BATCH = """
import ml_dtypes as _ml_dtypes, numpy as _np, ktmoe as _ktmoe
from ktmoe import synthetic as _synthetic
x = _np.random.default_rng(1).standard_normal((5, 128)).astype(_ml_dtypes.bfloat16)
_ids = _np.array([[0, 1], [2, 3], [4, 5], [6, 7], [0, 7]])
_weights = _np.full((5, 2), 0.5, _np.float32)
"""
_IDS = """
ids, weights = _ids, _weights
"""
_EXPERT_IDS = """
expert_ids, expert_weights = _ids, _weights
"""
_EXPERTS = """
experts = _synthetic.qwen3_experts(num_experts=8, hidden=128, intermediate=64)
"""
_GRAD_Y = """
grad_y = _np.ones((5, 128), _np.float32)
"""
_TRAINED = """
from ktmoe.training import Lora as _Lora, Training as _Training
layer = _ktmoe.MoELayer(experts, activations="bf16")
lora = _Lora.initial(layer.spec, rank=4, alpha=8)
x = x.astype("float32")
gradients = _Training(layer).backward(_Training(layer).forward(x, _ids, _weights, lora)[1], grad_y, lora)
"""
_TORCH = """
import torch as _torch
hidden_states = _torch.ones(5, 128, requires_grad=True)
top_k_index, top_k_weights = _torch.tensor([[0, 1]] * 5), _torch.full((5, 2), 0.5, requires_grad=True)
"""
_LORAS = """
import ktmoe as _ktmoe
from ktmoe.training import Lora as _Lora
with _ktmoe.MoEModel.from_checkpoint("MODEL", activations="bf16") as _model:
    loras = {_number: _Lora.initial(_model[_number].spec, rank=4, alpha=8) for _number in _model}
"""
_ATTENTION = """
import peft as _peft, transformers as _transformers
model = _transformers.AutoModelForCausalLM.from_pretrained("MODEL")
_peft.get_peft_model(model, _peft.LoraConfig(target_modules=["q_proj", "v_proj"])).save_pretrained("ATTENTION")
model = _transformers.AutoModelForCausalLM.from_pretrained("MODEL")
"""
_TWO_STAGE = """
import numpy as _np
from two_stage_pipeline import Experts as _Experts, batch as _batch
w1, w1_scale, w2, w2_scale = _Experts.random(_np.random.default_rng(4), 64, 32, 8).arrays
x, topk_ids, topk_weights = _batch(_np.random.default_rng(4), 5, 64, 8, 2)
"""
_SHARED = """
shared = _synthetic.qwen3_experts(num_experts=2, hidden=128, intermediate=64, seed=5)
gates = _np.full((5, 2), 0.5, _np.float32)
"""
_FOLDERS = """
DIR, OUT = "DIR", "OUT"
"""
#: Page -> environment -> code. Other environments also run that of the core.
GIVEN: dict[str, dict[str, str]] = {
    "docs/adapters.md": {CORE: _LORAS, ENGINES: _ATTENTION},
    "docs/fine-tuning.md": {CORE: _BATCH + _EXPERT_IDS + _GRAD_Y, ENGINES: _TORCH},
    "docs/formats.md": {CORE: "import ktmoe\n" + _BATCH + _IDS + _EXPERTS + _SHARED},
    "docs/low-precision.md": {CORE: 'DIR = "DIR"\n' + _BATCH + _IDS + _EXPERTS},
    "docs/numerics.md": {CORE: _BATCH + _EXPERT_IDS + _EXPERTS + _GRAD_Y + _TRAINED},
    "docs/packed-caches.md": {CORE: _FOLDERS},
    "docs/two-stage.md": {CORE: _TWO_STAGE},
}


def given(page: str, environment: str) -> str:
    """The code that runs before a page's first block."""
    code = GIVEN.get(page, {})
    return code.get(CORE, "") + (code.get(environment, "") if environment != CORE else "")
