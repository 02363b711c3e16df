"""Messages: whatever a hostile file says, they are short, can be printed, and cost little to make."""

import json
import struct
import tracemalloc

import checkpoints
import pytest

from ktmoe import loaders
from ktmoe.errors import CheckpointError, InputError, KtmoeError
from ktmoe.loaders import checkpoint as checkpoint_module
from ktmoe.loaders import safetensors_file
from ktmoe.loaders.base import find_loader
from ktmoe.loaders.checkpoint import INDEX_NAME, Checkpoint
from ktmoe.messages import MESSAGE_LIMIT, VALUE_LIMIT, printable, show

NASTY = "\x1b[2J\r\n\ud800\u202e\0\x7f" + "x" * 5000


def nested(depth, width):
    """A list in a list and so on, each beside many numbers."""
    value = 0
    for _ in range(depth):
        value = [list(range(width)), value, {str(i): i for i in range(width)}]
    return value


#: Each is made when it is used: the test processes that collect this file need none.
HUGE = {
    "nested": lambda: nested(900, 300),
    "a list": lambda: list(range(10**6)),
    "an object": lambda: {str(i): i for i in range(10**6)},
    "a string": lambda: "\n" * 10**7,
    "bytes": lambda: bytes(10**7),
    "a key": lambda: {"k" * 10**7: 1},
    "an integer": lambda: 10**4000,
}


@pytest.fixture
def peak():
    """peak(function): bytes that it had in use at most, beyond what there was."""

    def measure(function):
        tracemalloc.start()
        try:
            function()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    return measure


@pytest.mark.parametrize("make", HUGE.values(), ids=HUGE)
def test_a_huge_value_is_shown_in_bounded_work(make, peak):
    """repr() of each takes megabytes and more."""
    value = make()
    assert peak(lambda: show(value)) < 200_000
    assert len(show(value)) <= VALUE_LIMIT
    assert show(value).isprintable()


SMALL = ["a", "it's", "Größe", 3, -(2**64), 1.5, True, None, [], [1, "b"], {}, {"a": [1]}, {"b": 1, "a": 2}, (1,), b"\0"]


@pytest.mark.parametrize("value", SMALL, ids=repr)
def test_small_values_are_shown_as_they_are(value):
    assert show(value) == repr(value)


def test_what_python_cannot_write():
    """An integer of more digits than it converts."""
    assert show(10**5000) == f"an integer of {(10**5000).bit_length()} bits"
    assert show([10**5000]) == f"[{show(10**5000)}]"


def test_messages_can_be_printed():
    assert printable("Größe 3 µs") == "Größe 3 µs"
    assert printable("a\nb\ud800\x1b") == r"a\nb\ud800\x1b"
    error = InputError(f"{NASTY}: expected this, found that")
    assert str(error).isprintable()
    assert str(error).startswith(r"\x1b[2J\r\n\ud800\u202e\x00\x7fxxx")
    assert str(error).endswith("xxx: expected this, found that")
    assert len(str(error)) <= MESSAGE_LIMIT
    assert error.args == (str(error),)
    assert len(printable("\U000e0001" * 10**6)) <= MESSAGE_LIMIT
    assert KtmoeError(12, "two").args == (12, "two")


# Through a checkpoint


def refused(function) -> str:
    """What it says, which must be fit to be printed."""
    with pytest.raises(KtmoeError) as caught:
        function()
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) <= MESSAGE_LIMIT
    text.encode("utf-8")
    return text


def write_file(path, tensors):
    header, start = {}, 0
    for name, (dtype, shape, nbytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + nbytes]}
        start += nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(start))


def test_names_of_a_hostile_index(tmp_path):
    """Of tensors and of files, in each message that they come into."""
    index = tmp_path / INDEX_NAME

    def opened(weight_map):
        index.write_text(json.dumps({"weight_map": weight_map}))
        return Checkpoint(tmp_path)

    assert "expected a file name" in refused(lambda: opened({NASTY: 1}))
    assert "expected a bare file name" in refused(lambda: opened({NASTY: f"/{NASTY}"}))
    assert "expected a bare file name" in refused(lambda: opened({"a": f"/{NASTY}"}))
    for file in (NASTY, "x" * 5000, "\ud800", "\x1b[2J.safetensors"):
        assert "found no such file" in refused(lambda file=file: opened({NASTY: file}).info(NASTY))
    write_file(tmp_path / "\x1b[2J.safetensors", {"a": ("U8", [1], 1), NASTY: ("U8", [1], 1)})
    assert "found no such tensor" in refused(lambda: opened({"b": "\x1b[2J.safetensors"}).info("b"))
    moved = {"a": "\x1b[2J.safetensors", NASTY: f"{NASTY}.safetensors"}
    assert "found here" in refused(lambda: opened(moved).info("a"))
    assert "found 1 others" in refused(lambda: opened({"a": "b"}).info(NASTY))


