/* One pass of a dense model on a CPU, in one call: what `model/` computes, rounded where it rounds.
 *
 * A small model on a CPU spends more time between operators than in them, so all layers of a pass run here, on the
 * threads that torch has (the same OpenMP). What a token gets depends on that token and the ones before it alone:
 * every sum has one order, whatever else is in the pass, however many threads there are and however a prompt is cut.
 *
 * Numbers are fp32, by vectors of any processor, or bf16 with sums in fp32, by the tiles of AMX (`is_bf16`, a constant
 * wherever it is inlined). A word is four bytes: one number in fp32, two neighbours in bf16. Matrices are stored in
 * units of 32 outputs, word by word: `native.py` does that. Keys and values lie in pages of tokens, head by head. Keys
 * are transposed by words, so that a vector holds one word of many tokens; a word of values holds the same number of
 * two tokens in bf16. Sizes of heads, of the hidden state and within the MLP are multiples of 32.
 *
 * Functions that hold an `omp for` are called by all threads of a pass, and all leave them together. Nothing here
 * depends on Python.
 */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORS
#endif
#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16, UNIT = 32, TILE = 16, ROWS = 2 * TILE, MAX_HEAD = 256, FEW = 4 };

typedef float F __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t U __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t Half __attribute__((vector_size(32), aligned(2), may_alias));

typedef struct {
    const float *norm, *bias, *q_norm, *k_norm, *mlp_norm; /* bias and the norms of heads may be absent */
    const void *qkv, *out, *gate_up, *down;
    void *keys, *values;
} Layer;

typedef struct {
    int64_t is_bf16, num_layers, hidden, inner, heads, kv_heads, head_size, vocabulary;
    double eps;
    const float *rope; /* [positions, 2, head_size], as rope.table makes it */
    const void *embedding, *head;
    const float *norm;
    const Layer *layers;
} Model;

typedef struct {
    int64_t num_tokens, num_rows, width; /* width: of the block table */
    const int64_t *tokens, *positions, *slots, *starts, *sequence, *blocks, *rows;
    float *logits; /* [num_rows, vocabulary] */
    char *scratch;
    int64_t longest, threads;
} Pass;

/* Numbers. */

INLINE int64_t size_of(int is_bf16) { return is_bf16 ? 2 : 4; }

INLINE int64_t page_of(int is_bf16) { return is_bf16 ? 32 : 16; } /* tokens: what a vector or a tile takes */

INLINE F each(float x) { return x - (F){0}; }

INLINE F either(I mask, F yes, F no) { return (F)((mask & (I)yes) | (~mask & (I)no)); }

INLINE F load(int is_bf16, const void *from, int64_t i) {
    if (is_bf16) return (F)(__builtin_convertvector(*(const Half *)((const uint16_t *)from + i), U) << 16);
    return *(const F *)((const float *)from + i);
}

INLINE U nearest(F x) { /* the bits of bf16, in the upper half; ties to even */
    return ((U)x + 0x7fff + (((U)x >> 16) & 1)) & 0xffff0000;
}

INLINE F rounded(int is_bf16, F x) { return is_bf16 ? (F)nearest(x) : x; }

INLINE void store(int is_bf16, void *to, int64_t i, F x) {
    if (is_bf16)
        *(Half *)((uint16_t *)to + i) = __builtin_convertvector(nearest(x) >> 16, Half);
    else
        *(F *)((float *)to + i) = x;
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

/* Products: rows of x with one unit of a matrix, into y [ROWS][UNIT]. */

INLINE void multiply_few(const float *x, const F *w, int64_t inner, int64_t rows, F *y) {
    F left[FEW] = {0}, right[FEW] = {0};
    for (int64_t k = 0; k < inner; k++) {
        const F a = w[2 * k], b = w[2 * k + 1];
        for (int64_t r = 0; r < rows; r++) {
            left[r] += x[r * inner + k] * a;
            right[r] += x[r * inner + k] * b;
        }
    }
    for (int64_t r = 0; r < rows; r++) y[2 * r] = left[r], y[2 * r + 1] = right[r];
}

VECTORS static void multiply(const float *x, const F *w, int64_t inner, int64_t rows, F *y) {
    for (; rows >= FEW; rows -= FEW, x += FEW * inner, y += FEW * 2) multiply_few(x, w, inner, FEW, y);
    for (; rows; rows--, x += inner, y += 2) multiply_few(x, w, inner, 1, y);
}

#if defined(__x86_64__)
#define AMX __attribute__((target("amx-tile,amx-bf16,avx512f")))

int has_bf16(void) {
    enum { ASK_FOR_STATE = 0x1023, TILES = 18 }; /* Linux wants to be asked before it saves tiles */
    return __builtin_cpu_supports("amx-bf16") && !syscall(SYS_arch_prctl, ASK_FOR_STATE, TILES);
}

static const struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} SHAPE = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

