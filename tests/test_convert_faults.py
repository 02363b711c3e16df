"""`ktmoe convert` when something goes wrong: a clear error, nothing half-written that loads, and the same bytes in the end."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from converting import names, refused, tree, write

from ktmoe import cli
from ktmoe.cache.packing import pack
from ktmoe.conversion import convert, stated, writing
from ktmoe.conversion.storage import storage
from ktmoe.errors import CheckpointError, OutOfSpaceError, OutputError, UnavailableError
from ktmoe.loaders.tensor_file import TensorInfo
from ktmoe.weights.formats import MXFP4

#: Bytes of a file, so few that a conversion has several.
SHARD_BYTES = 12_000
INDEX = "model.safetensors.index.json"


@pytest.fixture
def source(tmp_path) -> Path:
    write(tmp_path / "source")
    return tmp_path / "source"


@pytest.fixture
def whole(source, tmp_path) -> dict[str, bytes]:
    """The files of a conversion to which nothing happened."""
    convert(source, tmp_path / "whole", "mxfp4", shard_bytes=SHARD_BYTES)
    return tree(tmp_path / "whole")


def again(source, out, **options):
    return convert(source, out, **{"to": "mxfp4", "shard_bytes": SHARD_BYTES, **options})


def at_half(action):
    """A progress function that does something once, when half of the source is done."""
    done = []

    def progress(now, total):
        if now > total / 2 and not done:
            done.append(now)
            action()

    return progress


def interrupted(source, out):
    """A conversion that ended at half."""

    def fail():
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        again(source, out, progress=at_half(fail))
    assert len(list(out.glob("model-*.safetensors"))) >= 2
    assert "ktmoe convert has not finished" in refused(out)


def command(source, out, start="", **options):
    """The command in a process of its own. start: code that it runs first."""
    code = f"import os, resource, signal, sys\n{start}\nfrom ktmoe.cli import main\nsys.exit(main(sys.argv[1:]))"
    arguments = ["convert", str(source), str(out), "--to", "mxfp4", "--shard-gb", str(SHARD_BYTES / 1e9)]
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False, **options
    )


def test_it_goes_on(source, whole, tmp_path):
    out = tmp_path / "out"
    interrupted(source, out)
    kept = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.glob("model-*.safetensors")}
    report = again(source, out)
    assert report.kept == sorted(kept)
    assert {name: ((out / name).stat().st_ino, (out / name).stat().st_mtime_ns) for name in kept} == kept
    assert tree(out) == whole


def test_progress_goes_on(source, tmp_path):
    interrupted(source, tmp_path / "out")
    seen = []
    again(source, tmp_path / "out", progress=lambda done, total: seen.append((done, total)))
    assert 0 < seen[0][0] < seen[0][1] == seen[-1][0]


def test_a_thread_that_cannot_be_started(source, whole, tmp_path, monkeypatch):
    """As of a process that may have no more, or of an interpreter that exits."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(UnavailableError, match=r"starting thread ktmoe-convert: can't start new thread"):
            again(source, tmp_path / "out")
    again(source, tmp_path / "out")
    assert tree(tmp_path / "out") == whole


@pytest.mark.parametrize("change", ["removed", "truncated", "of other tensors"])
def test_a_finished_file_that_is_not_what_it_was(source, whole, tmp_path, change):
    """It is made again."""
    out = tmp_path / "out"
    interrupted(source, out)
    path, other = sorted(out.glob("model-*.safetensors"))[:2]
    if change == "removed":
        path.unlink()
    elif change == "truncated":
        os.truncate(path, 100)
    else:
        shutil.copy(other, path)
    assert path.name not in again(source, out).kept
    assert tree(out) == whole


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ({"to": "int4"}, "options"),
        ({"rule": "floor"}, "options"),
        ({"layers": [0]}, "options"),
        ({"shard_bytes": 9}, "options"),
    ],
)
def test_other_options(source, tmp_path, options, label):
    interrupted(source, tmp_path / "out")
    before = tree(tmp_path / "out")
    with pytest.raises(OutputError, match=f"holds an unfinished conversion with another {label}; choose another folder"):
        again(source, tmp_path / "out", **options)
    assert tree(tmp_path / "out") == before


def test_a_journal_that_says_more(source, tmp_path):
    interrupted(source, tmp_path / "out")
    index = tmp_path / "out" / INDEX
    found = json.loads(index.read_text())
    found["ktmoe_convert"]["identity"]["more"] = 1
    index.write_text(json.dumps(found))
    with pytest.raises(OutputError, match="holds an unfinished conversion with another identity; choose another folder"):
        again(source, tmp_path / "out")


def test_another_source(source, tmp_path):
    interrupted(source, tmp_path / "out")
    os.utime(source / "model.safetensors", ns=(1, 1))
    with pytest.raises(OutputError, match="unfinished conversion with another source"):
        again(source, tmp_path / "out")


