"""Rounding weights to another format, for whoever asks for that by name: the rules, and what applies them.

No loader and no backend imports this package. ktmoe.modes has activations rounded by the rules of MX formats.
"""

from ktmoe.quantization.blocks import block_rule
from ktmoe.quantization.quantizer import Error, Quantizer, quantize
from ktmoe.quantization.rules import RULES, Rule
from ktmoe.quantization.targets import TARGETS

__all__ = ["RULES", "TARGETS", "Error", "Quantizer", "Rule", "block_rule", "quantize"]
