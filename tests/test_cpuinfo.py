"""What Linux says about the CPU, of files that a test wrote."""

from ktmoe.machine import cpu


def test_a_field_of_the_first_cpu_that_has_it(tmp_path, monkeypatch):
    """Names are compared whole; a line without a colon and an empty one are no fields; a value may have colons."""
    file = tmp_path / "cpuinfo"
    first = "model name\n\nprocessor\t: 0\nmodel\t\t: 143\nmodel name\t: A CPU: fast\n\n"
    file.write_text(first + "processor\t: 1\nmodel name\t: Another\nstepping\t: 8\n")
    monkeypatch.setattr(cpu, "CPUINFO", file)
    found = {name: cpu.cpuinfo(name) for name in ("processor", "model", "model name", "stepping", "name", "microcode")}
    assert found == {
        "processor": "0",
        "model": "143",
        "model name": "A CPU: fast",
        "stepping": "8",
        "name": None,
        "microcode": None,
    }


def test_data_caches(tmp_path):
    """Those of instructions are left out. A size without a unit is in bytes."""
    caches = ("1 Data 48K", "1 Instruction 32K", "2 Unified 2M", "3 Unified 1G", "4 Data 512")
    for number, words in enumerate(caches):
        folder = tmp_path / f"index{number}"
        folder.mkdir()
        for name, word in zip(("level", "type", "size"), words.split(), strict=True):
            (folder / name).write_text(f"{word}\n")
    assert cpu.cache_sizes(tmp_path) == {1: 48 << 10, 2: 2 << 20, 3: 1 << 30, 4: 512}
    assert cpu.cache_sizes(tmp_path / "none") == {}
