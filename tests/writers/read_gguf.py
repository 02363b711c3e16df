"""read_gguf.py FILE...: what gguf's own reader finds in them, as JSON: name, type, shape, offset and bytes of each tensor."""

import json
import sys
import zlib

import gguf
import numpy as np

if __name__ == "__main__":
    tensors = [tensor for file in sys.argv[1:] for tensor in gguf.GGUFReader(file).tensors]
    rows = [
        (t.name, t.tensor_type.name, t.shape[::-1].tolist(), int(t.data_offset), zlib.crc32(np.ascontiguousarray(t.data)))
        for t in tensors
    ]
    print(json.dumps(rows))
