"""The two-stage pipeline again, in plain float64 numpy, and wrong kernels: what ktmoe.two_stage is compared with.

It shares nothing with the package: the sort is a loop, numbers are rounded by their definition. A Kernel with another token
mask, with the scales of another row and so on is a kernel that is wrong on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
#: The sizes of E2M1's codes 0 to 7.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
#: Largest number, bits behind the first one, and the exponent of the least normal number of each format.
FLOATS = {"mxfp4": (6.0, 1, 0), "mxfp8": (448.0, 3, -6)}


def plain_sorting(ids, weights, num_experts, unit, mask=None):
    """sorted_token_ids, sorted_weights, sorted_expert_ids and num_valid_ids as lists, by the words of the contract."""
    tokens, top_k = ids.shape
    token_ids, row_weights, block_experts = [], [], []
    local = 0
    for expert in range(num_experts):
        if mask is not None and not mask[expert]:
            continue
        rows = [(t, s) for t in range(tokens) for s in range(top_k) if ids[t, s] == expert]
        for token, slot in rows:
            token_ids.append(slot * 2**24 + token)
            row_weights.append(float(weights[token, slot]))
        while len(token_ids) % unit:
            token_ids.append(top_k * 2**24 + tokens)
            row_weights.append(0.0)
        block_experts += [local] * (len(token_ids) // unit - len(block_experts))
        local += 1
    valid = [len(token_ids), tokens]
    # a token cannot have more different experts than there are
    capacity = tokens * top_k + num_experts * unit - min(top_k, num_experts)
    rest = capacity - len(token_ids)
    blocks = -(-capacity // unit)
    token_ids += [top_k * 2**24 + tokens] * rest
    row_weights += [0.0] * rest
    block_experts += [-1] * (blocks - len(block_experts))
    return token_ids, row_weights, block_experts, valid


def to_bfloat16(numbers):
    """The nearest of 8 significant bits, ties to even, float64; of numbers in the range where none is denormal."""
    fraction, exponent = np.frexp(numbers)
    return np.ldexp(np.rint(fraction * 256), exponent - 8)


def rounded(rows, to):
    """(codes' values, scales' exponents) of rows of bfloat16 numbers: float64 [rows, blocks, 32] and int [rows, blocks].

    Rule "ceil": the least power of two that leaves nothing above the format's largest number; codes to nearest, ties to even.
    """
    largest, bits, least = FLOATS[to]
    blocks = rows.reshape(len(rows), -1, 32)
    most = np.abs(blocks).max(axis=2)
    exponents = np.frexp(most / largest)[1]  # most / largest < 2^e
    exponents -= np.ldexp(largest, exponents - 1) >= most
    exponents = np.where(most == 0, -127, exponents)
    quotients = np.ldexp(blocks, -exponents[..., None])
    quantum = np.maximum(np.frexp(quotients)[1] - 1, least) - bits
    return np.ldexp(np.rint(np.ldexp(quotients, -quantum)), quantum), exponents


def restored(values, exponents):
    """float64 [rows, k] of what rounded() gives."""
    return np.ldexp(values, exponents[..., None]).reshape(len(values), -1)


def to_bytes(values, exponents, to):
    """(codes, scales) of what rounded() gives, as the format stores them."""
    scales = (exponents + 127).astype(np.uint8)
    if to == "mxfp8":
        return values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).reshape(len(values), -1), scales
    codes = np.searchsorted(E2M1, np.abs(values)) + 8 * np.signbit(values)
    codes = codes.reshape(len(values), -1).astype(np.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4, scales


def decoded(codes, scales):
    """float64 [rows, k] of MXFP4 weights."""
    sizes = np.concatenate([E2M1, -E2M1])
    values = np.stack([sizes[codes & 15], sizes[codes >> 4]], axis=-1).reshape(len(codes), -1, 32)
    return restored(values, scales.astype(int) - 127)


@dataclass(frozen=True)
class Experts:
    """MXFP4 weights of Gaussian numbers: w1 [E, 2I, H/2], gate's rows first, w1_scale [E, 2I, H/32], w2 and w2_scale."""

    w1: np.ndarray
    w1_scale: np.ndarray
    w2: np.ndarray
    w2_scale: np.ndarray

    @classmethod
    def random(cls, rng, hidden, intermediate, num_experts):
        arrays = []
        for rows, columns in ((2 * intermediate, hidden), (hidden, intermediate)):
            numbers = to_bfloat16(rng.standard_normal((num_experts * rows, columns)) / columns**0.5)
            codes, scales = to_bytes(*rounded(numbers, "mxfp4"), "mxfp4")
            arrays += [codes.reshape(num_experts, rows, -1), scales.reshape(num_experts, rows, -1)]
        return cls(*arrays)

    @property
    def count(self):
        return len(self.w1)

    @property
    def arrays(self):
        return self.w1, self.w1_scale, self.w2, self.w2_scale

    def matrix(self, expert, stage):
        """float64, of the first stage or of the second."""
        codes, scales = self.arrays[2 * stage - 2 : 2 * stage]
        return decoded(codes[expert], scales[expert])


