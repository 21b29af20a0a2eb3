// Softmax attention in float32: causal inside sequences lying end to end, with its gradients, and of one new token a
// sequence over a paged cache. Called through ctypes (attention.py); every function returns 0, or 1 when memory ran out.
//
// A unit of work is one sequence and one key/value head, with the query heads that share it. Its keys and values are
// laid out side by side, padded to multiples of PAD with zeros, so that all products below are of whole registers.
// What a unit computes does not depend on the number of threads, nor on the other sequences.

#include "product.h"

#define PAD 16
#define QUERIES 32  // rows of scores held at once

// A tensor [tokens, heads, dim]; dim lies side by side.
typedef struct {
  float *data;
  int64_t token_stride, head_stride;
} tensor;

typedef struct {
  int64_t sequences, heads, kv_heads, dim;
  const int64_t *starts;  // [sequences + 1] in places, the tokens of all sequences end to end
  const int64_t *first;   // [sequences] the first token of a sequence whose output is computed here
  const int64_t *token;   // [places] where a place's token lies; null: token = place
  const int64_t *order;   // [sequences] longest first
  int64_t longest, threads;
} pack;

static inline int64_t padded(int64_t n) { return (n + PAD - 1) / PAD * PAD; }

// c [m, n] (+)= a b: a's element (i, k) lies at a[i * ai + k * ak], the rows of b and c are ldb and ldc apart. m is a
// multiple of ROWS, n one of W.
static inline __attribute__((always_inline)) void multiply(
    int add, int64_t m, int64_t n, int64_t depth, const float *a, int64_t ai, int64_t ak, const float *b, int64_t ldb,
    float *c, int64_t ldc) {
  int64_t j = 0;
  for (; j + 2 * W <= n; j += 2 * W)
    for (int64_t i = 0; i < m; i += ROWS)
      tile(ROWS, 2, depth, a + i * ai, ai, ak, b + j, ldb, c + i * ldc + j, ldc, add);
  for (; j < n; j += W)
    for (int64_t i = 0; i < m; i += ROWS)
      tile(ROWS, 1, depth, a + i * ai, ai, ak, b + j, ldb, c + i * ldc + j, ldc, add);
}

static __attribute__((noinline)) void rows_by_matrix(  // a [m, depth], its rows lda apart
    int64_t m, int64_t n, int64_t depth, const float *a, int64_t lda, const float *b, int64_t ldb, float *c,
    int64_t ldc) {
  multiply(0, m, n, depth, a, lda, 1, b, ldb, c, ldc);
}

static __attribute__((noinline)) void add_columns_by_matrix(  // a [depth, m], transposed
    int64_t m, int64_t n, int64_t depth, const float *a, int64_t lda, const float *b, int64_t ldb, float *c,
    int64_t ldc) {
  multiply(1, m, n, depth, a, 1, lda, b, ldb, c, ldc);
}

static inline int64_t token_at(const pack *p, int64_t place) { return p->token ? p->token[place] : place; }

static inline float *at(const pack *p, const tensor *x, int64_t place, int64_t head) {
  return x->data + token_at(p, place) * x->token_stride + head * x->head_stride;
}

// `count` tokens from `place` on, times `scale`, as rows [rows, dims], zeros where there is none.
static void copy_rows(
    const pack *p, const tensor *x, int64_t head, int64_t place, int64_t count, int64_t rows, float scale, float *out) {
  int64_t dim = p->dim, dims = padded(dim);
  for (int64_t i = 0; i < count; i++) {
    const float *row = at(p, x, place + i, head);
    for (int64_t d = 0; d < dim; d++) out[i * dims + d] = row[d] * scale;
    for (int64_t d = dim; d < dims; d++) out[i * dims + d] = 0.0f;
  }
  memset(out + count * dims, 0, (rows - count) * dims * sizeof(float));
}

// The same as columns: [dim, columns], rows `apart`.
static void copy_columns(
    const pack *p, const tensor *x, int64_t head, int64_t place, int64_t count, int64_t columns, int64_t apart,
    float *out) {
  for (int64_t i = 0; i < count; i++) {
    const float *row = at(p, x, place + i, head);
    for (int64_t d = 0; d < p->dim; d++) out[d * apart + i] = row[d];
  }
  for (int64_t d = 0; d < p->dim; d++) memset(out + d * apart + count, 0, (columns - count) * sizeof(float));
}

// The first key that query `row` sees.
static inline int64_t oldest(int64_t row, int64_t window) { return window ? most(0, row - window + 1) : 0; }

