"""Which C file calls what which other one defines, as the symbols of their objects say: no circles, and nothing from above.

tests/test_includes.py says the same of headers. A header may declare what a file above it defines, and only symbols show that.
"""

import functools
import graphlib
import re

from built_objects import DRIVER, objdump, objects

from ktmoe._native import isa

#: An object's symbol: whether it is local, the section, the name. https://sourceware.org/binutils/docs/binutils/objdump.html
SYMBOL = re.compile(r"^[0-9a-f]+ (.).{6} (\S+)\t[0-9a-f]+(?: +\.hidden)? +(\S+)$", re.MULTILINE)


@functools.cache
def uses() -> dict[str, dict[str, set[str]]]:
    """{object: {an object that it uses: the symbols}}. Symbols of libraries are left out."""
    files = [name for folder in (DRIVER, *isa.ISAS) for name in objects(folder)]
    defined, wanted = {}, {name: set() for name in files}
    tables = objdump("-t", files=files).split(":     file format ")[1:]
    for name, table in zip(files, tables, strict=True):
        for scope, section, symbol in SYMBOL.findall(table):
            if section == "*UND*":
                wanted[name].add(symbol)
            elif scope != "l":
                assert symbol not in defined, f"{symbol} is defined by {name} and {defined[symbol]}"
                defined[symbol] = name
    graph = {name: {} for name in files}
    for name, symbols in wanted.items():
        for symbol in symbols & defined.keys():
            graph[name].setdefault(defined[symbol], set()).add(symbol)
    return graph


def test_uses_are_seen():
    """Of functions and of data, from one room to another, within one, and from a table to its kernels."""
    assert "kt_pool_run" in uses()["driver/forward/moe.o"]["driver/base/pool.o"]
    assert "kt_moe_tuning" in uses()["driver/backward/step.o"]["driver/forward/tuning.o"]
    assert uses()["portable/kernels/table.o"].keys() >= {f"portable/kernels/{name}.o" for name in isa.ISAS["portable"].kernels}


def test_no_circle():
    graphlib.TopologicalSorter(uses()).prepare()  # CycleError names one


def runs_with(row: str) -> set[str]:
    """The rows whose objects run wherever a row's do."""
    return {row}.union(*map(runs_with, isa.ISAS[row].implies))


def test_kernels_use_objects_of_rows_that_theirs_implies():
    rows = {(name.split("/")[0], other.split("/")[0]) for name, others in uses().items() for other in others}
    assert [(row, other) for row, other in rows if row in isa.ISAS and other not in runs_with(row)] == []


def test_rooms_use_only_what_is_below_them():
    """And kernels use nothing but kernels."""
    wrong = []
    for name, others in uses().items():
        folder, room, _ = name.split("/")
        below = isa.DRIVER[: isa.DRIVER.index(room) + 1] if folder == DRIVER else ("kernels",)
        wrong += [(name, other, symbols) for other, symbols in others.items() if other.split("/")[1] not in below]
    assert wrong == []
