/* The forward pass of a dense model, rounded where `model/` rounds; compiled once for each instruction set.
 *
 * A small model on a CPU spends more time between operators than in them, so all layers of a pass run here, on torch's
 * threads (the same OpenMP). The result of a token depends only on that token and the ones before it: every sum has a
 * fixed order, whatever else is in the pass, however many threads there are and however a prompt is cut.
 *
 * Numbers are fp32, or bf16 with sums in fp32. Matrices, keys and values consist of words of four bytes: one number in
 * fp32, two neighbours in bf16, which become two vectors of fp32 by a shift and a mask. Activations are fp32 in both
 * formats, rounded in BF16; they are bf16 only for the tiles of AMX, which take nothing else. `format` is a constant
 * wherever it is inlined.
 *
 * Matrices are stored in units of 32 outputs, word by word, as packed by `native.py`. Keys and values are stored in
 * pages of 32 tokens, head by head. A page of keys is a unit whose outputs are tokens; a page of values is a matrix
 * whose inputs are tokens. Sizes of heads, of the hidden state and within the MLP are multiples of 32.
 *
 * Functions that contain an `omp for` are called by all threads of a pass, and all threads leave them together.
 *
 * A file that includes this defines FORWARD, the name of the function; WIDTH, the bytes of a vector; REGISTERS, the
 * number of vector registers; HAS_TILES, 1 if it provides the products for TILES.
 */
#include "native.h"

#define INLINE static inline __attribute__((always_inline))

enum { LANES = WIDTH / 4, UNIT = 32, PAGE = 32, TILE = 16, ROWS = 2 * TILE, MAX_HEAD = 256 };
enum { MANY = REGISTERS / 4, ACROSS = REGISTERS == 32 && WIDTH < 64 ? 4 : 2 }; /* rows, vectors: sums in registers */
enum { DEPTH = 128 }; /* words; this part of a unit stays in the L1 cache for all rows */

typedef float F __attribute__((vector_size(WIDTH), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(WIDTH), aligned(4), may_alias));
typedef uint32_t U __attribute__((vector_size(WIDTH), aligned(4), may_alias));
typedef uint16_t Half __attribute__((vector_size(WIDTH / 2), aligned(2), may_alias));

#if !HAS_TILES
INLINE void tiles_on(void) {}
INLINE void tiles_off(void) {}
INLINE void multiply_tiles(const char *x, const char *w, int64_t inner, int64_t rows, float *y) {}
INLINE void multiply_pieces(
    const char *x, int64_t x_stride, const char *w, int64_t w_stride, const int64_t *pages, int64_t jump, int64_t count,
    float *y, int64_t y_stride) {}
#endif

/* Numbers. */

INLINE int64_t size_of(Format f) { return f == TILES ? 2 : 4; } /* bytes, between matrices */

INLINE int64_t in_word(Format f) { return f == FP32 ? 1 : 2; } /* numbers, in matrices */

INLINE F each(float x) { return x - (F){0}; }

INLINE F either(I mask, F yes, F no) { return (F)((mask & (I)yes) | (~mask & (I)no)); }

INLINE U nearest(F x) { /* the bits of bf16, in the upper half; ties to even */
    return ((U)x + 0x7fff + (((U)x >> 16) & 1)) & 0xffff0000;
}

INLINE F rounded(Format f, F x) { return f == FP32 ? x : (F)nearest(x); }

INLINE F load(Format f, const void *from, int64_t i) {
    if (f == TILES) return (F)(__builtin_convertvector(*(const Half *)((const uint16_t *)from + i), U) << 16);
    return *(const F *)((const float *)from + i);
}

INLINE void store(Format f, void *to, int64_t i, F x) {
    if (f == TILES)
        *(Half *)((uint16_t *)to + i) = __builtin_convertvector(nearest(x) >> 16, Half);
    else
        *(F *)((float *)to + i) = rounded(f, x);
}