// Scores s [count] that lie outside of from ... to become -infinity.
static inline void hide(float *s, int64_t count, int64_t from, int64_t to) {
  for (int64_t j = 0; j < from; j++) s[j] = -INFINITY;
  for (int64_t j = to + 1; j < count; j++) s[j] = -INFINITY;
}

// s [count, a multiple of W] becomes e^(s - bottom).
static inline void weigh(float *s, int64_t count, float bottom) {
  for (int64_t j = 0; j < count; j += W) store(s + j, exponential(load(s + j) - bottom));
}

// The same with the largest of s as the bottom, which is returned; *total is the sum of what s becomes.
static inline float weigh_below_largest(float *s, int64_t count, float *total) {
  vec top = load(s), sums = all(0.0f);
  for (int64_t j = W; j < count; j += W) top = choose((ivec)(load(s + j) > top), load(s + j), top);
  float bottom = largest(top);
  weigh(s, count, bottom);
  for (int64_t j = 0; j < count; j += W) sums += load(s + j);
  *total = sum(sums);
  return bottom;
}

// Memory that starts a cache line; null if there is none.
static float *scratch(int64_t floats) { return aligned_alloc(64, padded(floats) * sizeof(float)); }

// out [tokens, heads, dim] and the logarithm of each softmax's denominator, [tokens, heads].
int headrace_attend(const pack *p, tensor q, tensor k, tensor v, double scale, int64_t window, tensor out, float *logs) {
  int64_t dims = padded(p->dim), longest = padded(p->longest), apart = longest + PAD;
  int64_t group = p->heads / p->kv_heads, units = p->sequences * p->kv_heads;
  int failed = 0;
#pragma omp parallel num_threads(p->threads)
  {
    float *memory = scratch(dims * (apart + longest + 2 * QUERIES) + QUERIES * apart);
    float *keys = memory, *values = keys + dims * apart, *rows = values + dims * longest;
    float *result = rows + dims * QUERIES, *scores = result + dims * QUERIES;
    if (!memory)
#pragma omp atomic write
      failed = 1;
#pragma omp for schedule(dynamic, 1)
    for (int64_t unit = 0; unit < units; unit++) {
      int64_t sequence = p->order[unit / p->kv_heads], kv_head = unit % p->kv_heads;
      int64_t start = p->starts[sequence], n = p->starts[sequence + 1] - start;
      if (!memory || p->first[sequence] >= n) continue;
      copy_columns(p, &k, kv_head, start, n, padded(n), apart, keys);
      copy_rows(p, &v, kv_head, start, n, n, 1.0f, values);
      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (int64_t row = p->first[sequence]; row < n; row += QUERIES) {
          int64_t count = least(QUERIES, n - row), end = row + count;
          int64_t from = oldest(row, window) / PAD * PAD, columns = padded(end) - from;
          copy_rows(p, &q, head, start + row, count, padded(count), scale, rows);
          rows_by_matrix(padded(count), columns, p->dim, rows, dims, keys + from, apart, scores, apart);
          float total[QUERIES];
          for (int64_t i = 0; i < count; i++) {
            float *s = scores + i * apart;
            hide(s, columns, oldest(row + i, window) - from, row + i - from);
            float bottom = weigh_below_largest(s, columns, total + i);
            int64_t token = token_at(p, start + row + i);
            logs[token * p->heads + head] = bottom + logf(total[i]);
          }
          memset(scores + count * apart, 0, (padded(count) - count) * apart * sizeof(float));
          rows_by_matrix(padded(count), dims, end - from, scores, apart, values + from * dims, dims, result, dims);
          for (int64_t i = 0; i < count; i++) {
            float *to = at(p, &out, start + row + i, head), share = 1.0f / total[i];
            for (int64_t d = 0; d < p->dim; d++) to[d] = result[i * dims + d] * share;
          }
        }
    }
    free(memory);
  }
  return failed;
}

