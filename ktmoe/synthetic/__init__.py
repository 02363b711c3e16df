"""Synthetic checkpoints with true tensor names, dtypes and sizes, for the demo, tests and benches.

write_*: into a folder. *_experts: what layer 0 of that loads as, without a file; a matrix is made when it is asked for.
"""

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
from ktmoe.synthetic.quantized import PUBLISHED

__all__ = [
    "PUBLISHED",
    "deepseek_v4_experts",
    "gpt_oss_experts",
    "kimi_k2_experts",
    "qwen3_experts",
    "write_deepseek_v4",
    "write_gpt_oss",
    "write_kimi_k2",
    "write_qwen3",
]
