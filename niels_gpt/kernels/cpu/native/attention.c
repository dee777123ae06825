/* Causal attention with RoPE, forward and backward, in float32. One core computes one head of one row, which stays in
   its cache, so no sum depends on the number of cores.

   D, the head size, is a macro from the command line of the compiler. Contiguous are qkv (B, n, H + 2 G, D) with G heads
   of keys and of values, dqkv (B, n, 3, H, D) with those of every query head, y and dy (B, n, H, D), lse (B, H, n), sin
   and cos (n, D / 2); sin is null without RoPE. */

#include "vectors.h"
#include <omp.h>

/* A matmul is computed in tiles of TALL x COLUMNS numbers, which fill the registers (AVX2 has 16, others 32). */
#define TALL 4
#define WIDE (W != 8 && D % (4 * W) == 0 ? 4 : D % (2 * W) == 0 ? 2 : 1)
#define COLUMNS (WIDE * W)
#define ROWS 64 /* queries at a time */
#define UP(n) round_up(n, TOGETHER * W > ROWS ? TOGETHER * W : ROWS)

/* c = a b, or c += a b if `more`; a[i, k] is a[i * ai + k * ak]; rows of b and c are contiguous, bk and ci apart. */
INLINE void tile(long depth, const float *a, long ai, long ak, const float *b, long bk, float *c, long ci, int more) {
    vec s[TALL][WIDE];
    for (int i = 0; i < TALL; i++)
        for (int j = 0; j < WIDE; j++) s[i][j] = more ? load(c + i * ci + j * W) : every(0);
    #pragma GCC unroll 4
    for (long k = 0; k < depth; k++, a += ak, b += bk) {
        vec row[WIDE];
        for (int j = 0; j < WIDE; j++) row[j] = load(b + j * W);
        for (int i = 0; i < TALL; i++)
            for (int j = 0; j < WIDE; j++) s[i][j] += a[i * ai] * row[j];
    }
    for (int i = 0; i < TALL; i++)
        for (int j = 0; j < WIDE; j++) store(c + i * ci + j * W, s[i][j]);
}

/* Query i of the ROWS from `first` on sees keys 0 to first + i: tiles that are fully masked are skipped. */

/* s (ROWS x keys) = q b, q (ROWS x D); b is stored in panels of D x COLUMNS. */
static void scores(long first, long keys, const float *q, const float *b, float *s, long wide) {
    for (long j = 0; j < keys; j += COLUMNS, b += D * COLUMNS)
        for (long i = j > first ? (j - first) / TALL * TALL : 0; i < ROWS; i += TALL)
            tile(D, q + i * D, D, 1, b, COLUMNS, s + i * wide + j, wide, 0);
}

/* y (ROWS x D) = s x, x (keys x D). */
static void mixture(long first, long keys, const float *s, long wide, const float *x, float *y) {
    for (long j = 0; j < D; j += COLUMNS)
        for (long i = 0; i < ROWS; i += TALL)
            tile(least(keys, first + i + TALL), s + i * wide, wide, 1, x + j, D, y + i * D + j, D, 0);
}

/* x (keys x D) += s^T y, y (rows x D). */
static void spread(long first, long keys, long rows, const float *s, long wide, const float *y, float *x) {
    for (long j = 0; j < D; j += COLUMNS)
        for (long i = 0; i < keys; i += TALL) {
            long from = i > first ? i - first : 0; /* the first query that sees key i */
            tile(rows - from, s + from * wide + i, 1, wide, y + from * D + j, D, x + i * D + j, D, 1);
        }
}

typedef struct {
    const float *sin, *cos;
} Angles;

/* out = times x (D), its pairs rotated by the angles of position i; rotated back with direction = -1. */
INLINE void rotate(const float *x, float *out, Angles angles, long i, float times, float direction) {
    if (!angles.sin) {
        for (int d = 0; d < D; d++) out[d] = x[d] * times;
        return;
    }
    const float *sin = angles.sin + i * (D / 2), *cos = angles.cos + i * (D / 2);
    for (int d = 0; d < D / 2; d++) {
        float s = sin[d] * times * direction, c = cos[d] * times, a = x[2 * d], b = x[2 * d + 1];
        out[2 * d] = a * c - b * s;
        out[2 * d + 1] = a * s + b * c;
    }
}

