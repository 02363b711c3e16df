"""The examples of docstrings run and say what they print, and everything public has one."""

import documented
import pytest

PUBLIC = list(documented.public(documented.MODULES))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    documented.write_checkpoints(folder)
    return folder


@pytest.mark.parametrize("module", documented.MODULES)
def test_the_examples_run(module, checkpoints, tmp_path):
    wrong = [
        documented.run(module, name, thing, checkpoints, tmp_path)
        for where, name, thing in PUBLIC
        if where == module and documented.examples(thing)
    ]
    assert not any(wrong), "".join(wrong)


def test_everything_public_has_an_example():
    assert not [f"{module}.{name}" for module, name, thing in PUBLIC if not documented.examples(thing)]


def test_what_is_public_is_found():
    """Functions, classes, their own methods and inherited ones; methods of an object that a module gives a name."""
    names = {f"{module}.{name}" for module, name, _ in PUBLIC}
    assert {"ktmoe.MoELayer", "ktmoe.MoELayer.forward", "ktmoe.Linear.close", "ktmoe.fp8"} <= names
    assert {"ktmoe.MoEModel.from_checkpoint", "ktmoe.backends.register", "ktmoe.synthetic.write_awq"} <= names
    assert not [name for name in names if name.rpartition(".")[2].startswith("_")]
    assert len(names) == len(PUBLIC) > 150


def test_a_wrong_example_is_seen(checkpoints, tmp_path):
    """Of another output, and of one that raises."""

    def documented_wrongly():
        """What it is not.

        >>> 1 + 1
        3
        >>> layer.no_such_attribute
        """

    text = documented.run("ktmoe", "documented_wrongly", documented_wrongly, checkpoints, tmp_path)
    assert "Expected:\n    3\nGot:\n    2" in text
    assert "AttributeError" in text
