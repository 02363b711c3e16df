"""Registries: built-ins, plugins at run time and through entry points, and a backend that is all Python."""

import importlib
import inspect
import pkgutil
import subprocess
import sys

import numpy as np
import pytest
from helpers import BF16, random_batch, random_experts, same_bits

import ktmoe
from ktmoe import MoELayer, backends, loaders, reference
from ktmoe._native import core
from ktmoe.backends.base import Backend, Missing, Packed
from ktmoe.errors import InputError, UnknownNameError
from ktmoe.loaders.base import Loader
from ktmoe.registry import Registry

REGISTRIES = {"ktmoe.backends": backends.registry, "ktmoe.loaders": loaders.registry}


def subclasses(cls):
    for subclass in cls.__subclasses__():
        yield subclass
        yield from subclasses(subclass)


@pytest.mark.parametrize(("module", "base"), [(backends, Backend), (loaders, Loader)], ids=["backends", "loaders"])
def test_every_subclass_in_the_package_is_registered(module, base):
    for room in pkgutil.iter_modules(ktmoe.__path__, "ktmoe."):
        if room.name not in ("ktmoe.torch", "ktmoe.transformers", "ktmoe.vllm", "ktmoe.distributed"):  # which need torch
            path = getattr(importlib.import_module(room.name), "__path__", [])
            for found in pkgutil.walk_packages(path, f"{room.name}."):
                importlib.import_module(found.name)
    registered = {type(plugin) for plugin in module.registry.values()}
    concrete = {cls for cls in subclasses(base) if cls.__module__.startswith("ktmoe.") and not inspect.isabstract(cls)}
    assert concrete == registered
    assert len(concrete) >= 1


def test_built_in_names():
    """Of modules and plugins alike; the backends' are part of the API."""
    files = {
        "architectures",
        "base",
        "checkpoint",
        "checks",
        "config_groups",
        "dense",
        "direct_io",
        "fused",
        "gguf_file",
        "gguf_header",
        "gguf_model",
        "model_config",
        "model_shape",
        "naming",
        "one_layer",
        "one_matrix",
        "pairs",
        "per_expert",
        "quantization",
        "safetensors_file",
        "scheme",
        "stacked",
        "staging",
        "tensor_file",
        "unchanged",
        "unknown",
    }
    for module, others in ((backends, {"base", "choice", "native"}), (loaders, files)):
        assert set(module.names()) == {found.name for found in pkgutil.iter_modules(module.__path__)} - others
    assert {"amx", "avx2", "avx512_bf16", "fp32_lut"} <= set(backends.names())
    assert {"awq", "bf16", "compressed_tensors", "deepseek_v4", "fp8", "gpt_oss", "gptq", "nvfp4"} <= set(loaders.names())


# Of a fresh registry


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with a plugin module "local", and a function that installs a distribution with entry points."""
    folder = tmp_path / "plugged"
    folder.mkdir()
    registry = "from ktmoe.registry import Registry\nregistry = Registry('tool', __name__, 'plugged.tools')\n"
    (folder / "__init__.py").write_text(registry)
    (folder / "local.py").write_text("from plugged import registry\nregistry.register('local', 'built in')\n")
    (tmp_path / "outside.py").write_text("plugin = 'from outside'\n")
    (tmp_path / "broken.py").write_text("raise ZeroDivisionError('sorry')\n")
    monkeypatch.syspath_prepend(tmp_path)

    def install(entry_points):
        info = tmp_path / "some_plugin-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-plugin\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[plugged.tools]\n" + "\n".join(entry_points) + "\n")
        importlib.invalidate_caches()

    yield install
    for name in [name for name in sys.modules if name.partition(".")[0] in ("plugged", "outside", "broken")]:
        del sys.modules[name]


def registry() -> Registry:
    return importlib.import_module("plugged").registry


def test_plugins_are_found_through_entry_points(package):
    package(["remote = outside:plugin"])
    assert registry().names() == ["local", "remote"]
    assert registry().get("remote") == "from outside"
    assert registry().values() == ["built in", "from outside"]


def test_entry_points_are_loaded_when_a_name_is_first_asked_for(package):
    package(["remote = outside:plugin"])
    tools = registry()
    assert "outside" not in sys.modules
    assert "plugged.local" not in sys.modules
    tools.get("local")
    assert "outside" in sys.modules


def test_a_built_in_wins_over_an_entry_point(package):
    package(["local = outside:plugin"])
    assert registry().get("local") == "built in"
    assert "outside" not in sys.modules


@pytest.mark.parametrize(
    ("entry_point", "why"),
    [
        ("bad = broken:plugin", "ZeroDivisionError: sorry"),
        ("bad = outside:absent", "AttributeError"),
        ("bad = nowhere:x", "ModuleNotFoundError"),
    ],
)
def test_a_broken_plugin_warns_and_takes_no_other_down(package, entry_point, why):
    package([entry_point, "remote = outside:plugin"])
    tools = registry()
    with pytest.warns(RuntimeWarning, match=f"tool 'bad' .* was left out: {why}"):
        names = tools.names()
    assert names == ["local", "remote"]
    with pytest.raises(UnknownNameError, match="unknown tool 'bad'; known are local, remote"):
        tools.get("bad")


def test_registering(package):
    tools = registry()
    tools.names()
    tools.register("mine", 1)
    assert tools.get("mine") == 1
    for name in ("mine", "local"):
        with pytest.raises(ValueError, match=f"tool '{name}' is already registered; pass overwrite=True"):
            tools.register(name, 2)
    tools.register("mine", 3, overwrite=True)
    tools.register("local", 4, overwrite=True)
    assert (tools.get("mine"), tools.get("local")) == (3, 4)
    tools.unregister("mine")
    with pytest.raises(UnknownNameError, match="unknown tool 'mine'; known are local"):
        tools.get("mine")
    with pytest.raises(UnknownNameError, match="unknown tool 'mine'"):
        tools.unregister("mine")


def test_registering_before_anything_was_asked_for(package):
    """The same rules: a built-in's name is taken, and overwrite replaces it for good."""
    package(["remote = outside:plugin"])
    tools = registry()
    with pytest.raises(ValueError, match="tool 'local' is already registered"):
        tools.register("local", 1)
    tools.register("mine", 2)
    tools.register("local", 3, overwrite=True)
    assert {name: tools.get(name) for name in tools.names()} == {"local": 3, "mine": 2, "remote": "from outside"}


