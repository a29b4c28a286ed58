/* The delta codec in C: byte for byte the same as the numpy codec in `reference.py`, at memory speed.
 *
 * The payload is documented in `codec.py`. Elements are processed in blocks of 64: one mask per context marks the
 * elements that belong to it, so a popcount moves a context past the block, and only blocks with a change need more work.
 * The walk is compiled for each instruction set below; `isa` and `width` are constants wherever it is inlined.
 *
 * The decoder trusts no input: every count is checked against the number of elements, every read against the end of the
 * payload, and memory is allocated only after that. Nothing here depends on Python.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the payload is little-endian, and so must the machine be"
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

enum { BLOCK = 64, MAX_CONTEXTS = 16, SAMPLE = 256 };
enum { TOO_LARGE = -1, NO_MEMORY = -2, DAMAGED = -3 };
enum { GENERIC, AVX2, AVX512 }; /* in the order of core/isa.py */

#define INLINE static inline __attribute__((always_inline))

typedef uint64_t Pair __attribute__((vector_size(16), aligned(8), may_alias));
typedef int32_t Quad __attribute__((vector_size(16), aligned(4), may_alias));

typedef struct {
    int width, shift, contexts, ordered, top; /* width in bytes; ordered: sign and magnitude, not an integer */
    uint32_t exponent;                        /* mask of the exponent, after the shift */
} Kind;

typedef struct {
    uint32_t gap, step; /* step: two's complement */
} Change;

/* Bits, lowest first. */

typedef struct {
    uint8_t *at, *end;
    uint64_t bits;
    int fill, full;
} Writer;

INLINE void put(Writer *w, uint64_t bits, int count) { /* count <= 32 */
    w->bits |= bits << w->fill;
    w->fill += count;
    if (w->fill >= 32) {
        if (w->end - w->at < 4) {
            w->full = 1;
            w->at = w->end - 4;
        }
        memcpy(w->at, &w->bits, 4);
        w->at += 4;
        w->bits >>= 32;
        w->fill -= 32;
    }
}

INLINE void put_unary(Writer *w, uint32_t zeros) {
    for (; zeros >= 31; zeros -= 31) put(w, 0, 31);
    put(w, 1ull << zeros, (int)zeros + 1);
}

static void finish(Writer *w) {
    for (; w->fill > 0; w->fill -= 8, w->bits >>= 8) {
        if (w->at == w->end) {
            w->full = 1;
            return;
        }
        *w->at++ = (uint8_t)w->bits;
    }
}

typedef struct {
    const uint8_t *at, *end;
    uint64_t bits;
    int fill, bad;
} Reader;

/* Refill to at least 56 bits, unless the end is near. Bits above `fill` are the next ones, or zero. */
INLINE void refill(Reader *r) {
    if (r->end - r->at >= 8) {
        uint64_t word;
        memcpy(&word, r->at, 8);
        r->bits |= word << r->fill;
        r->at += (63 - r->fill) >> 3;
        r->fill |= 56;
        return;
    }
    for (; r->fill < 56 && r->at < r->end; r->fill += 8) r->bits |= (uint64_t)*r->at++ << r->fill;
}

INLINE uint64_t take(Reader *r, int count) { /* count <= 32 */
    refill(r);
    r->bad |= count > r->fill;
    uint64_t bits = r->bits & ((1ull << count) - 1);
    r->bits >>= count;
    r->fill -= r->bad ? r->fill : count;
    return bits;
}

INLINE uint64_t take_unary(Reader *r) {
    for (uint64_t zeros = 0;; zeros += (uint64_t)r->fill, r->bits >>= r->fill, r->fill = 0) {
        refill(r);
        const int more = r->bits ? __builtin_ctzll(r->bits) : 64;
        if (more < r->fill) {
            r->bits = r->bits >> more >> 1;
            r->fill -= more + 1;
            return zeros + (uint64_t)more;
        }
        if (r->at == r->end) {
            r->bad = 1;
            r->fill = 0;
            return 0;
        }
    }
}

