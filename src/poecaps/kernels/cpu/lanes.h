/* Vectors of LANES floats, one for each of LANES images, and their arithmetic. A part of routing.c.

   LANES and the instruction set are options of the compiler: 16 (AVX-512), 8 (AVX2 with FMA) or 4
   (NEON of ARM, SSE2 of x86-64). The compiler's vector extensions, of GCC and Clang, do the rest.
   The number of registers decides how many sums are computed at the same time. */

#include <math.h>
#include <stddef.h>
#include <string.h>

#if LANES == 16 || LANES == 8
#include <immintrin.h>
#endif

#if LANES == 16 || defined __ARM_NEON /* 32 vector registers */
#define BLOCK_D 16 /* components d with one accumulator each: half of the registers */
#define PAIR_K 8   /* components k with one accumulator for each of two experts */
#else /* 16 vector registers */
#define BLOCK_D 8
#define PAIR_K 4
#endif
#define BLOCK_K 8 /* components k with one accumulator each */

/* aligned(4): pointers into tensors and the workspace are aligned to floats only. */
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int mask __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef ptrdiff_t size; /* signed; a long has 32 bits on Windows */

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* The elements of two vectors that constants name: a has 0 to LANES − 1, b the next ones. */
#if defined __clang__ || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (mask){__VA_ARGS__})
#endif
#if LANES == 16
#define INTERLEAVE_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define INTERLEAVE_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define INTERLEAVE_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define INTERLEAVE_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define INTERLEAVE_LOW 0, 4, 1, 5
#define INTERLEAVE_HIGH 2, 6, 3, 7
#endif

INLINE vec broadcast(float x) { return (vec){0} + x; }

/* yes ? a : b */
INLINE vec blend(mask yes, vec a, vec b) { return (vec)(((mask)a & yes) | ((mask)b & ~yes)); }

/* √x */
INLINE vec square_root(vec x)
{
    vec y;
    for (int l = 0; l < LANES; l++) y[l] = sqrtf(x[l]);
    return y;
}

/* About x^(−1/2), ∞ for 0 and 0 for ∞: to 14 bits (AVX-512), 12 bits (AVX2) or all bits. */
INLINE vec estimated_inverse_square_root(vec x)
{
#if LANES == 16
    return (vec)_mm512_rsqrt14_ps((__m512)x);
#elif LANES == 8
    return (vec)_mm256_rsqrt_ps((__m256)x);
#else
    return 1 / square_root(x);
#endif
}

/* x^(−1/2), and 0 for 0 and ∞; one Newton step from the estimate. */
INLINE vec inverse_square_root(vec x)
{
    vec estimate = estimated_inverse_square_root(x);
    vec refined = estimate + 0.5f * estimate * (1 - x * estimate * estimate);
    return blend((estimate > 0) & (estimate < INFINITY), refined, broadcast(0));
}

/* eˣ = 2ⁿ eʳ for x ≤ 88, with n = round(x log₂e) and r = x − n ln 2; 0 below −87; NaN stays NaN.

   |r| ≤ ln(2)/2, where the first term that the series leaves out, r⁸/8!, is below 2⁻²⁷. Below about
   −87 the power 2ⁿ is not a normal number. */
INLINE vec exponential(vec x)
{
    const float log2_e = 1.44269504f;
    const float rounding = 12582912.0f; /* 1.5·2²³: adding it leaves n in the last bits */
    const float ln2_high = 0.693359375f, ln2_low = 2.12194440e-4f; /* ln 2 = high − low */
    vec shifted = x * log2_e + rounding;
    vec n = shifted - rounding;
    vec r = x - n * ln2_high + n * ln2_low;
    vec series = broadcast(1.0f / 5040);
    series = series * r + 1.0f / 720;
    series = series * r + 1.0f / 120;
    series = series * r + 1.0f / 24;
    series = series * r + 1.0f / 6;
    series = series * r + 0.5f;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    vec power = (vec)(((mask)shifted + 127) << 23); /* 127: bias of the exponent, above 23 bits */
    return blend(x < -87.0f, broadcast(0), series * power);
}

/* ⟨a, b⟩ = Σ_d a_d b_d, in four partial sums: a single one would wait for every addition. */
INLINE vec inner(const vec *a, const vec *b, int n)
{
    vec sums[4] = {{0}, {0}, {0}, {0}};
    UNROLL for (int d = 0; d < n; d++) sums[d % 4] += a[d] * b[d];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

/* Transpose LANES vectors: each of log₂(LANES) rounds interleaves the first and the second half. */
INLINE void transpose(vec *rows)
{
    vec next[LANES];
    UNROLL for (int round = 1; round < LANES; round *= 2) {
        UNROLL for (int n = 0; n < LANES / 2; n++) {
            next[2 * n] = SHUFFLE(rows[n], rows[n + LANES / 2], INTERLEAVE_LOW);
            next[2 * n + 1] = SHUFFLE(rows[n], rows[n + LANES / 2], INTERLEAVE_HIGH);
        }
        UNROLL for (int n = 0; n < LANES; n++) rows[n] = next[n];
    }
}

/* sum += x with Kahan's compensation, because the denominator of a softmax may have many terms. */
INLINE void compensated_add(vec *sum, vec *compensation, vec x)
{
    vec term = x - *compensation, next = *sum + term;
    *compensation = (next - *sum) - term;
    *sum = next;
}
