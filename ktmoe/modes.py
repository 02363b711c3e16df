"""Activation modes: how x and h enter the matrices. A name says what each is rounded to, docs/numerics.md says how."""

from __future__ import annotations

from dataclasses import dataclass

from ktmoe._native import core
from ktmoe.errors import InputError
from ktmoe.messages import show
from ktmoe.quantization.blocks import ELEMENTS, block_rule
from ktmoe.quantization.rules import RULES, Rule

#: Modes of integers, which are forms of rows at the same time; x and h are alike.
_INTEGERS = ("int16", "int8")
#: What x or h may be rounded to in blocks of 32, most bits first. Modes with one of these formats are MX modes.
MX = tuple(sorted(ELEMENTS, key=lambda target: -ELEMENTS[target].bits))
#: The modes that lists name. There are more: any x with any h, and other rules; see mode_of().
MODES = ("bf16", *_INTEGERS, *MX)
#: The rules of MX, the default first: {format: {name: rule}}.
_RULES = {target: {name: rule for (of, name), rule in RULES.items() if of == target} for target in MX}


@dataclass(frozen=True)
class Mode:
    """An activation mode.

    name: the shortest of its names. x, h: the rule that rounds blocks of 32 of it, or None. forms: of the rows that kernels
    take (kt_rows in ktmoe.h), those that hold the numbers of this mode exactly.
    """

    name: str
    x: Rule | None
    h: Rule | None
    forms: tuple[str, ...]

    def block_rules(self) -> tuple[core.BlockRule | None, core.BlockRule | None]:
        """What rounds x and h, as packed layers take it."""
        x, h = (None if rule is None else block_rule(rule) for rule in (self.x, self.h))
        return x, h


def mode_of(name: str) -> Mode:
    """The mode that a name means: "bf16", "int16", "int8", or what x and h are rounded to: SIDE, which is both, or SIDE/SIDE.

    A side is "bf16", "mxfp8" or "mxfp4"; ":RULE" behind an MX format names another rule than its first, "ceil".
    Raises InputError for all other names, which says what there is.
    """
    if not isinstance(name, str) or name.count("/") > 1:
        raise _unknown(name)
    if name in _INTEGERS:
        return Mode(name, None, None, (name,))
    sides = name.split("/")
    x, h = _rule(name, sides[0]), _rule(name, sides[-1])
    names = [_name(rule) for rule in (x, h)]
    # Sizes of E2M1 times a power of two are integers times another one.
    of_integers = _INTEGERS if x and h and x.target == h.target == "mxfp4" else ()
    return Mode("/".join(dict.fromkeys(names)), x, h, ("bf16", *of_integers))


def _rule(name: str, side: str) -> Rule | None:
    """The rule that one side of a mode's name means; None for bf16."""
    if side == "bf16":
        return None
    target, colon, rule = side.partition(":")
    if target not in _RULES:
        raise _unknown(name)
    rules = _RULES[target]
    if colon and rule not in rules:
        raise InputError(f"activations {show(name)}: rules of {target} are {', '.join(rules)}, found {show(rule)}")
    return rules[rule] if colon else _default(target)


def _default(target: str) -> Rule:
    return next(iter(_RULES[target].values()))


def _name(rule: Rule | None) -> str:
    if rule is None:
        return "bf16"
    return rule.target if rule == _default(rule.target) else f"{rule.target}:{rule.name}"


def _unknown(name: str) -> InputError:
    return InputError(
        f"activations must be one of {', '.join(MODES)}, or X/H with bf16, {' or '.join(MX)} for each (as in 'mxfp8/mxfp4'; "
        f"'mxfp4:even' is another rule), found {show(name)}"
    )