static int is_spent(const Reader *r) { return !r->bad && r->at == r->end && r->fill < 8 && r->bits == 0; }

static uint64_t take_varint(const uint8_t **at, const uint8_t *end, int *bad) {
    uint64_t value = 0;
    for (int shift = 0; shift < 63; shift += 7) {
        if (*at == end) break;
        uint8_t byte = *(*at)++;
        value |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) return value;
    }
    *bad = 1;
    return 0;
}

static void put_varint(Writer *w, uint64_t value) { /* the writer must be at a byte boundary */
    for (; value >= 128; value >>= 7) put(w, (value & 127) | 128, 8);
    put(w, value, 8);
}

INLINE int bit_length(uint64_t x) { return x ? 64 - __builtin_clzll(x) : 0; }

static int rice_parameter(uint64_t sum, uint64_t count) {
    int k = bit_length(sum * 123 / (count * 256));
    return k < 32 ? k : 31;
}

/* Elements */

INLINE uint32_t load(const void *data, int64_t i, int width) {
    return width == 1 ? ((const uint8_t *)data)[i] : width == 2 ? ((const uint16_t *)data)[i] : ((const uint32_t *)data)[i];
}

INLINE void store(void *data, int64_t i, uint32_t value, int width) {
    if (width == 1) ((uint8_t *)data)[i] = (uint8_t)value;
    else if (width == 2) ((uint16_t *)data)[i] = (uint16_t)value;
    else ((uint32_t *)data)[i] = value;
}

INLINE uint32_t all_bits(int width) { return width == 4 ? 0xffffffffu : (1u << (8 * width)) - 1; }

/* Without branches, because signs are nearly random. */
INLINE uint32_t to_order(uint32_t code, int width) {
    const uint32_t negative = code >> (8 * width - 1), sign = 1u << (8 * width - 1);
    return (code ^ ((0u - negative) | sign)) & all_bits(width);
}

INLINE uint32_t from_order(uint32_t rank, int width) {
    const uint32_t positive = rank >> (8 * width - 1), sign = 1u << (8 * width - 1);
    return (rank ^ ((positive - 1u) | sign)) & all_bits(width);
}

INLINE uint32_t step_between(uint32_t old, uint32_t new, int ordered, int width) {
    uint32_t d = ordered ? to_order(new, width) - to_order(old, width) : new - old;
    return width == 1 ? (uint32_t)(int8_t)d : width == 2 ? (uint32_t)(int16_t)d : d;
}

INLINE uint32_t stepped(uint32_t old, uint32_t step, int ordered, int width) {
    uint32_t d = (ordered ? to_order(old, width) : old) + step;
    d &= all_bits(width);
    return ordered ? from_order(d, width) : d;
}

/* In the element's own width, with a constant shift for the important types, so that a vector holds as many as possible. */
#define CONTEXTS(T, SHIFT)                                                                                             \
    do {                                                                                                               \
        const T top = (T)kind->top, last = (T)(kind->contexts - 1), exponent = (T)kind->exponent;                      \
        for (int i = 0; i < count; i++) {                                                                              \
            const T code = (T)(((const T *)old)[from + i] >> (SHIFT)) & exponent;                                      \
            const T below = (T)(top > code ? top - code : 0);                                                          \
            context[i] = (uint8_t)(below < last ? below : last);                                                       \
        }                                                                                                              \
    } while (0)

INLINE void contexts_of(uint8_t *context, const void *old, int64_t from, int count, const Kind *kind, int width) {
    const int shift = kind->shift;
    if (width == 2 && shift == 7) CONTEXTS(uint16_t, 7);
    else if (width == 2) CONTEXTS(uint16_t, shift);
    else if (width == 1 && shift == 3) CONTEXTS(uint8_t, 3);
    else if (width == 1) CONTEXTS(uint8_t, shift);
    else CONTEXTS(uint32_t, shift);
    for (int i = count; i < BLOCK; i++) context[i] = 255;
}

