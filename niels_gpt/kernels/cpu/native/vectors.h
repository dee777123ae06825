/* Vectors of floats of the width of the processor, in the extensions that gcc and clang share. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#define W 16 /* floats in a vector */
#elif defined(__AVX2__)
#define W 8
#else
#define W 4
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * W), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * W), aligned(4), may_alias));

/* Long chains of operations run on several vectors at once, line by line: a single one would wait for its results. */
#define TOGETHER 4
#define EACH for (int u = 0; u < TOGETHER; u++)

INLINE vec load(const float *from) { return *(const vec *)from; }
INLINE void store(float *to, vec x) { *(vec *)to = x; }
INLINE vec pick(ints where, vec yes, vec no) { return (vec)((where & (ints)yes) | (~where & (ints)no)); }
INLINE vec every(float x) { return (vec){0} + x; }
INLINE long least(long a, long b) { return a < b ? a : b; }
INLINE long round_up(long n, long to) { return (n + to - 1) / to * to; }

INLINE float sum(vec x) {
    float part[W];
    store(part, x);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

/* x = e^x for x <= 0, within two units in the last place; x below -87 counts as -87 (1.6e-38). NaN stays NaN. */
INLINE void exponentials(vec x[TOGETHER]) {
    static const float c[] = {1.9875692e-4f, 1.3981999e-3f, 8.3334519e-3f, 4.1665796e-2f, 1.6666665e-1f, 0.5f, 1, 1};
    ints exponent[TOGETHER]; /* x / ln 2, rounded: truncated after 0.5 is subtracted, since x <= 0 */
    vec n[TOGETHER], r[TOGETHER];
    EACH x[u] = pick(x[u] < -87.0f, every(-87), x[u]);
    EACH exponent[u] = __builtin_convertvector(x[u] * 1.44269504f - 0.5f, ints);
    EACH n[u] = __builtin_convertvector(exponent[u], vec);
    EACH x[u] = x[u] - n[u] * 0.693359375f; /* ln 2 in two parts */
    EACH x[u] = x[u] + n[u] * 2.12194440e-4f;
    EACH r[u] = x[u] * c[0] + c[1];
    for (int i = 2; i < 8; i++) EACH r[u] = r[u] * x[u] + c[i];
    EACH x[u] = (vec)((ints)r[u] + (exponent[u] << 23));
}
