"""The mistakes of a C source, found in its tokens: no tree is needed, since the compiler refuses what is none.

Left out are comments, strings, directives, assertions, declarations of types, and the sizes of arrays that are declared.
A line that only fetches ahead is left out, too: no result depends on it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from mutations import OPERATORS, Mutation, number, trivial

TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/|^[ \t]*\#(?:\\\n|/\*.*?\*/|[^\n])*)
      |(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
      |(?P<number>0[xX][0-9a-fA-F]+[uUlL]*|\d[\w.]*(?:(?<=[eEpP])[-+]\d+\w*)?)
      |(?P<name>[A-Za-z_]\w*)
      |(?P<operator><<=|>>=|->|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|.)""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
KEYWORDS = {"return", "if", "else", "for", "while", "do", "switch", "case", "goto", "break", "continue", "sizeof"}
ASSERTIONS = {"assert", "_Static_assert", "static_assert"}
OPEN, CLOSE = {"(": ")", "[": "]", "{": "}"}, {")", "]", "}"}


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    start: int
    end: int


class Source:
    """A C source as tokens. ends[i]: the token that closes the bracket i. code[i]: whether token i is in a function's body.
    inside[i]: whether it is between round or square brackets."""

    def __init__(self, file: str, text: str):
        self.file, self.text = file, text
        self.tokens = [
            Token(found.lastgroup, found[0], found.start(), found.end())
            for found in TOKEN.finditer(text)
            if found.lastgroup != "skip"
        ]
        self.ends, self.code = {}, []
        self.inside = []
        stack, bodies = [], []
        for i, token in enumerate(self.tokens):
            self.inside.append(bool(stack) and self.tokens[stack[-1]].text != "{")
            if token.text in OPEN:
                stack.append(i)
                if token.text == "{":
                    bodies.append((bool(bodies) and bodies[-1]) or (i > 0 and self.tokens[i - 1].text in (")", "=")))
            elif token.text in CLOSE and stack:
                self.ends[stack.pop()] = i
                if token.text == "}" and bodies:
                    bodies.pop()
            self.code.append(bool(bodies) and bodies[-1])

    def text_of(self, first: int, last: int) -> str:
        return self.text[self.tokens[first].start : self.tokens[last].end]

    def word(self, i: int) -> str:
        return self.tokens[i].text if 0 <= i < len(self.tokens) else ""

    def kind(self, i: int) -> str:
        return self.tokens[i].kind if 0 <= i < len(self.tokens) else ""

    def changed(self, kind: str, first: int, last: int, new: str) -> Mutation:
        return Mutation(self.file, kind, self.tokens[first].start, self.tokens[last].end, new)

    def mutations(self) -> Iterator[Mutation]:
        skip_to = -1
        for i, token in enumerate(self.tokens):
            if token.text in ASSERTIONS and i + 1 in self.ends:
                skip_to = self.ends[i + 1]
            if not self.code[i] or i <= skip_to:
                continue
            if token.kind == "operator":
                yield from self.operator(i)
            elif token.kind == "number" and number(token.text) and not self.size(i):
                yield self.changed("constant", i, i, number(token.text))
            elif token.kind == "name":
                yield from self.named(i)
            if not self.inside[i] and self.word(i - 1) in (";", "{", "}", ")", "else") and self.begins(i):
                end = self.end_of(i)
                if end is not None:
                    yield self.changed("deleted", i, end, ";")

    def operator(self, i: int) -> Iterator[Mutation]:
        """An operator with two operands: before it stands a value."""
        new = OPERATORS.get(self.word(i))
        operand = self.kind(i - 1) in ("name", "number") and self.word(i - 1) not in KEYWORDS
        value = operand or self.word(i - 1) in (")", "]")
        declares = self.word(i) in "*&" and (self.word(i - 1).endswith(("_t", "void", "char", "int", "float", "const")))
        if new and value and not declares:
            yield self.changed("operator", i, i, new)

    def size(self, i: int) -> bool:
        """Whether a number is the size of an array that is declared."""
        if self.word(i - 1) != "[" or self.word(i + 1) != "]":
            return False
        first = i
        while first > 0 and self.word(first - 1) not in (";", "{", "}"):
            first -= 1
        declares = self.kind(first) == self.kind(first + 1) == "name" and self.word(first) not in KEYWORDS
        return declares and "=" not in self.text_of(first, i).split()

    def begins(self, i: int) -> bool:
        """Whether a statement that is an expression, or break or continue, begins here."""
        if self.word(i) in ("break", "continue"):
            return True
        if self.word(i - 1) == ")" and not self.controlled(i - 1):
            return False
        name = self.kind(i) == "name" and self.word(i) not in KEYWORDS | ASSERTIONS | {"const", "static"}
        return (name and self.kind(i + 1) != "name" and self.word(i + 1) != "*") or (self.word(i) == "*")

    def controlled(self, close: int) -> bool:
        """Whether a closing bracket ends the head of if, for or while."""
        first = next((first for first, last in self.ends.items() if last == close), None)
        return first is not None and self.word(first - 1) in ("if", "for", "while")

    def end_of(self, i: int) -> int | None:
        """The semicolon of the statement that begins here; None if a brace comes first."""
        while i < len(self.tokens):
            if i in self.ends and self.word(i) in "([":
                i = self.ends[i]
            elif self.word(i) == ";":
                return i
            elif self.word(i) in "{}":
                return None
            i += 1
        return None

    def named(self, i: int) -> Iterator[Mutation]:
        word = self.word(i)
        if word in ("true", "false"):
            yield self.changed("constant", i, i, "false" if word == "true" else "true")
        elif word == "if" and i + 1 in self.ends:
            condition = self.text_of(i + 1, self.ends[i + 1])
            yield self.changed("negated", i + 1, self.ends[i + 1], f"(!{condition})")
        elif word == "return" and self.word(i + 1) != ";":
            end = self.end_of(i)
            if end is not None:
                old = self.text_of(i + 1, end - 1)
                yield self.changed("returned", i + 1, end - 1, "1" if old in ("0", "NULL", "false") else "0")
        elif word not in KEYWORDS | ASSERTIONS and self.word(i + 1) == "(" and i + 1 in self.ends:
            yield from self.swapped(i + 1, self.ends[i + 1])

    def swapped(self, opened: int, closed: int) -> Iterator[Mutation]:
        """Neighbouring arguments of a call, in each other's place."""
        arguments, first, i = [], opened + 1, opened + 1
        while i <= closed:
            if i in self.ends:
                i = self.ends[i]
            elif self.word(i) == "," or i == closed:
                if i > first:
                    arguments.append((first, i - 1))
                first = i + 1
            i += 1
        for (a, b), (c, d) in itertools.pairwise(arguments):
            if self.text_of(a, b) != self.text_of(c, d):
                middle = self.text[self.tokens[b].end : self.tokens[c].start]
                yield self.changed("swapped", a, d, self.text_of(c, d) + middle + self.text_of(a, b))


def of_c(file: str, text: str) -> list[Mutation]:
    """All mistakes that can be planted in a C source or header, by their places."""
    found = sorted(Source(file, text).mutations(), key=lambda mutation: (mutation.start, mutation.end, mutation.new))
    return [mutation for mutation in found if not trivial(mutation, text) and "prefetch" not in mutation.lines(text)[0]]