#if defined(__x86_64__)
#define TARGET_AVX2 __attribute__((target("avx2,bmi,bmi2,popcnt,lzcnt")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vpopcntdq,avx2,bmi,bmi2,popcnt,lzcnt")))

/* The four bits of a context as four masks; each of the sixteen context masks is then a product of them. Bytes past the
 * end belong to no context and have their highest bit set. */
TARGET_AVX512 static inline void masks_avx512(uint64_t *mask, const uint8_t *byte) {
    const __m512i all = _mm512_loadu_si512(byte);
    const __m512i p0 = _mm512_set1_epi64((long long)_mm512_movepi8_mask(_mm512_slli_epi16(all, 7)));
    const __m512i p1 = _mm512_set1_epi64((long long)_mm512_movepi8_mask(_mm512_slli_epi16(all, 6)));
    const __m512i p2 = _mm512_set1_epi64((long long)_mm512_movepi8_mask(_mm512_slli_epi16(all, 5)));
    const __m512i p3 = _mm512_set1_epi64((long long)_mm512_movepi8_mask(_mm512_slli_epi16(all, 4)));
    const __m512i none = _mm512_set1_epi64((long long)_mm512_movepi8_mask(all));
    /* Lane j takes bit i unchanged if j has it, and inverted if not. */
    const __m512i q0 = _mm512_xor_si512(p0, _mm512_setr_epi64(-1, 0, -1, 0, -1, 0, -1, 0));
    const __m512i q1 = _mm512_xor_si512(p1, _mm512_setr_epi64(-1, -1, 0, 0, -1, -1, 0, 0));
    const __m512i q2 = _mm512_xor_si512(p2, _mm512_setr_epi64(-1, -1, -1, -1, 0, 0, 0, 0));
    const __m512i low = _mm512_andnot_si512(none, _mm512_and_si512(_mm512_and_si512(q0, q1), q2));
    _mm512_storeu_si512(mask, _mm512_andnot_si512(p3, low));
    _mm512_storeu_si512(mask + 8, _mm512_and_si512(p3, low));
}

TARGET_AVX2 static inline uint64_t plane_avx2(const uint8_t *byte, int bit) {
    const __m256i a = _mm256_loadu_si256((const __m256i *)byte), b = _mm256_loadu_si256((const __m256i *)(byte + 32));
    const uint32_t low = (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(a, 7 - bit));
    return low | (uint64_t)(uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(b, 7 - bit)) << 32;
}

TARGET_AVX512 static inline uint32_t less_avx512(const int32_t *a, const int32_t *b) {
    return _mm512_cmplt_epi32_mask(_mm512_loadu_si512(a), _mm512_loadu_si512(b));
}

TARGET_AVX2 static inline uint32_t less_avx2(const int32_t *a, const int32_t *b) {
    const __m256i *x = (const __m256i *)a, *y = (const __m256i *)b;
    __m256i low = _mm256_cmpgt_epi32(_mm256_loadu_si256(y), _mm256_loadu_si256(x));
    __m256i high = _mm256_cmpgt_epi32(_mm256_loadu_si256(y + 1), _mm256_loadu_si256(x + 1));
    return (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(low)) |
           (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(high)) << 8;
}

TARGET_AVX2 static inline int at_rank_bmi2(uint64_t mask, int rank) {
    return __builtin_ctzll(_pdep_u64(1ull << rank, mask));
}
#endif

/* One bit of each of the 64 bytes. */
INLINE uint64_t plane(const uint8_t *byte, int bit, int isa) {
#if defined(__x86_64__)
    if (isa != GENERIC) return plane_avx2(byte, bit);
    uint64_t found = 0;
    for (int i = 0; i < BLOCK; i += 16) {
        const __m128i part = _mm_slli_epi16(_mm_loadu_si128((const __m128i *)(byte + i)), 7 - bit);
        found |= (uint64_t)(uint32_t)_mm_movemask_epi8(part) << i;
    }
    return found;
#elif defined(__aarch64__)
    const uint8x16_t place = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    uint8x16_t part[4];
    for (int i = 0; i < 4; i++)
        part[i] = vandq_u8(vtstq_u8(vld1q_u8(byte + 16 * i), vdupq_n_u8((uint8_t)(1 << bit))), place);
    const uint8x16_t sums = vpaddq_u8(vpaddq_u8(part[0], part[1]), vpaddq_u8(part[2], part[3]));
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(sums, sums)), 0);
#else
    uint64_t found = 0;
    for (int i = 0; i < BLOCK; i += 8) {
        uint64_t word;
        memcpy(&word, byte + i, 8);
        found |= ((word >> bit & 0x0101010101010101) * 0x0102040810204080 >> 56) << i; /* gathers one bit of each byte */
    }
    return found;
