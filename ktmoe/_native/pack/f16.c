/* Packing f16, weights of IEEE 754's 16 bits; see words.h. */
#define EXPONENT 0x7C00
#include "pack/words.h"

const kt_packing kt_pack_f16 = {"f16", 0, 1, 16, BLOCK_BYTES, pack_codes, unpack_codes, unpack_row};
