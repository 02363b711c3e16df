"""The examples of docstrings that need torch and transformers, as tests/test_docstrings.py has the others."""

import documented
import pytest

PUBLIC = list(documented.public(documented.OF_TORCH))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    documented.write_checkpoints(folder)
    return folder


@pytest.mark.smoke("all")
@pytest.mark.parametrize("which", PUBLIC, ids=lambda which: f"{which[0]}.{which[1]}")
def test_the_examples_run(which, checkpoints, tmp_path):
    module, name, thing = which
    assert documented.examples(thing), "it has no example"
    wrong = documented.run(module, name, thing, checkpoints, tmp_path)
    assert not wrong, wrong


def test_everything_is_found():
    names = {f"{module}.{name}" for module, name, _ in PUBLIC}
    assert {"ktmoe.torch.DenseLinear", "ktmoe.transformers.load", "ktmoe.transformers.count_experts"} <= names