INLINE float sum(F x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

INLINE F exponential(F x) { /* within 2 units in the last place; 0 below -87 */
    const F low = each(-87), high = each(88);
    const I tiny = x < low;
    x = either(x > high, high, either(tiny, low, x));
    const F shifted = x * 1.44269504f + 12582912.0f; /* the integer nearest to x / log 2, in the last bits */
    const F n = shifted - 12582912.0f;
    const F r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    F p = each(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return either(tiny, each(0), (F)((I)p + ((I)shifted << 23)));
}

/* Products: y [rows][UNIT] += x [rows][inputs] times w [words][UNIT]. The inputs of an output are added one by one, in
 * order, however many rows are computed at once. */

/* Prefetches `next` meanwhile: `step` bytes of it for each word. */
INLINE void multiply_few(
    Format f, int rows, int across, const float *x, int64_t x_stride, const uint32_t *w, int64_t w_stride, int64_t words,
    const char *next, int step, float *y, int64_t y_stride) {
    for (int at = 0; at < UNIT; at += across * LANES, step = 0) {
        F sums[MANY][UNIT / LANES];
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < across; c++) sums[r][c] = *(const F *)(y + r * y_stride + at + c * LANES);
        for (int64_t k = 0; k < words; k++) {
            for (int line = 0; line < step; line += 64) __builtin_prefetch(next + k * step + line);
            for (int c = 0; c < across; c++) {
                const U word = *(const U *)(w + k * w_stride + at + c * LANES);
                for (int r = 0; r < rows; r++) {
                    const float *in = x + r * x_stride + k * in_word(f);
                    sums[r][c] += in[0] * (f == FP32 ? (F)word : (F)(word << 16));
                    if (f != FP32) sums[r][c] += in[1] * (F)(word & 0xffff0000);
                }
            }
        }
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < across; c++) *(F *)(y + r * y_stride + at + c * LANES) = sums[r][c];
    }
}

INLINE void multiply_rows(
    Format f, int64_t rows, const float *x, int64_t x_stride, const uint32_t *w, int64_t w_stride, int64_t words,
    const void *next, int step, float *y, int64_t y_stride) {
#define MULTIPLY_NEXT(ROWS, ACROSS)                                                                                    \
    {                                                                                                                  \
        multiply_few(f, ROWS, ACROSS, x, x_stride, w, w_stride, words, next, step, y, y_stride);                       \
        rows -= ROWS, x += ROWS * x_stride, y += ROWS * y_stride, step = 0;                                            \
    }
    while (rows >= MANY) MULTIPLY_NEXT(MANY, 2)
    while (rows >= 4) MULTIPLY_NEXT(4, ACROSS)
    if (rows == 3) MULTIPLY_NEXT(3, ACROSS)
    if (rows == 2) MULTIPLY_NEXT(2, ACROSS)
    if (rows == 1) MULTIPLY_NEXT(1, UNIT / LANES)
#undef MULTIPLY_NEXT
}

INLINE void widen(const uint32_t *w, int64_t w_stride, int64_t words, float *to) {
    for (int64_t k = 0; k < words; k++)
        for (int c = 0; c < UNIT; c += LANES) {
            const U word = *(const U *)(w + k * w_stride + c);
            *(U *)(to + 2 * k * UNIT + c) = word << 16;
            *(U *)(to + (2 * k + 1) * UNIT + c) = word & 0xffff0000;
        }
}

/* One piece of `w` at a time stays in the L1 cache for all rows. For many rows bf16 is widened there once. */
static void multiply(
    Format f, int64_t rows, const float *x, int64_t x_stride, const uint32_t *w, int64_t w_stride, int64_t words,
    float *y, int64_t y_stride) {
    float wide[2 * DEPTH * UNIT] __attribute__((aligned(64)));
    while (words > 0) {
        const int64_t depth = words < DEPTH ? words : DEPTH;
        const uint32_t *next = w + depth * w_stride;
        if (f == FP32) {
            multiply_rows(FP32, rows, x, x_stride, w, w_stride, depth, next, 128, y, y_stride);
        } else if (rows < MANY) {
            multiply_rows(BF16, rows, x, x_stride, w, w_stride, depth, next, 128, y, y_stride);
        } else {
            widen(w, w_stride, depth, wide);
            multiply_rows(FP32, rows, x, x_stride, (uint32_t *)wide, UNIT, 2 * depth, next, 64, y, y_stride);
        }
        words -= depth, x += depth * in_word(f), w = next;
    }
}

