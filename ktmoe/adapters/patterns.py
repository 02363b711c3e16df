"""rank_pattern and alpha_pattern of adapter_config.json: the value that they give a name, in bounded work.

A pattern is a regular expression. PEFT matches it with all of a name or with its last segments, and the first one that matches
counts. ktmoe reads names with one .* or \\d+ and one ( | ), and writes the alternatives out. Those without .* are looked up by
a name's last segments, however many there are. The others are compared with each name, one by one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping

from ktmoe.errors import CheckpointError
from ktmoe.messages import show

#: The most patterns, the most characters of one, and the most of all together with their alternatives written out, each of
#: which counts as _OF_ONE characters more, since it takes as long as they do.
PATTERNS, LENGTH, CHARACTERS = 20_000, 1_000, 2_000_000
_OF_ONE = 32
#: The most characters of names that are compared with one pattern after another.
COMPARED = 20_000_000
#: A pattern with ( | ) once at most: (1) what is before the bracket, (2) in it and (3) behind it.
_ONE_BRACKET = re.compile(r"([^()]*)(?:\(([^()]*)\))?([^()]*)")
#: What a pattern has more than a name.
_WILD = re.compile(r"(\.\*|\\d\+|\[0-9\]\+)")
#: A pattern that is only a name, its dots escaped or not.
_NAME = re.compile(r"(?:[A-Za-z0-9_]|\\?[.-])*")
#: A dot that is not escaped stands for any character.
_ANY = re.compile(r"(?<!\\)\.")
#: What stands in the tables of names for a segment that is a number. No name has it.
_NUMBER = "#"


class Patterns:
    """The values of names. where: what messages call these patterns.

    Raises CheckpointError for too many or too long ones, and for one that has more than the module says.
    """

    def __init__(self, where: str, values: object):
        self._where, self._left = where, COMPARED
        if not isinstance(values, Mapping) or len(values) > PATTERNS:
            raise self._wrong(f"an object of at most {PATTERNS} patterns", values)
        self._values = list(values.values())
        #: The orders of names by their length, by where they have any character, by the name with a dot in these places.
        self._names: dict[int, dict[tuple[int, ...], dict[str, int]]] = {}
        #: The patterns that are in no table: the order of each, how long its end is, the end, and the whole pattern.
        self._wild: list[tuple[int, int, re.Pattern[str], re.Pattern[str]]] = []
        characters = 0
        for order, pattern in enumerate(values):
            for each in self._alternatives(pattern):
                characters += len(each) + _OF_ONE
                if characters > CHARACTERS:
                    raise CheckpointError(
                        f"{self._where}: expected at most {CHARACTERS} characters with all alternatives written out, found more"
                    )
                self._add(order, each)

    def value(self, name: str, usual: object) -> object:
        """The first matching pattern's; usual if none matches. Raises CheckpointError after too many comparisons."""
        found = (order for each in _endings_with_a_number(name) for order in self._orders(each))
        order = min(found, default=len(self._values))
        for of_wild, length, end, pattern in self._wild:
            if of_wild > order:
                break
            self._compare(name)
            # the end first: where it is another one, what may be any length need not be tried with every length
            if end.fullmatch(name, max(0, len(name) - length)) and pattern.fullmatch(name):
                return self._values[of_wild]
        return self._values[order] if order < len(self._values) else usual

    def _alternatives(self, pattern: str) -> list[str]:
        if len(pattern) > LENGTH:
            raise self._wrong(f"patterns of at most {LENGTH} characters", pattern)
        names = [name for each in re.split(r"[(|)]", pattern) for name in _WILD.split(each)[::2]]
        one = _ONE_BRACKET.fullmatch(pattern)
        if not one or len(_WILD.findall(pattern)) > 1 or not all(map(_NAME.fullmatch, names)):
            raise self._wrong("names of parameters or modules, with .* at most once", pattern)
        before, inner, after = one.groups()
        if inner is None:
            return pattern.split("|")
        *others, first = before.split("|")
        last, *more = after.split("|")
        return [*others, *(first + each + last for each in inner.split("|")), *more]

    def _add(self, order: int, pattern: str) -> None:
        first, wild, last = (*_WILD.split(pattern), "", "")[:3]
        if wild == ".*" or (wild and not _is_segment(first, last)):
            length = len(last.replace("\\", ""))
            self._wild.append((order, length, re.compile(last), re.compile(rf"(?:.*\.)?{pattern}")))
            return
        segments = [segment.replace("\\", "") for segment in _ANY.split(first + _NUMBER * bool(wild) + last)]
        loose = tuple(itertools.accumulate((len(segment) + 1 for segment in segments[:-1]), initial=-1))[1:]
        name = ".".join(segments)
        self._names.setdefault(len(name), {}).setdefault(loose, {}).setdefault(name, order)

    def _orders(self, name: str) -> Iterator[int]:
        """The orders of the names in the tables that match this one."""
        for loose, orders in self._names.get(len(name), {}).items():
            self._compare(name)
            if (found := orders.get(_with_dots(name, loose))) is not None:
                yield found

    def _compare(self, name: str) -> None:
        self._left -= len(name)
        if self._left < 0:
            raise CheckpointError(
                f"{self._where}: expected fewer patterns with .* or fewer names: {COMPARED} characters of names were compared "
                "with one pattern after another"
            )

    def _wrong(self, expected: str, found: object) -> CheckpointError:
        return CheckpointError(f"{self._where}: expected {expected}, found {show(found)}")


def endings(segments: list[str]) -> Iterator[str]:
    """The last segment of a name, the last two, and so on."""
    yield from itertools.accumulate(reversed(segments), lambda ending, segment: f"{segment}.{ending}")


def _endings_with_a_number(name: str) -> Iterator[str]:
    """All endings of a name, and of what it is with one of its numbers left out."""
    segments = name.split(".")
    yield from endings(segments)
    for at, segment in enumerate(segments):
        if segment.isdigit():
            yield from endings([*segments[:at], _NUMBER, *segments[at + 1 :]])


def _is_segment(first: str, last: str) -> bool:
    """Whether what is between these two is a whole segment of a name, since a dot or nothing is beside it."""
    return (not first or first.endswith(r"\.")) and (not last or last.startswith(r"\."))


def _with_dots(name: str, places: tuple[int, ...]) -> str:
    """A name with dots in these places, where any character may be, but not a whole number."""
    if all(name[at] == "." for at in places):
        return name
    characters = list(name)
    for at in places:
        characters[at] = _NUMBER if characters[at] == _NUMBER else "."
    return "".join(characters)
