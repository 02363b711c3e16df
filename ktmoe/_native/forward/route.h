/* Which expert sees which tokens. */
#ifndef KT_ROUTE_H
#define KT_ROUTE_H

#include "forward/carve.h"
#include "forward/forward.h"

/* An expert's rows in one range of tokens: [first, first + count) of everything that is kept by slot. */
typedef struct kt_piece {
    size_t expert, first, count;
} kt_piece;

/* Tokens [first, end), and what there is of them. */
typedef struct kt_route_range {
    size_t first, end, first_piece, num_pieces, num_slots;
} kt_route_range;

/* A slot is one (token, expert) pair that is not skipped. Slots are sorted by range of tokens, then expert, then token, then their
 * place in the token's list. */
typedef struct kt_route {
    size_t num_ranges, num_pieces, num_slots;
    kt_route_range *ranges;
    kt_piece *pieces;      /* by range, then ascending expert */
    uint32_t *by_cost;     /* indices of pieces, most rows first */
    uint32_t *slot_token;  /* [slots] */
    float *slot_weight;    /* [slots] */
    uint32_t *slot_row;    /* [slots]: the batch's row of h and of what is kept */
    uint32_t *token_slots; /* [tokens][top_k]: a token's slots, ascending, so in ascending expert */
    uint32_t *token_count; /* [tokens] */
    uint8_t *active;       /* [num_experts]: the mask as it was when the call began, set by the caller */
    int64_t *ids;          /* [tokens][top_k]: as they were then */
} kt_route;

void kt_route_carve(kt_route *r, kt_carver *c, size_t num_experts, size_t tokens, size_t top_k, size_t ranges);
/* ranges: of tokens, equally many; as many as there are tokens if those are fewer. */
void kt_route_fill(kt_route *r, const kt_batch *batch, size_t num_experts, size_t ranges);

#endif
