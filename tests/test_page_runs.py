"""The runner of the documentation's blocks: what it reads of a page, and that it finds a fault that is planted in one."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import page_given
import page_models
import page_runs
import pages
import pytest
from environments import NEEDS_COMPILER

PAGE = """
# A page

```sh
ktmoe inspect DeepSeek-V4-Flash --no-measure
```

1. In a list:

   ```python
   import ktmoe

   layer = ktmoe.MoELayer.from_checkpoint("DeepSeek-V4-Flash", layer=3)
   ```

```text
3 layers
```

```python
hidden = layer.hidden
```

<!-- not run: needs a GPU -->
```python
layer.to("cuda")
```

```sh
pip install '.[cli]'
make test ARGS="-k pack"     # a comment
python -c "import ktmoe"
```
"""


@pytest.fixture(scope="session")
def core():
    return page_runs.core()


def found(text: str) -> list[pages.Block]:
    return pages.blocks("PAGE.md", text)


def test_blocks():
    blocks = found(PAGE)
    assert [(block.language, block.reason) for block in blocks] == [
        ("sh", None),
        ("python", None),
        ("text", None),
        ("python", None),
        ("python", "needs a GPU"),
        ("sh", None),
    ]
    lines = PAGE.splitlines()
    for block in blocks:
        assert lines[block.line - 1].strip() == block.text.splitlines()[0]
    assert [block.line for block in pages.runnable(blocks)] == [blocks[i].line for i in (0, 1, 3, 5)]
    assert not [fault for block in blocks for fault in pages.faults(block)]
    assert pages.environments_of(blocks) == [pages.CORE]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("```\nktmoe config\n```\n", "expected one of"),
        ("```bash\nktmoe config\n```\n", "expected one of"),
        ("```sh\n$ ktmoe config\n```\n", "without a prompt"),
        ("<!-- not run: nobody knows -->\n```sh\nktmoe config\n```\n", "expected a reason"),
        ("<!-- not run: needs a GPU -->\n```text\nktmoe config\n```\n", "expected no mark"),
    ],
)
def test_faults_of_fences(text, fault):
    [said] = [said for block in found(text) for said in pages.faults(block)]
    assert said.startswith("PAGE.md:")
    assert fault in said


def test_a_mark_must_stand_directly_before_its_fence():
    [block] = found("<!-- not run: needs a GPU -->\n\n```sh\nktmoe config\n```\n")
    assert block.reason is None


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ("```python\nimport numpy  # and a torch tensor\n```\n", ["core"]),
        ("```python\nimport ktmoe.transformers\nm = 1\n```\n\n```python\nprint(m)\n```\n", ["engines", "engines"]),
        ("```python\nimport torch\n```\n\n```python\nm = 1\n```\n", ["engines", "core"]),
        ("```python\nfrom ktmoe import torch\n```\n", ["engines"]),
        ("```sh\nktmoe config\n```\n\n```sh\nA=1 ktmoe serve DIR --port 8000 &\n```\n", ["core", "engines"]),
        ("```sh\nktmoe inspect chat && ktmoe chat DIR\n```\n", ["engines"]),
        ("```sh\npython -m ktmoe.vllm MODEL\n```\n", ["vllm"]),
        ("```python\nfrom vllm import LLM\n```\n", ["vllm"]),
    ],
)
def test_what_a_block_needs(text, needs):
    assert [block.needs for block in found(text)] == needs


@NEEDS_COMPILER
def test_a_right_page_runs(core, tmp_path):
    assert page_runs.run("PAGE.md", core, tmp_path, PAGE) == [block.line for block in pages.runnable(found(PAGE))]


#: (what stands in PAGE, what it becomes, what is said of that). The first few are of one kind each.
FAULTS = [
    ("--no-measure", "--no-mesure", "--no-mesure"),
    ("layer.hidden", "layer.hiden", "hiden"),
    ("make test", "make tests", "no such target"),
    ("inspect DeepSeek-V4-Flash", "inspect DeepSeek-V4", "DeepSeek-V4: expected a folder"),
    ("ktmoe inspect", "ktmoe inspekt", "inspekt"),
    ("layer=3", "layer=4", "layer 4"),
    ("layer=3", "layers=3", "layers"),
    ("layer.hidden", "lair.hidden", "lair"),
    ("[cli]", "[client]", "client"),
    ("install '.", "instal '.", "instal"),
    ("ARGS=", "ARG=", "no such variable"),
    ('-c "import ktmoe"', '-c "import ktmoe.transformers"', "torch, which is not installed"),
    ("<!-- not run: needs a GPU -->\n", "", "'to'"),
]


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("right", "wrong", "said"), [*FAULTS[:3], *(pytest.param(*fault, marks=pytest.mark.exhaustive) for fault in FAULTS[3:])]
)
def test_a_planted_fault_is_found(core, tmp_path, right, wrong, said):
    """Each fails at the block that has it."""
    assert right in PAGE
    text = PAGE.replace(right, wrong)
    [block] = [new for new in found(text) if new.text not in {old.text for old in found(PAGE)}] or [found(text)[4]]
    with pytest.raises(AssertionError) as caught:
        page_runs.run("PAGE.md", core, tmp_path, text)
    assert str(caught.value).startswith(f"PAGE.md:{block.line}: ")
    assert said in str(caught.value)


SERVING = """
```sh
echo before > before
ktmoe serve MODEL --port 8123    # until Ctrl-C
test -e before && echo behind > behind
```

