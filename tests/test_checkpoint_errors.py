"""Checkpoints whose files are hostile, missing, cut off or cannot be read."""

import gc
import json
import os

import pytest
from checkpoint_files import CODES, SCALES, descriptors, write_file, write_index
from helpers import POINTER

from ktmoe.errors import CheckpointError, MissingTensorError
from ktmoe.loaders.checkpoint import INDEX_NAME, Checkpoint


def test_missing_tensor(two_files):
    checkpoint = Checkpoint(two_files)
    for call in (checkpoint.info, checkpoint.read, checkpoint.release):
        with pytest.raises(MissingTensorError) as caught:
            call("nobody")
        assert all(word in str(caught.value) for word in (str(two_files), "'nobody'", "expected", "found 4 others"))


@pytest.mark.parametrize("name", ["config.json", INDEX_NAME, "model-1.safetensors", "model.gguf"])
def test_a_pointer_of_git_lfs(two_shards, name):
    """What stands in a file's place where git-lfs has not fetched it."""
    before = descriptors()
    (two_shards / name).write_bytes(POINTER)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(two_shards / name if name.endswith("gguf") else two_shards).info("a")
    found = "found git-lfs's pointer to it: run `git lfs pull` in its folder"
    assert str(caught.value) == f"{two_shards / name}: expected the file itself, {found}"
    del caught
    gc.collect()
    assert descriptors() == before


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("config.json", "found .json: it has no weights, name the folder"),
        ("pytorch_model.bin", "found .bin: torch's pickled files are not read, convert them to safetensors"),
        ("model.safetensors", "in a file of 12 bytes, found 2333181762011690089; it is damaged, or no .safetensors file"),
    ],
)
def test_files_of_another_kind(tmp_path, name, found):
    (tmp_path / name).write_bytes(b"it is a text")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(tmp_path / name)
    assert str(caught.value).startswith(f"{tmp_path / name}: ")
    assert str(caught.value).endswith(found)


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"a": 1, "a": 2}', b"\xff", b""])
@pytest.mark.parametrize("name", ["config.json", INDEX_NAME])
def test_malformed_json(two_shards, name, text):
    (two_shards / name).write_bytes(text)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(two_shards)
    assert all(word in str(caught.value) for word in (str(two_shards / name), "expected", "found"))


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({}, ["weight_map", "expected an object", "None"]),
        ({"weight_map": ["a"]}, ["weight_map", "expected an object", "['a']"]),
        ({"weight_map": {"a": 1}}, ["tensor 'a'", "expected a file name", "found 1"]),
        ({"weight_map": {"a": None}}, ["tensor 'a'", "expected a file name", "None"]),
        ({"weight_map": {"a": ["model-1.safetensors"]}}, ["tensor 'a'", "expected a file name", "['model-1"]),
        *(
            ({"weight_map": {"b": "model-1.safetensors", "a": file}}, ["tensor 'a'", "bare file name", repr(file)])
            for file in ("../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..\\x", "", ".", "..")
        ),
    ],
)
def test_hostile_index(two_shards, index, words):
    (two_shards / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(two_shards)
    assert all(word in str(caught.value) for word in [INDEX_NAME, *words]), str(caught.value)


@pytest.mark.parametrize("file", ["gone.safetensors", "nul\0", "\ud800", "x" * 5000])
def test_index_names_a_file_that_is_not_there(two_shards, file):
    write_index(two_shards, {"a": "model-1.safetensors", "d": file})
    checkpoint = Checkpoint(two_shards)
    assert checkpoint.read("a").tobytes() == CODES  # a partial download serves what it has
    with pytest.raises(MissingTensorError, match=rf"expected by {INDEX_NAME} for tensor 'd', found no such file"):
        checkpoint.info("d")


def test_dangling_symlink(two_shards):
    (two_shards / "model-2.safetensors").unlink()
    (two_shards / "model-2.safetensors").symlink_to("nowhere")
    with pytest.raises(MissingTensorError, match=r"model-2.safetensors: expected .* tensor 'c', found no such file"):
        Checkpoint(two_shards).read("c")


def test_index_and_header_disagree(two_shards):
    write_index(two_shards, {"a": "model-2.safetensors", "c": "model-2.safetensors", "b": "model-1.safetensors"})
    checkpoint = Checkpoint(two_shards)
    with pytest.raises(CheckpointError, match=r"model-2.safetensors: tensor 'a': expected here .* found no such tensor"):
        checkpoint.info("a")
    assert checkpoint.read("c").tobytes() == SCALES
    before = descriptors()
    match = r"model-1.safetensors: tensor 'a': expected in model-2.safetensors .* found here"
    with pytest.raises(CheckpointError, match=match) as caught:
        checkpoint.info("b")
    assert descriptors() == before
    assert caught
    with pytest.raises(MissingTensorError, match=r"'empty': expected in this checkpoint, found 3 others"):
        checkpoint.info("empty")


def test_one_name_in_two_files(two_shards):
    (two_shards / INDEX_NAME).unlink()
    write_file(two_shards / "model-3.safetensors", {"a": ("U8", [1], b"x")})
    before = descriptors()
    match = r"tensor 'a': expected in one file, found in model-1.\w+, model-3.safetensors"
    with pytest.raises(CheckpointError, match=match) as caught:
        Checkpoint(two_shards)
    assert descriptors() == before
    assert caught  # whose traceback keeps the failed object alive: it was closed, not collected


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match=r"absent: expected a folder, .* or a .gguf file, found nothing"):
        Checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=rf"expected {INDEX_NAME}, \*.safetensors or \*.gguf files .* found none"):
        Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError, match=r"model.safetensors: expected a regular file, found d"):
        Checkpoint(tmp_path)


