/* GELU, and its slope for the backward, in one pass. */

#include "vectors.h"

/* Coefficients of e^(x^2 / 2) Phi(-x) on 0 <= x <= 5, fitted so that the error of Phi is at most 1.6e-8. */
static const float TAIL[] = {2.962037393e-08f,  -9.279758276e-07f, 1.310656958e-05f,  -1.113642046e-04f, 6.443925483e-04f,
                             -2.747220198e-03f, 9.201538350e-03f,  -2.563024933e-02f, 6.200168798e-02f,  -1.328274965e-01f,
                             2.499755860e-01f,  -3.989407595e-01f, 4.999999843e-01f};

/* y = x Phi(x) and slope = Phi(x) + x phi(x) of TOGETHER vectors. */
INLINE void gelu_vectors(const float *from, float *y, float *slope) {
    vec x[TOGETHER], far[TOGETHER], e[TOGETHER], r[TOGETHER];
    EACH x[u] = load(from + u * W);
    EACH e[u] = -0.5f * x[u] * x[u];
    exponentials(e);
    EACH far[u] = (vec)((ints)x[u] & 0x7fffffff);
    EACH far[u] = pick(far[u] > 5.0f, every(5), far[u]);
    EACH r[u] = far[u] * TAIL[0] + TAIL[1];
    for (int i = 2; i < 13; i++) EACH r[u] = r[u] * far[u] + TAIL[i];
    EACH {
        vec tail = r[u] * e[u], share = pick(x[u] > 0.0f, 1.0f - tail, tail);
        store(y + u * W, x[u] * share);
        store(slope + u * W, share + x[u] * e[u] * 0.39894228f);
    }
}

/* GELU and slope of n numbers; the last ones go through a copy, because they may not fill the vectors. */
void gelu(const float *x, float *y, float *slope, long n, int threads) {
    const long block = 64 * TOGETHER * W;
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (long start = 0; start < n; start += block) {
        long at = start, stop = least(start + block, n);
        for (; at + TOGETHER * W <= stop; at += TOGETHER * W) gelu_vectors(x + at, y + at, slope + at);
        if (at < stop) {
            float in[TOGETHER * W] = {0}, out[TOGETHER * W], slopes[TOGETHER * W];
            memcpy(in, x + at, (stop - at) * sizeof(float));
            gelu_vectors(in, out, slopes);
            memcpy(y + at, out, (stop - at) * sizeof(float));
            memcpy(slope + at, slopes, (stop - at) * sizeof(float));
        }
    }
}
