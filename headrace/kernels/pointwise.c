// Root mean square normalisation and gated units in float32, with their gradients. Called through ctypes
// (pointwise.py). What is computed does not depend on the number of threads.

#include "vec.h"

#define SMALL 16384  // numbers below which waking other threads takes longer
#define ROWS_AT_ONCE 256  // whose part of a gain's gradient is added up first

// y [rows, size] = x r gain with r [rows] = 1 / sqrt(mean(x^2) + eps).
int headrace_rms_norm(
    int64_t rows, int64_t size, const float *x, const float *gain, double eps, float *y, float *r, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > SMALL)
  for (int64_t i = 0; i < rows; i++) {
    const float *from = x + i * size;
    float *to = y + i * size, found = (float)(1.0 / sqrt(dot(from, from, size) / (double)size + eps));
    for (int64_t d = 0; d < size; d++) to[d] = from[d] * found * gain[d];
    if (r) r[i] = found;
  }
  return 0;
}

// dx = r gain g - x r^3 / size sum(gain g x), and dgain [size] = sum over rows of g x r; dgain may be null.
int headrace_rms_norm_backward(
    int64_t rows, int64_t size, const float *x, const float *gain, const float *r, const float *g, float *dx,
    float *dgain, int64_t threads) {
  int64_t parts = rows / ROWS_AT_ONCE + 1;
  float *sums = dgain ? calloc(parts * size + 1, sizeof(float)) : 0;
  if (dgain && !sums) return 1;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * size > SMALL)
  for (int64_t part = 0; part < parts; part++) {
    int64_t end = (part + 1) * ROWS_AT_ONCE < rows ? (part + 1) * ROWS_AT_ONCE : rows;
    for (int64_t i = part * ROWS_AT_ONCE; i < end; i++) {
      const float *a = x + i * size, *b = g + i * size;
      float *to = dx + i * size, own = r[i];
      vec added = all(0.0f);
      int64_t d = 0;
      for (; d + W <= size; d += W) added += load(a + d) * load(b + d) * load(gain + d);
      float along = sum(added);
      for (; d < size; d++) along += a[d] * b[d] * gain[d];
      along *= own * own * own / (float)size;
      for (d = 0; d < size; d++) to[d] = own * gain[d] * b[d] - along * a[d];
      if (sums)
        for (d = 0; d < size; d++) sums[part * size + d] += b[d] * a[d] * own;
    }
  }
  if (dgain) {
    memcpy(dgain, sums, size * sizeof(float));
    for (int64_t part = 1; part < parts; part++)
      for (int64_t d = 0; d < size; d++) dgain[d] += sums[part * size + d];
  }
  free(sums);
  return 0;
}

static inline vec first_of(const float *x, int64_t count) {  // zeros behind them
  float some[W] = {0};
  memcpy(some, x, count * sizeof(float));
  return load(some);
}

static inline void store_first(float *x, int64_t count, vec y) {
  float some[W];
  store(some, y);
  memcpy(x, some, count * sizeof(float));
}

// out [n] = silu(gate) up.
int headrace_gated(int64_t n, const float *gate, const float *up, float *out, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (n > SMALL)
  for (int64_t i = 0; i < n; i += W) {
    if (i + W <= n) {
      vec x = load(gate + i);
      store(out + i, x * sigmoid(x) * load(up + i));
    } else {
      vec x = first_of(gate + i, n - i);
      store_first(out + i, n - i, x * sigmoid(x) * first_of(up + i, n - i));
    }
  }
  return 0;
}

// silu'(x) = s (1 + x (1 - s)) with s = sigmoid(x).
static inline vec gate_gradient(vec x, vec up, vec g, vec *d_up) {
  vec s = sigmoid(x);
  *d_up = g * x * s;
  return g * up * s * (1.0f + x * (1.0f - s));
}

int headrace_gated_backward(
    int64_t n, const float *gate, const float *up, const float *g, float *d_gate, float *d_up, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (n > SMALL)
  for (int64_t i = 0; i < n; i += W) {
    vec to_up;
    if (i + W <= n) {
      store(d_gate + i, gate_gradient(load(gate + i), load(up + i), load(g + i), &to_up));
      store(d_up + i, to_up);
    } else {
      int64_t left = n - i;
      vec to_gate = gate_gradient(first_of(gate + i, left), first_of(up + i, left), first_of(g + i, left), &to_up);
      store_first(d_gate + i, left, to_gate);
      store_first(d_up + i, left, to_up);
    }
  }
  return 0;
}

// out = x cos + (-x2, x1) sin for the halves x1 and x2 of x [rows, heads, dim], cos and sin [rows, dim] (Su et al. 2021,
// RoFormer, equation 34, in the order of halves). Strides are those of rows, then of heads.
int headrace_rotate(
    int64_t rows, int64_t heads, int64_t dim, int64_t x_row, int64_t x_head, int64_t cos_row, int64_t sin_row,
    int64_t out_row, int64_t out_head, const float *x, const float *cos, const float *sin, float *out,
    int64_t threads) {
  int64_t half = dim / 2;
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * heads * dim > SMALL)
  for (int64_t row = 0; row < rows; row++)
    for (int64_t head = 0; head < heads; head++) {
      const float *a = x + row * x_row + head * x_head, *b = a + half, *c = cos + row * cos_row;
      const float *s = sin + row * sin_row;
      float *to = out + row * out_row + head * out_head;
      for (int64_t d = 0; d < half; d++) {
        to[d] = a[d] * c[d] - b[d] * s[d];
        to[d + half] = b[d] * c[d + half] + a[d] * s[d + half];
      }
    }
  return 0;
}