// Gradients of `headrace_attend`'s output: dq [tokens, ...], and dk and dv [places, ...], a token's once for each of its
// places. P = e^(S - log), dS = P (dP - sum(dO O)) as in Dao et al. 2022 (FlashAttention), appendix B.2.
int headrace_attend_backward(
    const pack *p, tensor q, tensor k, tensor v, double scale, int64_t window, tensor out, const float *logs,
    tensor dout, tensor dq, tensor dk, tensor dv) {
  int64_t dim = p->dim, dims = padded(dim), longest = padded(p->longest), apart = longest + PAD;
  int64_t group = p->heads / p->kv_heads, units = p->sequences * p->kv_heads;
  int failed = 0;
#pragma omp parallel num_threads(p->threads)
  {
    float *memory = scratch(dims * (2 * apart + 3 * longest + 3 * QUERIES) + 2 * QUERIES * apart);
    float *keys = memory, *values = keys + dims * apart, *key_rows = values + dims * apart;
    float *sum_k = key_rows + dims * longest, *sum_v = sum_k + dims * longest;
    float *rows = sum_v + dims * longest, *grads = rows + dims * QUERIES, *result = grads + dims * QUERIES;
    float *weights = result + dims * QUERIES, *slopes = weights + QUERIES * apart;
    if (!memory)
#pragma omp atomic write
      failed = 1;
#pragma omp for schedule(dynamic, 1)
    for (int64_t unit = 0; unit < units; unit++) {
      int64_t sequence = p->order[unit / p->kv_heads], kv_head = unit % p->kv_heads;
      int64_t start = p->starts[sequence], n = p->starts[sequence + 1] - start;
      if (!memory) continue;
      copy_columns(p, &k, kv_head, start, n, padded(n), apart, keys);
      copy_columns(p, &v, kv_head, start, n, padded(n), apart, values);
      copy_rows(p, &k, kv_head, start, n, n, 1.0f, key_rows);
      memset(sum_k, 0, 2 * dims * longest * sizeof(float));
      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (int64_t row = p->first[sequence]; row < n; row += QUERIES) {
          int64_t count = least(QUERIES, n - row), end = row + count;
          int64_t from = oldest(row, window) / PAD * PAD, columns = padded(end) - from;
          copy_rows(p, &q, head, start + row, count, padded(count), scale, rows);
          copy_rows(p, &dout, head, start + row, count, padded(count), 1.0f, grads);
          rows_by_matrix(padded(count), columns, dim, rows, dims, keys + from, apart, weights, apart);
          rows_by_matrix(padded(count), columns, dim, grads, dims, values + from, apart, slopes, apart);
          for (int64_t i = 0; i < count; i++) {
            int64_t token = token_at(p, start + row + i);
            const float *o = at(p, &out, start + row + i, head), *g = grads + i * dims;
            float *s = weights + i * apart, *ds = slopes + i * apart, along = 0.0f;
            for (int64_t d = 0; d < dim; d++) along += o[d] * g[d];
            hide(s, columns, oldest(row + i, window) - from, row + i - from);
            weigh(s, columns, logs[token * p->heads + head]);
            for (int64_t j = 0; j < columns; j += W) store(ds + j, load(s + j) * (load(ds + j) - along));
          }
          memset(slopes + count * apart, 0, (padded(count) - count) * apart * sizeof(float));
          add_columns_by_matrix(columns, dims, count, weights, apart, grads, dims, sum_v + from * dims, dims);
          add_columns_by_matrix(columns, dims, count, slopes, apart, rows, dims, sum_k + from * dims, dims);
          rows_by_matrix(padded(count), dims, end - from, slopes, apart, key_rows + from * dims, dims, result, dims);
          for (int64_t i = 0; i < count; i++) {
            float *to = at(p, &dq, start + row + i, head);
            for (int64_t d = 0; d < dim; d++) to[d] = result[i * dims + d] * scale;
          }
        }
      for (int64_t i = 0; i < n; i++) {
        float *to_k = dk.data + (start + i) * dk.token_stride + kv_head * dk.head_stride;
        float *to_v = dv.data + (start + i) * dv.token_stride + kv_head * dv.head_stride;
        memcpy(to_k, sum_k + i * dims, dim * sizeof(float));
        memcpy(to_v, sum_v + i * dims, dim * sizeof(float));
      }
    }
    free(memory);
  }
  return failed;
}

// x [places, width] → out [tokens, width], the sum over each token's places: places[runs[t]] ... places[runs[t + 1] - 1].
int headrace_sum_places(
    int64_t tokens, int64_t width, const int64_t *runs, const int64_t *places, const float *x, float *out,
    int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t t = 0; t < tokens; t++) {
    float *to = out + t * width;
    memcpy(to, x + places[runs[t]] * width, width * sizeof(float));
    for (int64_t i = runs[t] + 1; i < runs[t + 1]; i++)
      for (int64_t j = 0; j < width; j++) to[j] += x[places[i] * width + j];
  }
  return 0;
}

typedef struct {
  int64_t rows, heads, kv_heads, dim, block_size, table_stride;
  const int64_t *table;    // [rows, ...] the blocks of each sequence, in order
  const int64_t *lengths;  // [rows] tokens, the new one included
  int64_t longest, threads;
} step;

