/* The pass for processors with AVX-512, and bf16 on the tiles of AMX if available. */
#if defined(__x86_64__)
#include <immintrin.h>

#include "native.h"

#define HAS_TILES KNOWS_AMX
#if HAS_TILES
#define AMX_CODE __attribute__((target("amx-tile,amx-bf16,avx512f")))

static const struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} SHAPE = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

AMX_CODE static void tiles_on(void) { _tile_loadconfig(&SHAPE); }

AMX_CODE static void tiles_off(void) { _tile_release(); }

AMX_CODE static void multiply_tiles(const char *x, const char *w, int64_t inner, int64_t rows, float *y) {
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
        if (rows > 16) {
            _tile_loadd(5, x + 16 * stride, stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, y, 128);
    _tile_stored(1, y + 16, 128);
    if (rows > 16) {
        _tile_stored(2, y + 16 * 32, 128);
        _tile_stored(3, y + 16 * 32 + 16, 128);
    }
}

/* y [16][32] = x [16][32 * count] times the sum of `count` pieces, each 32 outputs wide and 32 numbers deep; rows of
 * words of a piece are `w_stride` bytes apart. Pieces are `jump` bytes apart, in order or as listed in `pages`. */
AMX_CODE static void multiply_pieces(
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

#endif

#define FORWARD forward_avx512
#define WIDTH 64
#define REGISTERS 32
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#include "pass.h"
#pragma clang attribute pop
#else
#pragma GCC target("avx512f")
#include "pass.h"
#endif
#endif
