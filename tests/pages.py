"""The pages of documentation, their fenced blocks, and which environment each block needs.

A `python` or `sh` block is run, word for word. One that cannot run has `<!-- not run: REASON -->` in the line before its fence.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from environments import ROOT
from markdown_it import MarkdownIt

#: Languages of blocks that are run, and of blocks that are not. A fence must have one of them.
RUN = ("python", "sh")
SHOWN = ("c", "cython", "dockerfile", "json", "mermaid", "text", "toml", "yaml")
#: Every reason for which a block may be left out, as a regular expression for the whole reason.
REASONS = (
    r"needs (a GPU|SGLang|conda|root|two machines|a model of full size)",
    r"takes (minutes|hours)",
    r"a part of .+",  # a few lines of a larger file, or of a definition
    r"tests/[\w/]+\.py runs it",  # with other addresses, sizes or devices
)
#: What a block needs besides the package and its dependencies: an environment's name.
CORE, ENGINES, VLLM = "core", "engines", "vllm"
#: Modules, by their first names or by ktmoe's names, that only another environment has.
MODULES = {
    "torch": ENGINES,
    "transformers": ENGINES,
    "peft": ENGINES,
    "openai": ENGINES,
    "mpi4py": ENGINES,
    "ktmoe.torch": ENGINES,
    "ktmoe.transformers": ENGINES,
    "ktmoe.distributed": ENGINES,
    "vllm": VLLM,
    "ktmoe.vllm": VLLM,
}
#: Beginnings of commands, by the environment that they need. Those of other commands need none.
COMMANDS = {
    ("ktmoe", "chat"): ENGINES,
    ("ktmoe", "serve"): ENGINES,
    ("ktmoe", "accuracy"): ENGINES,
    ("curl",): ENGINES,  # it asks a server
    ("mpiexec",): ENGINES,
    ("torchrun",): ENGINES,
    ("vllm",): VLLM,
    ("python", "-m", "ktmoe.vllm"): VLLM,
}
_MARK = re.compile(r"<!-- not run: (.*?) -->\s*\Z")


@dataclass(frozen=True)
class Block:
    """page: its path below the repository's folder. line: of the first line of the text. reason: why it is not run, or None.

    needs: the name of an environment.
    """

    page: str
    line: int
    language: str
    text: str
    reason: str | None
    needs: str = CORE

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """README, CONTRIBUTING and all of docs/, by their paths below the repository's folder."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path.relative_to(ROOT).as_posix() for path in found]


def blocks(page: str, text: str | None = None) -> list[Block]:
    """All fenced blocks of a page in its order. text: of the page, None: what the file says."""
    text = (ROOT / page).read_text(encoding="utf-8") if text is None else text
    found, before = [], None
    for token in MarkdownIt().parse(text):
        if token.type == "fence":
            mark = _MARK.search(before.content) if before is not None and before.type == "html_block" else None
            # a mark with an empty line behind it belongs to no fence
            reason = mark[1] if mark and before.map[1] == token.map[0] else None
            found.append(Block(page, token.map[0] + 2, token.info.strip(), token.content, reason))
        before = token
    return list(_with_needs(found))


def faults(block: Block) -> Iterator[str]:
    """What is wrong with a block's tag or mark."""
    if block.language not in RUN + SHOWN:
        yield f"{block}: expected one of {', '.join(RUN + SHOWN)} behind the fence, found {block.language!r}"
    if block.reason is not None and block.language not in RUN:
        yield f"{block}: expected no mark, since {block.language} is not run, found {block.reason!r}"
    if block.reason is not None and not any(re.fullmatch(reason, block.reason) for reason in REASONS):
        yield f"{block}: expected a reason of tests/pages.py, found {block.reason!r}"
    if block.language == "sh":
        for line in block.text.splitlines():
            if line.startswith(("$ ", "> ")):
                yield f"{block}: expected commands without a prompt, found {line!r}"


def quoted(block: Block) -> bool:
    """Whether a Python block is a file of examples/: tests/test_plugins.py compares, installs and runs these files."""
    return block.language == "python" and any(block.text in path.read_text() for path in (ROOT / "examples").rglob("*.py"))


def runnable(found: Iterable[Block]) -> list[Block]:
    """Those of a page's blocks that are run."""
    return [block for block in found if block.language in RUN and block.reason is None and not quoted(block)]


def environments_of(found: Iterable[Block]) -> list[str]:
    """The environments that a page is run in: each runs the blocks that need it, and those that need none."""
    return sorted({block.needs for block in runnable(found)})


def commands(text: str) -> list[list[str]]:
    """The words of each command of a shell block, without what it sets before it. A comment is no word."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|()"):
                while words and re.match(r"\w+=", words[0]):
                    words.pop(0)
                found += [words] if words else []
                words = []
            else:
                words.append(word)
    return found


def _with_needs(found: Iterable[Block]) -> Iterator[Block]:
    """A Python block also needs what the block needs that made one of its names."""
    makers: dict[str, str] = {}
    for block in found:
        if block.language == "sh":
            needed = {need for words in commands(block.text) for need in _command_needs(words)}
        elif block.language == "python":
            tree = ast.parse(block.text)
            needed = {MODULES[module] for module in _modules(tree) if module in MODULES}
            used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - _made(tree)
            needed |= {makers[name] for name in used if name in makers}
        else:
            needed = set()
        needs = VLLM if VLLM in needed else ENGINES if ENGINES in needed else CORE
        if block.language == "python" and block.reason is None:
            makers |= dict.fromkeys(_made(tree), needs)
        yield replace(block, needs=needs)


def _command_needs(words: list[str]) -> Iterator[str]:
    for beginning, need in COMMANDS.items():
        if tuple(words[: len(beginning)]) == beginning:
            yield need


def _modules(tree: ast.AST) -> set[str]:
    """Modules that code imports or names, each as its first name and as its first two."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in {"ktmoe", *MODULES}:
            found.add(f"{node.value.id}.{node.attr}")
    return {".".join(name.split(".")[:count]) for name in found for count in (1, 2)}


def _made(tree: ast.AST) -> set[str]:
    """Names that code makes, but for modules: an import in one block is no need of another."""
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return found | {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