AMX static void tiles_on(void) { _tile_loadconfig(&SHAPE); }

AMX static void tiles_off(void) { _tile_release(); }

AMX static void multiply_tiles(const char *x, const char *w, int64_t inner, int64_t rows, float *y) {
    const int64_t stride = 2 * inner;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < inner; k += 32, x += 64, w += 2048) {
        _tile_loadd(4, x, stride);
        _tile_loadd(6, w, 128);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + 64, 128);
        _tile_dpbf16ps(1, 4, 7);
        if (rows > TILE) {
            _tile_loadd(5, x + TILE * stride, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, y, 128);
    _tile_stored(1, y + 16, 128);
    if (rows > TILE) {
        _tile_stored(2, y + TILE * UNIT, 128);
        _tile_stored(3, y + TILE * UNIT + 16, 128);
    }
}

/* y [TILE][32] = x [TILE][32 * count] times the sum of `count` pieces, 32 outputs wide and 32 numbers deep each; a row
 * of words of a piece is `w_stride` bytes behind the last. `jump` bytes are between pieces, or `pages` says where. */
AMX static void multiply_pieces(
    const char *x, int64_t x_stride, const char *w, int64_t w_stride, const int64_t *pages, int64_t jump, int64_t count,
    float *y, int64_t y_stride) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t k = 0; k < count; k++) {
        const char *piece = w + (pages ? pages[k] : k) * jump;
        _tile_loadd(4, x + 64 * k, x_stride);
        _tile_loadd(6, piece, w_stride);
        _tile_loadd(7, piece + 64, w_stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
    }
    _tile_stored(0, y, y_stride);
    _tile_stored(1, y + 16, y_stride);
}
#else
int has_bf16(void) { return 0; }
#define tiles_on()
#define tiles_off()
#define multiply_tiles(...)
#define multiply_pieces(...)
#endif

/* What becomes of a product. A unit of PAIRS is 16 outputs of the gate and the 16 of the other matrix beside them. */

typedef enum { PLAIN, ADDED, PAIRS, LOGITS } Use;

INLINE void use_rows(int is_bf16, Use use, const F *y, const float *bias, void *to, int64_t at, int64_t outputs) {
    F a = y[0], b = y[1];
    if (use == PLAIN && bias) a += *(const F *)(bias + at), b += *(const F *)(bias + at + LANES);
    a = rounded(is_bf16, a), b = rounded(is_bf16, b);
    if (use == PAIRS) {
        const F active = rounded(is_bf16, a / (1.0f + exponential(-a)));
        store(is_bf16, to, at / 2, active * b);
        return;
    }
    if (use == LOGITS) {
        const int64_t count = outputs - at < UNIT ? outputs - at : UNIT;
        const F both[2] = {a, b};
        memcpy((float *)to + at, both, count * sizeof(float));
        return;
    }
    if (use == ADDED) a += load(is_bf16, to, at), b += load(is_bf16, to, at + LANES);
    store(is_bf16, to, at, a);
    store(is_bf16, to, at + LANES, b);
}

VECTORS static void use_product(
    int is_bf16, Use use, const float *y, const float *bias, char *to, int64_t stride, int64_t at, int64_t outputs,
    int64_t rows) {
    for (int64_t r = 0; r < rows; r++)
        if (is_bf16)
            use_rows(1, use, (const F *)(y + r * UNIT), bias, to + r * stride, at, outputs);
        else
            use_rows(0, use, (const F *)(y + r * UNIT), bias, to + r * stride, at, outputs);
}

static void linear(
    const Model *m, Use use, const char *x, int64_t rows, int64_t inner, const char *w, int64_t outputs,
    const float *bias, void *to) {
    const int64_t size = size_of(m->is_bf16);
    const int64_t stride = use == LOGITS ? outputs * 4 : use == PAIRS ? outputs / 2 * size : outputs * size;
#pragma omp for schedule(static)
    for (int64_t unit = 0; unit < (outputs + UNIT - 1) / UNIT; unit++) {
        float y[ROWS * UNIT] __attribute__((aligned(64)));
        const char *own = w + unit * UNIT * inner * size;
        for (int64_t row = 0; row < rows; row += ROWS) {
            const int64_t count = rows - row < ROWS ? rows - row : ROWS;
            if (m->is_bf16)
                multiply_tiles(x + row * inner * size, own, inner, count, y);
            else
                multiply((const float *)x + row * inner, (const F *)own, inner, count, (F *)y);
            use_product(m->is_bf16, use, y, bias, (char *)to + row * stride, stride, unit * UNIT, outputs, count);
        }
    }
}

