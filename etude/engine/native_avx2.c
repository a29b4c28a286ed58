/* The pass for processors with AVX2. */
#if defined(__x86_64__)
#include "native.h"

#define FORWARD forward_avx2
#define WIDTH 32
#define REGISTERS 16
#define HAS_TILES 0
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#include "pass.h"
#pragma clang attribute pop
#else
#pragma GCC target("avx2,fma")
#include "pass.h"
#endif
#endif