#endif
}

/* mask[c]: the bytes among the 64 that are c. Each mask is a product of the four bits of a context, unchanged or
 * inverted. Bytes past the end belong to no context and have their highest bit set. */
INLINE void masks(uint64_t *mask, const uint8_t *byte, int isa) {
#if defined(__x86_64__)
    if (isa == AVX512) {
        masks_avx512(mask, byte);
        return;
    }
#endif
    const uint64_t p0 = plane(byte, 0, isa), p1 = plane(byte, 1, isa), p2 = plane(byte, 2, isa);
    const uint64_t p3 = plane(byte, 3, isa), some = ~plane(byte, 7, isa);
    const Pair low[2] = {{~p1 & ~p0, ~p1 & p0}, {p1 & ~p0, p1 & p0}};
    const uint64_t high[4] = {~p3 & ~p2 & some, ~p3 & p2 & some, p3 & ~p2 & some, p3 & p2 & some};
    for (int h = 0; h < 4; h++) {
        ((Pair *)mask)[2 * h] = low[0] & high[h];
        ((Pair *)mask)[2 * h + 1] = low[1] & high[h];
    }
}

/* The number of set bits in each mask. */
INLINE void count_all(int32_t *members, const uint64_t *mask, int isa) {
    if (isa != GENERIC) {
        for (int c = 0; c < MAX_CONTEXTS; c++) members[c] = (int32_t)__builtin_popcountll(mask[c]);
        return;
    }
#if defined(__aarch64__)
    for (int c = 0; c < MAX_CONTEXTS; c += 4) {
        const uint8x16_t a = vcntq_u8(vreinterpretq_u8_u64(vld1q_u64(mask + c)));
        const uint8x16_t b = vcntq_u8(vreinterpretq_u8_u64(vld1q_u64(mask + c + 2)));
        const uint32x4_t sums = vpaddq_u32(vpaddlq_u16(vpaddlq_u8(a)), vpaddlq_u16(vpaddlq_u8(b)));
        vst1q_s32(members + c, vreinterpretq_s32_u32(sums));
    }
#else
    for (int c = 0; c < MAX_CONTEXTS; c++) { /* by shifts and additions, which any vector unit has */
        uint64_t x = mask[c];
        x -= x >> 1 & 0x5555555555555555;
        x = (x & 0x3333333333333333) + (x >> 2 & 0x3333333333333333);
        x = (x + (x >> 4)) & 0x0f0f0f0f0f0f0f0f;
        x += x >> 8;
        x += x >> 16;
        members[c] = (int32_t)((x + (x >> 32)) & 127);
    }
#endif
}

INLINE int at_rank(uint64_t mask, int rank, int isa) { /* the index of the set bit with `rank` set bits below it */
#if defined(__x86_64__)
    if (isa != GENERIC) return at_rank_bmi2(mask, rank);
#endif
    for (; rank; rank--) mask &= mask - 1;
    return __builtin_ctzll(mask);
}

/* Bit c: a[c] < b[c], for all contexts. */
INLINE uint32_t less(const int32_t *a, const int32_t *b, int isa) {
#if defined(__x86_64__)
    if (isa == AVX512) return less_avx512(a, b);
    if (isa == AVX2) return less_avx2(a, b);
#endif
    Quad found = {0}, bit = {1, 2, 4, 8};
    for (int c = 0; c < MAX_CONTEXTS; c += 4, bit <<= 4) found |= (*(const Quad *)(a + c) < *(const Quad *)(b + c)) & bit;
    const Pair halves = (Pair)found;
    const uint64_t both = halves[0] | halves[1];
    return (uint32_t)(both | both >> 32);
}