/* Norms and positions. */

INLINE void norm_row(int is_bf16, const void *x, const float *gain, void *to, int64_t size, float eps) {
    F squares = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        const F value = load(is_bf16, x, i);
        squares += value * value;
    }
    const float scale = 1.0f / sqrtf(sum(squares) / size + eps);
    for (int64_t i = 0; i < size; i += LANES) store(is_bf16, to, i, load(is_bf16, x, i) * scale * *(F *)(gain + i));
}

VECTORS static void norm(int is_bf16, const void *x, const float *gain, void *to, int64_t size, float eps) {
    if (is_bf16)
        norm_row(1, x, gain, to, size, eps);
    else
        norm_row(0, x, gain, to, size, eps);
}

static void norm_all(const Model *m, const char *x, const int64_t *rows, int64_t count, const float *gain, char *to) {
    const int64_t stride = m->hidden * size_of(m->is_bf16);
#pragma omp for schedule(static)
    for (int64_t n = 0; n < count; n++)
        norm(m->is_bf16, x + (rows ? rows[n] : n) * stride, gain, to + n * stride, m->hidden, m->eps);
}

INLINE void rotate(int is_bf16, void *head, const float *rope, int64_t size) {
    for (int64_t i = 0; i < size / 2; i += LANES) {
        const int64_t j = i + size / 2;
        const F *cosine = (const F *)(rope + i), *sine = (const F *)(rope + size + i);
        const F a = load(is_bf16, head, i), b = load(is_bf16, head, j);
        store(is_bf16, head, i, rounded(is_bf16, a * *cosine) + b * *sine);
        store(is_bf16, head, j, rounded(is_bf16, b * *cosine) + a * *(const F *)(rope + size + j));
    }
}

/* Norms and rotates the heads of a token in place, and writes its keys and values into the cache. */
INLINE void place_token(int is_bf16, const Model *m, const Layer *l, char *qkv, int64_t position, int64_t slot) {
    const int64_t size = m->head_size, bytes = size * size_of(is_bf16), page = page_of(is_bf16), t = slot % page;
    for (int64_t h = 0; h < m->heads + m->kv_heads; h++) {
        const float *gain = h < m->heads ? l->q_norm : l->k_norm;
        if (gain) norm_row(is_bf16, qkv + h * bytes, gain, qkv + h * bytes, size, m->eps);
        rotate(is_bf16, qkv + h * bytes, m->rope + position * 2 * size, size);
    }
    for (int64_t h = 0; h < m->kv_heads; h++) {
        const char *k = qkv + (m->heads + h) * bytes, *v = k + m->kv_heads * bytes;
        const int64_t first = (slot / page * m->kv_heads + h) * bytes * page;
        uint32_t *keys = (uint32_t *)((char *)l->keys + first) + t;
        for (int64_t d = 0; d < bytes / 4; d++) keys[d * page] = ((const uint32_t *)k)[d];
        if (is_bf16) {
            uint16_t *values = (uint16_t *)((char *)l->values + first) + t / 2 * 2 * size + t % 2;
            for (int64_t d = 0; d < size; d++) values[2 * d] = ((const uint16_t *)v)[d];
        } else
            memcpy((char *)l->values + first + t * bytes, v, bytes);
    }
}

VECTORS static void place(int is_bf16, const Model *m, const Layer *l, char *qkv, int64_t position, int64_t slot) {
    if (is_bf16)
        place_token(1, m, l, qkv, position, slot);
    else
        place_token(0, m, l, qkv, position, slot);
}

/* Attention: query heads that share a key head, of one token or (in bf16) of several that stand in a row. */

typedef struct {
    const int64_t *blocks; /* of the sequence */
    const char *keys, *values;
    int64_t size, head, kv_heads;
    float scale;
    float *scores; /* TILE rows of `room` tokens; and behind them as many of shares in bf16 */
    int64_t room;
} Seen;

INLINE float largest_of(F x) {
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
    return most;
}

/* Makes shares of the first `length` of `all` scores and returns their sum; the rest get none. */
INLINE float soften(float *scores, uint16_t *shares, int64_t length, int64_t all, float scale) {
    F most = each(-INFINITY), sums = {0};
    for (int64_t t = 0; t < all; t += LANES) {
        F score = *(F *)(scores + t) * scale;
        for (int64_t i = length - t < 0 ? 0 : length - t; i < LANES; i++) score[i] = -INFINITY;
        most = either(score > most, score, most);
        *(F *)(scores + t) = score;
    }
    const float largest = largest_of(most);
    for (int64_t t = 0; t < all; t += LANES) {
        const F share = rounded(shares != NULL, exponential(*(F *)(scores + t) - largest));
        sums += share;
        store(shares != NULL, shares ? (void *)shares : scores, t, share);
    }
    return sum(sums);
}

