"""What `ktmoe convert` writes, read by transformers itself: its experts are the numbers that ktmoe reads, nothing else changed."""

import re

import pytest
import torch
from checkpoints import numbers
from engine_models import experts as modules
from engine_models import logits, make, prompts, save
from serving import eager
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config

import ktmoe
import ktmoe.transformers as served

COMPRESSED = CompressedTensorsConfig(dequantize=True)
#: case -> model, sizes, what to convert to, and what transformers is told so that it makes bfloat16 numbers of them.
CASES = {
    "mxfp4": ("qwen3_moe", {}, {"to": "mxfp4"}, COMPRESSED),
    "int4": ("qwen3_moe", {}, {"to": "int4"}, COMPRESSED),
    "int8": ("qwen3_moe", {}, {"to": "int8"}, COMPRESSED),
    "int8 group": ("qwen3_moe", {}, {"to": "int8", "group": 32}, COMPRESSED),
    "fp8": ("deepseek_v3", {"hidden_size": 256, "moe_intermediate_size": 128}, {"to": "fp8"}, FineGrainedFP8Config(dequantize=True)),
    "fp8 row": ("qwen3_moe", {}, {"to": "fp8", "group": "row"}, COMPRESSED),
    "numbered": ("mixtral", {}, {"to": "mxfp4"}, COMPRESSED),
    "stacked": ("qwen3_5_moe", {}, {"to": "mxfp4"}, COMPRESSED),
    "gpt-oss": ("gpt_oss", {}, {"to": "mxfp4"}, Mxfp4Config(dequantize=True)),
}
