"""A MoE layer in two stages around a token sort, as GPU kernels compute it, with the bits of MoELayer.forward().

docs/two-stage.md says how to check a kernel with it.
"""

from ktmoe.two_stage.rows import BlockScaled, dequantize, quantize, sort_scales
from ktmoe.two_stage.scales import SCALE_ORDERS, tile_scales, untile_scales
from ktmoe.two_stage.sorting import UNITS, Sorting, capacity, moe_sorting
from ktmoe.two_stage.stages import gemm1, gemm2
from ktmoe.two_stage.weights import INTERLEAVES, experts

__all__ = [
    "INTERLEAVES",
    "SCALE_ORDERS",
    "UNITS",
    "BlockScaled",
    "Sorting",
    "capacity",
    "dequantize",
    "experts",
    "gemm1",
    "gemm2",
    "moe_sorting",
    "quantize",
    "sort_scales",
    "tile_scales",
    "untile_scales",
]
