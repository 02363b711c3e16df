"""Random layers: any format, sizes, biases, activation, mode and shards; random batches for them; and how a call is computed.

All comes from the generator that is passed, so that a case's number is all that one needs to have it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from helpers import BF16, DEEPSEEK, GPT_OSS, MANY_THREADS, MIXED, SCALES, TURNED, whole
from linears import DENSE_FORMATS, random_matrix

from ktmoe import SILU, ExpertWeights, GatedActivation, MoELayer, WeightFormat
from ktmoe.experts import PROJECTIONS, ROUTER_WEIGHTS
from ktmoe.quantization import RULES
from ktmoe.reference.moe import ROUNDING, TUNED_FOR

#: Every format that kernels have, in every order of its codes.
POOL: dict[str, WeightFormat] = DENSE_FORMATS | TURNED
FAMILIES = sorted({weight_format.family for weight_format in POOL.values()})
#: Those that have kernels of integers.
OF_INTEGERS = ("grid", "int", "q4", "ternary")
#: Scale kinds whose numbers reach as far as float32's, so that x can bring sums back to about 1.
FAR = ("ue8m0", "bf16", "fp32")
#: The mixtures of formats that helpers.MIXED has.
MIXTURES = [kind["formats"] for kind in MIXED.values()]
#: How calls are computed, none of which may change a bit: core.tune()'s.
TUNINGS = {
    "scratch_bytes": (256 << 20, 1 << 19, 1),  # all at once, in a few chunks, a token a chunk
    "reduce_slots": (0, 20, 10**9),
    "uneven": (0, 1, 0xDEADBEEF),
    "only_many": (False, True),
}


def one_of(rng, values):
    return values[rng.integers(len(values))]


def random_tuning(rng) -> dict:
    return {name: one_of(rng, values) for name, values in TUNINGS.items()}


def random_threads(rng) -> int:
    return int(rng.integers(1, MANY_THREADS, endpoint=True))


def random_formats(rng, family: str | None = None, integers: bool = False) -> dict[str, WeightFormat]:
    """Formats by projection: alike, or each by itself, or a mixture. family: of all of them; None: any.

    integers: of those families alone that have kernels of integers."""
    families = (family,) if family else OF_INTEGERS if integers else FAMILIES
    pool = [weight_format for weight_format in POOL.values() if weight_format.family in families]
    way = rng.integers(4)
    if way == 0 and family is None and not integers:
        formats = one_of(rng, MIXTURES)
        return formats if isinstance(formats, dict) else dict.fromkeys(PROJECTIONS, formats)
    if way == 1:
        return {projection: one_of(rng, pool) for projection in PROJECTIONS}
    return dict.fromkeys(PROJECTIONS, one_of(rng, pool))


def random_size(rng) -> int:
    """One that may end anywhere in a block and a panel; a whole number of blocks as often as not."""
    size = int(rng.integers(1, 161))
    return size if rng.integers(2) else max(32, size // 32 * 32)


def random_activation(rng) -> GatedActivation:
    if rng.integers(4):
        return one_of(rng, (SILU, DEEPSEEK, GPT_OSS))
    limit = np.inf if rng.integers(2) else float(rng.uniform(0.1, 4))
    return GatedActivation(alpha=float(rng.uniform(0.2, 3)), limit=limit, up_offset=float(rng.integers(-1, 2)))


def random_side(rng, of_integers: bool) -> str:
    """What an MX mode rounds x or h to, by any rule; only to MXFP4 where rows are to be integers."""
    rules = [rule for rule in RULES.values() if rule.target in (("mxfp4",) if of_integers else ("mxfp4", "mxfp8"))]
    rule = one_of(rng, rules)
    return f"{rule.target}:{rule.name}"


def random_mode(rng, of_integers: bool = False) -> str:
    """ "auto" as often as not, else an MX mode."""
    if rng.integers(2):
        return "auto"
    sides = [random_side(rng, of_integers) if of_integers or rng.integers(4) else "bf16" for _ in "xh"]
    return "/".join(sides)


@dataclass
class RandomLayer:
    """Experts, and what a layer of them is made with. x, weights: by what to multiply x and router weights, so that sums do not
    leave float32 where scales are extreme."""

    experts: ExpertWeights
    settings: dict = field(default_factory=dict)
    x: float = 1.0
    weights: float = 1.0

    @property
    def extreme(self) -> bool:
        """Whether scales are: some sums may leave float32 all the same."""
        return self.x != 1 or self.weights != 1

    def made(self, backend: str, **settings) -> MoELayer:
        return MoELayer(self.experts, backend, **(self.settings | settings))


def experts_of(rng, formats, num_experts, hidden, intermediate, scales, down_scales, fold, activation) -> ExpertWeights:
    """Random experts of any formats, GGUF's records too; sizes are rounded up to what these allow."""
    hidden, intermediate = whole(hidden, intermediate, formats)
    shapes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}
    biased = bool(rng.integers(2))
    matrices = {}
    for expert in range(num_experts):
        for projection in PROJECTIONS:
            ends = down_scales if projection == "down" else scales
            made = random_matrix(rng, *shapes[projection], formats[projection], scales=ends, fold=fold, bias=biased)
            matrices[expert, projection] = made
    return ExpertWeights(num_experts, hidden, intermediate, lambda *key: matrices[key], formats, activation)