INLINE void attend_few(const Seen *s, int64_t length, int64_t count, const float *q, float *to) {
    const int64_t page = page_of(0), pages = (length + page - 1) / page;
    for (int64_t b = 0; b < pages; b++) {
        const F *keys = (const F *)s->keys + (s->blocks[b] * s->kv_heads + s->head) * s->size;
        F score[FEW] = {0};
        for (int64_t d = 0; d < s->size; d++)
            for (int64_t r = 0; r < count; r++) score[r] += q[r * s->size + d] * keys[d];
        for (int64_t r = 0; r < count; r++) *(F *)(s->scores + r * s->room + b * page) = score[r];
    }
    float total[FEW];
    for (int64_t r = 0; r < count; r++)
        total[r] = soften(s->scores + r * s->room, NULL, length, pages * page, s->scale);
    for (int64_t d = 0; d < s->size; d += 2 * LANES) {
        F left[FEW] = {0}, right[FEW] = {0};
        for (int64_t t = 0; t < length; t++) {
            const int64_t first = (s->blocks[t / page] * s->kv_heads + s->head) * page + t % page;
            const F *values = (const F *)((const float *)s->values + first * s->size + d);
            for (int64_t r = 0; r < count; r++) {
                const float share = s->scores[r * s->room + t];
                left[r] += share * values[0];
                right[r] += share * values[1];
            }
        }
        for (int64_t r = 0; r < count; r++) {
            *(F *)(to + r * s->size + d) = left[r] / total[r];
            *(F *)(to + r * s->size + d + LANES) = right[r] / total[r];
        }
    }
}

VECTORS static void attend(const Seen *s, int64_t length, int64_t count, const float *q, float *to) {
    for (; count >= FEW; count -= FEW, q += FEW * s->size, to += FEW * s->size) attend_few(s, length, FEW, q, to);
    if (count == 3) attend_few(s, length, 3, q, to);
    if (count == 2) attend_few(s, length, 2, q, to);
    if (count == 1) attend_few(s, length, 1, q, to);
}

VECTORS static float soften_row(float *scores, uint16_t *shares, int64_t length, int64_t all, float scale) {
    return soften(scores, shares, length, all, scale);
}

VECTORS static void divide_row(const float *y, float total, uint16_t *to) {
    store(1, to, 0, *(const F *)y / total);
    store(1, to, LANES, *(const F *)(y + LANES) / total);
}

/* Up to TILE rows: the queries at `q`, of `length` tokens each, go to `to`. */
static void attend_tile(const Seen *s, int64_t rows, const uint16_t *const *q, const int64_t *lengths, uint16_t **to) {
    const int64_t page = page_of(1), pages = (lengths[rows - 1] + page - 1) / page, bytes = 2 * s->size;
    uint16_t query[TILE * MAX_HEAD], *shares = (uint16_t *)(s->scores + TILE * s->room);
    float y[TILE * UNIT], total[TILE];
    for (int64_t r = 0; r < rows; r++) memcpy(query + r * s->size, q[r], bytes);
    for (int64_t b = 0; b < pages; b++) {
        const char *keys = s->keys + (s->blocks[b] * s->kv_heads + s->head) * bytes * page;
        float *scores = s->scores + b * page;
        multiply_pieces((char *)query, bytes, keys, 4 * page, NULL, 64 * page, s->size / 32, scores, 4 * s->room);
    }
    for (int64_t r = 0; r < rows; r++)
        total[r] = soften_row(s->scores + r * s->room, shares + r * s->room, lengths[r], pages * page, s->scale);
    for (int64_t d = 0; d < s->size; d += UNIT) {
        const char *values = s->values + s->head * bytes * page + 4 * d;
        const int64_t jump = s->kv_heads * bytes * page;
        multiply_pieces((char *)shares, 2 * s->room, values, 2 * bytes, s->blocks, jump, pages, y, 4 * UNIT);
        for (int64_t r = 0; r < rows; r++) divide_row(y + r * UNIT, total[r], to[r] + d);
    }
}