@pytest.mark.parametrize("journal", ["[]", "{", '{"weight_map": {}}', '{"weight_map": "x", "ktmoe_convert": {"identity": 1}}'])
def test_an_index_that_is_no_journal(source, tmp_path, journal):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / INDEX).write_text(journal)
    with pytest.raises((OutputError, CheckpointError)):
        again(source, tmp_path / "out")
    assert names(tmp_path / "out") == [INDEX]


@pytest.mark.parametrize(
    "finished", [{"a": 1}, {"a": [[0, "x", 1]]}, {"a": [[0, ["x", "y"]]]}, {"a": [[0, [1.0, -1.0]]]}, [1], None]
)
def test_a_journal_that_is_malformed(source, tmp_path, finished):
    interrupted(source, tmp_path / "out")
    index = tmp_path / "out" / INDEX
    found = json.loads(index.read_text())
    found["ktmoe_convert"]["finished"] = finished
    index.write_text(json.dumps(found))
    with pytest.raises(OutputError, match="expected the journal of a conversion, found another content"):
        again(source, tmp_path / "out")


def test_a_journal_with_other_layers(source, whole, tmp_path):
    """Their errors are nobody's."""
    interrupted(source, tmp_path / "out")
    index = tmp_path / "out" / INDEX
    found = json.loads(index.read_text())
    next(iter(found["ktmoe_convert"]["finished"].values())).append([77, [1.0, 1.0]])
    index.write_text(json.dumps(found))
    assert 77 not in again(source, tmp_path / "out").layers
    assert tree(tmp_path / "out") == whole


def test_a_file_that_cannot_be_read(source, tmp_path, monkeypatch):
    """It is named, and nothing loads."""
    real = os.open

    def refusing(path, *arguments, **options):
        if path == "tokenizer.json":
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: expected a readable file, found Permission denied"):
        again(source, tmp_path / "out")
    assert ".tokenizer.json.part" not in names(tmp_path / "out")
    refused(tmp_path / "out")


def test_a_target_with_files(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"expected a new or an empty folder, found notes\.txt"):
        again(source, tmp_path / "out")
    assert tree(tmp_path / "out") == {"notes.txt": b"mine"}


def test_a_target_that_is_the_source(source):
    before = tree(source)
    with pytest.raises(OutputError, match="expected a new or an empty folder"):
        again(source, source)
    assert tree(source) == before


def test_a_target_without_a_name(source):
    with pytest.raises(OutputError, match="found embedded null byte"):
        again(source, "a\0b")
    with pytest.raises(OutputError, match="embedded null byte"):
        pack(source, "a\0b")


@pytest.mark.parametrize(
    "pattern", ["(.|.)" * 37 + "!", "(.*)*!", ".*.*.*.*.*.*.*.*.*.*.*.*!", "a{99999999999}", "(", "(" * 300]
)
def test_a_pattern_that_takes_years(source, pattern):
    """Of another quantization's config, beside one that is for the experts."""
    ignored = {"quant_method": "compressed-tensors", "ignore": ["re:" + pattern, "re:.*experts.*"]}
    info = TensorInfo("a.weight", "F8_E4M3", (2, 2), source, 0, 4)
    found, _ = stated.config({"quantization_config": ignored}, storage(MXFP4), [0], False, [info])
    assert found["quantization_config"]["ignore"] == ["re:" + pattern]


def test_a_group_that_is_no_object():
    """It says nothing of weights, and is not kept."""
    stated_before = {"quant_method": "compressed-tensors", "config_groups": {"a": 1, "b": {"targets": ["x"]}}}
    info = TensorInfo("model.layers.0.self_attn.q_proj.weight_packed", "I32", (1, 1), Path("f"), 0, 4)
    found, _ = stated.config({"quantization_config": stated_before}, storage(MXFP4), [0], False, [info])
    assert found["quantization_config"]["config_groups"]["group_1"] == {"format": None, "targets": ["x"]}
    assert found["quantization_config"]["config_groups"].keys() == {"group_0", "group_1"}


