"""A backend that trains, simulated in float32 numpy, for the tests of ktmoe/reference/training.py's bound."""

import numpy as np
from reference_experts import BFLOAT16
from simulated import allow_folding, flushed, fma, numbers_of, options, simulated_linear, tdpbf16ps

from ktmoe.experts import PROJECTIONS
from ktmoe.reference import EXP_RELATIVE_ERROR

#: portable: products and sums are rounded apart, and each sum begins at zero; fma: one chain for all that is added up;
#: vdpbf16ps, amx: weights that are bfloat16 numbers are multiplied so, and amx's may be the sum of two. "amx folded", "amx
#: terms": amx with rounding="folded", or tuned_for="prefill".
KINDS = ("portable", "fma", "vdpbf16ps", "amx")
CHOSEN = ("amx folded", "amx terms")


def bfloat16(a):
    return a.astype(BFLOAT16).astype(np.float32)


class Lora:
    """What an adapter has to have."""

    def __init__(self, rng, experts, rank=3, projections=PROJECTIONS, scale=0.75, dtype=np.float32, size=0.1):
        self.scale, self.rank, self.pairs = scale, rank, {}
        for projection in projections:
            n, k = experts.shape(projection)
            shapes = (experts.num_experts, rank, k), (experts.num_experts, n, rank)
            self.pairs[projection] = tuple((size * rng.standard_normal(shape)).astype(dtype) for shape in shapes)


