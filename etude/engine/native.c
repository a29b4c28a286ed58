/* One pass of a dense model on a CPU, in one call: `pass.h`, for the instruction set that `native.py` selects.
 *
 * All instruction sets share the same source. This file compiles the pass for any processor (SSE2 on x86, NEON on ARM),
 * the files native_*.c for newer ones. Nothing here depends on Python.
 */
#include "native.h"

#define FORWARD forward_generic
#define WIDTH 16
#define HAS_TILES 0
#if defined(__aarch64__)
#define REGISTERS 32
#else
#define REGISTERS 16
#endif
#include "pass.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

static int has_tiles(void) {
    enum { AMX_BF16 = 1 << 22, ASK_FOR_STATE = 0x1023, TILE_DATA = 18 }; /* Linux saves tiles only on request */
    unsigned a, b, c, d;
    if (!KNOWS_AMX || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & AMX_BF16)) return 0;
    return !syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA);
}

int best_isa(void) {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f")) return has_tiles() ? AMX : AVX512;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? AVX2 : GENERIC;
}
#else
int best_isa(void) { return GENERIC; }
#endif

int64_t scratch_bytes(const Model *m, const Pass *p) { return cut(m, p).end - p->scratch; }

void forward(const Model *m, const Pass *p) {
#if defined(__x86_64__)
    if (m->isa >= AVX512) {
        forward_avx512(m, p);
        return;
    }
    if (m->isa == AVX2) {
        forward_avx2(m, p);
        return;
    }
#endif
    forward_generic(m, p);
}