/* x (n x D), rows `apart`, as panels of D x COLUMNS; zeros past n. */
static void into_panels(const float *x, long apart, long n, float *out) {
    for (long start = 0; start < n; start += COLUMNS, out += D * COLUMNS) {
        long rows = least(n - start, COLUMNS);
        for (long d = 0; d < D; d++) {
            for (long i = 0; i < rows; i++) out[d * COLUMNS + i] = x[(start + i) * apart + d];
            for (long i = rows; i < COLUMNS; i++) out[d * COLUMNS + i] = 0;
        }
    }
}

/* Floats in a row of s and ds, which also hold rows of D; not a power of two, because those collide in a cache. */
static long wide(long n) { return (UP(n) > D ? UP(n) : D) + 16; }

/* The scratch memory of one core. */
typedef struct {
    long wide;
    float *q, *k, *keys, *v, *values, *dk, *dv, *s, *ds;
} Scratch;

/* Floats in a Scratch. */
long attention_scratch_size(long n) { return 7 * UP(n) * D + 2 * ROWS * wide(n); }

static Scratch divide(float *memory, long n) {
    long all = UP(n) * D;
    Scratch r = {.wide = wide(n), .q = memory};
    r.k = r.q + all, r.keys = r.k + all, r.v = r.keys + all, r.values = r.v + all, r.dk = r.values + all;
    r.dv = r.dk + all, r.s = r.dv + all, r.ds = r.s + ROWS * r.wide;
    return r;
}

/* A query head and the keys and values it sees; rows of each are `apart`. */
typedef struct {
    const float *q, *k, *v;
    long apart;
} Head;

/* Head h of row b of qkv (B, n, H + 2 G, D). */
static Head find_head(const float *qkv, long b, long h, long n, long H, long G) {
    const float *row = qkv + b * n * (H + 2 * G) * D;
    long g = h / (H / G);
    return (Head){row + h * D, row + (H + g) * D, row + (H + G + g) * D, (H + 2 * G) * D};
}

/* Copy q and k, rotated (and q divided by sqrt(D)), and a third matrix into r.q, r.k and r.v; zeros past n. */
static void load_head(Scratch r, Head head, Angles angles, const float *third, long apart, long n) {
    for (long i = 0; i < n; i++) {
        rotate(head.q + i * head.apart, r.q + i * D, angles, i, 1 / sqrtf(D), 1);
        rotate(head.k + i * head.apart, r.k + i * D, angles, i, 1, 1);
        memcpy(r.v + i * D, third + i * apart, D * sizeof(float));
    }
    long rest = (UP(n) - n) * D * sizeof(float);
    memset(r.q + n * D, 0, rest), memset(r.k + n * D, 0, rest), memset(r.v + n * D, 0, rest);
    into_panels(r.k, D, n, r.keys);
}

static void head_forward(Scratch r, Head head, Angles angles, float *y, float *lse, long n, long H) {
    load_head(r, head, angles, head.v, head.apart, n);
    for (long first = 0; first < n; first += ROWS) {
        long rows = least(ROWS, n - first), keys = first + rows;
        scores(first, keys, r.q + first * D, r.keys, r.s, r.wide);
        float share[ROWS];
        for (long i = 0; i < rows; i++) {
            float *s = r.s + i * r.wide, top;
            long seen = first + i + 1, stop = round_up(seen, TOGETHER * W);
            for (long j = seen; j < stop; j++) s[j] = -INFINITY;
            vec tops = load(s), total = every(0);
            for (long j = W; j < stop; j += W) tops = pick(load(s + j) > tops, load(s + j), tops);
            top = tops[0];
            for (int j = 1; j < W; j++) top = tops[j] > top ? tops[j] : top;
            for (long j = 0; j < stop; j += TOGETHER * W) {
                vec p[TOGETHER];
                EACH p[u] = load(s + j + u * W) - top;
                exponentials(p);
                EACH total += p[u];
                EACH store(s + j + u * W, p[u]);
            }
            memset(s + seen, 0, (stop - seen) * sizeof(float));
            share[i] = 1 / sum(total);
            lse[first + i] = top - logf(share[i]);
        }
        mixture(first, keys, r.s, r.wide, r.v, r.ds);
        for (long i = 0; i < rows; i++)
            for (int d = 0; d < D; d++) y[(first + i) * H * D + d] = r.ds[i * D + d] * share[i];
    }
}

