// Gated feed-forward layers, y = down (silu(gate x) up x), in float32, with their gradients. Called through ctypes
// (feed_forward.py). Tokens lie side by side in registers and weights are read as they are stored, number by number.
// Sums over tokens are added up thread by thread.

#include <omp.h>

#include "product.h"

#define BLOCK 64  // tokens that one thread takes at once, so that what is between the products stays in its cache

typedef struct {
  int64_t tokens, hidden, inner, threads;
} layer;

static float *memory(int64_t count) { return aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64); }

// out [size, BLOCK] = x [count, size], transposed, up to the next full register of tokens.
static void turn_in(int64_t count, int64_t size, const float *x, float *out) {
  for (int64_t t = 0; t < count; t += W)
    for (int64_t i = 0; i < size; i += W)
      transpose(least(W, count - t), W, x + t * size + i, size, out + i * BLOCK + t, BLOCK);
}

static void turn_out(int64_t count, int64_t size, const float *x, float *out) {
  for (int64_t t = 0; t < count; t += W)
    for (int64_t i = 0; i < size; i += W)
      transpose(W, least(W, count - t), x + i * BLOCK + t, BLOCK, out + t * size + i, size);
}

// out [rows, count] = a b, b [depth, BLOCK] the block's tokens.
static void of_block(
    int64_t count, int64_t rows, int64_t depth, const float *a, int64_t a_row, int64_t a_step, const float *b,
    float *out, int add) {
  for (int64_t r = 0; r < rows; r += HIGH)
    for (int64_t t = 0; t < count; t += WIDE)
      product(
          least(HIGH, rows - r), count - t > W ? 2 : 1, depth, a + r * a_row, a_row, a_step, b + t, BLOCK,
          out + r * BLOCK + t, BLOCK, add);
}

// gate, up and inner [rows, BLOCK] of x [hidden, BLOCK].
static void gated(
    const layer *s, int64_t count, int64_t rows, const float *gate_weight, const float *up_weight, const float *x,
    float *gate, float *up, float *inner) {
  of_block(count, rows, s->hidden, gate_weight, s->hidden, 1, x, gate, 0);
  of_block(count, rows, s->hidden, up_weight, s->hidden, 1, x, up, 0);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t t = r * BLOCK; t < r * BLOCK + count; t += W) {
      vec g = load(gate + t);
      store(inner + t, g * sigmoid(g) * load(up + t));
    }
}

static void forward_block(
    const layer *s, int64_t count, const float *x, const float *gate_weight, const float *up_weight,
    const float *down_weight, float *kept, float *y, float *scratch) {
  float *turned_x = scratch, *inner = turned_x + s->hidden * BLOCK, *some = inner + s->inner * BLOCK;
  turn_in(count, s->hidden, x, turned_x);
  for (int64_t f = 0; f < s->inner; f += HIGH) {
    float *gate = kept ? kept + f * BLOCK : some, *up = kept ? gate + s->inner * BLOCK : some + HIGH * BLOCK;
    gated(
        s, count, least(HIGH, s->inner - f), gate_weight + f * s->hidden, up_weight + f * s->hidden, turned_x, gate, up,
        inner + f * BLOCK);
  }
  of_block(count, s->hidden, s->inner, down_weight, s->inner, 1, inner, turned_x, 0);
  turn_out(count, s->hidden, turned_x, y);
}

// Few tokens: threads share the weights' rows, so each reads its part of them once.
static int forward_rows(
    const layer *s, const float *x, const float *gate_weight, const float *up_weight, const float *down_weight,
    float *y) {
  int64_t blocks = (s->tokens + BLOCK - 1) / BLOCK, chunks = (s->inner + HIGH - 1) / HIGH;
  int64_t size = (s->hidden + s->inner + 2 * HIGH) * BLOCK;
  float *scratch = memory(blocks * size), *some = memory(s->threads * 2 * HIGH * BLOCK);
  int failed = !scratch || !some;
  if (!failed) {
    for (int64_t b = 0; b < blocks; b++)
      turn_in(least(BLOCK, s->tokens - b * BLOCK), s->hidden, x + b * BLOCK * s->hidden, scratch + b * size);
#pragma omp parallel num_threads(s->threads)
    {
      float *own = some + omp_get_thread_num() * 2 * HIGH * BLOCK;
#pragma omp for schedule(static)
      for (int64_t c = 0; c < chunks; c++)
        for (int64_t b = 0; b < blocks; b++) {
          int64_t f = c * HIGH, rows = least(HIGH, s->inner - f), count = least(BLOCK, s->tokens - b * BLOCK);
          float *block = scratch + b * size;
          gated(
              s, count, rows, gate_weight + f * s->hidden, up_weight + f * s->hidden, block, own, own + HIGH * BLOCK,
              block + (s->hidden + f) * BLOCK);
        }
#pragma omp for schedule(static)
      for (int64_t i = 0; i < s->hidden; i += W)
        for (int64_t b = 0; b < blocks; b++) {
          int64_t count = least(BLOCK, s->tokens - b * BLOCK);
          of_block(
              count, W, s->inner, down_weight + i * s->inner, s->inner, 1, scratch + b * size + s->hidden * BLOCK, own,
              0);
          for (int64_t t = 0; t < count; t += W)
            transpose(
                W, least(W, count - t), own + t, BLOCK, y + (b * BLOCK + t) * s->hidden + i, s->hidden);
        }
    }
  }
  free(scratch);
  free(some);
  return failed;
}

