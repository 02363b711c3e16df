# Kernels of a table one by one, on rows and panels; and rounding as the driver does it.

ROWS_MAX = KT_ROWS_MAX


def kernels(KernelTable table not None):
    """[(family, scale kind, longest scale group, form of rows, folded, offset or "none")] of every kernel."""
    return [
        (k["family"], k["scale"], k["group"][1], k["form"], k["folded"], k["offset"] or "none") for k, _ in table._rows()
    ]


def folds(KernelTable table not None, weight_format, str form, str rounding="exact", str tuned_for="decode"):
    """Whether a table has a kernel whose weights hold the scale, for those matrices of a format whose scales allow it: 0, or of how
    many bfloat16 numbers such a weight is the sum."""
    return table._folding(weight_format, form, rounding, tuned_for)[1]


def encode(KernelTable table not None, weight_format, str form, const uint16_t[::1] row, bint e2m1=False,
           size_t together=0):
    """One row of bfloat16 bits [k], k a multiple of 32, as the kernel for any scale takes it: uint8 [bytes].

    e2m1: as it takes rows whose blocks of 32 are E2M1 numbers times a power of two. together: how many k, a multiple of 32, are
    encoded at a time, as h is strip by strip; 0: all.
    """
    cdef const kt_kernel *kernel = table.find(weight_format, form)
    cdef const kt_rows *rows = kernel.rows if kernel else NULL
    cdef size_t first, k = row.shape[0]
    if not rows or (k | together) % KT_BLOCK:
        raise InputError(f"{table.name} has no rows of {k} for {form!r}")
    if not rows.encode:
        return np.asarray(row).view(np.uint8).copy()
    encoded = np.empty(k // KT_BLOCK * rows.block_bytes, np.uint8)
    cdef uint8_t[::1] to = encoded
    for first in range(0, k, together or k or 1):
        (rows.encode_e2m1 if e2m1 and rows.encode_e2m1 else rows.encode)(
            &row[first], first, min(together or k, k - first), k, &to[0]
        )
    return encoded


def operand(KernelTable table not None, weight_format, str form, const uint8_t[::1] panel, size_t k, size_t first, int folded=0,
            str tuned_for="decode"):
    """What a kernel makes for the transposed product of a packed panel's 64 n and its k from `first` on, for its test:
    (family, uint8 [terms, bytes]), or None if it makes nothing. folded, tuned_for: as kt_kernel has them."""
    cdef const kt_kernel *kernel = <const kt_kernel *><size_t>table._choose(weight_format, form, folded, tuned_for)[0]
    cdef kt_codebook codebook
    cdef kt_transposing t
    cdef kt_format packed
    cdef unsigned state
    if not kernel or not kernel.transpose:
        return None
    _fill_format(&packed, weight_format)
    _fill_codebook(&codebook, weight_format)
    if k % KT_BLOCK or first % KT_PANEL or first >= k or panel.shape[0] != kt_panel_bytes(&packed, k):
        raise InputError(f"no operand from {first} of a panel of {k}, {panel.shape[0]} bytes")
    family = kernel.operand.decode()
    operands = _aligned(kernel.terms * KT_PANEL * KT_PANEL * (2 if family == "b16" else 4)).reshape(kernel.terms, -1)
    operands[:] = 0xFF
    cdef uint8_t[:, ::1] to = operands
    memset(&t, 0, sizeof(t))
    t.w, t.k, t.first, t.scale_group, t.codebook = &panel[0], k, first, packed.groups[0].group, &codebook
    t.to[0], t.to[1] = &to[0, 0], &to[kernel.terms - 1, 0]
    state = kt_fp_enter()
    kernel.transpose(&t)
    kt_fp_leave(state)
    return family, operands


def product(KernelTable table not None, str family, const uint16_t[:, ::1] x, const uint8_t[::1] panel, out=None, bint many=False):
    """float32 [m, 64] of rows x, bfloat16 bits [m, k], and a packed panel of a family without scales, for its test. Added to
    out if that is given. many: by the kernel's function for many rows, however few there are."""
    cdef const kt_kernel *kernel = NULL
    for row, address in table._rows():
        if (row["family"], row["scale"], row["form"], row["tuned_for"]) == (family, "none", "bf16", None) and not kernel:
            kernel = <const kt_kernel *><size_t>address
    cdef size_t i, m = x.shape[0], k = x.shape[1]
    if not kernel or not 0 < m <= KT_ROWS_MAX or k % KT_BLOCK or not k or panel.shape[0] != k * KT_PANEL * (2 if family == "b16" else 4):
        raise InputError(f"{table.name} has no product of {m} rows of {k} and {panel.shape[0]} bytes of {family}")
    cdef kt_dot dot
    cdef unsigned state
    cdef uint8_t[::1] rows = _aligned((m + KT_TILE_ROWS) * k // KT_BLOCK * kernel.rows.block_bytes)
    cdef uint8_t[::1] scratch = _aligned(kernel.scratch_bytes)
    sums = _aligned((m + KT_TILE_ROWS) * KT_PANEL * 4).view(np.float32).reshape(-1, KT_PANEL)
    cdef float[:, ::1] to = sums
    cdef const void *at[192]
    cdef size_t row_bytes = k // KT_BLOCK * kernel.rows.block_bytes, tile, block
    sums[:m] = 0 if out is None else out
    for i in range(m):
        at[i] = &rows[i * row_bytes]
        if kernel.rows.encode:
            kernel.rows.encode(&x[i, 0], 0, k, k, &rows[i * row_bytes])
        elif not kernel.rows.tiled:
            memcpy(&rows[i * row_bytes], &x[i, 0], row_bytes)
        else:
            tile = i // KT_TILE_ROWS * KT_TILE_ROWS
            for block in range(k // KT_BLOCK):
                at[i] = &rows[tile * row_bytes + (i - tile) * kernel.rows.block_bytes]
                memcpy(<uint8_t *>at[i] + block * min(m - tile, KT_TILE_ROWS) * kernel.rows.block_bytes,
                       &x[i, block * KT_BLOCK], kernel.rows.block_bytes)
    memset(&dot, 0, sizeof(dot))
    dot.x, dot.m, dot.k, dot.panels, dot.add = at, m, k, 1, out is not None
    dot.w[0], dot.out[0], dot.scratch = &panel[0], &to[0, 0], &scratch[0]
    state = kt_fp_enter()
    if table.isa.enter:
        table.isa.enter()
    (kernel.few if m <= kernel.few_max and not many else kernel.many)(&dot)
    if table.isa.leave:
        table.isa.leave()
    kt_fp_leave(state)
    return sums[:m]


def activate(KernelTable table not None, g, u, activation, finish_g=None, finish_u=None, kept=None, r=None):
    """h of products g and u, float32 [m, 64], as bfloat16 bits [m, 64]: what a kernel's results become, for its test.

    finish_g, finish_u: {"factor": float32 [64], "divides": bool, "bias": float32 [64], "added": float32 [m, 64]}, or fewer.
    kept: float32 [2, m, columns], columns at most 64: is given g and u as finished; h has no more columns, but zeros.
    r: float32 [m], or None.
    """
    cdef kt_activate a
    cdef float[:, ::1] of_g = np.array(g, np.float32), of_u = np.array(u, np.float32)
    cdef uint16_t[:, ::1] h = np.empty((of_g.shape[0], KT_PANEL), np.uint16)
    cdef float[:, :, ::1] to = kept
    cdef float[::1] weights = None if r is None else np.array(r, np.float32)
    memset(&a, 0, sizeof(a))
    held = [_fill_finish(&a.finish_g, finish_g or {}), _fill_finish(&a.finish_u, finish_u or {})]
    a.g, a.u, a.m, a.columns = &of_g[0, 0], &of_u[0, 0], of_g.shape[0], KT_PANEL
    a.act = kt_activation(activation.alpha, activation.limit, activation.up_offset)
    a.h, a.h_stride = &h[0, 0], KT_PANEL
    if kept is not None:
        a.columns = a.kept_stride = to.shape[2]
        a.kept_g, a.kept_u = &to[0, 0, 0], &to[1, 0, 0]
    if r is not None:
        a.r = &weights[0]
    table.isa.activate(&a)
    return np.asarray(h)


def derive(KernelTable table not None, g, u, dh, activation, r=None, by_input=False):
    """(dg, du, h as bfloat16 bits [m, 64], dr float32 [m]) of g and u, float32 [m, columns], columns at most 64, and dh,
    float32 [m, 64], as kt_derive has them, for its test. r: float32 [m] or None."""
    cdef kt_derive d
    cdef float[:, ::1] of_g = np.array(g, np.float32), of_u = np.array(u, np.float32), of_h = np.array(dh, np.float32)
    cdef float[::1] weights = None if r is None else np.array(r, np.float32)
    cdef uint16_t[:, :, ::1] to = np.empty((3, of_g.shape[0], KT_PANEL), np.uint16)
    cdef float[::1] dr = np.empty(of_g.shape[0], np.float32)
    memset(&d, 0, sizeof(d))
    d.g, d.u, d.dh, d.m = &of_g[0, 0], &of_u[0, 0], &of_h[0, 0], of_g.shape[0]
    d.columns = d.stride = of_g.shape[1]
    d.r, d.by_input = &weights[0] if r is not None else NULL, by_input
    d.act = kt_activation(activation.alpha, activation.limit, activation.up_offset)
    d.dg, d.du, d.h, d.to_stride = &to[0, 0, 0], &to[1, 0, 0], &to[2, 0, 0], KT_PANEL
    d.dr = &dr[0]
    table.isa.derive(&d)
    return *np.asarray(to), np.asarray(dr)


def dense(KernelTable table not None, a, b, c=None, bint rows=False):
    """a times b, float32 [m, k] and [k, n], or for `rows` [n, k], as float32 [m, n], added to c if there is one.

    a, b, c: may have any distance between rows, a of dense() between columns, too; between others it is one number.
    """
    cdef const float[:, :] of_a = a, of_b = b
    cdef size_t m = a.shape[0], k = a.shape[1], n = b.shape[0 if rows else 1]
    cdef Py_ssize_t number = sizeof(float)
    cdef bint add = c is not None
    cdef float[:, :] of_c = c if add else np.full((m, n), np.nan, np.float32)
    cdef kt_dense d
    cdef kt_dense_rows by_rows
    if b.shape[1 if rows else 0] != k or (of_c.shape[0], of_c.shape[1]) != (m, n) or of_c.strides[1] != number or (
        of_b.strides[1] != number or rows and of_a.strides[1] != number
    ):
        raise InputError(f"no matrices for dense(): {a.shape}, {b.shape}")
    cdef size_t c_row = of_c.strides[0] // number, b_row = of_b.strides[0] // number, a_row = of_a.strides[0] // number
    if rows:
        by_rows = kt_dense_rows(&of_a[0, 0], &of_b[0, 0], a_row, b_row, &of_c[0, 0], c_row, m, n, k, add)
        table.isa.dense_rows(&by_rows)
    else:
        d = kt_dense(&of_a[0, 0], &of_b[0, 0], a_row, of_a.strides[1] // number, b_row, &of_c[0, 0], c_row, m, n, k, add)
        table.isa.dense(&d)
    return np.asarray(of_c)


def widen(KernelTable table not None, const uint16_t[::1] x):
    """bfloat16 bits [n] as float32."""
    y = np.empty(x.shape[0], np.float32)
    cdef float[::1] to = y
    if x.shape[0]:
        table.isa.widen(&x[0], &to[0], x.shape[0])
    return y


def exp(KernelTable table not None, const float[::1] x):
    """The activation's exponential, float32 [n]."""
    y = np.empty(x.shape[0], np.float32)
    cdef float[::1] to = y
    if x.shape[0]:
        table.isa.exp(&x[0], &to[0], x.shape[0])
    return y


def round_blocks(BlockRule rule not None, bits):
    """What bfloat16 numbers become, uint16 [..., k], k a multiple of 32: new bits. A block with a NaN or an infinity is NaN."""
    cdef uint16_t[::1] x = _flat("bits", bits, np.uint16, KT_BLOCK).copy()
    cdef unsigned state
    if x.shape[0]:
        with nogil:
            state = kt_fp_enter()
            kt_blocks_round(&rule.rule, &x[0], x.shape[0])
            kt_fp_leave(state)
    return np.asarray(x).reshape(bits.shape)


cdef object _aligned(size_t nbytes):
    """Zeros, uint8 [nbytes], from a cache line's beginning on."""
    memory = np.zeros(nbytes + 64, np.uint8)
    return memory[-memory.ctypes.data % 64 :][:nbytes]


cdef object _fill_finish(kt_finish *to, given):
    """Point at the arrays; returns them, who hold the memory."""
    cdef float[::1] numbers
    held = []
    for name in ("factor", "bias", "added"):
        if name not in given:
            continue
        numbers = np.array(given[name], np.float32).reshape(-1)
        held.append(numbers)
        if name == "factor":
            to.factor = &numbers[0]
        elif name == "bias":
            to.bias = &numbers[0]
        else:
            to.added = &numbers[0]
    to.divides = given.get("divides", False)
    return held