/* Uses of a product. A unit of PAIRS is 16 outputs of the gate followed by the corresponding 16 of `up`. */

typedef enum { PLAIN, ADDED, PAIRS, LOGITS } Use;

INLINE void use_row(Format f, Use use, const float *y, const float *bias, void *to, int64_t at, int64_t outputs) {
    if (use == LOGITS) {
        const int64_t count = outputs - at < UNIT ? outputs - at : UNIT;
        float all[UNIT];
        for (int i = 0; i < UNIT; i += LANES) *(F *)(all + i) = rounded(f, *(const F *)(y + i));
        memcpy((float *)to + at, all, count * sizeof(float));
        return;
    }
    for (int i = 0; i < (use == PAIRS ? UNIT / 2 : UNIT); i += LANES) {
        F a = *(const F *)(y + i);
        if (use == PLAIN && bias) a += *(const F *)(bias + at + i);
        a = rounded(f, a);
        if (use == PAIRS) {
            const F b = rounded(f, *(const F *)(y + UNIT / 2 + i));
            const F active = rounded(f, a / (1.0f + exponential(-a)));
            store(f, to, at / 2 + i, active * b);
        } else {
            if (use == ADDED) a += load(f, to, at + i);
            store(f, to, at + i, a);
        }
    }
}

INLINE void linear(
    Format f, Use use, const char *x, int64_t rows, int64_t inner, const uint32_t *w, int64_t outputs, const float *bias,
    void *to) {
    const int64_t stride = use == LOGITS ? outputs * 4 : use == PAIRS ? outputs / 2 * size_of(f) : outputs * size_of(f);
    const int64_t words = inner / in_word(f);
#pragma omp for schedule(static)
    for (int64_t unit = 0; unit < (outputs + UNIT - 1) / UNIT; unit++) {
        float y[ROWS * UNIT] __attribute__((aligned(64)));
        const uint32_t *own = w + unit * UNIT * words;
        for (int64_t row = 0; row < rows; row += ROWS) {
            const int64_t count = rows - row < ROWS ? rows - row : ROWS;
            const char *from = x + row * inner * size_of(f);
            if (f == TILES) {
                multiply_tiles(from, (const char *)own, inner, count, y);
            } else {
                memset(y, 0, sizeof y);
                multiply(f, count, (const float *)from, inner, own, UNIT, words, y, UNIT);
            }
            for (int64_t r = 0; r < count; r++)
                use_row(f, use, y + r * UNIT, bias, (char *)to + (row + r) * stride, unit * UNIT, outputs);
        }
    }
}

/* Norms and positions. */

INLINE void norm(Format f, const void *x, const float *gain, void *to, int64_t size, float eps) {
    F squares = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        const F value = load(f, x, i);
        squares += value * value;
    }
    const float scale = 1.0f / sqrtf(sum(squares) / size + eps);
    for (int64_t i = 0; i < size; i += LANES) store(f, to, i, load(f, x, i) * scale * *(F *)(gain + i));
}

INLINE void norm_all(
    Format f, const Model *m, const char *x, const int64_t *rows, int64_t count, const float *gain, char *to) {
    const int64_t stride = m->hidden * size_of(f);
#pragma omp for schedule(static)
    for (int64_t n = 0; n < count; n++)
        norm(f, x + (rows ? rows[n] : n) * stride, gain, to + n * stride, m->hidden, m->eps);
}

