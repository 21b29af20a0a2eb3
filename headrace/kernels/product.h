// Products of matrices in float32 with one factor laid out in columns of up to two registers, and transposition.

#pragma once

#include "vec.h"

#if defined(__AVX512F__)
#define HIGH 12  // rows of a product that are computed at once: with two registers of each 24 of 32
#else
#define HIGH 6  // 12 of 16
#endif
#define WIDE (2 * W)

// c [rows, wide registers] = or += sum over k of a[row * a_row + k * a_step] b[k * b_step + column].
static inline __attribute__((always_inline)) void tile(
    int rows, int wide, int64_t depth, const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_step,
    float *c, int64_t c_row, int add) {
  vec sums[HIGH][2];
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
    for (int v = 0; v < wide; v++) sums[r][v] = add ? load(c + r * c_row + v * W) : all(0.0f);
  for (int64_t k = 0; k < depth; k++) {
    vec x[2];
#pragma GCC unroll 2
    for (int v = 0; v < wide; v++) x[v] = load(b + k * b_step + v * W);
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
      for (int v = 0; v < wide; v++) sums[r][v] = fused(all(a[r * a_row + k * a_step]), x[v], sums[r][v]);
  }
#pragma GCC unroll 12
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
    for (int v = 0; v < wide; v++) store(c + r * c_row + v * W, sums[r][v]);
}

// The same for any number of rows, and for one or two registers of columns.
static void product(
    int64_t rows, int wide, int64_t depth, const float *a, int64_t a_row, int64_t a_step, const float *b,
    int64_t b_step, float *c, int64_t c_row, int add) {
  int64_t r = 0;
#define ROWS_OF(count)                                                                                       \
  for (; r + (count) <= rows; r += (count)) {                                                                \
    if (wide == 2)                                                                                           \
      tile(count, 2, depth, a + r * a_row, a_row, a_step, b, b_step, c + r * c_row, c_row, add);             \
    else                                                                                                     \
      tile(count, 1, depth, a + r * a_row, a_row, a_step, b, b_step, c + r * c_row, c_row, add);             \
  }
  ROWS_OF(HIGH)
#if HIGH > 8
  ROWS_OF(8)
#endif
  ROWS_OF(4)
  ROWS_OF(1)
#undef ROWS_OF
}

// to [W, W] = from [W, W], transposed; of what is read rows from `rows` on are 0, and so many columns are written.
static inline __attribute__((always_inline)) void transpose(
    int rows, int columns, const float *from, int64_t from_row, float *to, int64_t to_row) {
  const int32_t places[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  vec x[W];
  for (int i = 0; i < W; i++) x[i] = i < rows ? load(from + i * from_row) : all(0.0f);
#pragma GCC unroll 4
  for (int apart = 1; apart < W; apart *= 2) {
    ivec below = (*(const ivec *)places & apart) == 0;
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) {
      if (i & apart) continue;
      vec a = x[i], b = x[i | apart];
      x[i] = choose(below, a, turned(b, apart));
      x[i | apart] = choose(below, turned(a, apart), b);
    }
  }
  for (int i = 0; i < W && i < columns; i++) store(to + i * to_row, x[i]);
}