def far(weight_format: WeightFormat) -> bool:
    """Whether a format's numbers reach as far as float32's."""
    if weight_format.scale:
        return weight_format.scale.kind in FAR and not weight_format.super_scale and not weight_format.offset
    return weight_format.family in ("b16", "f32")


def random_layer(rng, family: str | None = None, integers: bool = False, mode: str | None = None) -> RandomLayer:
    """family, integers: random_formats()'s. mode: the layer's; None: any, of which integers can be rows if `integers`."""
    formats = random_formats(rng, family, integers)
    scales = down_scales = SCALES
    x = weights = 1.0
    if rng.integers(3) == 0 and all(far(weight_format) for weight_format in formats.values()):
        low, down_low = (int(v) for v in rng.integers(20, 220, 2))
        scales, down_scales = (low, low + 5), (down_low, down_low + 5)
        x, weights = (2.0 ** int(np.clip(121 - v, -90, 90)) for v in (low, down_low))
    sizes = random_size(rng), random_size(rng)
    experts = experts_of(
        rng, formats, int(rng.integers(1, 5)), *sizes, scales, down_scales, bool(rng.integers(3)), random_activation(rng)
    )
    settings = {
        "activations": random_mode(rng, integers) if mode is None else mode,
        "rounding": one_of(rng, ROUNDING),
        "tuned_for": one_of(rng, TUNED_FOR),
        "router_weight": one_of(rng, ROUTER_WEIGHTS),
        "numa_nodes": one_of(rng, ([0], [0], [0, 1], [2, 0, 1])),
    }
    units = -(-experts.intermediate // experts.shard_unit)
    settings["numa_nodes"] = settings["numa_nodes"][:units]
    return RandomLayer(experts, settings, x, weights)


def random_tokens(rng, layer: RandomLayer, tokens: int, dtype=BF16):
    """x, ids, router weights: ids repeat, and some are of no expert; sizes differ, and so do tokens."""
    experts, top_k = layer.experts, int(rng.integers(1, 5))
    x = rng.standard_normal((tokens, experts.hidden)) * layer.x
    if rng.integers(2):
        x = x * np.exp2(rng.integers(-6, 3, x.shape))
    ids = rng.integers(-1, experts.num_experts + (rng.integers(4) == 0), (tokens, top_k))
    weights = rng.standard_normal((tokens, top_k)) * layer.weights
    return x.astype(dtype), ids, weights.astype(np.float32)