def test_a_built_in_that_cannot_be_imported_raises_every_time(package, tmp_path):
    """A registry must not look complete after it failed to load."""
    (tmp_path / "plugged" / "worse.py").write_text("raise ZeroDivisionError('sorry')\n")
    tools = registry()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="sorry"):
            tools.names()


def test_ktmoes_own_groups(tmp_path):
    """A backend and a loader of an installed distribution, in an interpreter that has done nothing before."""
    (tmp_path / "theirs.py").write_text(
        "from ktmoe.backends.base import Backend, Missing\n"
        "class Tool(Backend):\n    rank = 7\n    def lookup(self): return Missing('it is Tuesday')\n"
        "    def pack(self): pass\n\ntool = Tool()\n"
    )
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ktmoe.backends]\nabacus = theirs:tool\n[ktmoe.loaders]\nscroll = theirs:tool\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import ktmoe\n"
        "assert 'theirs' not in sys.modules\n"
        "print(ktmoe.backends.ranked()[-1], ktmoe.loaders.names()[-1], 'abacus' in ktmoe.backends.available())\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "abacus scroll False\n"


# A backend in Python


class Float64(Backend):
    """The reference as a backend."""

    rank = 1

    def lookup(self, experts=None, activations="auto"):
        if experts is not None and experts.num_experts > 9:
            return Missing("too many experts")
        return super().lookup(experts, activations)

    def pack(self, experts, plan, progress=None):
        return Float64Packed(experts, plan.router_weight)


class Float64Packed(Packed):
    def __init__(self, experts, router_weight):
        self.experts, self.router_weight, self.nbytes = experts, router_weight, 0

    def forward(self, x, ids, weights, mask, out):
        assert (ids.dtype, weights.dtype, mask.dtype, out.dtype) == (np.int64, np.float32, np.uint8, x.dtype)
        assert all(a.flags.c_contiguous for a in (x, ids, weights, mask, out))
        given = x.view(BF16) if x.dtype == np.uint16 else x
        y = reference.forward(
            self.experts, given, ids, weights, expert_mask=mask.astype(bool), router_weight=self.router_weight
        ).y
        out[...] = y if out.dtype == np.float32 else y.astype(BF16).view(np.uint16)

    def close(self):
        self.experts = None


def test_a_python_backend_computes_through_a_layer(monkeypatch):
    rng = np.random.default_rng(1)
    experts = random_experts(rng, 3, 64, 64)
    x, ids, weights = random_batch(rng, experts, 5, 2)
    backends.register("float64", Float64())
    try:
        assert "float64" in backends.available()
        assert backends.ranked()[-1] == "float64"  # by its rank
        with MoELayer(experts, "float64", router_weight="down_input") as layer:
            for dtype in (BF16, np.float32):
                y = layer.forward(np.asfortranarray(x.astype(dtype)), ids.astype(np.int32), weights)
                expected = reference.forward(experts, x, ids, weights, router_weight="down_input").y
                assert same_bits(y, expected.astype(dtype))
            layer.expert_mask[:] = False
            assert not layer.forward(x, ids, weights).any()
        monkeypatch.setenv("KTMOE_BACKEND", "float64")
        with MoELayer(experts) as layer:
            assert layer.backend == "float64"
        many = random_experts(rng, 10, 64, 64)
        with pytest.raises(
            ktmoe.errors.UnavailableError, match=r"'float64' \(KTMOE_BACKEND\) cannot be used: too many experts"
        ):
            MoELayer(many)
    finally:
        backends.unregister("float64")


def test_what_is_no_backend():
    """A class in the place of its instance, what packs into anything, and what packs into experts of no size."""

    class Sizeless(Float64Packed):
        def __init__(self):
            pass

    class Loose(Float64):
        packed = object

        def pack(self, experts, plan, progress=None):
            return self.packed()

    with pytest.raises(
        InputError, match=r"'loose' must be an instance of a class that inherits ktmoe\.backends\.base\.Backend, found <class"
    ):
        backends.register("loose", Loose)
    backends.register("loose", Loose())
    experts = random_experts(np.random.default_rng(1), 1, 64, 64)
    words = r"what backend 'loose' packs into must inherit ktmoe\.backends\.base\.Packed and have nbytes, found "
    try:
        with pytest.raises(InputError, match=f"{words}<object object"):
            MoELayer(experts, "loose")
        Loose.packed = Sizeless
        with pytest.raises(InputError, match=f"{words}<.*Sizeless object"):
            MoELayer(experts, "loose")
    finally:
        backends.unregister("loose")


def test_a_native_layer_has_all_that_a_backend_may_have():
    """It inherits no default."""
    assert issubclass(core.PackedLayer, Packed)
    assert {name for name in dir(Packed) if not name.startswith("_")} <= set(dir(core.PackedLayer))