SCHEMES = {
    "deepseek_v4": "layers.0.ffn.experts.0.w1.weight",
    "gpt_oss": "model.layers.0.mlp.experts.gate_up_proj_blocks",
    "compressed_tensors": "layers.0.mlp.experts.0.gate_proj.weight_packed",
    "bf16": "layers.0.mlp.experts.0.gate_proj.weight",
}


@pytest.mark.parametrize("loader", SCHEMES)
def test_names_of_hostile_tensors(tmp_path, loader):
    """Beside the experts, as a layer, as the prefix of one, and of more dimensions than a message has room for."""
    name = SCHEMES[loader]
    layers = {name: ("U8", [1] * 5000, 1), name + NASTY.replace("\n", ""): ("U8", [1], 1)}
    layers[name.replace("layers.0", "layers.1").replace(".experts", f".{'x' * 5000}.experts")] = ("U8", [1], 1)
    write_file(tmp_path / "model.safetensors", layers)
    with Checkpoint(tmp_path) as checkpoint:
        for layer in (0, 1, NASTY, 10**5000):
            refused(lambda layer=layer: loaders.get(loader).load(checkpoint, layer))


def quantization(name, **weights):
    return {"quantization_config": {"config_groups": {name: {"weights": weights}}}}


CONFIGS = [
    ("deepseek_v4", lambda: {"swiglu_limit": HUGE["nested"]()}),
    ("bf16", lambda: {"hidden_act": HUGE["nested"]()}),
    ("bf16", lambda: {"swiglu_alpha": HUGE["an object"]()}),
    ("bf16", lambda: {"num_experts": HUGE["a string"]()}),
    ("compressed_tensors", lambda: {"quantization_config": HUGE["a list"]()}),
    ("compressed_tensors", lambda: {"quantization_config": {"config_groups": HUGE["nested"]()}}),
    ("compressed_tensors", lambda: quantization("k" * 10**6, num_bits=HUGE["nested"]())),
    ("compressed_tensors", lambda: quantization("group_0", group_size=HUGE["a string"]())),
]


@pytest.mark.parametrize(("loader", "config"), CONFIGS, ids=[f"{name}-{i}" for i, (name, _) in enumerate(CONFIGS)])
def test_values_of_a_hostile_config(tmp_path, loader, config, peak):
    """The work is bounded: what the values' names take, at most, and not what their repr() would."""
    scheme = next(scheme for scheme in checkpoints.SCHEMES.values() if scheme.loader == loader)
    with checkpoints.write(tmp_path, scheme.layer("layers.0")) as checkpoint:
        assert find_loader(checkpoint) is loaders.get(loader)
    with Checkpoint(tmp_path) as checkpoint:
        checkpoint.config = config()
        assert peak(lambda: refused(lambda: loaders.get(loader).load(checkpoint, 0))) < 10_000_000


@pytest.mark.parametrize("name", sorted(HUGE.keys() - {"bytes"}))  # which JSON does not have
def test_values_of_a_hostile_index_or_header(tmp_path, monkeypatch, name, peak):
    value = HUGE[name]()

    def parse(index):
        monkeypatch.setattr(checkpoint_module, "read_json_object", lambda _: index)
        return refused(lambda: checkpoint_module.parse_index(tmp_path))

    def header(tensors):
        return refused(lambda: safetensors_file.parse_tensors(tensors, tmp_path, 0, 0))

    wrong = ["a"] if isinstance(value, dict) else value  # an object is what is expected
    assert peak(lambda: parse({"weight_map": wrong})) < 500_000
    if not isinstance(value, str):
        assert peak(lambda: parse({"weight_map": {"a": value}})) < 500_000
        assert peak(lambda: header({"__metadata__": {"a": value}})) < 500_000
    for field in ("dtype", "shape", "data_offsets"):
        if field != "shape" or not isinstance(value, list):
            entry = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]} | {field: value}
            assert peak(lambda entry=entry: header({"a": entry})) < 500_000


def test_a_read_that_fails(tmp_path):
    write_file(tmp_path / "model.safetensors", {NASTY: ("U8", [100], 100)})
    with Checkpoint(tmp_path) as checkpoint:
        info = checkpoint.info(NASTY)
        info.file.write_bytes(info.file.read_bytes()[:-1])
        assert "truncated" in refused(lambda: checkpoint.read(NASTY))
        assert "expected 0 <= start" in refused(lambda: checkpoint.read(NASTY, byte_range=(-1, 0)))
    with pytest.raises(CheckpointError):
        Checkpoint(tmp_path)