static void head_backward(Scratch r, Head head, Angles angles, const float *y, const float *lse, const float *dy,
                          float *dqkv, long n, long H) {
    const float *gradient = r.v; /* of y */
    load_head(r, head, angles, dy, H * D, n);
    into_panels(head.v, head.apart, n, r.values);
    memset(r.dk, 0, 2 * UP(n) * D * sizeof(float)); /* and dv */
    for (long first = 0; first < n; first += ROWS) {
        long rows = least(ROWS, n - first), keys = first + rows;
        scores(first, keys, r.q + first * D, r.keys, r.s, r.wide);
        scores(first, keys, gradient + first * D, r.values, r.ds, r.wide);
        for (long i = 0; i < rows; i++) {
            float *s = r.s + i * r.wide, *ds = r.ds + i * r.wide;
            vec through = every(0);
            for (int d = 0; d < D; d += W)
                through += load(y + (first + i) * H * D + d) * load(gradient + (first + i) * D + d);
            float mean = sum(through);
            long seen = first + i + 1, stop = round_up(seen, TOGETHER * W);
            for (long j = 0; j < stop; j += TOGETHER * W) {
                vec p[TOGETHER];
                EACH p[u] = load(s + j + u * W) - lse[first + i];
                exponentials(p);
                EACH store(s + j + u * W, p[u]);
                EACH store(ds + j + u * W, p[u] * (load(ds + j + u * W) - mean));
            }
            memset(s + seen, 0, (stop - seen) * sizeof(float));
            memset(ds + seen, 0, (stop - seen) * sizeof(float));
        }
        spread(first, keys, rows, r.s, r.wide, gradient + first * D, r.dv);
        spread(first, keys, rows, r.ds, r.wide, r.q + first * D, r.dk);
        mixture(first, keys, r.ds, r.wide, r.k, r.s);
        for (long i = 0; i < rows; i++)
            rotate(r.s + i * D, dqkv + (first + i) * 3 * H * D, angles, first + i, 1 / sqrtf(D), -1);
    }
    for (long i = 0; i < n; i++) {
        float *out = dqkv + i * 3 * H * D;
        rotate(r.dk + i * D, out + H * D, angles, i, 1, -1);
        memcpy(out + 2 * H * D, r.dv + i * D, D * sizeof(float));
    }
}

/* `memory` has attention_scratch_size(n) floats per thread. */
void attention_forward(const float *qkv, const float *sin, const float *cos, float *y, float *lse, float *memory, long B,
                       long n, long H, long G, int threads) {
    long next = 0;
    #pragma omp parallel num_threads(threads)
    {
        Scratch r = divide(memory + omp_get_thread_num() * attention_scratch_size(n), n);
        for (long i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < B * H;) {
            long b = i / H, h = i % H, start = (b * n * H + h) * D;
            head_forward(r, find_head(qkv, b, h, n, H, G), (Angles){sin, cos}, y + start, lse + i * n, n, H);
        }
    }
}

void attention_backward(const float *qkv, const float *sin, const float *cos, const float *y, const float *lse,
                        const float *dy, float *dqkv, float *memory, long B, long n, long H, long G, int threads) {
    long next = 0;
    #pragma omp parallel num_threads(threads)
    {
        Scratch r = divide(memory + omp_get_thread_num() * attention_scratch_size(n), n);
        for (long i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < B * H;) {
            long b = i / H, h = i % H, start = (b * n * H + h) * D;
            head_backward(r, find_head(qkv, b, h, n, H, G), (Angles){sin, cos}, y + start, lse + i * n, dy + start,
                          dqkv + (b * n * 3 * H + h) * D, n, H);
        }
    }
}
