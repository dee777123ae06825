/* Attention of one new token per row to the tokens of its row so far, with RoPE, in float32. The new keys and values are
   stored in the cache. One core computes the queries that share a key head, so no sum depends on the number of cores,
   nor on the rows beside a row.

   D, the head size, is a macro from the command line of the compiler. Contiguous are qkv (B, H + 2 G, D), cache
   (B, 2, G, T, D), y (B, H, D) and rotation (T, D / 2, 2): cosine and sine; rotation is null without RoPE. Row b has
   lengths[b] < T tokens in the cache. */

#include "vectors.h"
#include <omp.h>

/* out = times x (D), its pairs rotated. */
INLINE void rotate(const float *x, const float *rotation, float *out, float times) {
    for (int d = 0; d < D; d += 2) {
        float c = rotation ? rotation[d] * times : times, s = rotation ? rotation[d + 1] * times : 0;
        out[d] = x[d] * c - x[d + 1] * s;
        out[d + 1] = x[d] * s + x[d + 1] * c;
    }
}

/* s = q k for `keys` keys, which is a constant. */
INLINE void scores(int keys, const float *q, const float *k, float *s) {
    vec a[TOGETHER];
    for (int u = 0; u < keys; u++) a[u] = load(q) * load(k + u * D);
    for (int d = W; d < D; d += W)
        for (int u = 0; u < keys; u++) a[u] += load(q + d) * load(k + u * D + d);
    for (int u = 0; u < keys; u++) s[u] = sum(a[u]);
}

/* y = softmax(q k) v over n tokens; s has round_up(n, TOGETHER W) floats. */
static void attend(const float *q, const float *k, const float *v, long n, float *s, float *y) {
    long j = 0, stop = round_up(n, TOGETHER * W);
    for (; j + TOGETHER <= n; j += TOGETHER) scores(TOGETHER, q, k + j * D, s + j);
    for (; j < n; j++) scores(1, q, k + j * D, s + j);
    for (; j < stop; j++) s[j] = -INFINITY;
    vec tops = load(s), total = every(0), mixed[D / W];
    for (j = W; j < stop; j += W) tops = pick(load(s + j) > tops, load(s + j), tops);
    float top = tops[0];
    for (int i = 1; i < W; i++) top = tops[i] > top ? tops[i] : top;
    for (j = 0; j < stop; j += TOGETHER * W) {
        vec p[TOGETHER];
        EACH p[u] = load(s + j + u * W) - top;
        exponentials(p);
        EACH total += p[u];
        EACH store(s + j + u * W, p[u]);
    }
    float share = 1 / sum(total);
    for (int d = 0; d < D / W; d++) mixed[d] = every(0);
    for (j = 0; j < n; j++)
        for (int d = 0; d < D / W; d++) mixed[d] += s[j] * load(v + j * D + d * W);
    for (int d = 0; d < D / W; d++) store(y + d * W, mixed[d] * share);
}

/* Floats of scratch memory per thread. */
static long scratch_size(long T) { return round_up(T, TOGETHER * W); }
long token_attention_scratch_size(long T) { return scratch_size(T); }

void token_attention(const float *qkv, const float *rotation, float *cache, const int64_t *lengths, float *y,
                     float *memory, long B, long H, long G, long T, int threads) {
    long next = 0, group = H / G;
    #pragma omp parallel num_threads(threads)
    {
        float *s = memory + omp_get_thread_num() * scratch_size(T), q[D];
        for (long i; (i = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < B * G;) {
            long b = i / G, g = i % G, n = lengths[b];
            const float *new = qkv + b * (H + 2 * G) * D, *angles = rotation ? rotation + n * D : 0;
            float *k = cache + (b * 2 * G + g) * T * D, *v = k + G * T * D;
            rotate(new + (H + g) * D, angles, k + n * D, 1);
            memcpy(v + n * D, new + (H + G + g) * D, D * sizeof(float));
            for (long h = g * group; h < (g + 1) * group; h++) {
                rotate(new + h * D, angles, q, 1 / sqrtf(D));
                attend(q, k, v, n + 1, s, y + (b * H + h) * D);
            }
        }
    }
}
