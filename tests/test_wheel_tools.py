"""What make wheel checks and writes, and the workflow that calls it: without building a wheel."""

import re
import shlex
import shutil
import subprocess
import sys

import pytest
from environments import COMPILER, NEEDS_COMPILER, ROOT

from tools import installed_wheels, sbom, wheels

METADATA = b"""Metadata-Version: 2.4
Name: ktmoe
Version: 1.2.3
Summary: Experts
License-Expression: Apache-2.0
Requires-Dist: numpy>=1.26
Requires-Dist: ml_dtypes>=0.5
Requires-Dist: click>=8.1; extra == "cli"

Requires-Dist: in the description
"""


def test_a_bill_of_materials():
    """It names the package, what is installed with it and what is linked in, in the standard's words; not what extras need."""
    bill = sbom.bill(METADATA, {"gcc": "12.2.0", "Cython": "3.3.1"})
    itself = bill["metadata"]["component"]
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert (itself["purl"], itself["licenses"]) == ("pkg:pypi/ktmoe@1.2.3", [{"expression": "Apache-2.0"}])
    needed = ["pkg:pypi/numpy", "pkg:pypi/ml-dtypes", "pkg:generic/glibc#fstat"]
    assert [component["purl"] for component in bill["components"]] == needed
    assert [component["properties"][0]["value"] for component in bill["components"][:2]] == [">=1.26", ">=0.5"]
    assert bill["dependencies"] == [{"ref": "pkg:pypi/ktmoe@1.2.3", "dependsOn": needed}]
    assert [(tool["name"], tool["version"]) for tool in bill["metadata"]["tools"]["components"]] == [
        ("Cython", "3.3.1"),
        ("gcc", "12.2.0"),
    ]


@NEEDS_COMPILER
def test_a_symbol_that_no_glibc_has_is_seen(tmp_path):
    """The linker leaves undefined names to Python, and so also a name that only a newer glibc has."""
    if not shutil.which("objdump"):
        pytest.skip("objdump is not installed")
    source, module = tmp_path / "module.c", tmp_path / "module.so"
    source.write_text(
        "#include <stdlib.h>\n"
        "int PyNothing(void); int strange(void); int absent(void) __attribute__((weak));\n"
        "void *all(void) { return malloc(PyNothing() + strange() + (absent ? absent() : 0)); }\n"
    )
    subprocess.run([*COMPILER, "-shared", "-fPIC", source, "-o", module], check=True)
    assert wheels.unknown(module) == {"strange"}


@pytest.mark.parametrize("free", ["", "t"])
def test_the_python_of_a_wheel(free):
    tags = f"cp314-cp314{free}-manylinux2014_x86_64.manylinux_2_17_x86_64"
    assert installed_wheels.version_of(f"ktmoe-0.1.0-{tags}.whl") == f"3.14{free}"


def test_the_module_must_be_the_wheels():
    answer = {"where": str(ROOT / "ktmoe" / "__init__.py"), "backends": ["avx2"], "digests": {}, "numpy": "2"}
    with pytest.raises(installed_wheels.WrongError, match="imports this tree"):
        installed_wheels.compared("3.11", answer, answer)


@pytest.mark.parametrize(
    ("digests", "backends", "said"),
    [
        ({"bf16 avx2": "b"}, ["avx2"], "other bits"),
        ({"bf16 avx2": "a"}, ["fp32_lut"], "chooses fp32_lut, expected avx2"),
        ({"bf16 avx2": "a"}, ["avx2"], None),
    ],
)
def test_a_wheel_that_does_not_do_what_it_should(capsys, digests, backends, said):
    """Other bits, and another backend than that of the CPU model, are failures."""
    expected = {"backends": ["avx512_bf16"], "digests": {"bf16 avx512_bf16": "a", "bf16 avx2": "a"}}
    answer = {"where": "/elsewhere", "backends": backends, "digests": digests, "numpy": "2"}
    assert installed_wheels.passed("Haswell", lambda: answer, expected) == (said is None)
    assert (said or "have this tree's bits") in capsys.readouterr().out


def test_the_release_workflow_calls_what_there_is():
    """Its targets of make, the Pythons of its wheels, and actions of fixed versions. The only permission that publishes."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    makefile = (ROOT / "Makefile").read_text()
    called = re.findall(r"run: make (\S+)", text)
    assert called == ["wheel", "test-wheel"]
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in called)
    versions = re.search(r"VERSIONS: (\S+)", text)[1].split(",")
    assert set(versions) == set(wheels.VERSIONS)
    set_up = re.search(r"python-version: \|\n((?: {12}\S+\n)+)", text)[1].split()
    assert sorted(set_up) == sorted(versions)
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+\.\d+)?", action) for action in re.findall(r"uses: (\S+)", text))
    assert text.count("id-token: write") == 1
    assert "\t" not in text


def test_the_workflow_checks_the_tag():
    """The command as it stands there, with this Python's name: it fails for another version."""
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    command = re.search(r"run: (test .*)", text)[1].replace("python3.11", shlex.quote(sys.executable))
    (version,) = re.findall(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    for tag, code in ((f"v{version}", 0), ("v99", 1), (version, 1)):
        assert subprocess.run(["sh", "-c", command], cwd=ROOT, env={"GITHUB_REF_NAME": tag}).returncode == code
