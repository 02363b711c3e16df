"""What `ktmoe convert` and `ktmoe merge` copy beside the weights: folders, links, modes; and an output path that is empty."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoints import EXPERTS, HIDDEN, INTERMEDIATE
from converting import check_layer, names, refused, tree, write

from ktmoe import cli
from ktmoe.adapters import export_adapter, merge_adapter
from ktmoe.cache.packing import pack
from ktmoe.conversion import convert
from ktmoe.conversion.source import Source
from ktmoe.errors import CheckpointError, OutputError
from ktmoe.quantization import Quantizer
from ktmoe.training.lora import Lora

MADE = {"config.json", "ktmoe_convert.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"}


@pytest.fixture
def source(tmp_path) -> Path:
    write(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def secret(tmp_path) -> Path:
    """A file elsewhere."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").write_text("secret")
    return tmp_path / "elsewhere" / "secret"


def fill(folder: Path, *files: str) -> None:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_folders(source, tmp_path, capsys):
    """Files in them are copied. Weights in other files, folders with weights and what is no file are left out, and named."""
    fill(source, "assets/a/b.txt", "assets/.hidden", ".git/HEAD", ".c", "params.json", "chat.jinja")
    (source / "quantize_config.json").write_text("{}")
    fill(
        source,
        "a.bin",
        "b.gguf",
        "original/consolidated.00.pth",
        "original/params.json",
        "onnx/a/model.onnx_data",
        "onnx/b.txt",
    )
    (source / "empty").mkdir()
    os.mkfifo(source / "assets" / "pipe")
    (source / "dangling").symlink_to("nothing")
    (source / "loop").symlink_to("loop")
    (source / "folder").symlink_to("assets")
    report = convert(source, tmp_path / "out", "mxfp4")
    copied = {"assets/a/b.txt", "onnx/b.txt", "chat.jinja", "tokenizer.json", "templates/more/tools.jinja"}
    assert tree(tmp_path / "out").keys() == MADE | copied
    assert names(tmp_path / "out" / "assets") == ["a"]
    left_out = ["a.bin", "assets/pipe", "b.gguf", "dangling", "folder", "loop", "onnx/a/", "original/", "quantize_config.json"]
    assert report.left_out == left_out
    assert cli.main(["convert", str(source), str(tmp_path / "again"), "--to", "mxfp4"]) == 0
    assert "not copied: a.bin, assets/pipe, b.gguf and 6 more\n" in capsys.readouterr().out
    assert cli.main(["convert", str(source), str(tmp_path / "json"), "--to", "mxfp4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["not_copied"] == left_out
    assert tree(tmp_path / "again") == tree(tmp_path / "json") == tree(tmp_path / "out")


def test_a_result_within_the_source(source, tmp_path):
    """It is no part of the source, also when an interrupted one goes on."""

    def fail(done, total):
        if done:
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        convert(source, source / "out", "mxfp4", progress=fail)
    assert names(source / "out") == ["model.safetensors.index.json"]
    convert(source, source / "out", "mxfp4")
    shutil.move(source / "out", tmp_path / "within")
    convert(source, tmp_path / "beside", "mxfp4")
    assert tree(tmp_path / "within") == tree(tmp_path / "beside")


def test_modes_are_plain(source, tmp_path):
    """A new file's, whatever the original has: also in folders that only their owner may enter."""
    for name, mode in (("tokenizer.json", 0o6777), ("templates/more/tools.jinja", 0o400), ("templates", 0o700)):
        (source / name).chmod(mode)
    before = os.umask(0o027)
    try:
        convert(source, tmp_path / "out", "mxfp4")
    finally:
        os.umask(before)
    found = {path.stat().st_mode & 0o7777 for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {0o640}
    assert (tmp_path / "out" / "templates").stat().st_mode & 0o7777 == 0o750


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "quantize_config.json", "templates/more/tools.jinja", "new"])
@pytest.mark.parametrize("relative", [True, False])
def test_a_link_that_leaves(source, secret, tmp_path, name, relative):
    """It is named before anything is written."""
    link = source / name
    text = link.read_text() if link.exists() else "{}"
    link.unlink(missing_ok=True)
    secret.write_text(text)
    link.symlink_to(os.path.relpath(secret, link.parent) if relative else secret)
    with pytest.raises(
        CheckpointError, match=rf"{name}: expected a file of this checkpoint, found a link to '.*secret', which"
    ):
        convert(source, tmp_path / "out", "mxfp4")
    assert not (tmp_path / "out").exists()


def test_a_chain_of_links_that_leaves(source, secret, tmp_path):
    (source / "templates" / "inner").symlink_to(secret)
    (source / "outer").symlink_to("templates/inner")
    with pytest.raises(CheckpointError, match=r"(inner|outer): expected a file of this checkpoint"):
        convert(source, tmp_path / "out", "mxfp4")


def test_a_config_beside_one_file_that_leaves(source, secret, tmp_path):
    shutil.move(source / "config.json", secret)
    (source / "config.json").symlink_to(secret)
    with pytest.raises(CheckpointError, match=r"config\.json: expected a file of this checkpoint, found a link to"):
        convert(source / "model.safetensors", tmp_path / "out", "mxfp4")


def test_links_that_stay(source, tmp_path):
    """Also by a path that has links itself, and one that leaves and comes back."""
    (source / "a.txt").symlink_to("templates/more/tools.jinja")
    (source / "templates" / "b.txt").symlink_to(source / "tokenizer.json")
    (tmp_path / "link").symlink_to("source")
    (source / "c.txt").symlink_to(tmp_path / "link" / "tokenizer.json")
    convert(tmp_path / "link", tmp_path / "out", "mxfp4")
    for name in ("a.txt", "templates/b.txt", "c.txt"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
        assert not (tmp_path / "out" / name).is_symlink()


def test_weights_may_be_links(source, tmp_path):
    """They are the model that was asked for, and are read, not copied."""
    shutil.move(source / "model.safetensors", tmp_path / "elsewhere.safetensors")
    (source / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    assert convert(source, tmp_path / "out", "mxfp4").left_out == []
    check_layer(source, tmp_path / "out", 1, Quantizer("mxfp4"))


def hub(source: Path, cache: Path) -> Path:
    """The same files as the Hub's cache has them: links into its own blobs."""
    model = cache / "models--owner--name"
    snapshot = model / "snapshots" / "0123abcd"
    (model / "blobs").mkdir(parents=True)
    for number, path in enumerate(path for path in sorted(source.rglob("*")) if path.is_file()):
        name = path.relative_to(source)
        shutil.copy(path, model / "blobs" / str(number))
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / name).symlink_to(os.path.relpath(model / "blobs" / str(number), (snapshot / name).parent))
    return snapshot


def test_the_cache_of_the_hub(source, tmp_path):
    """Links into its own blobs are followed, and no others."""
    snapshot = hub(source, tmp_path / "cache")
    convert(source, tmp_path / "plain", "mxfp4")
    (tmp_path / "link").symlink_to(snapshot)
    for number, path in enumerate((snapshot, tmp_path / "link")):
        convert(path, tmp_path / f"out{number}", "mxfp4")
        assert tree(tmp_path / f"out{number}") == tree(tmp_path / "plain")
    (snapshot / "inner").mkdir()
    for path in list(snapshot.iterdir()):
        if path.is_symlink():
            (snapshot / "inner" / path.name).symlink_to(os.path.join("..", os.readlink(path)))
    shutil.copytree(snapshot / "templates", snapshot / "inner" / "templates")
    convert(snapshot / "inner", tmp_path / "of a folder", "mxfp4")
    assert tree(tmp_path / "of a folder") == tree(tmp_path / "plain")
    convert(snapshot / "model.safetensors", tmp_path / "one", "mxfp4")
    assert (tmp_path / "one" / "config.json").read_bytes() == (tmp_path / "plain" / "config.json").read_bytes()
    other = hub(source, tmp_path / "other").parents[1] / "blobs" / "0"
    (snapshot / "more.txt").symlink_to(other)
    with pytest.raises(CheckpointError, match=r"more\.txt: expected a file of this checkpoint, found a link to"):
        convert(snapshot, tmp_path / "none", "mxfp4")


def test_blobs_that_are_elsewhere(source, secret, tmp_path):
    """A folder that only looks like the Hub's cache."""
    snapshot = hub(source, tmp_path / "cache")
    blobs = snapshot.parents[1] / "blobs"
    shutil.move(blobs, tmp_path / "moved")
    blobs.symlink_to(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="expected a file of this checkpoint, found a link to"):
        convert(snapshot, tmp_path / "out", "mxfp4")


def _link(path: Path, secret: Path) -> None:
    path.unlink()
    path.symlink_to(secret)


def _pipe(path: Path, _secret: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _other(path: Path, _secret: Path) -> None:
    path.unlink()
    path.write_text("secret")


def _folder_link(path: Path, secret: Path) -> None:
    shutil.rmtree(path.parent)
    shutil.copy(secret, secret.with_name(path.name))
    path.parent.symlink_to(secret.parent)


@pytest.mark.parametrize("change", [_link, _pipe, _other, _folder_link])
def test_a_file_that_is_exchanged_before_it_is_copied(source, secret, tmp_path, monkeypatch, change):
    """After it was looked at, and at the last moment: the file that is opened is looked at once more."""
    path = source / "templates" / "more" / "tools.jinja"
    real = Source.open

    def late(self, name):
        if name.endswith("tools.jinja"):
            change(path, secret)
        return real(self, name)

    monkeypatch.setattr(Source, "open", late)
    with pytest.raises(CheckpointError, match=r"tools\.jinja: (changed while it was read|expected a readable file, found)"):
        convert(source, tmp_path / "out", "mxfp4")
    assert "secret" not in "".join(map(str, tree(tmp_path / "out").values()))
    refused(tmp_path / "out")


def test_merge_copies_alike(source, secret, tmp_path):
    """Folders, plain modes, and links that leave."""
    random = np.random.default_rng(0)
    shapes = {"down": ((EXPERTS, 2, INTERMEDIATE), (EXPERTS, HIDDEN, 2))}
    pairs = {name: tuple(random.standard_normal(shape).astype(np.float32) for shape in both) for name, both in shapes.items()}
    loras = {0: Lora(pairs, alpha=4.0)}
    (source / "tokenizer.json").chmod(0o4755)
    fill(source, "original/a.pth")
    assert merge_adapter(source, loras, tmp_path / "out").left_out == ["original/"]
    assert (tmp_path / "out" / "templates" / "more" / "tools.jinja").read_text() == "{{ tools }}"
    assert not (tmp_path / "out" / "tokenizer.json").stat().st_mode & 0o4111
    _link(source / "tokenizer.json", secret)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: expected a file of this checkpoint"):
        merge_adapter(source, loras, tmp_path / "none")


def test_an_empty_output_path(source, tmp_path, monkeypatch):
    """It is not the current folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    calls = (
        lambda: convert(source, "", "mxfp4"),
        lambda: pack(source, ""),
        lambda: merge_adapter(source, {}, ""),
        lambda: export_adapter("", {}, source),
    )
    for call in calls:
        with pytest.raises(OutputError, match="expected a folder to write into, found an empty path"):
            call()
    assert names(tmp_path / "here") == []