/* Find the changes, in order of position; context_of[j] is the context of change j. Returns their number. */
INLINE int64_t find(const Kind *kind, const void *old, const void *new, int64_t n, Change *change, uint8_t *context_of,
                    int isa, int width) {
    const int ordered = kind->ordered;
    int32_t run[MAX_CONTEXTS] = {0};
    int64_t found = 0;
    for (int64_t from = 0; from < n; from += BLOCK) {
        const int count = n - from < BLOCK ? (int)(n - from) : BLOCK;
        uint8_t context[BLOCK], same[BLOCK];
        uint64_t mask[MAX_CONTEXTS];
        int32_t members[MAX_CONTEXTS];
        if (count == BLOCK) {
            contexts_of(context, old, from, BLOCK, kind, width);
            for (int i = 0; i < BLOCK; i++) same[i] = load(old, from + i, width) == load(new, from + i, width);
        } else {
            contexts_of(context, old, from, count, kind, width);
            for (int i = 0; i < BLOCK; i++)
                same[i] = i >= count || load(old, from + i, width) == load(new, from + i, width);
        }
        masks(mask, context, isa);
        for (uint64_t left = ~plane(same, 0, isa); left; left &= left - 1) {
            const int i = __builtin_ctzll(left), c = context[i];
            const uint64_t bit = left & -left;
            change[found].gap = (uint32_t)(run[c] + __builtin_popcountll(mask[c] & (bit - 1)));
            change[found].step = step_between(load(old, from + i, width), load(new, from + i, width), ordered, width);
            context_of[found++] = (uint8_t)c;
            run[c] = -__builtin_popcountll(mask[c] & (bit | (bit - 1)));
        }
        count_all(members, mask, isa);
        for (int c = 0; c < MAX_CONTEXTS; c++) run[c] += members[c];
    }
    return found;
}

/* Apply changes that are sorted by context, count[c] in context c. `out` may be `old`. */
INLINE int64_t place(const Kind *kind, const void *old, void *out, int64_t n, const Change *change, const int64_t *count,
                     int isa, int width) {
    const int ordered = kind->ordered;
    const int32_t never = INT32_MAX; /* still far above 64 after all n <= 2^30 elements are subtracted */
    const Change *next[MAX_CONTEXTS], *end[MAX_CONTEXTS];
    int32_t left[MAX_CONTEXTS]; /* elements of the context before its next change */
    for (int c = 0; c < MAX_CONTEXTS; c++) {
        next[c] = change;
        end[c] = change += c < kind->contexts ? count[c] : 0;
        left[c] = next[c] < end[c] ? (int32_t)next[c]->gap : never;
    }
    for (int64_t from = 0; from < n; from += BLOCK) {
        const int here = n - from < BLOCK ? (int)(n - from) : BLOCK;
        uint8_t context[BLOCK];
        uint64_t mask[MAX_CONTEXTS];
        int32_t members[MAX_CONTEXTS];
        if (here == BLOCK) {
            contexts_of(context, old, from, BLOCK, kind, width);
            if (out != old) memcpy((char *)out + from * width, (const char *)old + from * width, BLOCK * (size_t)width);
        } else {
            contexts_of(context, old, from, here, kind, width);
            if (out != old) memcpy((char *)out + from * width, (const char *)old + from * width, (size_t)here * (size_t)width);
        }
        masks(mask, context, isa);
        count_all(members, mask, isa);
        uint32_t hit = less(left, members, isa);
        while (hit) { /* one change per iteration, so that there is one branch to predict */
            const int c = __builtin_ctz(hit);
            const int64_t i = from + at_rank(mask[c], left[c], isa);
            store(out, i, stepped(load(old, i, width), next[c]->step, ordered, width), width);
            next[c]++;
            left[c] = next[c] < end[c] ? left[c] + 1 + (int32_t)next[c]->gap : never;
            hit &= ~((uint32_t)(left[c] >= members[c]) << c);
        }
        for (int c = 0; c < MAX_CONTEXTS; c++) left[c] -= members[c];
    }
    for (int c = 0; c < MAX_CONTEXTS; c++)
        if (next[c] != end[c]) return DAMAGED;
    return 0;
}