def test_a_fifo_does_not_hang(two_shards):
    (two_shards / "model-2.safetensors").unlink()
    os.mkfifo(two_shards / "model-2.safetensors")
    checkpoint = Checkpoint(two_shards)
    before = descriptors()
    with pytest.raises(CheckpointError, match=r"model-2.safetensors: expected a regular file, found p"):
        checkpoint.read("c")
    assert descriptors() == before


def test_unreadable_file(two_shards, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)  # root may open anything
    with pytest.raises(CheckpointError, match=rf"{INDEX_NAME}: expected a readable file, found .*Permission denied"):
        Checkpoint(two_shards)


@pytest.mark.parametrize("kept", [0, 1, 31])
def test_file_shrinks_while_open(two_files, kept):
    checkpoint = Checkpoint(two_files)
    info = checkpoint.info("a")
    os.truncate(info.file, info.offset + kept)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read("a")
    words = (str(info.file), "truncated", "tensor 'a'", "expected 32 bytes", f"at {info.offset}", f"found {kept}")
    assert all(word in str(caught.value) for word in words), str(caught.value)
    words = (
        str(info.file),
        "truncated",
        "tensor 'a'",
        "expected 31 bytes",
        f"at {info.offset + 1}",
        f"found {max(kept - 1, 0)}",
    )
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read("a", byte_range=(1, 32))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    with pytest.raises(CheckpointError, match=r"changed while it was read: size: expected"):
        checkpoint.read("a", byte_range=(0, kept))
    assert checkpoint.read("c").tobytes() == SCALES


def test_truncated_before_it_is_opened(two_shards):
    file = two_shards / "model-1.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 1)
    checkpoint = Checkpoint(two_shards)
    with pytest.raises(CheckpointError, match=rf"truncated: expected {size} bytes by its header, found {size - 1}"):
        checkpoint.read("a")


def test_short_reads_are_continued(two_files, monkeypatch):
    checkpoint = Checkpoint(two_files)
    checkpoint.info("a")
    preadv = os.preadv
    counts = []

    def dribble(fd, buffers, offset):
        counts.append(preadv(fd, [buffers[0][:5]], offset))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", dribble)
    assert checkpoint.read("a").tobytes() == CODES
    assert counts == [5, 5, 5, 5, 5, 5, 2]


def test_read_error_names_the_tensor(two_files, monkeypatch):
    checkpoint = Checkpoint(two_files)
    checkpoint.info("a")

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(
        CheckpointError, match=r"model-1.safetensors: tensor 'a': expected 32 bytes .* found .*Input/output error"
    ):
        checkpoint.read("a")


def test_no_descriptor_leaks_on_errors(two_files):
    write_file(two_files / "model-1.safetensors", {"a": ("I8", [3, 16], CODES)})
    before = descriptors()

    def read():
        with Checkpoint(two_files) as checkpoint:
            assert checkpoint.read("c").tobytes() == SCALES
            checkpoint.read("a")

    for _ in range(3):
        with pytest.raises(CheckpointError, match="48 bytes for I8"):
            read()
    (two_files / "model-1.safetensors").unlink()
    (two_files / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config.json"):
        Checkpoint(two_files)
    assert descriptors() == before
