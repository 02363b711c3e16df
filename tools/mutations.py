"""What a mistake in a source is, and the mistakes of a Python source.

Left out are docstrings, strings, annotations, decorators, assert and what a raise or a warning says: no test has to tell these.
"""

from __future__ import annotations

import ast
import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

#: Operator -> what is planted in its place. C's, too.
OPERATORS = {
    "+": "-",
    "-": "+",
    "*": "/",
    "/": "*",
    "//": "*",
    "%": "*",
    "**": "*",
    "<<": ">>",
    ">>": "<<",
    "&": "|",
    "|": "&",
    "^": "|",
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "&&": "||",
    "||": "&&",
    "and": "or",
    "or": "and",
    "is": "is not",
    "is not": "is",
    "in": "not in",
    "not in": "in",
    "+=": "-=",
    "-=": "+=",
    "*=": "+=",
    "//=": "*=",
    "%=": "*=",
    "|=": "=",
    "&=": "=",
    "<<=": ">>=",
    ">>=": "<<=",
}
#: Named arguments that state what cannot be otherwise, or where a warning points to.
STATEMENTS = {"strict", "slots", "frozen", "stacklevel", "check", "daemon"}


@dataclass(frozen=True)
class Mutation:
    """A planted mistake: text[start:end] of a file becomes new. kind: such as "operator"."""

    file: str
    kind: str
    start: int
    end: int
    new: str

    def of(self, text: str) -> str:
        """The source with the mistake."""
        return text[: self.start] + self.new + text[self.end :]

    def lines(self, text: str) -> tuple[str, str]:
        """The lines that it touches, before and after, with one space for any white space: what a mistake is known by."""
        first = text.rfind("\n", 0, self.start) + 1
        last = text.find("\n", self.end)
        last = len(text) if last < 0 else last
        before, after = text[first:last], text[first : self.start] + self.new + text[self.end : last]
        return " ".join(before.split()), " ".join(after.split())


def shuffled(mutations: list[Mutation], seed: str) -> list[Mutation]:
    """In a random order where each kind comes as often as any other, as far as there are some. seed: chooses the order."""
    rng, kinds = random.Random(seed), {}
    for mutation in mutations:
        kinds.setdefault(mutation.kind, []).append(mutation)
    for some in kinds.values():
        rng.shuffle(some)
    order = []
    while kinds:
        kind = rng.choice(sorted(kinds))
        order.append(kinds[kind].pop())
        if not kinds[kind]:
            del kinds[kind]
    return order


def number(text: str) -> str | None:
    """An integer's neighbour, in Python's and C's notation; None if the text is no integer."""
    match = re.fullmatch(r"(0[xX][0-9a-fA-F]+|0|[1-9]\d*)([uUlL]*)", text)
    if match is None:
        return None
    value = int(match[1], 0) + (-1 if match[1] not in ("0", "1") and int(match[1], 0) % 2 else 1)
    return (hex(value) if match[1].startswith(("0x", "0X")) else str(value)) + match[2]


class Source:
    """A Python source. Its syntax tree counts bytes of lines; a Mutation counts characters of the file."""

    def __init__(self, file: str, text: str):
        self.file, self.text = file, text
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        start = self.starts[line - 1]
        raw = self.text[start : self.starts[line]].encode()[:column]
        return start + len(raw.decode())

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def changed(self, node: ast.AST, kind: str, new: str) -> Mutation:
        return Mutation(self.file, kind, *self.span(node), new)

    def code(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def between(self, left: ast.AST, right: ast.AST) -> Iterator[Mutation]:
        """The operator between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        gap = re.sub(r"#.*", lambda comment: " " * len(comment[0]), self.text[start:end])
        match = re.search(r"is\s+not\b|not\s+in\b|\b(?:is|in|and|or)\b|[-+*/%<>=!&|^]+", gap)
        old = " ".join(match[0].split()) if match else ""  # none: a product of matrices, @
        if old in OPERATORS:
            yield Mutation(self.file, "operator", start + match.start(), start + match.end(), OPERATORS[old])

    def mutations(self) -> Iterator[Mutation]:
        stack = [(ast.parse(self.text), None)]
        while stack:
            node, parent = stack.pop()
            yield from self.of_node(node, parent)
            stack += [(child, node) for child in self.children(node)]

    def children(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes below a node in which mistakes are planted."""
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr):
                    if isinstance(child, ast.Raise):
                        yield ast.copy_location(ast.Raise(), child)  # it can be deleted; what it says is left out
                    continue
                if isinstance(child, ast.keyword) and child.arg in STATEMENTS:
                    continue
                if isinstance(child, ast.If) and re.search("TYPE_CHECKING|__name__", ast.unparse(child.test)):
                    continue
                if isinstance(child, ast.Expr) and re.search(r"^(warnings\.)?warn\(", ast.unparse(child)):
                    continue
                if isinstance(child, ast.AST):
                    yield child

    def of_node(self, node: ast.AST, parent: ast.AST | None) -> Iterator[Mutation]:
        match node:
            case ast.BinOp():
                said = any(
                    isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
                    for side in (node.left, node.right)
                )
                if not said:
                    yield from self.between(node.left, node.right)
            case ast.BoolOp():
                yield from self.between(*node.values[:2])
            case ast.Compare():
                yield from self.between(node.left, node.comparators[0])
            case ast.AugAssign():
                yield from self.between(node.target, node.value)
                yield self.changed(node, "deleted", "pass")
            case ast.UnaryOp(op=ast.Not()):
                yield self.changed(node, "negated", f"({self.code(node.operand)})")
            case ast.Constant(value=bool()):
                yield self.changed(node, "constant", str(not node.value))
            case ast.Constant(value=int()):
                new = number(self.code(node))
                if new is not None:
                    yield self.changed(node, "constant", new)
            case ast.Constant(value=float()):
                yield self.changed(node, "constant", f"({self.code(node)} * 2 + 1)")
            case ast.Return(value=ast.AST()) if not (isinstance(node.value, ast.Constant) and node.value.value is None):
                yield self.changed(node, "returned", "return None")
            case ast.Raise() | ast.Break() | ast.Continue() | ast.Delete():
                yield self.changed(node, "deleted", "pass")
            case ast.Expr(value=ast.Call() | ast.Yield() | ast.YieldFrom()):
                yield self.changed(node, "deleted", "pass")
            case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield self.changed(node, "deleted", "pass")
        if isinstance(node, ast.Call):
            yield from self.swapped(node)
        tests = node.ifs if isinstance(node, ast.comprehension) else [getattr(node, "test", None)]
        for test in tests:
            if test is not None and not isinstance(node, ast.While):
                yield self.changed(test, "negated", f"(not ({self.code(test)}))")

    def swapped(self, node: ast.Call) -> Iterator[Mutation]:
        for left, right in itertools.pairwise(node.args):
            if isinstance(left, ast.Starred) or isinstance(right, ast.Starred) or self.code(left) == self.code(right):
                continue
            (start, middle), (other, end) = self.span(left), self.span(right)
            new = self.code(right) + self.text[middle:other] + self.code(left)
            yield Mutation(self.file, "swapped", start, end, new)


def compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


def of_python(file: str, text: str) -> list[Mutation]:
    """All mistakes that can be planted in a Python source, by their places."""
    found = sorted(Source(file, text).mutations(), key=lambda mutation: (mutation.start, mutation.end, mutation.new))
    return [mutation for mutation in found if not trivial(mutation, text)]


def trivial(mutation: Mutation, text: str) -> bool:
    return mutation.of(text) == text
