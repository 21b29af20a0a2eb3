// Registers of W floats in gcc's vector extensions, and what several kernels do with them.

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define W 16  // floats in a register
#define ROWS 8  // of a product that is computed at once, two registers of each
#elif defined(__AVX__)
#define W 8
#define ROWS 4
#else
#define W 4
#define ROWS 4
#endif

typedef float vec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * W), aligned(4), may_alias));

static inline vec load(const float *x) { return *(const vec *)x; }
static inline void store(float *x, vec y) { *(vec *)x = y; }
static inline vec choose(ivec which, vec a, vec b) { return (vec)((which & (ivec)a) | (~which & (ivec)b)); }
static inline vec all(float x) { return x - (vec){}; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// a b + c in one instruction: tuned for some processors compilers take two where sums are chained.
static inline __attribute__((always_inline)) vec fused(vec a, vec b, vec c) {
#if defined(__AVX512F__)
  return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

// x with the places j and j ^ apart exchanged.
static inline __attribute__((always_inline)) vec turned(vec x, int apart) {
  const int32_t places[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return __builtin_shuffle(x, *(const ivec *)places ^ apart);
}

static inline __attribute__((always_inline)) float sum(vec x) {
#pragma GCC unroll 4
  for (int apart = W / 2; apart; apart /= 2) x += turned(x, apart);
  return x[0];
}

static inline __attribute__((always_inline)) float largest(vec x) {
#pragma GCC unroll 4
  for (int apart = W / 2; apart; apart /= 2) {
    vec other = turned(x, apart);
    x = choose((ivec)(other > x), other, x);
  }
  return x[0];
}

// e^x for x <= 0, to two units in the last place: e^x = 2^n e^r, |r| <= ln(2) / 2, by a polynomial (Cephes, expf).
// Below -87 it is 0; NaN stays NaN.
static inline vec exponential(vec x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds
  vec n = (x * 1.44269504088896341f + magic) - magic;
  vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  vec y = all(1.9875691500e-4f);
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
  return choose((ivec)(x < -87.0f), all(0.0f), y * (vec)power);
}

// 1 / (1 + e^-x), of either sign by an exponential of what is not above 0.
static inline vec sigmoid(vec x) {
  ivec below = (ivec)(x < all(0.0f));
  vec e = exponential(choose(below, x, -x)), share = 1.0f / (1.0f + e);
  return choose(below, e * share, share);
}

static inline float dot(const float *a, const float *b, int64_t dim) {
  vec sums = all(0.0f);
  int64_t d = 0;
  for (; d + W <= dim; d += W) sums = fused(load(a + d), load(b + d), sums);
  float found = sum(sums);
  for (; d < dim; d++) found += a[d] * b[d];
  return found;
}