def test_a_target_that_is_a_file(source, tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(OutputError, match="expected a folder that can be written, found File exists"):
        again(source, tmp_path / "out")


def test_an_empty_target(source, whole, tmp_path):
    (tmp_path / "out").mkdir()
    again(source, tmp_path / "out")
    assert tree(tmp_path / "out") == whole


def test_too_little_space(source, whole, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(OutOfSpaceError, match=r"expected [0-9]+ bytes of free space, found 1000"):
        again(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_too_little_space_for_files_beside_the_weights(source, tmp_path, monkeypatch):
    """They count until they are there."""
    beside, usage = b"x" * 2_000_000, shutil.disk_usage(tmp_path)
    (source / "templates" / "large").write_bytes(beside)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=len(beside)))
    with pytest.raises(OutOfSpaceError, match=r"expected [0-9]+ bytes of free space, found 2000000"):
        again(source, tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        patch.setattr(writing, "write_json", None)  # after all else
        with pytest.raises(TypeError, match="not callable"):
            again(source, tmp_path / "out")
    again(source, tmp_path / "out")
    assert (tmp_path / "out" / "templates" / "large").read_bytes() == beside


def test_a_full_disk(source, whole, tmp_path):
    """Files may have 10,000 bytes, as if the disk were full after that."""
    out = tmp_path / "out"
    found = command(source, out, "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))")
    assert (found.returncode, found.stdout) == (1, "")
    assert "cannot be written: files may not be so large" in found.stderr
    assert found.stderr.count("\n") == 1
    assert not [name for name in names(out) if name.endswith((".part", ".lock"))]
    assert "ktmoe convert has not finished" in refused(out)
    again(source, out)
    assert tree(out) == whole


def _touch(path):
    os.utime(path, ns=(1, 1))


def _grow(path):
    with path.open("ab") as file:
        file.write(b"more")


def _replace(path):
    """Replace a file by one of the same size and time."""
    shutil.copy2(path, path.with_name("copy"))
    os.replace(path.with_name("copy"), path)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("model.safetensors", _touch, "changed while it was read: time of change: expected"),
        ("model.safetensors", _grow, "changed while it was read: size: expected"),
        ("model.safetensors", _replace, "changed while it was read: inode: expected"),
        ("model.safetensors", Path.unlink, "expected the file that was read, found No such file"),
        ("model.safetensors", lambda path: os.truncate(path, 1000), r"truncated|read: size: expected"),
        ("tokenizer.json", _grow, "changed while it was read: size: expected"),
        ("config.json", _touch, "changed while it was read: time of change: expected"),
    ],
)
def test_a_source_that_changes(source, tmp_path, file, change, message):
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match=message):
        again(source, out, progress=at_half(lambda: change(source / file)))
    assert "ktmoe convert has not finished" in refused(out)
    assert not [name for name in names(out) if name.endswith(".part")]


def test_two_at_once(source, whole, tmp_path):
    out, seen = tmp_path / "out", []

    def other():
        seen.append(command(source, out))
        with pytest.raises(OutputError, match="out: another process is writing it"):
            again(source, out)

    again(source, out, progress=at_half(other))
    assert seen[0].returncode == 1
    assert seen[0].stderr == f"ktmoe: {out}: another process is writing it\n"
    assert tree(out) == whole


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_signal(source, whole, tmp_path, number, status):
    """Ctrl-C, and what ends a process politely, in the middle of a file."""
    out = tmp_path / "out"
    start = (
        "from ktmoe.cli import convert as module\n"
        "real = module.convert\n"
        "def progress(done, total):\n"
        f"    if done > total / 2: os.kill(os.getpid(), {int(number)})\n"
        "module.convert = lambda *given, **options: real(*given, **{**options, 'progress': progress})"
    )
    found = command(source, out, start)
    assert (found.returncode, found.stdout) == (status, "")
    assert found.stderr.lstrip() == ("ktmoe: interrupted\n" if number == signal.SIGINT else "")
    assert not [name for name in names(out) if name.endswith((".part", ".lock"))]
    assert "ktmoe convert has not finished" in refused(out)
    again(source, out)
    assert tree(out) == whole


def dying(source, folder, first, step) -> int:
    folder.mkdir()
    arguments = [sys.executable, Path(__file__).with_name("dying.py"), source, folder, first, step]
    done = subprocess.run([*map(str, arguments)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("step", [13, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_killed_at_any_point(source, whole, tmp_path, step):
    """Nobody reads what is left, and the next run makes the same files of it as if nothing had happened."""
    last = dying(source, tmp_path / "killed", 0, step)
    assert last > 60
    for number in range(0, last, step):
        out = tmp_path / "killed" / str(number)
        if "ktmoe_convert.json" not in names(out) or b'weight_map": {' not in (out / INDEX).read_bytes():
            refused(out)
            again(source, out)
        else:  # it had its index already
            (out / ".ktmoe.lock").unlink()
        assert tree(out) == whole, number


def test_killed_again_and_again(source, whole, tmp_path):
    """Each run gets a little further."""
    dying(source, tmp_path / "killed", 40, 0)
    assert tree(tmp_path / "killed" / "40") == whole


def test_the_command_goes_on(source, tmp_path, capsys):
    out = tmp_path / "out"
    interrupted(source, out)
    assert cli.main(["convert", str(source), str(out), "--to", "mxfp4", "--shard-gb", str(SHARD_BYTES / 1e9)]) == 0
    assert "files of an interrupted run stayed\n" in capsys.readouterr().out