/* One copy of the walks for each instruction set and width. Marked hot, because the compiler would otherwise assume that
 * code inlined after so many checks runs rarely, and not vectorise it. */

#define HOT __attribute__((hot, noinline)) static
#define WALKS(NAME, ISA, TARGET)                                                                                       \
    TARGET HOT int64_t find_##NAME(const Kind *k, const void *old, const void *new, int64_t n, Change *change,         \
                                   uint8_t *context_of) {                                                              \
        if (k->width == 1) return find(k, old, new, n, change, context_of, ISA, 1);                                    \
        if (k->width == 2) return find(k, old, new, n, change, context_of, ISA, 2);                                    \
        return find(k, old, new, n, change, context_of, ISA, 4);                                                       \
    }                                                                                                                  \
    TARGET HOT int64_t place_##NAME(const Kind *k, const void *old, void *out, int64_t n, const Change *change,        \
                                    const int64_t *count) {                                                            \
        if (k->width == 1) return place(k, old, out, n, change, count, ISA, 1);                                        \
        if (k->width == 2) return place(k, old, out, n, change, count, ISA, 2);                                        \
        return place(k, old, out, n, change, count, ISA, 4);                                                           \
    }

WALKS(generic, GENERIC, )
#if defined(__x86_64__)
WALKS(avx2, AVX2, TARGET_AVX2)
WALKS(avx512, AVX512, TARGET_AVX512)
#endif

/* The best instruction set of this machine; tests select lower ones. */
int best_isa(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512vpopcntdq"))
        return AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) return AVX2;
#endif
    return GENERIC;
}

static int64_t find_by(int isa, const Kind *k, const void *old, const void *new, int64_t n, Change *change, uint8_t *of) {
#if defined(__x86_64__)
    if (isa == AVX512) return find_avx512(k, old, new, n, change, of);
    if (isa == AVX2) return find_avx2(k, old, new, n, change, of);
#endif
    return find_generic(k, old, new, n, change, of);
}

static int64_t place_by(int isa, const Kind *k, const void *old, void *out, int64_t n, const Change *c, const int64_t *count) {
#if defined(__x86_64__)
    if (isa == AVX512) return place_avx512(k, old, out, n, c, count);
    if (isa == AVX2) return place_avx2(k, old, out, n, c, count);
#endif
    return place_generic(k, old, out, n, c, count);
}

/* Payloads */

INLINE uint32_t magnitude(uint32_t step) { return step >> 31 ? 0u - step : step; }

static int golomb_order(const uint32_t *excess, int64_t count, int bits) {
    int64_t sample = count < SAMPLE ? count : SAMPLE, best = INT64_MAX;
    int order = 0;
    for (int k = 0; k < bits; k++) {
        int64_t cost = 0;
        for (int64_t j = 0; j < sample; j++) cost += 2 * bit_length(excess[j] + (1ull << k)) - k;
        if (cost < best) {
            best = cost;
            order = k;
        }
    }
    return order;
}