// One sequence of `headrace_decode`: scores is memory for [heads, apart]. Fast where `dim` is a constant.
static inline __attribute__((always_inline)) void decode_row(
    const step *p, int64_t dim, int64_t row, const float *query, int64_t query_stride, const float *keys,
    const float *values, float scale, int64_t window, float *scores, int64_t apart, float *out, int64_t out_stride) {
  const int64_t *table = p->table + row * p->table_stride;
  int64_t size = p->block_size, slot = p->kv_heads * dim, n = p->lengths[row], from = oldest(n - 1, window);
  int64_t group = p->heads / p->kv_heads, count = n - from, whole = dim / W * W;
  for (int64_t t = from; t < n;) {
    int64_t end = least(n, (t / size + 1) * size);
    const float *key = keys + (table[t / size] * size + t % size) * slot;
    // blocks lie anywhere, so no processor knows by itself what is read next
    const float *next = end < n ? keys + table[end / size] * size * slot : values + table[from / size] * size * slot;
    for (; t < end; t++, key += slot, next += slot) {
      for (int64_t d = 0; d < slot; d += 16) __builtin_prefetch(next + d);
      for (int64_t kv_head = 0, head = 0; kv_head < p->kv_heads; kv_head++)
        for (int64_t g = 0; g < group; g++, head++)
          scores[head * apart + t - from] = dot(query + head * query_stride, key + kv_head * dim, dim) * scale;
    }
  }
  for (int64_t head = 0; head < p->heads; head++) {
    float *s = scores + head * apart, *to = out + head * out_stride;
    const float *own = values + head / group * dim;
    hide(s, padded(count), 0, count - 1);
    float total;
    weigh_below_largest(s, padded(count), &total);
    float share = 1.0f / total;
    for (int64_t d = 0; d < whole; d += 2 * W) {
      int wide = d + 2 * W <= whole;
      vec first = all(0.0f), second = all(0.0f);
      for (int64_t t = from; t < n;) {
        int64_t end = least(n, (t / size + 1) * size);
        const float *value = own + (table[t / size] * size + t % size) * slot + d;
        const float *next = own + (end < n ? table[end / size] * size * slot : 0) + d;
        for (; t < end; t++, value += slot, next += slot) {
          __builtin_prefetch(next);
          if (wide) __builtin_prefetch(next + W);
          first = fused(all(s[t - from]), load(value), first);
          if (wide) second = fused(all(s[t - from]), load(value + W), second);
        }
      }
      store(to + d, first * share);
      if (wide) store(to + d + W, second * share);
    }
    for (int64_t d = whole; d < dim; d++) {
      float found = 0.0f;
      for (int64_t t = from; t < n; t++)
        found += s[t - from] * own[(table[t / size] * size + t % size) * slot + d];
      to[d] = found * share;
    }
  }
}

// Writes each sequence's new key and value into the pools [slots, kv_heads, dim] and attends to all of its tokens.
int headrace_decode(
    const step *p, tensor q, tensor k, tensor v, float *keys, float *values, double scale, int64_t window, tensor out) {
  int64_t dim = p->dim, size = p->block_size, apart = padded(p->longest);
  int failed = 0;
#pragma omp parallel num_threads(p->threads)
  {
    float *scores = scratch(p->heads * apart);
    if (!scores)
#pragma omp atomic write
      failed = 1;
#pragma omp for schedule(dynamic, 1)
    for (int64_t row = 0; row < p->rows; row++) {
      int64_t last = p->lengths[row] - 1;
      if (!scores) continue;
      int64_t own = (p->table[row * p->table_stride + last / size] * size + last % size) * p->kv_heads * dim;
      for (int64_t head = 0; head < p->kv_heads; head++) {
        memcpy(keys + own + head * dim, k.data + row * k.token_stride + head * k.head_stride, dim * sizeof(float));
        memcpy(values + own + head * dim, v.data + row * v.token_stride + head * v.head_stride, dim * sizeof(float));
      }
      const float *query = q.data + row * q.token_stride;
      float *to = out.data + row * out.token_stride;
#define ROW(D) \
  decode_row(p, D, row, query, q.head_stride, keys, values, (float)scale, window, scores, apart, to, out.head_stride)
      switch (dim) {
        case 32: ROW(32); break;
        case 64: ROW(64); break;
        case 128: ROW(128); break;
        case 256: ROW(256); break;
        default: ROW(dim);
      }
#undef ROW
    }
    free(scores);
  }
  return failed;
}
