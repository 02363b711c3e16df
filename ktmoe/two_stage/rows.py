"""BlockScaled: rows of MXFP4 or MXFP8, and how bfloat16 rows become such rows and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ktmoe import arrays
from ktmoe._native import core
from ktmoe.arrays import AnyArray, expect_shape
from ktmoe.errors import InputError
from ktmoe.messages import show
from ktmoe.quantization import RULES, Rule
from ktmoe.quantization.blocks import ELEMENTS, block_rule
from ktmoe.two_stage.kinds import as_bits, as_bytes, give
from ktmoe.two_stage.pairs import arrays_of
from ktmoe.two_stage.scales import checked_order, tiled, untiled
from ktmoe.two_stage.sorting import TOKEN_MASK, Sorting

#: k that share a scale.
BLOCK = 32


class BlockScaled(NamedTuple):
    """Rows whose blocks of 32 k have a scale each. Arrays of numpy, or tensors of torch.

    codes: uint8 [rows, k/2] of mxfp4, low nibble = even k; [rows, k] of mxfp8. scales: UE8M0 bytes, [rows, ceil(k/32)], or in
    tiles. format: "mxfp4" or "mxfp8". scale_order: one of SCALE_ORDERS.

    Examples:
        >>> rows = quantize(np.ones((1, 64), np.float32), "mxfp4")
        >>> rows.codes.shape, rows.scales
        ((1, 32), array([[125, 125]], dtype=uint8))
    """

    codes: Any
    scales: Any
    format: str
    scale_order: str = "plain"


def quantize(x: AnyArray, to: str = "mxfp4", rule: str = "ceil", scale_order: str = "plain") -> BlockScaled:
    """x [rows, k] as BlockScaled, by a rule of ktmoe.quantization (docs/quantizing.md), as a MoELayer in that mode rounds it.

    x: bfloat16, uint16 that holds its bits, float32 (rounded to bfloat16 first) or a torch CPU tensor of bfloat16 or float32;
    k even for mxfp4. The codes and scales are torch tensors if x is one. Raises InputError.

    Examples:
        >>> quantize(np.ones((1, 32), np.float32), "mxfp8").codes[0, :2]
        array([120, 120], dtype=uint8)
    """
    order = checked_order(scale_order)
    if not isinstance(to, str) or to not in ELEMENTS:
        raise InputError(f"to must be one of {', '.join(ELEMENTS)}, found {show(to)}")
    names = [name for target, name in RULES if target == to]
    if not isinstance(rule, str) or rule not in names:
        raise InputError(f"rule must be one of {', '.join(names)} to make {to}, found {show(rule)}")
    bits = as_bits(x, "x")
    expect_shape("x", bits, (None, None))
    codes, scales = quantized(bits, RULES[to, rule])
    torch = arrays.is_torch(x)
    return BlockScaled(give(codes, torch), give(tiled(scales, order), torch), to, scale_order)


def dequantize(rows: BlockScaled) -> Any:
    """The numbers that rows stand for, bfloat16 [rows, k]: a code's value times 2^(scale - 127).

    What is above bfloat16's range is infinite; a block whose scale is 255 is NaN. Raises InputError.

    Examples:
        >>> dequantize(quantize(np.full((1, 32), 1.1, np.float32), "mxfp4"))[0, :2]
        array([1, 1], dtype=bfloat16)
    """
    codes, scales = checked(rows, "rows")
    return give(values(codes, scales, rows.format), arrays.is_torch(rows.codes))


def sort_scales(rows: BlockScaled, sorting: Sorting, scale_order: str = "tiled") -> Any:
    """The scales of quantised tokens in sorted rows, as GPU kernels of the first stage take them beside the tokens' codes.

    rows: of tokens. The scales are [sorted rows, blocks], or in tiles; those of padding, and behind the blocks, are 0. Raises
    InputError.

    Examples:
        >>> sorting = moe_sorting(ids, weights, layer.num_experts)
        >>> sort_scales(quantize(x), sorting, "plain").shape[0] == len(sorting.sorted_token_ids)
        True
    """
    order = checked_order(scale_order)
    _, scales = checked(rows, "rows")
    token_ids, _, _, valid, tokens = arrays_of(sorting)
    if tokens != len(scales):
        raise InputError(f"rows must be of {tokens} tokens, which num_valid_ids says, found {len(scales)}")
    token = token_ids[:valid] & TOKEN_MASK
    at = np.flatnonzero(token < tokens)
    found = np.zeros((len(token_ids), scales.shape[1]), np.uint8)
    found[at] = scales[token[at]]
    return give(tiled(found, order), arrays.is_torch(rows.scales))


def checked(rows: BlockScaled, name: str, columns: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Codes and plain scales of rows, uint8. columns: what k has to be. Raises InputError."""
    if not isinstance(rows, BlockScaled):
        raise InputError(f"{name} must be BlockScaled, found {type(rows).__name__}")
    if not isinstance(rows.format, str) or rows.format not in ELEMENTS:
        raise InputError(f"{name}.format must be one of {', '.join(ELEMENTS)}, found {show(rows.format)}")
    order = checked_order(rows.scale_order)
    codes = as_bytes(rows.codes, f"{name}.codes")
    per_byte = 8 // ELEMENTS[rows.format].bits
    expect_shape(f"{name}.codes", codes, (None, None if columns is None else columns // per_byte))
    count, blocks = len(codes), -(-codes.shape[1] * per_byte // BLOCK)
    return codes, untiled(as_bytes(rows.scales, f"{name}.scales"), order, count, blocks, f"{name}.scales")


def quantized(bits: np.ndarray, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """Codes and plain scales of bfloat16 bits [rows, k]."""
    columns, per_byte = bits.shape[1], 8 // ELEMENTS[rule.target].bits
    if columns % per_byte:
        raise InputError(f"{rule.target} rows must have an even number of columns, found {columns}")
    codes, scales = block_rule(rule).quantize(_whole_blocks(bits, BLOCK))
    return np.ascontiguousarray(codes[:, : columns // per_byte]), scales


def values(codes: np.ndarray, scales: np.ndarray, format: str) -> np.ndarray:
    """bfloat16 bits [rows, k] of codes and plain scales."""
    per_byte = 8 // ELEMENTS[format].bits
    columns = codes.shape[1] * per_byte
    whole = _whole_blocks(codes, BLOCK // per_byte)
    return np.ascontiguousarray(core.block_values(ELEMENTS[format].name, whole, np.ascontiguousarray(scales))[:, :columns])


def _whole_blocks(rows: np.ndarray, block: int) -> np.ndarray:
    """Rows as native code reads them, with zeros behind them up to a multiple of a block."""
    missing = -rows.shape[1] % block
    return np.pad(rows, ((0, 0), (0, missing))) if missing else arrays.contiguous(rows)
