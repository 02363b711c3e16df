"""exchanging.py FILE RANK: one of three ranks that have 1, 2 and 3 tokens. Prints what it gets of the others, as JSON."""

from __future__ import annotations

import json
import sys

SIZES = [1, 2, 3]


def main(file: str, rank: int) -> dict[str, list]:
    import torch
    from torch import distributed

    from ktmoe.vllm.communicator import UnevenCommunicator

    store = distributed.FileStore(file, len(SIZES))
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=len(SIZES))
    world = distributed.group.WORLD
    ours = UnevenCommunicator(world, torch.device("cpu"), world, "dp:0")
    rows = torch.full((SIZES[rank], 2), rank + 1.0, dtype=torch.bfloat16)
    ids = torch.arange(SIZES[rank]) + 10 * rank
    gathered = ours.all_gatherv([rows, ids], 0, SIZES)
    # 256 + 1 is 256 in bfloat16, and 256 + 1 + 1 is 258
    parts = torch.full((sum(SIZES), 1), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16) * (1 + torch.arange(6)[:, None] // 5)
    found = [*gathered, ours.reduce_scatterv(parts, 0, SIZES)]
    distributed.destroy_process_group()
    return {"dtypes": [str(each.dtype) for each in found], "values": [each.tolist() for each in found]}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