/* The tokens from `n` on, as many as make a tile. */
static void attend_tokens(
    const Model *m, const Pass *p, const Seen *s, int64_t n, int64_t end, char *qkv, char *mixed) {
    const int64_t group = m->heads / m->kv_heads, all = m->heads + 2 * m->kv_heads;
    if (!m->is_bf16) {
        float *q = (float *)qkv + (n * all + s->head * group) * s->size;
        attend(s, p->positions[n] + 1, group, q, (float *)mixed + (n * m->heads + s->head * group) * s->size);
        return;
    }
    const uint16_t *q[TILE];
    uint16_t *to[TILE];
    int64_t lengths[TILE], rows = 0;
    for (; n < end; n++)
        for (int64_t g = 0; g < group; g++) {
            q[rows] = (uint16_t *)qkv + (n * all + s->head * group + g) * s->size;
            to[rows] = (uint16_t *)mixed + (n * m->heads + s->head * group + g) * s->size;
            lengths[rows] = p->positions[n] + 1;
            if (++rows == TILE || (n == end - 1 && g == group - 1)) {
                attend_tile(s, rows, q, lengths, to);
                rows = 0;
            }
        }
}

static void attend_all(const Model *m, const Layer *l, const Pass *p, char *qkv, char *mixed, float *scores) {
    const int64_t group = m->heads / m->kv_heads, step = m->is_bf16 && group < TILE ? TILE / group : 1;
    Seen seen = {
        .keys = l->keys, .values = l->values, .size = m->head_size, .kv_heads = m->kv_heads,
        .scale = 1.0f / sqrtf(m->head_size), .room = p->longest, .scores = scores,
    };
    /* Neighbouring tokens see different lengths; whoever is done takes the next. */
#pragma omp for collapse(2) schedule(dynamic)
    for (int64_t n = 0; n < p->num_tokens; n++)
        for (int64_t head = 0; head < m->kv_heads; head++) {
            const int64_t sequence = p->sequence[n];
            if ((n - p->starts[sequence]) % step) continue; /* belongs to the tile of a token before it */
            int64_t end = n + 1;
            while (end < p->num_tokens && end < n + step && p->sequence[end] == sequence) end++;
            seen.blocks = p->blocks + sequence * p->width, seen.head = head;
            attend_tokens(m, p, &seen, n, end, qkv, mixed);
        }
}

/* The whole. Rows of scratch are filled up to whole tiles, which are computed and never looked at. */

typedef struct {
    char *x, *normed, *qkv, *mixed, *act, *end;
    float *scores; /* of this thread */
} Scratch;

static Scratch cut(const Model *m, const Pass *p) {
    const int64_t rows = (p->num_tokens + ROWS - 1) / ROWS * ROWS * size_of(m->is_bf16);
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

int64_t scratch_bytes(const Model *m, const Pass *p) { return cut(m, p).end - p->scratch; }

static void layers(const Model *m, const Pass *p, Scratch s) {
    const int64_t rows = p->num_tokens, size = size_of(m->is_bf16), heads = m->heads * m->head_size;
    const int64_t qkv = heads + 2 * m->kv_heads * m->head_size;
#pragma omp for schedule(static)
    for (int64_t n = 0; n < rows; n++) {
        const int64_t bytes = m->hidden * size;
        memcpy(s.x + n * bytes, (const char *)m->embedding + p->tokens[n] * bytes, bytes);
    }
    for (const Layer *l = m->layers; l < m->layers + m->num_layers; l++) {
        norm_all(m, s.x, NULL, rows, l->norm, s.normed);
        linear(m, PLAIN, s.normed, rows, m->hidden, l->qkv, qkv, l->bias, s.qkv);
#pragma omp for schedule(static)
        for (int64_t n = 0; n < rows; n++)
            place(m->is_bf16, m, l, s.qkv + n * qkv * size, p->positions[n], p->slots[n]);
        attend_all(m, l, p, s.qkv, s.mixed, s.scores);
        linear(m, ADDED, s.mixed, rows, heads, l->out, m->hidden, NULL, s.x);
        norm_all(m, s.x, NULL, rows, l->mlp_norm, s.normed);
        linear(m, PAIRS, s.normed, rows, m->hidden, l->gate_up, 2 * m->inner, NULL, s.act);
        linear(m, ADDED, s.act, rows, m->inner, l->down, m->hidden, NULL, s.x);
    }
    norm_all(m, s.x, p->rows, p->num_rows, m->norm, s.normed);
    linear(m, LOGITS, s.normed, p->num_rows, m->hidden, m->head, m->vocabulary, NULL, p->logits);
}

void forward(const Model *m, const Pass *p) {
#pragma omp parallel num_threads(p->threads)
    {
        if (m->is_bf16) tiles_on();
        layers(m, p, cut(m, p));
        if (m->is_bf16) tiles_off();
    }
}
