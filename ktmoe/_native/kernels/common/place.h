/* What decode() is asked for, as panel.h has it. */
#ifndef KT_PLACE_H
#define KT_PLACE_H

#include <stddef.h>
#include <stdint.h>

/* 8 k of a panel. */
typedef struct place {
    const uint8_t *block; /* their block's packed bytes */
    size_t number;        /* the block's, from the row's beginning */
    int octet;            /* of the block's four */
} place;

#endif
