"""What the gguf package makes of records: golden/ggml_records.npz holds random records of each type, its values of them, and
the numbers of its grids.

`python tests/ggml_golden.py`, where gguf 0.19.0 is installed, adds what the file does not have yet.
"""

from pathlib import Path

import numpy as np

from ktmoe.weights.grid_records import GridRecords

FILE = Path(__file__).parent / "golden" / "ggml_records.npz"
WEIGHTS = 1024


def write(random_codes, formats) -> None:
    import gguf

    arrays = dict(np.load(FILE)) if FILE.exists() else {}
    for name, weight_format in formats.items():
        if f"{name} records" in arrays:
            continue
        kind = gguf.GGMLQuantizationType[name]
        records = random_codes(np.random.default_rng([20, kind]), weight_format, 1, 1, WEIGHTS)[0]
        arrays[f"{name} records"] = records
        arrays[f"{name} values"] = gguf.quants.dequantize(records, kind)
        if isinstance(weight_format.order, GridRecords):
            of_grid = getattr(gguf.quants, name)
            of_grid.init_grid()
            arrays[f"{name} grid"] = of_grid.grid.reshape(of_grid.grid_shape).astype(np.int8)
    arrays["sizes"] = np.array([(int(t), *size) for t, size in gguf.GGML_QUANT_SIZES.items()])
    arrays["names"] = np.array([t.name for t in gguf.GGML_QUANT_SIZES])
    np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
    from ggml_records import IN_RECORDS, random_codes

    write(random_codes, IN_RECORDS)