// y [tokens, hidden] of x [tokens, hidden], gate and up [inner, hidden] and down [hidden, inner]. `kept`, or null, gets
// what the backward pass needs: [blocks, 2, inner, BLOCK]. Returns 1 where there is no memory.
int headrace_feed_forward(
    int64_t tokens, int64_t hidden, int64_t inner, const float *x, const float *gate, const float *up,
    const float *down, float *kept, float *y, int64_t threads) {
  const layer own = {tokens, hidden, inner, threads}, *s = &own;
  int64_t blocks = (tokens + BLOCK - 1) / BLOCK, failed = 0;
  if (!kept && blocks < 4 * threads) return forward_rows(s, x, gate, up, down, y);
#pragma omp parallel num_threads(threads) reduction(| : failed)
  {
    float *scratch = memory((s->hidden + s->inner + 2 * HIGH) * BLOCK);
    failed |= !scratch;
#pragma omp for schedule(static)
    for (int64_t b = 0; b < blocks; b++)
      if (scratch)
        forward_block(
            s, least(BLOCK, s->tokens - b * BLOCK), x + b * BLOCK * s->hidden, gate, up, down,
            kept ? kept + b * 2 * s->inner * BLOCK : 0, y + b * BLOCK * s->hidden, scratch);
    free(scratch);
  }
  return failed;
}

static void backward_block(
    const layer *s, int64_t count, const float *x, const float *gate_weight, const float *up_weight,
    const float *down_weight, const float *kept, const float *dy, float *dx, float *const sums[3], float *scratch) {
  float *turned = scratch, *d_gate = turned + s->hidden * BLOCK, *d_up = d_gate + s->inner * BLOCK;
  float *inner = d_up + s->inner * BLOCK, *d_inner = inner + HIGH * BLOCK;
  turn_in(count, s->hidden, dy, turned);
  for (int64_t f = 0; f < s->inner; f += HIGH) {
    int64_t rows = least(HIGH, s->inner - f);
    of_block(count, rows, s->hidden, down_weight + f, 1, s->inner, turned, d_inner, 0);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t t = 0; t < count; t += W) {
        const float *from = kept + (f + r) * BLOCK + t;
        vec g = load(from), u = load(from + s->inner * BLOCK), d = load(d_inner + r * BLOCK + t), share = sigmoid(g);
        // silu'(x) = s (1 + x (1 - s)) with s = sigmoid(x)
        store(inner + r * BLOCK + t, g * share * u);
        store(d_gate + (f + r) * BLOCK + t, d * u * share * (1.0f + g * (1.0f - share)));
        store(d_up + (f + r) * BLOCK + t, d * g * share);
      }
    for (int64_t i = 0; i < s->hidden && x; i += WIDE) {
      int wide = s->hidden - i > W ? 2 : 1;
      const float *left[3] = {d_gate + f * BLOCK, d_up + f * BLOCK, inner}, *right[3] = {x, x, dy};
      for (int64_t k = 0; k < 3; k++)
        product(
            rows, wide, count, left[k], BLOCK, 1, right[k] + i, s->hidden,
            sums[k] + f * s->hidden + i, s->hidden, 1);
    }
  }
  if (!dx) return;
  of_block(count, s->hidden, s->inner, gate_weight, 1, s->hidden, d_gate, turned, 0);
  of_block(count, s->hidden, s->inner, up_weight, 1, s->hidden, d_up, turned, 1);
  turn_out(count, s->hidden, turned, dx);
}

// dx [tokens, hidden], and the gradients of gate, of up and of down transposed [inner, hidden], from dy, that of y, and
// from `kept`. dx may be null, or x with all gradients of weights. Returns 1 where there is no memory.
int headrace_feed_forward_backward(
    int64_t tokens, int64_t hidden, int64_t inner, const float *x, const float *gate, const float *up,
    const float *down, const float *kept, const float *dy, float *dx, float *d_gate, float *d_up, float *d_down,
    int64_t threads) {
  const layer own_sizes = {tokens, hidden, inner, threads}, *s = &own_sizes;
  float *const out[3] = {d_gate, d_up, d_down};  // the first thread's sums
  int64_t blocks = (tokens + BLOCK - 1) / BLOCK, size = d_gate ? inner * hidden : 0, failed = 0;
  float *others = memory((threads - 1) * 3 * size + 1);
  if (!others) return 1;
#pragma omp parallel num_threads(threads) reduction(| : failed)
  {
    float *scratch = memory((s->hidden + 2 * s->inner + 2 * HIGH) * BLOCK);
    int64_t thread = omp_get_thread_num(), team = omp_get_num_threads();
    float *own[3];
    for (int64_t k = 0; k < 3; k++) {
      own[k] = thread ? others + ((thread - 1) * 3 + k) * size : out[k];
      if (size) memset(own[k], 0, size * sizeof(float));
    }
    failed |= !scratch;
#pragma omp for schedule(static)
    for (int64_t b = 0; b < blocks; b++)
      if (scratch)
        backward_block(
            s, least(BLOCK, s->tokens - b * BLOCK), x ? x + b * BLOCK * s->hidden : 0, gate, up, down,
            kept + b * 2 * s->inner * BLOCK, dy + b * BLOCK * s->hidden, dx ? dx + b * BLOCK * s->hidden : 0, own,
            scratch);
    free(scratch);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < 3 * size; i += W) {
      float *sum = out[i / size] + i % size;
      for (int64_t other = 0; other < team - 1; other++) store(sum, load(sum) + load(others + other * 3 * size + i));
    }
  }
  free(others);
  return failed;
}
