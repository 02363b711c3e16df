/* Packing b16, bfloat16 weights; see words.h. */
#define EXPONENT 0x7F80
#include "pack/words.h"

const kt_packing kt_pack_b16 = {"b16", 0, 1, 16, BLOCK_BYTES, pack_codes, unpack_codes, unpack_row};