class SimulatedTraining:
    """forward() and backward() for all experts; every method is a step that a mistake may replace."""

    def __init__(self, experts, lora, router_weight, kind, rng, shards=None):
        self.experts, self.lora, self.where, self.kind, self.rng = experts, lora, router_weight, kind, rng
        self.shards = shards or [(0, experts.intermediate)]
        self.scale = np.float32(lora.scale) if lora else None
        activation = experts.activation
        self.alpha, self.limit, self.offset = (np.float32(getattr(activation, v)) for v in ("alpha", "limit", "up_offset"))

    # sums

    def chain(self, a, b, total=None):
        """total + a @ b, one product after the other."""
        total = np.zeros((len(a), b.shape[1]), np.float32) if total is None else total
        for k in range(a.shape[1]):
            x, w = a[:, k, None], b[k]
            total = total + x * w if self.kind == "portable" else fma(x, w, total)
        return total

    def lanes(self, a, b):
        """a @ b in 16 sums, which are then added."""
        parts = [self.chain(a[:, lane::16], b[lane::16]) for lane in range(min(16, a.shape[1]))]
        while len(parts) > 1:
            parts = [sum(parts[at : at + 2]) for at in range(0, len(parts), 2)]
        return parts[0]

    def added(self, *parts):
        """What several (rows, numbers) give together: by chains from zero, or by one."""
        total = None
        for multiply, a, b in parts:
            if self.kind == "portable":
                one = multiply(a, b, None)
                total = one if total is None else total + one
            else:
                total = multiply(a, b, total)
        return total

    def weights(self, matrix):
        """float32 [n, k], without factor."""
        weights, scales, minima = numbers_of(matrix)
        k = matrix.shape[1]
        if scales is not None:
            weights = weights * np.repeat(scales, matrix.format.scale.extent[1], axis=1)[:, :k]
        if minima is not None:
            weights = weights - np.repeat(minima, matrix.format.offset.scale.extent[1], axis=1)[:, :k]
        folded = self.kind == "amx folded" and allow_folding(scales, matrix.format.element.values)
        return bfloat16(weights) if folded else weights

    def transposed(self, rows, weights, total):
        """total + rows @ weights, n ascending."""
        total = np.zeros((len(rows), weights.shape[1]), np.float32) if total is None else total
        terms = [bfloat16(weights)]
        terms.append(bfloat16(weights - terms[0]))
        if self.kind.startswith("amx") and np.array_equal(terms[0] + terms[1], weights):
            terms = terms[: 1 + terms[1].any()]
            for first in range(0, len(weights), 512):
                for term in terms:
                    for start in range(first, min(first + 512, len(weights)), 32):
                        total = flushed(total + tdpbf16ps(rows[:, start : start + 32], term[start : start + 32].T))
            return total
        if self.kind == "vdpbf16ps" and not terms[1].any():
            for n in range(0, len(weights), 2):
                for one in range(min(n + 1, len(weights) - 1), n - 1, -1):
                    total = flushed(fma(flushed(rows[:, one, None]), flushed(weights[one]), total))
            return total
        return self.chain(rows, weights, total)

    def rows(self, matrix, dv, part=slice(None)):
        """What the transposed product takes."""
        if matrix.format.factor is None:
            return dv
        factor = np.broadcast_to(matrix.factor, matrix.shape[:1])[part]
        return bfloat16(dv / factor if matrix.format.factor.divides else dv * factor)

    # steps

    def exp(self, z):
        exact = np.exp(z.astype(np.float64))
        return (exact * (1 + 0.8 * EXP_RELATIVE_ERROR * self.rng.uniform(-1, 1, z.shape))).astype(np.float32)

    def inner(self, rows, projection, expert):
        """T."""
        return self.scale * self.lanes(rows, self.lora.pairs[projection][0][expert].astype(np.float32).T)

    def outer(self, projection, expert):
        return self.lora.pairs[projection][1][expert].astype(np.float32)

    def adapts(self, projection):
        return self.lora is not None and projection in self.lora.pairs

    def linear(self, a, projection, expert, inner):
        total = simulated_linear(self.experts.matrix(expert, projection), a, self.kind)
        if self.adapts(projection):
            inner[projection] = self.inner(a, projection, expert)
            total = total + self.chain(inner[projection], self.outer(projection, expert).T)
        return total

    def act(self, g, u):
        g = np.minimum(g, self.limit)
        return (np.clip(u, -self.limit, self.limit) + self.offset) * (g / (1 + self.exp(-self.alpha * g)))

    def derive(self, g, u, t):
        """dG and dU before they are rounded to bfloat16."""
        gate, up = np.minimum(g, self.limit), np.clip(u, -self.limit, self.limit) + self.offset
        e = self.exp(-self.alpha * gate)
        s = 1 / (1 + e)
        by_gate = s * (1 + self.alpha * gate * (1 - s))
        dg = t * up * by_gate if self.kind == "portable" else t * (by_gate * up)
        du = t * gate * s
        return np.where(g > self.limit, np.float32(0), dg), np.where(np.abs(u) > self.limit, np.float32(0), du)

    def by_down(self, dh, r):
        """dact."""
        return dh if self.where == "expert_input" else r * dh

    def rounded(self, v):
        return bfloat16(v)

    # passes

    def each(self, x, ids, weights):
        for expert in range(self.experts.num_experts):
            token, slot = np.nonzero(ids == expert)
            if len(token):
                yield expert, token, slot, weights[token, slot].astype(np.float32)[:, None]

    @np.errstate(all="ignore")
    def first(self, x, expert, token, r):
        a = x[token].astype(np.float32)
        a = bfloat16(a * r) if self.where == "expert_input" else a
        inner = {}
        g, u = (self.linear(a, projection, expert, inner) for projection in ("gate", "up"))
        act = self.act(g, u)
        return a, inner, g, u, act, bfloat16(act * r if self.where == "down_input" else act)

    @np.errstate(all="ignore")
    def forward(self, x, ids, weights):
        """y, g, u, t, float32."""
        rank = self.lora.rank if self.lora else 0
        y = np.zeros((len(self.shards), len(x), self.experts.hidden), np.float32)
        g, u = np.zeros((2, ids.size, self.experts.intermediate), np.float32)
        t = np.zeros((ids.size, 3, rank), np.float32)
        for expert, token, slot, r in self.each(x, ids, weights):
            _, inner, of_g, of_u, _, h = self.first(x, expert, token, r)
            pair = token * ids.shape[1] + slot
            g[pair], u[pair] = of_g, of_u
            down = self.experts.matrix(expert, "down")
            parts = [simulated_linear(down, h, self.kind, shard) for shard in self.shards]
            if self.adapts("down"):
                inner["down"] = self.of_shards(h, expert, parts)
            for projection, found in inner.items():
                t[pair, PROJECTIONS.index(projection)] = found
            for of_shard, d in zip(y, parts, strict=True):
                np.add.at(of_shard, token, r * d if self.where == "down_output" else d)
        return self.all_shards(y), g, u, t

    def of_shards(self, h, expert, parts):
        """T of down, which is added to the parts: whole to the first, or what each shard has of it."""
        b = self.outer("down", expert).T
        if self.kind == "portable" or len(parts) == 1:
            inner = self.inner(h, "down", expert)
            parts[0] += self.chain(inner, b)
            return inner
        total = np.float32(0)
        for (first, last), part in zip(self.shards, parts, strict=True):
            own = np.zeros_like(h)
            own[:, first:last] = h[:, first:last]
            inner = self.inner(own, "down", expert)
            part += self.chain(inner, b)
            total = total + inner
        return total

    @staticmethod
    def all_shards(parts):
        total, *others = parts
        for other in others:
            total = total + other
        return total

    @np.errstate(all="ignore")
    def backward(self, x, ids, weights, dy):
        """dx, dr, {projection: [da, db]}, float32."""
        dx = np.zeros((len(x), self.experts.hidden), np.float32)
        dr = np.zeros(ids.shape, np.float32)
        sums = {p: [np.zeros(v.shape, np.float32) for v in pair] for p, pair in (self.lora.pairs if self.lora else {}).items()}
        for expert, token, slot, r in self.each(x, ids, weights):
            a, inner, g, u, act, h = self.first(x, expert, token, r)
            matrix, of_y = self.experts.matrix(expert, "down"), dy[token].astype(np.float32)
            parts = [(self.transposed, self.rows(matrix, of_y), self.weights(matrix))]
            of_inner = {}
            self.through("down", expert, of_y, of_inner, parts)
            dh = self.added(*parts)
            grads = [self.rounded(v) for v in self.derive(g, u, self.by_down(dh, r))]
            if self.adapts("down"):
                inner["down"] = self.inner(h, "down", expert)
            adapted = []
            for projection, dv in zip(("gate", "up"), grads, strict=True):
                self.through(projection, expert, dv, of_inner, adapted)
            of_x = []
            for shard in self.shards:
                parts = []
                for projection, dv in zip(("gate", "up"), grads, strict=True):
                    matrix, n = self.experts.matrix(expert, projection), slice(*shard)
                    parts.append((self.transposed, self.rows(matrix, dv[:, n], n), self.weights(matrix)[n]))
                of_x.append(self.added(*parts, *(adapted if shard == self.shards[0] else ())))
            of_x = self.all_shards(of_x)
            dr[token, slot] = self.of_weights(x[token].astype(np.float32), of_x, dh, act, h, of_y, expert)
            np.add.at(dx, token, r * of_x if self.where == "expert_input" else of_x)
            for projection, (da, db) in sums.items():
                dv, into = (of_y, h) if projection == "down" else (grads[projection == "up"], a)
                factor = r if projection == "down" and self.where == "down_output" else np.float32(1)
                da[expert] = self.chain((factor * of_inner[projection]).T, into)
                db[expert] = self.chain((factor * dv).T, inner[projection])
        return dx, dr, sums

    def through(self, projection, expert, dv, of_inner, parts):
        if self.adapts(projection):
            of_inner[projection] = self.scale * self.lanes(dv, self.outer(projection, expert))
            parts.append((self.chain, of_inner[projection], self.lora.pairs[projection][0][expert].astype(np.float32)))

    def of_weights(self, x, of_x, dh, act, h, dy, expert):
        """dr_w."""
        if self.where == "expert_input":
            return (x * of_x).sum(axis=1)
        found = (dh * (act if self.where == "down_input" else h)).sum(axis=1)
        bias = self.experts.matrix(expert, "down").bias
        return found if bias is None or self.where == "down_input" else found + (dy * bias).sum(axis=1)


