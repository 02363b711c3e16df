"""Synthetic checkpoints with true tensor names, dtypes and sizes, for the demo, tests and benches.

write_*: into a folder, write_gguf as GGUF, the others as safetensors. *_experts: what layer 0 of that loads as, without a
file; a matrix is made when it is asked for.
write_chat_model: not the experts alone, but a whole tiny model with a tokenizer, which generates text.
PUBLISHED, GGUF: experts of each quantized format by the name of the weights; each has write() and experts().
"""

from ktmoe.synthetic.chat import write_chat_model
from ktmoe.synthetic.gguf import GGUF, gguf_experts, write_gguf
from ktmoe.synthetic.models import (
    deepseek_v4_experts,
    gpt_oss_experts,
    kimi_k2_experts,
    qwen3_experts,
    write_deepseek_v4,
    write_gpt_oss,
    write_kimi_k2,
    write_qwen3,
)
from ktmoe.synthetic.quantized import (
    PUBLISHED,
    awq_experts,
    fp8_experts,
    gptq_experts,
    mxfp8_experts,
    nvfp4_experts,
    write_awq,
    write_fp8,
    write_gptq,
    write_mxfp8,
    write_nvfp4,
)

__all__ = [
    "GGUF",
    "PUBLISHED",
    "awq_experts",
    "deepseek_v4_experts",
    "fp8_experts",
    "gguf_experts",
    "gpt_oss_experts",
    "gptq_experts",
    "kimi_k2_experts",
    "mxfp8_experts",
    "nvfp4_experts",
    "qwen3_experts",
    "write_awq",
    "write_chat_model",
    "write_deepseek_v4",
    "write_fp8",
    "write_gguf",
    "write_gpt_oss",
    "write_gptq",
    "write_kimi_k2",
    "write_mxfp8",
    "write_nvfp4",
    "write_qwen3",
]
