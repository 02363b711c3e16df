"""Which files make up a GGUF model, and its metadata as config."""

import gc
import os

import pytest
from gguf_files import F32, Q4_0, Q8_0, array, layer, metadata, string, u32, write

from ktmoe.errors import CheckpointError
from ktmoe.loaders.checkpoint import Checkpoint

KINDS = {"gate": Q4_0, "up": Q4_0, "down": Q8_0}
CONFIG = metadata(expert_count=2, expert_used_count=1, block_count=3)


def split(folder, count=3, **changes):
    """A model split into so many files, a layer each. changes: by a file's number, of its metadata, or None: it is left out."""
    for number in range(count):
        keys = {} if number else CONFIG
        keys = keys | {"split.no": u32(number), "split.count": u32(count), "split.tensors.count": u32(3 * count)}
        changed = changes.get(f"file{number}", {})
        if changed is not None:
            write(folder / f"m-{number + 1:05}-of-{count:05}.gguf", keys | changed, layer(number, KINDS))
    return folder


def refusal(path) -> str:
    """The message of a checkpoint's refusal, which leaves no file open."""
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(path)
    text = str(caught.value)
    del caught
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == before
    return text


@pytest.mark.parametrize("count", [string("3"), u32(7)])
def test_refused_files_are_closed(tmp_path, count):
    """Also those that lie beside a model, while somebody still has the error."""
    write(tmp_path / "a.gguf", CONFIG, layer(0, KINDS))
    write(tmp_path / "b.gguf", CONFIG | {"split.count": count}, layer(1, KINDS))
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path)
    assert set(os.listdir("/proc/self/fd")) == before, caught


@pytest.mark.parametrize("name", ["", "m-00001-of-00003.gguf", "m-00003-of-00003.gguf"])
def test_a_split_model(tmp_path, name):
    """By its folder or by any file: all tensors, in the files' order, and the first one's metadata."""
    with Checkpoint(split(tmp_path) / name) as checkpoint:
        stored = {name: data for number in range(3) for name, (_, _, data) in layer(number, KINDS).items()}
        assert list(checkpoint.names()) == list(stored)
        assert all(checkpoint.read(name).tobytes() == data for name, data in stored.items())
        assert checkpoint.config["split.no"] == 0
        wanted = {"model_type": "qwen3moe", "num_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 3}
        assert {key: checkpoint.config[key] for key in wanted} == wanted


def test_a_file_that_is_missing(tmp_path):
    split(tmp_path, file1=None)
    for name in ("", "m-00003-of-00003.gguf"):
        message = refusal(tmp_path / name)
        assert f"{tmp_path / 'm-00002-of-00003.gguf'}: expected file 2 of 3 of a split model, found none" in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"file1": {"split.no": u32(2)}}, ["00002", "split.no: expected 1 by its name, found 2"]),
        ({"file2": {"split.count": u32(4)}}, ["00003", "split.count: expected 3 by its name, found 4"]),
        ({"file0": {"split.count": string("3")}}, ["00001", "split.count: expected a number, found '3'"]),
        ({"file0": {"split.tensors.count": u32(10)}}, ["expected 10 tensors in all files by split.tensors.count, found 9"]),
    ],
    ids=["number", "count", "a string", "tensors"],
)
def test_files_that_do_not_fit(tmp_path, changes, words):
    message = refusal(split(tmp_path, **changes))
    assert all(word in message for word in words), message


def test_a_file_of_another_name(tmp_path):
    split(tmp_path, 2)
    (tmp_path / "m-00001-of-00002.gguf").rename(tmp_path / "first.gguf")
    assert "expected a name that ends in -00001-of-00002.gguf, as split.count is 2" in refusal(tmp_path / "first.gguf")


def test_a_tensor_in_two_files(tmp_path):
    split(tmp_path, 2)
    keys = {"split.no": u32(1), "split.count": u32(2), "split.tensors.count": u32(6)}
    write(tmp_path / "m-00002-of-00002.gguf", keys, layer(0, KINDS))
    assert "tensor 'blk.0.ffn_gate_exps.weight': expected in one file, found in m-00001-of-00002.gguf" in refusal(tmp_path)


def test_a_file_for_each_layer(tmp_path):
    """As kt-kernel takes them: no numbers of split files, one architecture, no tensor in common."""
    for number in range(3):
        write(tmp_path / f"layer-{number}.gguf", CONFIG, layer(number, KINDS))
    with Checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint) == 9
    with Checkpoint(tmp_path / "layer-1.gguf") as checkpoint:
        assert len(checkpoint) == 3


def test_files_that_are_no_models_are_left_out(tmp_path):
    write(tmp_path / "m.gguf", CONFIG, layer(0, KINDS))
    one = {"v.blk.0.weight": (F32, (1,), b"1234")}
    write(tmp_path / "a.gguf", metadata("clip"), one)
    write(tmp_path / "mmproj.gguf", metadata("other") | {"general.type": string("mmproj")}, one)
    write(tmp_path / "lora.gguf", CONFIG | {"general.type": string("adapter")}, one)
    (tmp_path / "._m.gguf").write_bytes(b"macOS")
    with Checkpoint(tmp_path) as checkpoint:
        assert len(checkpoint) == 3
    (tmp_path / "m.gguf").unlink()
    assert "expected a GGUF model, found 'a.gguf', which is none by its general.type" in refusal(tmp_path)


def test_several_models_in_a_folder(tmp_path):
    """Refused by the names of two, whatever makes them two; the path of one is taken."""
    write(tmp_path / "Q4_0.gguf", CONFIG, layer(0, KINDS))
    write(tmp_path / "Q8_0.gguf", CONFIG, layer(0, dict.fromkeys(KINDS, Q8_0)))
    assert "expected one model, found 'Q4_0.gguf' and 'Q8_0.gguf'; give the path of one of the files" in refusal(tmp_path)
    write(tmp_path / "Q8_0.gguf", metadata("llama"), layer(1, KINDS))
    assert "expected one model, found 'Q4_0.gguf' and 'Q8_0.gguf'" in refusal(tmp_path)
    with Checkpoint(tmp_path / "Q8_0.gguf") as checkpoint:
        assert checkpoint.config["model_type"] == "llama"
    (tmp_path / "Q8_0.gguf").unlink()
    split(tmp_path)
    assert "expected one model, found 'Q4_0.gguf' and 'm-00001-of-00003.gguf'" in refusal(tmp_path)


def test_safetensors_come_first(tmp_path, two_shards):
    write(two_shards / "m.gguf", CONFIG, layer(0, KINDS))
    with Checkpoint(two_shards) as checkpoint:
        assert "a" in checkpoint
    with Checkpoint(two_shards / "m.gguf") as checkpoint:
        assert checkpoint.config["model_type"] == "qwen3moe"


def test_metadata_as_config(tmp_path):
    """Layers of multi-token prediction are counted by block_count and not by num_hidden_layers; lists are no numbers."""
    keys = metadata("glm4moe", block_count=47, nextn_predict_layers=1, embedding_length=4096, expert_count=128)
    keys |= {"glm4moe.expert_used_count": array(4, [b"\1\0\0\0"] * 2), "num_experts": u32(7)}
    path = write(tmp_path / "m.gguf", keys, layer(0, KINDS))
    with Checkpoint(path) as checkpoint:
        config = checkpoint.config
    assert (config["num_hidden_layers"], config["hidden_size"], config["num_experts"]) == (46, 4096, 128)
    assert "num_experts_per_tok" not in config
    assert config["glm4moe.expert_used_count"] == [1, 1]