```python
import json, urllib.request

assert open("behind").read() == "behind\\n"
assert json.load(urllib.request.urlopen("http://127.0.0.1:8123/v1/models"))["data"]
import ktmoe.transformers
```
"""
#: A ktmoe that answers as an OpenAI-compatible server does, and ends with a status.
SERVER = """
import http.server, json, os, signal, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "it"}], "choices": json.loads(os.environ["CHOICES"])}).encode())

    do_POST = do_GET

def end(*_):
    os._exit(int(os.environ["STATUS"]))

signal.signal(signal.SIGINT, end)
assert sys.argv[1:] == ["serve", "MODEL", "--port", "8123"]
http.server.HTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler).serve_forever()
"""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"STATUS": "3"}, "ktmoe serve MODEL --port 8123: ended with 3"),
        ({"CHOICES": "[]"}, "its answer is empty"),
        ({"PORT": "none"}, "does not answer at http://127.0.0.1:8123/v1"),
    ],
)
def test_servers(tmp_path, changes, said):
    """What a page starts is asked, lives until the page's end, and must end well."""
    package = tmp_path / "packages" / "ktmoe"
    package.mkdir(parents=True)
    (package / "__main__.py").write_text(SERVER)
    for module in ("__init__", "transformers"):
        (package / f"{module}.py").touch()
    variables = {"PYTHONPATH": str(package.parent), "STATUS": "130", "CHOICES": "[1]", "PORT": "8123"} | changes
    place = page_runs.Place(pages.ENGINES, Path(sys.executable), variables, {"MODEL": lambda path: path.mkdir()})
    (tmp_path / "run").mkdir()
    if not said:
        assert len(page_runs.run("PAGE.md", place, tmp_path / "run", SERVING)) == 2
        return
    with pytest.raises(AssertionError, match=re.escape(said)):
        page_runs.run("PAGE.md", place, tmp_path / "run", SERVING)


def test_what_belongs_to_a_page_belongs_to_one_that_is_there():
    assert {*page_given.GIVEN, *page_models.OF_PAGES, *page_models.CHECKS} <= set(pages.pages())


@pytest.mark.parametrize("page", page_given.GIVEN)
def test_what_is_given_is_needed(page):
    """By a block that uses it before the page makes it. A page that makes its names itself needs nothing."""
    needed, made = set(), set()
    for block in pages.runnable(pages.blocks(page)):
        if block.language == "python":
            names = [node for node in ast.walk(ast.parse(block.text)) if isinstance(node, ast.Name)]
            needed |= {node.id for node in names if isinstance(node.ctx, ast.Load)} - made
            made |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
    for code in page_given.GIVEN[page].values():
        names = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
        given = {node.id for node in names if isinstance(node.ctx, ast.Store) and not node.id.startswith("_")}
        assert given - needed == set()