def batch(rng, tokens, hidden, num_experts, top_k):
    """x bfloat16, ids int32 without a repeated one in a token, router weights float32 that add up to 1."""
    x = rng.standard_normal((tokens, hidden)).astype(BF16)
    ids = np.argsort(rng.random((tokens, num_experts)), axis=1)[:, :top_k].astype(np.int32)
    weights = rng.random((tokens, top_k)).astype(np.float32) + np.float32(0.1)
    return x, ids, weights / weights.sum(axis=1, keepdims=True)


@dataclass(frozen=True)
class Kernel:
    """The pipeline; what differs from the defaults is wrong.

    token_mask: what sorted_token_ids are masked with to gather x. row_of_scale: how many rows further down the scales of h are
    taken. padding: whether rows of padding count, as rows of the last token with weight 1. dropped: the block of h whose scale
    is not applied.
    """

    token_mask: int = 0xFFFFFF
    row_of_scale: int = 0
    padding: bool = False
    dropped: int | None = None

    def __call__(self, experts, x, ids, weights, x_to, h_to, unit=32):
        """(h, y), float64: [rows of blocks, intermediate] and [tokens, hidden]. x_to, h_to: "mxfp4", "mxfp8" or "bf16"."""
        x = x.astype(np.float64)
        tokens, hidden = x.shape
        token_ids, row_weights, block_experts, (valid, _) = plain_sorting(ids, weights, experts.count, unit)
        token_ids, row_weights = np.array(token_ids[:valid]), np.array(row_weights[:valid])
        real = (token_ids & 0xFFFFFF) < tokens
        x = x if x_to == "bf16" else restored(*rounded(x, x_to))
        gathered = x[np.minimum(token_ids & self.token_mask, tokens - 1)]
        if not self.padding:
            gathered[~real] = 0
        of_block = [slice(row, row + unit) for row in range(0, valid, unit)]
        h = []
        for rows, expert in zip(of_block, block_experts, strict=False):
            gate, up = np.split(gathered[rows] @ experts.matrix(expert, 1).T, 2, axis=1)
            h.append(to_bfloat16(up * gate / (1 + np.exp(-gate))))
        h = np.concatenate(h)
        if h_to != "bf16":
            values, exponents = rounded(h, h_to)
            exponents = np.roll(exponents, -self.row_of_scale, axis=0)
            if self.dropped is not None:
                exponents[:, self.dropped] = 0
            h = restored(values, exponents)
        y = np.zeros((tokens, hidden))
        for rows, expert in zip(of_block, block_experts, strict=False):
            d = h[rows] @ experts.matrix(expert, 2).T
            counted = row_weights[rows, None] if not self.padding else np.where(real[rows], row_weights[rows], 1)[:, None]
            np.add.at(y, np.minimum(token_ids[rows] & 0xFFFFFF, tokens - 1), counted * d)
        return h, y


#: Wrong kernels, by what is wrong.
WRONG = {
    "a token mask without its lowest bit": Kernel(token_mask=0xFFFFFE),
    "scales of the next row": Kernel(row_of_scale=1),
    "padding counted": Kernel(padding=True),
    "the scales of a block dropped": Kernel(dropped=3),
}


def difference(y, of):
    """1 - 2 xy / (xx + yy): 0 for equal numbers; it sees a wrong direction as well as a wrong size."""
    y, of = np.asarray(y, np.float64), np.asarray(of, np.float64)
    return 1 - 2 * (y * of).sum() / ((y * y).sum() + (of * of).sum())


def cosine(y, of):
    y, of = np.asarray(y, np.float64).ravel(), np.asarray(of, np.float64).ravel()
    return y @ of / (np.linalg.norm(y) * np.linalg.norm(of))