def ratios(experts, lora, router_weight, kind, rng, x, ids, weights, dy, *, backend=SimulatedTraining, shards=None):
    """{name: a simulated backend's largest error by its bound}, for all that both passes give, and the references."""
    from ktmoe.reference.training import training_backward, training_forward

    given = {"router_weight": router_weight, "out_dtype": "float32", "shards": shards}
    given |= {name: choice for name, choice in options(kind).items() if name != "activations"}
    forward = training_forward(experts, x, ids, weights, lora, **given)
    backward = training_backward(experts, x, ids, weights, dy, lora, **given)
    run = backend(experts, lora, router_weight, kind, rng, shards)
    y, g, u, t = run.forward(x, ids, weights)
    dx, dr, sums = run.backward(x, ids, weights, dy)
    found = {
        "y": (forward.y, y),
        "g": (forward.g, g),
        "u": (forward.u, u),
        "dx": (backward.x, dx),
        "dr": (backward.weights, dr),
    }
    if lora:
        found["t"] = forward.t, t
        for projection, pair in sums.items():
            found |= {
                f"d{name} of {projection}": (of, actual)
                for name, of, actual in zip("ab", backward.lora[projection], pair, strict=True)
            }
    return {name: reference.worst(actual) for name, (reference, actual) in found.items()}, found
