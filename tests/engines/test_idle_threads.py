"""The warning of torch's idle threads: once, and only where they spin and nobody has chosen that."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch
from serving import eager
from transformers import AutoModelForCausalLM

import ktmoe.transformers as served
from ktmoe.transformers import idle_threads

WAYS = {
    "load()": served.load,
    "pack()": lambda folder: served.pack(eager(folder)),
    "Config": lambda folder: AutoModelForCausalLM.from_pretrained(folder, quantization_config=served.Config()),
}


@pytest.fixture
def process(monkeypatch):
    """A function of torch's threads and of variables: as if torch was imported with these, and nothing was loaded yet."""

    def begin(threads: int, **variables: str) -> None:
        for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        reloaded = importlib.reload(idle_threads)
        for module in ("loading", "quantizer"):
            monkeypatch.setattr(f"ktmoe.transformers.{module}.warn_of_spinning", reloaded.warn_of_spinning)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    return begin


def warned(load, *arguments) -> list[str]:
    with warnings.catch_warnings(record=True, action="always") as found:
        load(*arguments)
    return [str(each.message) for each in found if "idle threads" in str(each.message)]


@pytest.mark.smoke("one")
@pytest.mark.parametrize("way", WAYS)
def test_once_a_process(process, checkpoint, way):
    process(2)
    folder = checkpoint("qwen3_moe")
    (message,) = warned(WAYS[way], folder)
    assert "os.environ['OMP_WAIT_POLICY'] = 'passive'" in message
    for other in WAYS.values():
        assert warned(other, folder) == []


@pytest.mark.parametrize(
    ("threads", "variables"),
    [
        (1, {}),
        (2, {"OMP_WAIT_POLICY": "passive"}),
        (2, {"OMP_WAIT_POLICY": "active"}),
        (2, {"GOMP_SPINCOUNT": "10000"}),
        (2, {"KMP_BLOCKTIME": "0"}),
    ],
)
def test_never_where_it_was_chosen(process, threads, variables):
    process(threads, **variables)
    assert warned(idle_threads.warn_of_spinning) == []


def test_what_is_set_later_has_no_effect(process, monkeypatch):
    process(2)
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert len(warned(idle_threads.warn_of_spinning)) == 1