/* One context: its line of the header, its unary bits and its plain bits. */
static void pack_context(Writer *head, Writer *unary, Writer *plain, const Change *change, int64_t count, uint32_t *big_gap,
                         uint32_t *excess, int bits) {
    put_varint(head, (uint64_t)count);
    if (!count) return;
    uint64_t sum = 0, big_sum = 0;
    int64_t big = 0, since = 0;
    for (int64_t j = 0; j < count; j++, since++) {
        sum += change[j].gap;
        uint32_t m = magnitude(change[j].step);
        if (m > 1) {
            big_gap[big] = (uint32_t)since;
            excess[big++] = m - 2;
            big_sum += (uint64_t)since;
            since = -1;
        }
    }
    const int k = rice_parameter(sum, (uint64_t)count);
    put(head, (uint64_t)k, 8);
    put_varint(head, (uint64_t)big);
    for (int64_t j = 0; j < count; j++) put_unary(unary, change[j].gap >> k);
    for (int64_t j = 0; j < count; j++)
        put(plain, (change[j].gap & ((1ull << k) - 1)) | (uint64_t)(change[j].step >> 31) << k, k + 1);
    if (!big) return;
    const int kb = rice_parameter(big_sum, (uint64_t)big), order = golomb_order(excess, big, bits);
    put(head, (uint64_t)kb, 8);
    put(head, (uint64_t)order, 8);
    for (int64_t j = 0; j < big; j++) {
        const uint64_t x = excess[j] + (1ull << order);
        const int length = bit_length(x) - 1;
        put_unary(unary, big_gap[j] >> kb);
        put(plain, big_gap[j] & ((1ull << kb) - 1), kb);
        put_unary(unary, (uint32_t)(length - order));
        put(plain, x & ((1ull << length) - 1), length);
    }
}

static Writer writer(uint8_t *at, int64_t room) { return (Writer){at, at + room, 0, 0, 0}; }

/* The payload of old -> new after its mode byte. Returns its length, 0 if nothing changed, or an error. */
int64_t encode(int isa, int width, int shift, int exponent, int contexts, int ordered, int top, const void *old,
               const void *new, int64_t n, uint8_t *out, int64_t room) {
    const Kind kind = {width, shift, contexts, ordered, top, (uint32_t)exponent};
    if (room < 64 || n > 1 << 30) return TOO_LARGE;
    Change *change = malloc((size_t)n * sizeof *change), *sorted = NULL;
    uint8_t *context_of = malloc((size_t)n), *bits = NULL;
    uint32_t *big_gap = NULL, *excess = NULL;
    int64_t result = NO_MEMORY;
    if (!change || !context_of) goto end;
    const int64_t total = find_by(isa, &kind, old, new, n, change, context_of);
    if (!total) {
        result = 0;
        goto end;
    }
    sorted = malloc((size_t)total * sizeof *sorted);
    big_gap = malloc((size_t)total * 4);
    excess = malloc((size_t)total * 4);
    const int64_t side = room + 64;
    bits = malloc((size_t)(3 * side));
    if (!sorted || !big_gap || !excess || !bits) goto end;
    int64_t start[MAX_CONTEXTS + 1] = {0}, at[MAX_CONTEXTS];
    for (int64_t j = 0; j < total; j++) start[context_of[j] + 1]++;
    for (int c = 0; c < contexts; c++) at[c] = start[c + 1] += start[c];
    for (int c = 0; c < contexts; c++) at[c] = start[c];
    for (int64_t j = 0; j < total; j++) sorted[at[context_of[j]]++] = change[j];
    Writer head = writer(bits, side), unary = writer(bits + side, side), plain = writer(bits + 2 * side, side);
    put(&head, (uint64_t)top, 8);
    for (int c = 0; c < contexts; c++)
        pack_context(&head, &unary, &plain, sorted + start[c], start[c + 1] - start[c], big_gap, excess, 8 * width);
    finish(&unary);
    finish(&plain);
    const int64_t unary_bytes = unary.at - (bits + side), plain_bytes = plain.at - (bits + 2 * side);
    put_varint(&head, (uint64_t)unary_bytes);
    finish(&head);
    const int64_t head_bytes = head.at - bits;
    result = head_bytes + unary_bytes + plain_bytes;
    if (head.full || unary.full || plain.full || result > room) {
        result = TOO_LARGE;
        goto end;
    }
    memcpy(out, bits, (size_t)head_bytes);
    memcpy(out + head_bytes, bits + side, (size_t)unary_bytes);
    memcpy(out + head_bytes + unary_bytes, bits + 2 * side, (size_t)plain_bytes);
end:
    free(change), free(sorted), free(context_of), free(bits), free(big_gap), free(excess);
    return result;
}

