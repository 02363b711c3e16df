"""What the documentation calls public, and how the examples in its docstrings run: each in a folder with small checkpoints."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

import ktmoe
from ktmoe import synthetic
from ktmoe.machine import threads

#: Public modules, and the functions and classes of those that have no __all__.
MODULES = {
    "ktmoe": (),
    "ktmoe.adapters": (),
    "ktmoe.backends": (),
    "ktmoe.cache.packing": ("PackReport", "pack"),
    "ktmoe.conversion": (),
    "ktmoe.distributed": (),
    "ktmoe.errors": ("KtmoeError",),
    "ktmoe.loaders": (),
    "ktmoe.quantization": (),
    "ktmoe.reference": (),
    "ktmoe.registry": ("Registry",),
    "ktmoe.synthetic": (),
    "ktmoe.training": (),
    "ktmoe.two_stage": (),
}
#: Those that need torch, and transformers.
OF_TORCH = {"ktmoe.torch": (), "ktmoe.transformers": ()}
#: Classes whose methods have no example. Users call them by calling the module, or plugins and ktmoe itself call them; those of
#: Alone are Communicator's.
WITHOUT_METHODS = {
    "Alone",
    "Backend",
    "Config",
    "DenseEmbedding",
    "DenseGroupedLinear",
    "DenseLinear",
    "MoEExperts",
    "Order",
    "PackReport",
}


def public(modules: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, str, object]]:
    """(module, name, thing) of each function, class and method, once; a method's name is "Class.method"."""
    seen = set()
    for module_name, names in modules.items():
        module = importlib.import_module(module_name)
        for name in names or getattr(module, "__all__", ()):
            thing = inspect.unwrap(getattr(module, name))
            thing = getattr(thing, "__func__", thing)
            if not (inspect.isclass(thing) or inspect.isfunction(thing)) or thing in seen:
                continue
            seen.add(thing)
            yield module_name, name, thing
            if inspect.isclass(thing) and thing.__name__ not in WITHOUT_METHODS:
                for method, function in methods(thing):
                    if function not in seen:
                        seen.add(function)
                        yield module_name, f"{name}.{method}", function


def methods(of: type) -> Iterator[tuple[str, Callable]]:
    """Public methods that a class has, its own and those of bases of ktmoe. Not after_fork(), which os.fork() calls."""
    for name in dir(of):
        found = inspect.getattr_static(of, name)
        function = getattr(found, "__func__", found)
        ours = inspect.isfunction(function) and function.__module__.startswith("ktmoe.")
        if ours and not name.startswith("_") and name != "after_fork":
            yield name, function


def examples(thing: object) -> list[doctest.Example]:
    """Those of a docstring."""
    return doctest.DocTestParser().get_examples(inspect.getdoc(thing) or "")


def write_checkpoints(folder: Path) -> None:
    """Small ones under the names that examples use."""
    synthetic.write_deepseek_v4(folder / "DeepSeek-V4-Flash", hidden=64, intermediate=64, num_experts=8, layers=4)
    synthetic.write_chat_model(folder / "Qwen3-30B-A3B")


def run(module_name: str, name: str, thing: object, checkpoints: Path, folder: Path) -> str:
    """What doctest says of the examples of a docstring, which run in a new folder with these checkpoints; "" if all is well."""
    folder = folder / name
    folder.mkdir()
    for path in checkpoints.iterdir():
        (folder / path.name).symlink_to(path)
    out: list[str] = []
    chosen = threads._chosen
    with contextlib.chdir(folder), contextlib.ExitStack() as resources:
        module = importlib.import_module(module_name)
        text = inspect.getdoc(thing) or ""
        names = vars(module) | given(text, resources)
        if module_name in OF_TORCH:
            names |= {name: importlib.import_module(name) for name in ("torch", "transformers")}
            importlib.import_module("ktmoe.transformers")
        test = doctest.DocTestParser().get_doctest(text, names, f"{module_name}.{name}", inspect.getsourcefile(thing), 0)
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=out.append, clear_globs=False)
    threads._chosen = chosen
    threads.configure()
    return "".join(out)


def given(text: str, resources: contextlib.ExitStack) -> dict[str, object]:
    """The names that help(ktmoe) says examples have. Made only if the text has them, since most have few."""
    names: dict[str, object] = {"ktmoe": ktmoe, "np": np, "ml_dtypes": ml_dtypes, "os": os}
    names |= {module: importlib.import_module(f"ktmoe.{module}") for module in ("reference", "synthetic", "two_stage")}
    wanted = set(re.findall(r"\w+", text))
    if wanted & {"experts", "layer"}:
        names["experts"] = ktmoe.load_experts("DeepSeek-V4-Flash", 3)
    if "layer" in wanted:
        names["layer"] = resources.enter_context(ktmoe.MoELayer(names["experts"], activations="bf16"))
    if wanted & {"matrix", "linear"}:
        names["matrix"] = ktmoe.load_matrix("Qwen3-30B-A3B", "model.layers.0.self_attn.q_proj")
    if "linear" in wanted:
        names["linear"] = resources.enter_context(ktmoe.Linear(names["matrix"]))
    names["x"] = np.ones((1, 64), np.float32)
    names["ids"], names["weights"] = np.array([[0, 5]], np.int32), np.full((1, 2), 0.5, np.float32)
    return names
