"""ktmoe.files: a file is whole or absent, whatever happens while it is written; one process writes it at a time."""

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from ktmoe.errors import InputError, OutputError
from ktmoe.files.atomic import AtomicFile, unfinished, write_json
from ktmoe.files.lock import LOCK_NAME, exclusive
from ktmoe.files.safetensors_writer import SafetensorsWriter
from ktmoe.loaders.safetensors_file import SafetensorsFile

CODES = np.arange(24, dtype=np.uint8).reshape(2, 12)
SCALES = np.array([[1.5], [-2.0]], np.float32)
ROWS = np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16).reshape(3, 2)
TENSORS = [("scales", "F32", (2, 1)), ("rows", "BF16", (3, 2)), ("none", "I32", (0, 4)), ("codes", "U8", (2, 12))]


def contents(folder):
    return sorted(os.listdir(folder))


def run(code, *arguments, **options):
    """Another process, whose code has these modules."""
    start = "import os, signal, sys\nfrom ktmoe.files.atomic import *\nfrom ktmoe.files.lock import exclusive\n"
    return subprocess.run(
        [sys.executable, "-c", start + textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


def test_a_file_is_there_when_it_is_whole(tmp_path):
    path = tmp_path / "a"
    with AtomicFile(path) as file:
        file.write(b"one ")
        file.write(np.frombuffer(b"two", np.uint8))
        assert contents(tmp_path) == [".a.part"]
    assert path.read_bytes() == b"one two"
    assert contents(tmp_path) == ["a"]


def test_bytes_at_an_offset(tmp_path):
    with AtomicFile(tmp_path / "a") as file:
        file.write(b"....")
        file.write(b"12", at=1)
    assert (tmp_path / "a").read_bytes() == b".12."


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_nothing(tmp_path, fault):
    def fail():
        with AtomicFile(tmp_path / "a") as file:
            file.write(b"half")
            raise fault

    with pytest.raises(fault):
        fail()
    assert contents(tmp_path) == []


def test_what_exists_stays_unless_asked_for(tmp_path):
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(OutputError, match="a: expected no such file, found one"):
        AtomicFile(tmp_path / "a")
    assert contents(tmp_path) == ["a"]
    with AtomicFile(tmp_path / "a", overwrite=True) as file:
        file.write(b"new")
        assert (tmp_path / "a").read_bytes() == b"old"
    assert (tmp_path / "a").read_bytes() == b"new"


def test_what_appears_meanwhile_stays(tmp_path):
    file = AtomicFile(tmp_path / "a")
    file.write(b"mine")
    (tmp_path / "a").write_bytes(b"theirs")
    with pytest.raises(OutputError, match="found one"):
        file.commit()
    assert (tmp_path / "a").read_bytes() == b"theirs"
    assert contents(tmp_path) == ["a"]


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(OutputError, match="No such file or directory"):
        AtomicFile(tmp_path / "no" / "a")


def test_two_writers_of_a_file(tmp_path):
    with AtomicFile(tmp_path / "a") as file:
        file.write(b"first")
        with pytest.raises(OutputError, match="a: another process is writing it"):
            AtomicFile(tmp_path / "a")
        found = run("AtomicFile(sys.argv[1])", tmp_path / "a")
        assert "OutputError" in found.stderr
        assert "another process is writing it" in found.stderr
    assert (tmp_path / "a").read_bytes() == b"first"


def test_a_killed_writer(tmp_path):
    """What it leaves is under another name, and the next writer writes over it."""
    found = run("f = AtomicFile(sys.argv[1]); f.write(b'a long text'); os.kill(os.getpid(), signal.SIGKILL)", tmp_path / "a")
    assert found.returncode == -signal.SIGKILL
    assert contents(tmp_path) == [".a.part"]
    with AtomicFile(tmp_path / "a") as file:
        file.write(b"short")
    assert (tmp_path / "a").read_bytes() == b"short"
    assert contents(tmp_path) == ["a"]


def test_a_file_that_may_not_be_so_large(tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    found = run(
        "with AtomicFile(sys.argv[1]) as f:\n    f.write(b'x' * 999)\n    f.write(b'x' * 999)",
        tmp_path / "a",
        preexec_fn=limit,
    )
    assert "OutputError" in found.stderr
    assert "a: cannot be written: files may not be so large" in found.stderr
    assert contents(tmp_path) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk(tmp_path):
    """Linux's device that is always full, in the place of the unfinished file."""
    file = AtomicFile(tmp_path / "a")
    with open("/dev/full", "wb", buffering=0) as full:
        os.dup2(full.fileno(), file._file.fileno())
    with pytest.raises(OutputError, match="a: cannot be written: the disk is full"):
        file.write(b"x")
    file.abort()
    assert contents(tmp_path) == []


def test_json(tmp_path):
    write_json(tmp_path / "a.json", {"b": [1, 0.1]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"b": [1, 0.1]}


def test_a_locked_folder(tmp_path):
    with exclusive(tmp_path):
        with pytest.raises(OutputError, match=f"{tmp_path.name}: another process is writing it"), exclusive(tmp_path):
            pass
        found = run("with exclusive(sys.argv[1]): pass", tmp_path)
        assert "another process is writing it" in found.stderr
        assert contents(tmp_path) == [LOCK_NAME]
    assert contents(tmp_path) == []
    assert run("with exclusive(sys.argv[1]): pass", tmp_path).returncode == 0


def test_the_lock_of_a_killed_process(tmp_path):
    run("with exclusive(sys.argv[1]): os.kill(os.getpid(), signal.SIGKILL)", tmp_path)
    assert contents(tmp_path) == [LOCK_NAME]
    with exclusive(tmp_path):
        pass
    assert contents(tmp_path) == []


def test_no_lock_behind_a_link(tmp_path):
    """A link in the lock's place is not followed."""
    (tmp_path / LOCK_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OutputError, match="expected a file that can be written"), exclusive(tmp_path):
        pass
    assert contents(tmp_path) == [LOCK_NAME]


@pytest.mark.parametrize("align", [8, 4096])
def test_safetensors(tmp_path, align):
    """safetensors' own reader is the oracle, and ktmoe's takes the file."""
    path = tmp_path / "model.safetensors"
    with SafetensorsWriter(path, TENSORS, {"format": "pt"}, align=align) as writer:
        writer.write(SCALES)
        writer.write(CODES[:1], "codes")
        writer.write(ROWS)
        writer.write(CODES[1:])
    assert writer.nbytes == path.stat().st_size
    with safe_open(path, "numpy") as file:
        assert file.metadata() == {"format": "pt"}
        assert file.get_tensor("none").shape == (0, 4)
        np.testing.assert_array_equal(file.get_tensor("scales"), SCALES)
        np.testing.assert_array_equal(file.get_tensor("codes"), CODES)
    found = SafetensorsFile(path).tensors
    assert {name: info.offset for name, info in found.items()} == writer.offsets
    assert found["scales"].offset % align == 0
    assert path.read_bytes()[found["rows"].offset :][: ROWS.nbytes] == ROWS.tobytes()


def test_safetensors_that_are_not_whole(tmp_path):
    def write(*arrays, fault=None):
        with SafetensorsWriter(tmp_path / "model.safetensors", TENSORS) as writer:
            for array in arrays:
                writer.write(array)
            if fault:
                raise fault

    with pytest.raises(InputError, match="tensor rows: expected 12 bytes, found 8 written"):
        write(SCALES, ROWS[:2])
    with pytest.raises(KeyboardInterrupt):
        write(SCALES, fault=KeyboardInterrupt)
    assert contents(tmp_path) == []


def test_safetensors_of_the_wrong_bytes(tmp_path):
    path = tmp_path / "model.safetensors"
    with SafetensorsWriter(path, [("scales", "F32", (2, 1))]) as writer:
        with pytest.raises(InputError, match="scales: expected at most 8 bytes more, found 24"):
            writer.write(CODES)
        with pytest.raises(InputError, match="of other"):
            writer.write(CODES, "other")
        with pytest.raises(InputError, match="C-contiguous"):
            writer.write(CODES[:, ::6])
        writer.write(SCALES)
        with pytest.raises(InputError, match="of none"):
            writer.write(SCALES)
    assert SafetensorsFile(path).tensors["scales"].nbytes == 8


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("a", "U8", (1,)), ("b", "F32", (1,))], "b: F32 must begin at a multiple of 4 bytes, found 1"),
        ([("a", "U8", (1,)), ("a", "U8", (1,))], "tensor a: expected every name once"),
        ([("__metadata__", "U8", (1,))], "expected every name once"),
        ([("a", "U9", (1,))], "dtype: expected one of .*, found 'U9'"),
        ([("a", "F4", (3,))], "expected whole bytes of F4, found"),
    ],
)
def test_safetensors_that_cannot_be(tmp_path, tensors, message):
    with pytest.raises(InputError, match=message):
        SafetensorsWriter(tmp_path / "a", tensors)
    assert contents(tmp_path) == []


def test_safetensors_aligned_to_a_part_of_a_number(tmp_path):
    with pytest.raises(InputError, match="align: expected a multiple of 8, found 12"):
        SafetensorsWriter(tmp_path / "a", [], align=12)


def test_the_name_of_an_unfinished_file(tmp_path):
    """A folder's loaders take *.safetensors that do not begin with a dot."""
    assert unfinished(tmp_path / "model.safetensors").name == ".model.safetensors.part"
