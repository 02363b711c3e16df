"""CONTRIBUTING.md's list of what an addition costs, beside the sources: the files that it names are there, and no other has to
be edited for a family, a GGUF type or a format of vLLM's."""

import re

import pytest
from environments import ROOT

from ktmoe.weights import ggml

PACKAGE = ROOT / "ktmoe"
#: What is no code, by the ending of a file.
WORDS = dict.fromkeys((".py", ".pyx", ".pxi", ".pxd"), r'"""(?s:.*?)"""|#.*') | dict.fromkeys((".c", ".h"), r"/\*(?s:.*?)\*/")
#: File of the package -> its code.
SOURCES = {
    str(file.relative_to(PACKAGE)).removeprefix("_native/"): re.sub(WORDS[file.suffix], "", file.read_text())
    for file in sorted(PACKAGE.rglob("*"))
    if file.suffix in WORDS
}
#: Addition -> what its row says.
ROWS = dict(re.findall(r"^\| (an? [^|]+?) \| (\d.*?) \| ", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))


def paths(row: str) -> set[str]:
    """The files that a row names."""
    return {path for path in re.findall(r"`([\w/]+\.(?:py|pxi|pxd|c|h))`", row) if not path.startswith("tests/")}


def naming(pattern: str) -> set[str]:
    """The files whose code it occurs in."""
    return {name for name, text in SOURCES.items() if re.search(pattern, text)}


@pytest.mark.parametrize("addition", [addition for addition, row in ROWS.items() if paths(row)])
def test_the_files_of_a_row_are_there(addition):
    assert paths(ROWS[addition]) <= set(SOURCES)


#: Files in which the name of a family is another's word: compressed-tensors has "int" for all integers.
OTHERS = {
    "int": {"conversion/storage.py", "loaders/config_groups.py", "synthetic/models.py", "synthetic/quantized.py"},
}


#: q4's codebook, and the operands of training, which are of b16 and f32, have more places.
@pytest.mark.parametrize("family", ["f16", "f8", "int"])
def test_what_a_family_costs(family):
    own = {name for name in SOURCES if re.match(rf"{family}[_.]", name.rpartition("/")[2])}
    assert int(re.search(rf"(\d+) (?:named )?after `{family}`", ROWS["a family"])[1]) == len(own)
    named = naming(rf'"{family}["_]|\bX\({family}\)|\bkt_{family}_at\b')
    assert "weights/elements.py" in named - own - OTHERS.get(family, set()) <= paths(ROWS["a family"])


@pytest.mark.parametrize("name", [name for name in ggml.GGML if re.match(r"I?Q\d", name)])
def test_what_a_gguf_type_costs(name):
    assert "weights/ggml.py" in naming(f'"{name}"') <= paths(ROWS["a GGUF type"])


def test_what_a_format_of_vllms_costs():
    methods = set(re.findall(r"\b_row\(\s*(\w+),", SOURCES["vllm/experts_formats.py"]))
    assert len(methods) > 10
    for method in methods:
        assert naming(rf"\b{method}\b") <= paths(ROWS["a format of vLLM's"])


def test_what_a_format_of_activations_costs():
    row = ROWS["a format that activations are rounded to in blocks"]
    assert len(paths(row)) == int(row.partition(":")[0])
