# Rounding blocks of 32 bfloat16 numbers to MX formats.

cdef class BlockRule:
    """How blocks are rounded. ktmoe.quantization.blocks makes it of a rule.

    element: "E2M1" or "E4M3". A block's scale is 2^e: e is the exponent of its largest magnitude less that of the element's
    largest number; 1 more where the fraction of the largest magnitude, in 128ths, is at least `up`, 1 less where it is below
    `down`; from -127 on. zeros: e + 127 of a block of zeros. ties: "even", "away" or "zero"; of E4M3 "even". negative_zero:
    whether negative numbers that become zero keep their sign.
    """

    cdef kt_block_rule rule

    def __cinit__(self, str element, unsigned up, unsigned down, unsigned zeros, str ties, bint negative_zero):
        self.rule.e2m1 = _of_e2m1(element)
        if up > 128 or down > 128 or zeros > 254 or ties not in _TIES or (ties != "even" and not self.rule.e2m1):
            raise InputError(f"there is no rule of blocks {(element, up, down, zeros, ties)}")
        self.rule.up, self.rule.down, self.rule.zeros = up, down, zeros
        self.rule.negative_zero = negative_zero
        for i in range(KT_E2M1_TIES):
            self.rule.up_at[i] = ties == "away" or (ties == "even" and i % 2 == 1)

    def quantize(self, bits):
        """(codes, scales) of bfloat16 numbers, uint16 [..., k], k a multiple of 32.

        codes: uint8, [..., k / 2] of E2M1, low nibble = even k, [..., k] of E4M3. scales: UE8M0, uint8 [..., k / 32], 255 of a
        block with a NaN or an infinity, whose codes are 0.
        """
        cdef const uint16_t[::1] x = _flat("bits", bits, np.uint16, KT_BLOCK)
        cdef size_t count = x.shape[0]
        cdef uint8_t[::1] codes = np.empty(count // 2 if self.rule.e2m1 else count, np.uint8)
        cdef uint8_t[::1] scales = np.empty(count // KT_BLOCK, np.uint8)
        cdef unsigned state
        if count:
            with nogil:
                state = kt_fp_enter()
                kt_blocks_quantize(&self.rule, &x[0], count, &codes[0], &scales[0])
                kt_fp_leave(state)
        *rows, k = bits.shape
        return (
            np.asarray(codes).reshape(*rows, k // 2 if self.rule.e2m1 else k),
            np.asarray(scales).reshape(*rows, k // KT_BLOCK),
        )


def block_values(str element, codes, scales):
    """What codes and scales stand for, as BlockRule.quantize has them: bfloat16 bits, uint16 [..., k]. Rounded to nearest even where
    bfloat16 has no such number, which no quantized bfloat16 becomes. NaN for a scale of 255, and for codes that are no number."""
    cdef bint e2m1 = _of_e2m1(element)
    cdef const uint8_t[::1] from_codes = _flat("codes", codes, np.uint8, KT_BLOCK // 2 if e2m1 else KT_BLOCK)
    cdef const uint8_t[::1] from_scales = _flat("scales", scales, np.uint8, 1)
    cdef size_t count = from_codes.shape[0] * (2 if e2m1 else 1)
    *rows, k = codes.shape
    k = k * 2 if e2m1 else k
    if scales.shape != (*rows, k // KT_BLOCK):
        raise InputError(f"scales must be {[*rows, k // KT_BLOCK]}, found {list(scales.shape)}")
    cdef const float[::1] values = np.array([np.nan if v is None else v for v in ELEMENTS[element].values], np.float32)
    cdef uint16_t[::1] x = np.empty(count, np.uint16)
    cdef unsigned state
    if count:
        with nogil:
            state = kt_fp_enter()
            kt_blocks_values(e2m1, &values[0], &from_codes[0], &from_scales[0], count, &x[0])
            kt_fp_leave(state)
    return np.asarray(x).reshape(*rows, k)


cdef bint _of_e2m1(str element) except? 1:
    if element not in ("E2M1", "E4M3"):
        raise InputError(f"element must be 'E2M1' or 'E4M3', found {element!r}")
    return element == "E2M1"


cdef object _flat(str name, array, dtype, size_t unit):
    """An array of at least one dimension, the last a multiple of `unit`, as C-contiguous [size]."""
    if not isinstance(array, np.ndarray) or array.dtype != dtype or not array.ndim or array.shape[array.ndim - 1] % unit:
        found = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise InputError(f"{name} must be {np.dtype(dtype)} [..., a multiple of {unit}], found {found}")
    return np.ascontiguousarray(array).reshape(-1)
