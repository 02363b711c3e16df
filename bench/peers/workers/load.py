"""load.py LIBRARY FOLDER: what importing a library and loading a layer takes in this process, as a line of JSON.

LIBRARY: "ktmoe" or "kt-kernel". Times in seconds; memory in bytes, of anonymous pages alone, which no file gives back. The most
that was in use is for another process to see: kt-kernel holds the GIL while it loads.
"""

from __future__ import annotations

import json
import os
import sys
import time


def anonymous_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def ktmoe(folder: str, threads: int):
    """(import, load): functions; what load returns is kept until memory was looked at."""

    def load(module):
        module.set_num_threads(threads)
        return module.MoELayer.from_checkpoint(folder, 0)

    def import_():
        import ktmoe

        return ktmoe

    return import_, load


def kt_kernel(folder: str, threads: int):
    def load(module):
        import torch

        def unpinned(make):  # its wrapper wants pinned memory, which there is none of without a GPU
            return lambda *arguments, pin_memory=False, **others: make(*arguments, **others)

        torch.zeros, torch.empty = unpinned(torch.zeros), unpinned(torch.empty)
        with open(os.path.join(folder, "config.json")) as file:
            config = json.load(file)
        experts = config["n_routed_experts"]
        wrapper = module.KTMoEWrapper(
            layer_idx=0,
            num_experts=experts,
            num_experts_per_tok=config["num_experts_per_tok"],
            hidden_size=config["hidden_size"],
            moe_intermediate_size=config["moe_intermediate_size"],
            gpu_experts_mask=None,
            cpuinfer_threads=threads,
            threadpool_count=1,
            weight_path=folder,
            chunked_prefill_size=512,
            method="MXFP4",
        )
        wrapper.load_weights(torch.arange(experts))
        return wrapper

    def import_():
        import kt_kernel

        return kt_kernel

    return import_, load


def main(library: str, folder: str) -> None:
    import_, load = {"ktmoe": ktmoe, "kt-kernel": kt_kernel}[library](folder, len(os.sched_getaffinity(0)))
    start = time.perf_counter()
    module = import_()
    imported = time.perf_counter()
    before = anonymous_bytes()
    begin = time.perf_counter()
    kept = load(module)
    end = time.perf_counter()
    after = anonymous_bytes()
    del kept
    print(json.dumps({"import": imported - start, "load": end - begin, "before": before, "after": after}), flush=True)
    os._exit(0)  # the pool's threads of kt-kernel are not asked


if __name__ == "__main__":
    main(*sys.argv[1:])
