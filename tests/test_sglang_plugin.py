"""SGLang's plug-in, without SGLang: tests/in_sglang has it inside of SGLang's own processes."""

import importlib
import importlib.metadata
import logging
import multiprocessing
import sys
import tomllib
from types import ModuleType

import pytest
from environments import ROOT

from ktmoe import sglang
from ktmoe.compat import kt_kernel
from ktmoe.compat.kt_kernel import KTMoEWrapper, generate_gpu_experts_masks
from ktmoe.errors import InputError

#: The modules as SGLang 0.5.23 has them.
LAYER, RUNNER = "sglang.srt.layers.moe.kt_ep_wrapper", "sglang.srt.model_executor.runner.decode_cuda_graph_runner"
THEIRS = "class KTMoEWrapper: pass\n"


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """A process in which nobody has asked for kt_kernel, and that is left so."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ("kt_kernel", "sglang")}
    for name in before:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path_importer_cache", {})
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("kt_kernel", "sglang")]:
        del sys.modules[name]
    sys.modules.pop("sglang_other.kt_ep_wrapper", None)


def imported(name: str) -> ModuleType:
    """A module that asks for kt_kernel as SGLang's do, right now."""
    module = sys.modules[name] = ModuleType(name)
    try:
        module.KTMoEWrapper = importlib.import_module("kt_kernel").KTMoEWrapper
        module.KTRANSFORMERS_AVAILABLE = True
    except ImportError:
        module.KTRANSFORMERS_AVAILABLE = False
    return module


@pytest.fixture
def theirs(tmp_path, monkeypatch):
    """kt-kernel, installed: its file."""
    package = tmp_path / "kt_kernel"
    package.mkdir()
    (package / "__init__.py").write_text(THEIRS)
    (package / "utils.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    return package / "__init__.py"


def test_modules_that_were_imported_before_find_it():
    """As in a scheduler. A module of somebody else with the same flag is left alone, as is one without it."""
    modules = [imported(name) for name in (LAYER, RUNNER)]
    other, plain = imported("sglang_other.kt_ep_wrapper"), sys.modules.setdefault("sglang", ModuleType("sglang"))
    assert not any(module.KTRANSFORMERS_AVAILABLE for module in modules)
    for _ in range(2):
        sglang.register()
        for module in modules:
            assert module.KTRANSFORMERS_AVAILABLE is True
            assert module.KTMoEWrapper is KTMoEWrapper
            assert module.generate_gpu_experts_masks is generate_gpu_experts_masks
    assert not other.KTRANSFORMERS_AVAILABLE
    assert not hasattr(plain, "KTMoEWrapper")


def test_modules_that_are_imported_later_find_it():
    sglang.register()
    assert imported(LAYER).KTMoEWrapper is KTMoEWrapper
    assert importlib.import_module("kt_kernel") is kt_kernel
    assert importlib.import_module("kt_kernel.experts").KTMoEWrapper is KTMoEWrapper
    assert importlib.import_module("kt_kernel.sft") is kt_kernel.sft
    with pytest.raises(ModuleNotFoundError, match=r"kt_kernel\.utils"):
        importlib.import_module("kt_kernel.utils")
    with pytest.raises(ImportError, match="kt_kernel_ext"):
        exec("from kt_kernel import kt_kernel_ext")


@pytest.mark.parametrize("before", [True, False])
def test_a_kt_kernel_that_is_installed_stays(before, theirs, caplog):
    """Whether SGLang imported it before or not; the first process says so in one line."""
    module = imported(LAYER) if before else None
    with caplog.at_level(logging.INFO):
        sglang.register()
    module = module or imported(LAYER)
    assert module.KTMoEWrapper.__module__ == "kt_kernel"
    assert module.KTMoEWrapper is not KTMoEWrapper
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    (line,) = caplog.messages
    assert line.startswith(f"kt_kernel is installed ({theirs}): SGLang asks it for experts on the CPU")
    assert "KTMOE_SGLANG=1" in line


@pytest.mark.parametrize("before", [True, False])
def test_a_folder_without_code_is_no_kt_kernel(before, tmp_path, caplog, monkeypatch):
    """Python imports it, as a namespace, and finds no name in it."""
    (tmp_path / "kt_kernel" / "lib").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    if before:
        importlib.import_module("kt_kernel.lib")
    sglang.register()
    assert imported(LAYER).KTMoEWrapper is KTMoEWrapper
    assert caplog.messages == []


@pytest.mark.usefixtures("theirs")
def test_other_processes_do_not_say_it_again(caplog, monkeypatch):
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    sglang.register()
    assert caplog.messages == []


@pytest.mark.usefixtures("theirs")
@pytest.mark.parametrize("before", [True, False])
def test_ktmoe_by_name(before, caplog, monkeypatch):
    """KTMOE_SGLANG=1: in the place of a kt-kernel, also where it is imported already."""
    monkeypatch.setenv("KTMOE_SGLANG", "1")
    modules = [imported(name) for name in (LAYER, RUNNER)] if before else []
    importlib.import_module("kt_kernel.utils")
    sglang.register()
    modules = modules or [imported(LAYER)]
    assert {module.KTMoEWrapper for module in modules} == {KTMoEWrapper}
    assert "kt_kernel.utils" not in sys.modules
    assert caplog.messages == []


def test_switched_off(monkeypatch):
    monkeypatch.setenv("KTMOE_SGLANG", "0")
    module = imported(LAYER)
    sglang.register()
    assert not module.KTRANSFORMERS_AVAILABLE
    assert "kt_kernel" not in sys.modules


@pytest.mark.parametrize("value", ["yes", "2", "01"])
def test_a_wrong_value(value, monkeypatch):
    monkeypatch.setenv("KTMOE_SGLANG", value)
    with pytest.raises(InputError, match=rf"^KTMOE_SGLANG must be 0, 1 or nothing, found '{value}'$"):
        sglang.register()
    assert "kt_kernel" not in sys.modules


@pytest.mark.parametrize("before", [True, False])
def test_beside_the_shim(before, caplog, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "extras" / "kt_kernel_shim"))
    module = imported(LAYER) if before else None
    sglang.register()
    assert (module or imported(LAYER)).KTMoEWrapper is KTMoEWrapper
    assert caplog.messages == []


def test_the_entry_point():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    ((name, value),) = points["sglang.srt.plugins"].items()
    assert importlib.metadata.EntryPoint(name, value, "sglang.srt.plugins").load() is sglang.register