INLINE void rotate(Format f, void *head, const float *rope, int64_t size) {
    for (int64_t i = 0; i < size / 2; i += LANES) {
        const int64_t j = i + size / 2;
        const F *cosine = (const F *)(rope + i), *sine = (const F *)(rope + size + i);
        const F a = load(f, head, i), b = load(f, head, j);
        store(f, head, i, rounded(f, a * *cosine) + b * *sine);
        store(f, head, j, rounded(f, b * *cosine) + a * *(const F *)(rope + size + j));
    }
}

INLINE uint32_t bits(Format f, const void *x, int64_t i) { /* of one number; for bf16 in the lower half */
    if (f == TILES) return ((const uint16_t *)x)[i];
    return f == BF16 ? ((const uint32_t *)x)[i] >> 16 : ((const uint32_t *)x)[i];
}

/* Normalise and rotate the heads of a token in place, and write its keys and values to the cache. */
INLINE void place(Format f, const Model *m, const Layer *l, char *qkv, int64_t position, int64_t slot) {
    const int64_t size = m->head_size, bytes = size * size_of(f), t = slot % PAGE;
    for (int64_t h = 0; h < m->heads + m->kv_heads; h++) {
        const float *gain = h < m->heads ? l->q_norm : l->k_norm;
        if (gain) norm(f, qkv + h * bytes, gain, qkv + h * bytes, size, m->eps);
        rotate(f, qkv + h * bytes, m->rope + position * 2 * size, size);
    }
    for (int64_t h = 0; h < m->kv_heads; h++) {
        const char *k = qkv + (m->heads + h) * bytes, *v = k + m->kv_heads * bytes;
        const int64_t first = (slot / PAGE * m->kv_heads + h) * size * PAGE / in_word(f);
        uint32_t *keys = l->keys + first + t, *values = l->values + first + t / in_word(f) * size;
        if (f == FP32) {
            for (int64_t d = 0; d < size; d++) keys[d * PAGE] = bits(f, k, d);
            memcpy(values, v, bytes);
        } else {
            for (int64_t d = 0; d < size / 2; d++) keys[d * PAGE] = bits(f, k, 2 * d) | bits(f, k, 2 * d + 1) << 16;
            for (int64_t d = 0; d < size; d++) ((uint16_t *)(values + d))[t % 2] = (uint16_t)bits(f, v, d);
        }
    }
}

/* Attention: query heads that share a key head, of consecutive tokens. */

typedef struct {
    const int64_t *blocks; /* of the sequence */
    const uint32_t *keys, *values;
    int64_t size, head, kv_heads;
    float scale;
    float *scores; /* TILE rows of `room` tokens, followed by as many rows of shares for tiles */
    int64_t room;
} Seen;

INLINE float largest_of(F x) {
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
}

/* Turn the first `length` of `all` scores into shares and return their sum; the rest get 0. */
INLINE float soften(Format f, float *scores, void *shares, int64_t length, int64_t all, float scale) {
    F most = each(-INFINITY), sums = {0};
    for (int64_t t = 0; t < all; t += LANES) {
        F score = *(F *)(scores + t) * scale;
        for (int64_t i = length - t < 0 ? 0 : length - t; i < LANES; i++) score[i] = -INFINITY;
        most = either(score > most, score, most);
        *(F *)(scores + t) = score;
    }
    const float largest = largest_of(most);
    for (int64_t t = 0; t < all; t += LANES) {
        const F share = rounded(f, exponential(*(F *)(scores + t) - largest));
        sums += share;
        store(f, shares, t, share);
    }
    return sum(sums);
}

INLINE void score_page(Format f, const Seen *s, int64_t rows, const char *query, int64_t b) {
    const uint32_t *keys = s->keys + (s->blocks[b] * s->kv_heads + s->head) * s->size * PAGE / in_word(f);
    float *scores = s->scores + b * PAGE;
    if (f == TILES) {
        multiply_pieces(
            query, 2 * s->size, (const char *)keys, 4 * PAGE, NULL, 64 * PAGE, s->size / 32, scores, 4 * s->room);
        return;
    }
    for (int64_t r = 0; r < rows; r++) memset(scores + r * s->room, 0, PAGE * sizeof(float));
    multiply(f, rows, (const float *)query, s->size, keys, PAGE, s->size / in_word(f), scores, s->room);
}

