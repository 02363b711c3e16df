"""What the gguf package makes of records: golden/ggml_records.npz holds random records of each type, and its values of them.

`python tests/ggml_golden.py`, where gguf 0.19.0 is installed, writes that file again.
"""

from pathlib import Path

import numpy as np

FILE = Path(__file__).parent / "golden" / "ggml_records.npz"
WEIGHTS = 1024


def write(random_codes, formats) -> None:
    import gguf

    rng = np.random.default_rng(20)
    arrays = {}
    for name, weight_format in formats.items():
        records = random_codes(rng, weight_format, 1, 1, WEIGHTS)[0]
        arrays[f"{name} records"] = records
        arrays[f"{name} values"] = gguf.quants.dequantize(records, gguf.GGMLQuantizationType[name])
    arrays["sizes"] = np.array([(int(t), *size) for t, size in gguf.GGML_QUANT_SIZES.items()])
    arrays["names"] = np.array([t.name for t in gguf.GGML_QUANT_SIZES])
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    from ggml_records import IN_RECORDS, random_codes

    write(random_codes, IN_RECORDS)
