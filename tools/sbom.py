"""A wheel's bill of materials, as PEP 770 has it: what is in the wheel, what it needs, what it was built with."""

from __future__ import annotations

import json
import re
import subprocess
import sysconfig
from email import message_from_bytes
from importlib.metadata import version
from pathlib import Path

#: What the linker copies into the module, besides ktmoe's own code: glibc before 2.33 has no fstat() in its shared library.
COPIED = {
    "type": "library",
    "bom-ref": "pkg:generic/glibc#fstat",
    "name": "glibc",
    "description": "fstat(), of the part that is linked statically",
    "licenses": [{"license": {"name": "LGPL-2.1-or-later, with permission to link the compiled file without restriction"}}],
    "purl": "pkg:generic/glibc#fstat",
}
#: Packages that take part in building a wheel. The C compiler is added.
TOOLS = ("setuptools", "Cython", "ziglang", "auditwheel")


def write(folder: Path) -> Path:
    """Write the bill of a wheel whose .dist-info folder this is."""
    path = folder / "sboms" / "ktmoe.cdx.json"
    path.parent.mkdir()
    built_with = {name: version(name) for name in TOOLS} | {"gcc": compiler_version()}
    path.write_text(json.dumps(bill((folder / "METADATA").read_bytes(), built_with), indent=1) + "\n")
    return path


def bill(metadata: bytes, built_with: dict[str, str]) -> dict[str, object]:
    """A bill of CycloneDX 1.6. It has no time and no random number, so that two builds of one source have the same.

    metadata: the bytes of the wheel's METADATA. built_with: versions by tool.
    """
    said = message_from_bytes(metadata)
    needed = [need for need in said.get_all("Requires-Dist", []) if ";" not in need]  # behind one stands an extra's name
    components = [_needed(need) for need in needed] + [COPIED]
    itself = f"pkg:pypi/{said['Name']}@{said['Version']}"
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": itself,
                "name": said["Name"],
                "version": said["Version"],
                "description": said["Summary"],
                "licenses": [{"expression": said["License-Expression"]}],
                "purl": itself,
            },
            "tools": {"components": [{"type": "application", "name": n, "version": v} for n, v in sorted(built_with.items())]},
        },
        "components": components,
        "dependencies": [{"ref": itself, "dependsOn": [component["bom-ref"] for component in components]}],
    }


def _needed(requirement: str) -> dict[str, object]:
    """A package that is installed beside the wheel, in the version that its user's installer chooses."""
    name, versions = re.fullmatch(r"([\w.-]+)\s*(.*)", requirement).groups()
    reference = f"pkg:pypi/{re.sub(r'[-_.]+', '-', name).lower()}"
    return {
        "type": "library",
        "bom-ref": reference,
        "name": name,
        "purl": reference,
        "scope": "required",
        "properties": [{"name": "ktmoe:versions", "value": versions}],
    }


def compiler_version() -> str:
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    return subprocess.run([compiler, "-dumpfullversion"], capture_output=True, text=True, check=True).stdout.strip()