INLINE void mix_values(Format f, const Seen *s, int64_t rows, const void *shares, int64_t length, float *y) {
    const int64_t page_words = s->size * PAGE / in_word(f), jump = s->kv_heads * page_words;
    const int64_t pages = (length + PAGE - 1) / PAGE;
    for (int64_t d = 0; d < s->size; d += UNIT) {
        const uint32_t *values = s->values + s->head * page_words + d;
        if (f == TILES) {
            multiply_pieces(
                shares, 2 * s->room, (const char *)values, 4 * s->size, s->blocks, 4 * jump, pages, y + d, 4 * s->size);
            continue;
        }
        for (int64_t r = 0; r < rows; r++) memset(y + r * s->size + d, 0, UNIT * sizeof(float));
        for (int64_t b = 0; b < pages; b++) {
            const int64_t tokens = length - b * PAGE < PAGE ? length - b * PAGE : PAGE;
            multiply(
                f, rows, (const float *)shares + b * PAGE, s->room, values + s->blocks[b] * jump, s->size,
                (tokens + in_word(f) - 1) / in_word(f), y + d, s->size);
        }
    }
}

/* Up to TILE rows: the query q[r] attends to lengths[r] tokens, and its output goes to to[r]. */
INLINE void attend_tile(
    Format f, const Seen *s, int64_t rows, const char *const *q, const int64_t *lengths, char *const *to) {
    const int64_t longest = lengths[rows - 1], pages = (longest + PAGE - 1) / PAGE, bytes = s->size * size_of(f);
    char query[TILE * MAX_HEAD * sizeof(float)] __attribute__((aligned(64)));
    char *shares = (char *)(f == TILES ? s->scores + TILE * s->room : s->scores);
    float y[TILE * MAX_HEAD], total[TILE];
    for (int64_t r = 0; r < rows; r++) memcpy(query + r * bytes, q[r], bytes);
    for (int64_t b = 0; b < pages; b++) score_page(f, s, rows, query, b);
    for (int64_t r = 0; r < rows; r++) {
        void *own = shares + r * s->room * size_of(f);
        total[r] = soften(f, s->scores + r * s->room, own, lengths[r], pages * PAGE, s->scale);
    }
    mix_values(f, s, rows, shares, longest, y);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t d = 0; d < s->size; d += LANES) store(f, to[r], d, *(F *)(y + r * s->size + d) / total[r]);
}

/* The tokens from `n` to `end`, in tiles. */
INLINE void attend_tokens(
    Format f, const Model *m, const Pass *p, const Seen *s, int64_t n, int64_t end, char *qkv, char *mixed) {
    const int64_t group = m->heads / m->kv_heads, all = m->heads + 2 * m->kv_heads, bytes = s->size * size_of(f);
    const char *q[TILE];
    char *to[TILE];
    int64_t lengths[TILE], rows = 0;
    for (; n < end; n++)
        for (int64_t g = 0; g < group; g++) {
            q[rows] = qkv + (n * all + s->head * group + g) * bytes;
            to[rows] = mixed + (n * m->heads + s->head * group + g) * bytes;
            lengths[rows] = p->positions[n] + 1;
            if (++rows == TILE || (n == end - 1 && g == group - 1)) {
                attend_tile(f, s, rows, q, lengths, to);
                rows = 0;
            }
        }
}

INLINE void attend_all(
    Format f, const Model *m, const Layer *l, const Pass *p, char *qkv, char *mixed, float *scores) {
    const int64_t group = m->heads / m->kv_heads, step = group < TILE ? TILE / group : 1;
    Seen seen = {
        .keys = l->keys, .values = l->values, .size = m->head_size, .kv_heads = m->kv_heads,
        .scale = 1.0f / sqrtf(m->head_size), .room = p->longest, .scores = scores,
    };
    /* Neighbouring tokens see different lengths, so threads take the next one when they are done. */
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t n = 0; n < p->num_tokens; n++)
        for (int64_t head = 0; head < m->kv_heads; head++) {
            const int64_t sequence = p->sequence[n];
            if ((n - p->starts[sequence]) % step) continue; /* belongs to the tile of a token before it */
            int64_t end = n + 1;
            while (end < p->num_tokens && end < n + step && p->sequence[end] == sequence) end++;
            seen.blocks = p->blocks + sequence * p->width, seen.head = head;
            attend_tokens(f, m, p, &seen, n, end, qkv, mixed);
        }
}

