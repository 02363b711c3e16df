"""What the extension that kt-kernel chose for this CPU has."""

import pytest
from original import Original


@pytest.fixture(scope="module")
def exists(tmp_path_factory):
    """Whether the extension that kt-kernel chose for this CPU has a class; a class that it lacks is not compared."""
    original = Original()
    original.classes(out="classes")
    return set(original.run(tmp_path_factory.mktemp("classes"))["classes"].tolist())
