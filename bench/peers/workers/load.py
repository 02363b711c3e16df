"""load.py LIBRARY FOLDER: what importing a library and loading a layer takes in this process, as a line of JSON.

LIBRARY: "ktmoe" or "kt-kernel". Times in seconds; memory in bytes, of anonymous pages alone, which no file gives back.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

#: Between two looks at the memory in use.
PERIOD_SECONDS = 0.003


def anonymous_bytes() -> int:
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith("RssAnon"))


class Watch:
    """The most anonymous memory while it is open."""

    def __enter__(self) -> Watch:
        self.before = self.most = anonymous_bytes()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._end.wait(PERIOD_SECONDS):
            self.most = max(self.most, anonymous_bytes())

    def __exit__(self, *_error: object) -> None:
        self._end.set()
        self._thread.join()
        self.after = anonymous_bytes()
        self.most = max(self.most, self.after)


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
    with Watch() as watch:
        kept = load(module)
    loaded = time.perf_counter()
    report = {
        "import": imported - start,
        "load": loaded - imported,
        "most": watch.most - watch.before,
        "after": watch.after - watch.before,
        "library": type(kept).__module__,
    }
    print(json.dumps(report), flush=True)
    os._exit(0)  # the pool's threads of kt-kernel are not asked


if __name__ == "__main__":
    main(*sys.argv[1:])
