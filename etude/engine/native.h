/* The arguments that `native.py` passes for one pass, and the pass compiled for each instruction set. */
#pragma once
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#if defined(__clang__)
#define KNOWS_AMX (__clang_major__ >= 12)
#else
#define KNOWS_AMX (__GNUC__ >= 11)
#endif

enum { GENERIC, AVX2, AVX512, AMX };       /* in the order of core/isa.py */
typedef enum { FP32, BF16, TILES } Format; /* TILES: bf16 by AMX */

typedef struct {
    const float *norm, *bias, *q_norm, *k_norm, *mlp_norm; /* bias and the norms of heads may be absent */
    const uint32_t *qkv, *out, *gate_up, *down;
    uint32_t *keys, *values;
} Layer;

typedef struct {
    int64_t isa, format, num_layers, hidden, inner, heads, kv_heads, head_size, vocabulary;
    double eps;
    const float *rope; /* [positions, 2, head_size], as from rope.table */
    const void *embedding;
    const uint32_t *head;
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

void forward_generic(const Model *, const Pass *);
void forward_avx2(const Model *, const Pass *);
void forward_avx512(const Model *, const Pass *);
