/* y = add + x w^T for the few rows x of a decoding step, in float32.

   Contiguous are x (M, K), w (N, K), y and add (M, N). w is stored in panels of COLUMNS of its rows, each K x COLUMNS, so
   that memory is read in order. Each number of y is one sum over k in the same order for any number of rows and
   threads: a row's result does not depend on the rows beside it. */

#include "vectors.h"
#include <omp.h>

/* A tile of TALL x COLUMNS sums fills the registers: AVX2 has 16, others 32. */
#if W == 8
#define TALL 6
#define WIDE 2
#elif W == 16
#define TALL 12
#define WIDE 2
#else
#define TALL 5
#define WIDE 4
#endif
#define COLUMNS (WIDE * W)
#define PANELS 4 /* panels that a core takes at a time */

/* Keep a vector in its register: gcc would load it again for each row. */
#if defined(__x86_64__)
#define KEEP(x) __asm__("" : "+x"(x))
#elif defined(__aarch64__)
#define KEEP(x) __asm__("" : "+w"(x))
#else
#define KEEP(x)
#endif

typedef struct {
    const float *x, *w, *add;
    float *y;
    long M, N, K;
} Product;

/* `rows` rows from i on times `panels` panels from column n on. Both are constants: the sums stay in registers.
   `ahead`: fetch the next panel into the cache meanwhile. */
INLINE void tile(Product p, int rows, int panels, long i, long n, int ahead) {
    vec s[TALL][PANELS][WIDE];
    const float *x = p.x + i * p.K, *w = p.w + n * p.K;
    for (int r = 0; r < rows; r++)
        for (int q = 0; q < panels; q++)
            for (int j = 0; j < WIDE; j++) s[r][q][j] = every(0);
    for (long k = 0; k < p.K; k++) {
        if (ahead)
            for (int j = 0; j < COLUMNS; j += 16) __builtin_prefetch(w + (p.K + k) * COLUMNS + j, 0, 2);
        for (int q = 0; q < panels; q++) {
            vec b[WIDE];
            for (int j = 0; j < WIDE; j++) {
                b[j] = load(w + (q * p.K + k) * COLUMNS + j * W);
                if (rows > 1) KEEP(b[j]);
            }
            for (int r = 0; r < rows; r++)
                for (int j = 0; j < WIDE; j++) s[r][q][j] += x[r * p.K + k] * b[j];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int q = 0; q < panels; q++) {
            float sums[COLUMNS];
            for (int j = 0; j < WIDE; j++) store(sums + j * W, s[r][q][j]);
            long from = n + q * COLUMNS, at = (i + r) * p.N + from, columns = least(COLUMNS, p.N - from);
            for (long c = 0; c < columns; c++) p.y[at + c] = p.add ? p.add[at + c] + sums[c] : sums[c];
        }
}

/* All rows times one panel, in tiles of nearly equal height: a low one takes as long as one twice its height. */
static void panel(Product p, long n) {
    for (long tiles = (p.M + TALL - 1) / TALL, i = 0; tiles; tiles--) {
        long rows = (p.M - i) / tiles;
        switch (rows) {
            #define CASE(rows) \
                case rows: \
                    if (tiles == 1 && i) tile(p, rows, 1, i, n, 1); \
                    else tile(p, rows, 1, i, n, 0); \
                    break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
            #if TALL > 5
            CASE(6)
            #endif
            #if TALL > 6
            CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
            #endif
        }
        i += rows;
    }
}

/* Floats of the panels of a matrix. */
long matmul_panels_size(long N, long K) { return round_up(N, COLUMNS) * K; }

/* Store w (N, K) as panels; zeros past N. */
void matmul_store_panels(const float *w, float *panels, long N, long K, int threads) {
    #pragma omp parallel for num_threads(threads) schedule(static)
    for (long n = 0; n < N; n += COLUMNS) {
        long columns = least(COLUMNS, N - n);
        for (long k = 0; k < K; k++)
            for (long c = 0; c < COLUMNS; c++) panels[n * K + k * COLUMNS + c] = c < columns ? w[(n + c) * K + k] : 0;
    }
}

void matmul(const float *x, const float *panels, const float *add, float *y, long M, long N, long K, int threads) {
    Product p = {.x = x, .w = panels, .add = add, .y = y, .M = M, .N = N, .K = K};
    long next = 0;
    #pragma omp parallel num_threads(threads)
    for (long n; (n = __atomic_fetch_add(&next, PANELS * COLUMNS, __ATOMIC_RELAXED)) < N;) {
        if (M == 1 && n + PANELS * COLUMNS <= round_up(N, COLUMNS)) tile(p, 1, PANELS, 0, n, 0);
        else
            for (long stop = least(n + PANELS * COLUMNS, N); n < stop; n += COLUMNS) panel(p, n);
    }
}
