# Kernel tables: those of this build, and those of third parties.

#: What messages call scales and offsets, where that is not their name.
_SCALES = {"none": "weights without scales", "panel": f"scales shared by {KT_PANEL} rows or more"}
_OFFSETS = {"zero_point": "zero points", "minimum": "minima", None: "weights without zero points or minima"}


def kernel_table(str isa):
    """The kernels of a row of isa.py. Raises UnavailableError if the compiler that built this package did not know it."""
    cdef const kt_isa *const *table = kt_isas
    while table[0]:
        if table[0].name.decode() == isa:
            return KernelTable(PyCapsule_New(<void *>table[0], "ktmoe.isa", NULL))
        table += 1
    raise UnavailableError(f"{isa} was not compiled into this build: its compiler did not know the instructions")


cdef class KernelTable:
    """One instruction set's kernels, from a capsule that a module of them has.

    Raises UnavailableError if it was built for another version of ktmoe.h.
    """

    cdef const kt_isa *isa
    cdef object _capsule

    def __cinit__(self, capsule):
        self.isa = <const kt_isa *>PyCapsule_GetPointer(capsule, "ktmoe.isa")
        self._capsule = capsule
        if self.isa.abi_version != KT_ABI_VERSION:
            raise UnavailableError(
                f"kernel table {self.name!r} was built for version {self.isa.abi_version} of ktmoe.h, this is {KT_ABI_VERSION}"
            )

    @property
    def name(self):
        return self.isa.name.decode()

    cdef list _rows(self):
        """({what a kernel serves}, its address) of every kernel."""
        rows = []
        cdef const kt_kernel *const *listed = self.isa.kernels
        cdef const kt_kernel *kernel
        while listed[0]:
            kernel = listed[0]
            while kernel.family:
                rows.append(({
                    "family": kernel.family.decode(),
                    "bits": kernel.bits,
                    "element": kernel.element.decode() if kernel.element else None,
                    "scale": kernel.scale.decode(),
                    "group": (kernel.scale_group_min, kernel.scale_group_max),
                    "super_scale": kernel.super_scale.decode() if kernel.super_scale else None,
                    "offset": kernel.offset.decode() if kernel.offset else None,
                    "form": kernel.rows.form.decode(),
                    "folded": kernel.folded,
                    "whole": kernel.whole,
                    "tuned_for": kernel.tuned_for.decode() if kernel.tuned_for else None,
                }, <size_t>kernel))
                kernel += 1
            listed += 1
        return rows

    def serves(self, weight_format, str form):
        """Whether it has a kernel for these weights, whatever their scales are."""
        return not self.lacks(weight_format, form)

    def lacks(self, weight_format, str form):
        """The component of a format that no kernel here has, or that none of those with the components before it has; "" if none."""
        return self._choose(weight_format, form)[1]

    cdef tuple _choose(self, weight_format, str form, int folded=0, str tuned_for="decode"):
        """(a kernel's address, "") or (0, what is missing). folded, tuned_for: as kt_kernel has them."""
        try:
            kind, group = packed_scale(weight_format)
        except FormatError as error:
            return 0, str(error)
        super_kind = weight_format.super_scale.kind if weight_format.super_scale else None
        offset = {ZeroPoint: "zero_point", Minimum: "minimum"}.get(type(weight_format.offset))
        element = weight_format.element
        several = len(FAMILIES.get(weight_format.family, ())) > 1
        rows = self._rows()
        for what, fits in (
            (f"rows of the form {form!r}", lambda k: k["form"] == form and k["folded"] == folded
                and k["tuned_for"] in (None, tuned_for)),
            (f"weights of family {weight_format.family}", lambda k: k["family"] == weight_format.family),
            (f"codes of {element.bits} bits", lambda k: k["bits"] == (element.bits if several else 0)),
            (f"element {element.name}", lambda k: k["element"] is None or ELEMENTS.get(k["element"]) == element),
            ("values that are no small integers times a power of two", lambda k: not k["whole"] or folding.unit(element.values, k["whole"])),
            (_SCALES.get(kind, f"{kind} scales"), lambda k: k["scale"] == kind),
            (f"scale groups of {group}", lambda k: not group or k["group"][0] <= group <= k["group"][1]),
            (f"{super_kind} super-scales" if super_kind else "scales without super-scales", lambda k: k["super_scale"] == super_kind),
            (_OFFSETS[offset], lambda k: k["offset"] == offset),
            ("zero points of other integers than 0 to 15", lambda k: offset != "zero_point" or element.values == UINT4.values),
        ):
            rows = [row for row in rows if fits(row[0])]
            if not rows:
                return 0, what
        return rows[0][1], ""

    cdef tuple _folding(self, weight_format, str form, str rounding, str tuned_for):
        """(the address of the kernel that has scales in its weights, its `folded`, the range of such scales); 0 if there is none."""
        for terms in (1, 2):
            low, high = folding.fold_range(weight_format, rounding, terms)
            address = self._choose(weight_format, form, terms, tuned_for)[0] if low <= high else 0
            if address:
                return address, terms, low, high
        return 0, 0, 255, 0

    cdef const kt_kernel *find(self, weight_format, str form):
        """The kernel that takes a format with any scale."""
        return <const kt_kernel *><size_t>self._choose(weight_format, form)[0]

    cdef find_both(self, weight_format, str form, plan, kt_given *given):
        """given.kernels[1] where all scales are in [low, high], which fold into the weights, else kernels[0]. NULL: there is none."""
        cdef size_t address
        given.kernels[0] = given.kernels[1] = self.find(weight_format, form)
        address, terms, given.low, given.high = self._folding(weight_format, form, plan.rounding, plan.tuned_for)
        given.negative = terms == 1
        if address:  # else those for any scale serve these, too
            given.kernels[1] = <const kt_kernel *>address

    def peak(self, size_t iterations):
        """(FLOPs, seconds) of multiplies from registers on all threads of the pool."""
        cdef double flops = 0, seconds
        with nogil:
            seconds = kt_limit_peak(self.isa.peak, iterations, &flops)
        if seconds < 0:
            _raise(<int>-seconds, "measuring the multiply peak")
        return flops, seconds