/* The whole pass. Rows of scratch are padded to whole tiles; the padding is computed and never read. */

typedef struct {
    char *x, *normed, *qkv, *mixed, *act, *end;
    float *scores; /* of this thread */
} Scratch;

INLINE Scratch cut(const Model *m, const Pass *p) {
    const int64_t rows = (p->num_tokens + ROWS - 1) / ROWS * ROWS * size_of(m->format);
    const int64_t scores = TILE * p->longest * (sizeof(float) + sizeof(uint16_t));
    Scratch s = {.x = p->scratch};
    s.normed = s.x + rows * m->hidden;
    s.qkv = s.normed + rows * m->hidden;
    s.mixed = s.qkv + rows * (m->heads + 2 * m->kv_heads) * m->head_size;
    s.act = s.mixed + rows * m->heads * m->head_size;
    s.scores = (float *)(s.act + rows * m->inner + omp_get_thread_num() * scores);
    s.end = s.act + rows * m->inner + p->threads * scores;
    return s;
}

INLINE void embed(Format f, const void *table, int64_t token, int64_t size, char *to) {
    if (f != BF16) {
        memcpy(to, (const char *)table + token * size * size_of(f), size * size_of(f));
        return;
    }
    for (int64_t i = 0; i < size; i++)
        ((uint32_t *)to)[i] = (uint32_t)((const uint16_t *)table)[token * size + i] << 16;
}

INLINE void layers(Format f, const Model *m, const Pass *p, Scratch s) {
    const int64_t rows = p->num_tokens, size = size_of(f), heads = m->heads * m->head_size;
    const int64_t qkv = heads + 2 * m->kv_heads * m->head_size;
#pragma omp for schedule(static)
    for (int64_t n = 0; n < rows; n++) embed(f, m->embedding, p->tokens[n], m->hidden, s.x + n * m->hidden * size);
    for (const Layer *l = m->layers; l < m->layers + m->num_layers; l++) {
        norm_all(f, m, s.x, NULL, rows, l->norm, s.normed);
        linear(f, PLAIN, s.normed, rows, m->hidden, l->qkv, qkv, l->bias, s.qkv);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < rows; n++) place(f, m, l, s.qkv + n * qkv * size, p->positions[n], p->slots[n]);
        attend_all(f, m, l, p, s.qkv, s.mixed, s.scores);
        linear(f, ADDED, s.mixed, rows, heads, l->out, m->hidden, NULL, s.x);
        norm_all(f, m, s.x, NULL, rows, l->mlp_norm, s.normed);
        linear(f, PAIRS, s.normed, rows, m->hidden, l->gate_up, 2 * m->inner, NULL, s.act);
        linear(f, ADDED, s.act, rows, m->inner, l->down, m->hidden, NULL, s.x);
    }
    norm_all(f, m, s.x, p->rows, p->num_rows, m->norm, s.normed);
    linear(f, LOGITS, s.normed, p->num_rows, m->hidden, m->head, m->vocabulary, NULL, p->logits);
}

void FORWARD(const Model *m, const Pass *p) {
#pragma omp parallel num_threads(p->threads)
    {
        const Scratch scratch = cut(m, p);
        if (HAS_TILES && m->format == TILES) {
            tiles_on();
            layers(TILES, m, p, scratch);
            tiles_off();
        } else if (m->format == BF16) {
            layers(BF16, m, p, scratch);
        } else {
            layers(FP32, m, p, scratch);
        }
    }
}