typedef struct {
    int64_t count, big;
    int k, kb, order;
} Line;

static int unpack_context(Reader *unary, Reader *plain, const Line *line, Change *change, int64_t n, int bits) {
    const uint64_t limit = (uint64_t)n, remainder = (1ull << line->k) - 1;
    int bad = 0;
    for (int64_t j = 0; j < line->count; j++) {
        const uint64_t quotient = take_unary(unary), low = take(plain, line->k + 1);
        const uint64_t gap = quotient << line->k | (low & remainder);
        bad |= quotient > limit || gap >= limit;
        change[j] = (Change){(uint32_t)gap, 1u - 2u * (uint32_t)(low >> line->k)};
    }
    int64_t at = -1;
    for (int64_t j = 0; j < line->big && !(bad | unary->bad | plain->bad); j++) {
        const uint64_t quotient = take_unary(unary), low = take(plain, line->kb), more = take_unary(unary);
        if (quotient > limit || more > 32) return DAMAGED;
        const int length = (int)more + line->order;
        at += 1 + (int64_t)(quotient << line->kb | low);
        if (length > 32 || at >= line->count) return DAMAGED;
        const uint64_t size = (1ull << length) + take(plain, length) - (1ull << line->order) + 2;
        if (size > 1ull << (bits - 1)) return DAMAGED;
        change[at].step = change[at].step == 1 ? (uint32_t)size : 0u - (uint32_t)size;
    }
    return bad | unary->bad | plain->bad ? DAMAGED : 0;
}

/* old + payload -> out. Returns 0 or an error; after an error the content of `out` is undefined. */
int64_t apply(int isa, int width, int shift, int exponent, int contexts, int ordered, const uint8_t *payload, int64_t size,
              const void *old, void *out, int64_t n) {
    const uint8_t *at = payload, *end = payload + size;
    Line line[MAX_CONTEXTS];
    int64_t count[MAX_CONTEXTS], total = 0;
    int bad = 0;
    if (size < 2 || n > 1 << 30) return DAMAGED;
    const Kind kind = {width, shift, contexts, ordered, *at++, (uint32_t)exponent};
    for (int c = 0; c < contexts; c++) {
        Line *l = &line[c];
        *l = (Line){0, 0, 0, 0, 0};
        l->count = count[c] = (int64_t)take_varint(&at, end, &bad);
        if (bad || l->count < 0 || l->count > n - total) return DAMAGED;
        total += l->count;
        if (!l->count) continue;
        if (at == end) return DAMAGED;
        l->k = *at++;
        l->big = (int64_t)take_varint(&at, end, &bad);
        if (bad || l->big < 0 || l->big > l->count) return DAMAGED;
        if (l->big) {
            if (end - at < 2) return DAMAGED;
            l->kb = *at++;
            l->order = *at++;
        }
        if (l->k > 31 || l->kb > 31 || l->order > 31) return DAMAGED;
    }
    const uint64_t unary_bytes = take_varint(&at, end, &bad);
    if (bad || unary_bytes > (uint64_t)(end - at)) return DAMAGED;
    /* Each change has a one among the unary bits, so a payload cannot request more memory than its size justifies. */
    if ((uint64_t)total > 8 * unary_bytes) return DAMAGED;
    Reader unary = {at, at + unary_bytes, 0, 0, 0}, plain = {at + unary_bytes, end, 0, 0, 0};
    Change *change = malloc((size_t)(total ? total : 1) * sizeof *change);
    if (!change) return NO_MEMORY;
    int64_t result = 0, done = 0;
    for (int c = 0; c < contexts && !result; c++) {
        result = unpack_context(&unary, &plain, &line[c], change + done, n, 8 * width);
        done += line[c].count;
    }
    if (!result && !(is_spent(&unary) && is_spent(&plain))) result = DAMAGED;
    if (!result) result = place_by(isa, &kind, old, out, n, change, count);
    free(change);
    return result;
}
