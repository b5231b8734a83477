/* One learning step on a CPU, sixteen images at once: every variable of type `lanes` holds one number of each of them.

   D, K and TILE (inputs that are taken together) are constants of the compilation. The letters are those of the
   equations: inputs i, experts j, components k of a capsule and d of a vote. A block of images is `groups` of sixteen,
   the last one filled up with zeros, and lies as

       capsules x, x̃       (groups, I, K)          experts z, y, heard     (groups, J, D)
       coefficients e      (groups, J, I)          their sums `total`      (groups, J)

   of lanes. Where inputs share, Σ_i c_ij = 1, the coefficients are kept undivided, c_ij = e_ij / total_j, and the
   division is done where there is less to divide: in z_j, y_j and the pulls. Where experts share, total_j = 1.

   Work is cut into tasks whose results do not depend on who does them or when, so neither does any number. */

#include <immintrin.h>
#include <math.h>
#include <sched.h>
#include <string.h>

#define L 16       /* images in `lanes` */
#define AHEAD 3    /* inputs whose maps are fetched early */
#define WIDE ((D + L - 1) / L)  /* vectors that D numbers of one image fill */

typedef float lanes __attribute__((vector_size(4 * L), aligned(4), may_alias));
typedef int mask __attribute__((vector_size(4 * L), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

struct job {
    long inputs, experts, images, groups, pieces; /* of this block; inputs fall into pieces */
    long iterations, mixings;
    long experts_share, cosine, flat; /* flat: no maximum need be taken out of the softmax */
    long keeps;                       /* whether the votes for one expert are kept while it is routed */
    long first, last;                 /* whether this block is the first, the last, of the gradient */
    float sharpness, share;           /* share: 1 / the images of all blocks */
    const float *x;                   /* (images, I, K) */
    const float *w;                   /* (I, J, D, K) */
    float *c;                         /* where to write the coefficients, or none */
    long c_image, c_input, c_expert;  /* numbers from one to the next; where images are neighbours, to whole groups */
    float *standing;                  /* (images, J, D), where to write the preactivation */
    float *slope;                     /* (I, J, D, K), where to write the gradient, or none */
    const lanes *on;                  /* (groups, J), 1 for an expert that may fire and 0 for another, or none */
    lanes *gap;                       /* (groups, J), what each expert adds to F(x) − F(x̃) */
    lanes *capsules, *model, *e, *total, *z, *y;
    lanes *parts;                     /* (pieces, groups, J, D), what each piece adds to z */
    lanes *p, *q;                     /* (J, groups, L, WIDE), pulls of data and model: of one image after the other */
    lanes *grown;                     /* (I, J, K, WIDE), the gradient so far, where there are several blocks */
    lanes *own;                       /* of each thread `own_size` lanes */
    long own_size;
    long joined, taken, done; /* shared by the threads: how many there are, tasks taken and tasks done */
};

struct worker {
    struct job *job;
    lanes *own;
    long first, next; /* of all tasks: the first of this stage, and the one that is this worker's */
};

typedef void task(const struct job *, long n, lanes *own);

/* ---------------------------------------------------------------------------------------------------------
   Numbers */

INLINE lanes all(float x) { return (lanes){0} + x; }

INLINE lanes where(mask yes, lanes a, lanes b) { return (lanes)(((mask)a & yes) | ((mask)b & ~yes)); }

INLINE lanes root(lanes x)
{
    lanes y;
    for (int l = 0; l < L; l++) y[l] = sqrtf(x[l]);
    return y;
}

/* eˣ for x ≤ 88, and 0 below −87: 2ⁿ eʳ with n the nearest whole number, eʳ by its series. NaN stays NaN. */
INLINE lanes exponential(lanes x)
{
    lanes shifted = x * 1.44269504f + 12582912.0f; /* 1.5·2²³: n stands in the last bits */
    lanes n = shifted - 12582912.0f;
    lanes r = x - n * 0.693359375f + n * 2.12194440e-4f;
    lanes series = all(1.0f / 5040);
    series = series * r + 1.0f / 720;
    series = series * r + 1.0f / 120;
    series = series * r + 1.0f / 24;
    series = series * r + 1.0f / 6;
    series = series * r + 0.5f;
    series = series * r + 1.0f;
    series = series * r + 1.0f;
    lanes power = (lanes)(((mask)shifted + 127) << 23);
    return where(x < -87.0f, all(0), series * power);
}

/* Σ_d a_d b_d, in four sums for they are added one after the other. */
INLINE lanes inner(const lanes *a, const lanes *b, int n)
{
    lanes sums[4] = {{0}, {0}, {0}, {0}};
    UNROLL for (int d = 0; d < n; d++) sums[d % 4] += a[d] * b[d];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

/* ‖v‖; the largest component is divided by first, so that no square over- or underflows. `unit`: v/‖v‖, 0 for 0. */
static lanes polar(const lanes *v, lanes *unit)
{
    lanes scale = all(0);
    for (int d = 0; d < D; d++) {
        lanes size = where(v[d] < 0, -v[d], v[d]);
        scale = where(size > scale, size, scale);
    }
    lanes divisor = where(scale == 0, all(1), scale), square = all(0);
    for (int d = 0; d < D; d++) {
        unit[d] = v[d] / divisor;
        square += unit[d] * unit[d];
    }
    lanes norm = root(square), by = where(norm == 0, all(1), norm);
    for (int d = 0; d < D; d++) unit[d] /= by;
    return divisor * norm;
}

/* squash(z) = ‖z‖²/(1+‖z‖²) z/‖z‖; rounding may bring a norm to 1, which `functional.squash` prevents. */
static void squash(const lanes *z, lanes *y)
{
    lanes norm = polar(z, y), high = 1 / norm, low = norm * norm;
    lanes p = where(norm > 1, 1 / (1 + high * high), low / (1 + low));
    for (int d = 0; d < D; d++) y[d] *= p;
}

/* ---------------------------------------------------------------------------------------------------------
   One input and one expert */

INLINE void fetch(const float *w)
{
    for (int line = 0; line < D * K; line += L) __builtin_prefetch(w + line);
}

/* u = W x, n of its components. */
INLINE void vote_part(const float *w, const lanes *x, lanes *u, int n)
{
    lanes sum[L];
    UNROLL for (int d = 0; d < n; d++) sum[d] = w[d * K] * x[0];
    for (int k = 1; k < K; k++) UNROLL for (int d = 0; d < n; d++) sum[d] += w[d * K + k] * x[k];
    UNROLL for (int d = 0; d < n; d++) u[d] = sum[d];
}

INLINE void vote(const float *w, const lanes *x, lanes *u)
{
    for (int d = 0; d + L <= D; d += L) vote_part(w + d * K, x, u + d, L);
    if (D % L) vote_part(w + D / L * L * K, x, u + D / L * L, D % L);
}

/* z += Σ_i e_i W_i x_i over some inputs, n components; maps lie `row` numbers apart. Evenly: all e are 1. */
INLINE void up_part(const float *w, long row, const lanes *x, const lanes *e, long inputs, lanes *z, int n, int evenly)
{
    lanes sum[L];
    UNROLL for (int d = 0; d < n; d++) sum[d] = all(0);
    for (long i = 0; i < inputs; i++, w += row, x += K)
        for (int k = 0; k < K; k++) {
            lanes heard = x[k];
            if (!evenly) heard *= e[i];
            UNROLL for (int d = 0; d < n; d++) sum[d] += w[d * K + k] * heard;
        }
    UNROLL for (int d = 0; d < n; d++) z[d] += sum[d];
}

INLINE void up(const float *w, long row, const lanes *x, const lanes *e, long inputs, lanes *z, int evenly)
{
    for (int d = 0; d + L <= D; d += L) up_part(w + d * K, row, x, e, inputs, z + d, L, evenly);
    if (D % L) up_part(w + D / L * L * K, row, x, e, inputs, z + D / L * L, D % L, evenly);
}

/* x += e Wᵀ y, n components. */
INLINE void down_part(const float *w, const lanes *y, lanes e, lanes *x, int n)
{
    lanes sum[8];
    UNROLL for (int k = 0; k < n; k++) sum[k] = w[k] * y[0];
    for (int d = 1; d < D; d++) UNROLL for (int k = 0; k < n; k++) sum[k] += w[d * K + k] * y[d];
    UNROLL for (int k = 0; k < n; k++) x[k] += e * sum[k];
}

INLINE void down(const float *w, const lanes *y, lanes e, lanes *x)
{
    for (int k = 0; k + 8 <= K; k += 8) down_part(w + k, y, e, x + k, 8);
    if (K % 8) down_part(w + K / 8 * 8, y, e, x + K / 8 * 8, K % 8);
}

/* 1/‖u‖, and 0 for a zero vote; 0 too where ‖u‖² is too large for a number. By Newton's method, from 14 bits on. */
INLINE lanes inverse_norm(const lanes *u)
{
    lanes square = inner(u, u, D), near = (lanes)_mm512_rsqrt14_ps((__m512)square);
    lanes found = near + 0.5f * near * (1 - square * near * near);
    return where((near > 0) & (near < INFINITY), found, all(0));
}

/* e_i = ⟨u_i, heard⟩ of some inputs, n components, added to those before. */
INLINE void agree_part(const lanes *u, const lanes *heard, long inputs, lanes *e, int n, int before)
{
    lanes ear[L];
    UNROLL for (int d = 0; d < n; d++) ear[d] = heard[d];
    for (long i = 0; i < inputs; i++, u += D) {
        if (before) e[i] += inner(u, ear, n);
        else e[i] = inner(u, ear, n);
    }
}

INLINE void agree(const lanes *u, const lanes *heard, long inputs, lanes *e)
{
    for (int d = 0; d + L <= D; d += L) agree_part(u + d, heard + d, inputs, e, L, d);
    if (D % L) agree_part(u + D / L * L, heard + D / L * L, inputs, e, D % L, D / L);
}

/* z += Σ_i e_i u_i over some inputs, n components. Evenly: all e are 1. */
INLINE void add_part(const lanes *u, const lanes *e, long inputs, lanes *z, int n, int evenly)
{
    lanes sum[L];
    UNROLL for (int d = 0; d < n; d++) sum[d] = all(0);
    for (long i = 0; i < inputs; i++, u += D)
        UNROLL for (int d = 0; d < n; d++) {
            if (evenly) sum[d] += u[d];
            else sum[d] += e[i] * u[d];
        }
    UNROLL for (int d = 0; d < n; d++) z[d] += sum[d];
}

INLINE void add(const lanes *u, const lanes *e, long inputs, lanes *z, int evenly)
{
    for (int d = 0; d + L <= D; d += L) add_part(u + d, e, inputs, z + d, L, evenly);
    if (D % L) add_part(u + D / L * L, e, inputs, z + D / L * L, D % L, evenly);
}

/* sum += x, and what rounding loses of it is added the next time: sums of a softmax may have very many terms. */
INLINE void gain(lanes *sum, lanes *lost, lanes x)
{
    lanes term = x - *lost, next = *sum + term;
    *lost = (next - *sum) - term;
    *sum = next;
}

INLINE long least(long a, long b) { return a < b ? a : b; }

/* ---------------------------------------------------------------------------------------------------------
   Routing. What follows is made of tasks, see `stage`. */

/* (L, I, K) → (I, K) of lanes. */
static void pack(const struct job *job, long group, lanes *own)
{
    (void)own;
    long row = job->inputs * K, there = least(L, job->images - group * L);
    float *to = (float *)(job->capsules + group * row);
    const float *x = job->x + group * L * row;
    if (there < L) memset(to, 0, sizeof(lanes) * row);
    for (long some = 0; some < row; some += L)
        for (long l = 0; l < there; l++)
            for (long n = some; n < least(some + L, row); n++) to[n * L + l] = x[l * row + n];
}

/* heard_j += sharpness times direction or squash of z_j. */
static void listen(const struct job *job, const lanes *z, lanes *heard)
{
    lanes said[D];
    if (job->cosine) polar(z, said);
    else squash(z, said);
    for (int d = 0; d < D; d++) heard[d] += job->sharpness * said[d];
}

/* Keep z_j = Σ_i e_ij u_ij / total_j, and write it where the caller reads it. */
static void keep(const struct job *job, long group, long j, const lanes *z, lanes total)
{
    lanes *kept = job->z + (group * job->experts + j) * D;
    job->total[group * job->experts + j] = total;
    for (int d = 0; d < D; d++) kept[d] = z[d] / total;
    float *standing = job->standing + (group * L * job->experts + j) * D;
    for (long l = 0; l < least(L, job->images - group * L); l++)
        for (int d = 0; d < D; d++) standing[l * job->experts * D + d] = kept[d][l];
}

/* Write c_ij = e_ij / total_j of some inputs where the caller reads it, if it wants to. */
static void tell(const struct job *job, long group, long j, long from, long to, lanes total)
{
    const lanes *e = job->e + (group * job->experts + j) * job->inputs;
    for (long i = from; job->c && i < to; i++) {
        lanes c = e[i] / total;
        float *there = job->c + j * job->c_expert + i * job->c_input + group * L * job->c_image;
        if (job->c_image == 1) *(lanes *)there = c;
        else for (long l = 0; l < least(L, job->images - group * L); l++) there[l * job->c_image] = c[l];
    }
}

/* Route for one expert, where inputs share: no other expert matters. own: 1/‖u‖ (I); votes (I, D), or of one tile. */
static void route_expert(const struct job *job, long n, lanes *own)
{
    long inputs = job->inputs, j = n / job->groups, group = n % job->groups, row = job->experts * D * K;
    const lanes *x = job->capsules + group * inputs * K;
    const float *w = job->w + j * D * K;
    lanes *e = job->e + (group * job->experts + j) * inputs, *size = own, *votes = own + inputs;
    lanes heard[D], z[D], total = all(inputs);
    memset(heard, 0, sizeof heard);
    memset(z, 0, sizeof z);

    for (long from = 0; !job->keeps && from < inputs; from += TILE)
        up(w + from * row, row, x + from * K, e, least(TILE, inputs - from), z, 1);
    for (long from = 0, to; job->keeps && from < inputs; from = to) {
        to = least(from + TILE, inputs);
        for (long i = from; i < to; i++) {
            fetch(w + least(i + AHEAD, inputs - 1) * row);
            vote(w + i * row, x + i * K, votes + i * D);
            size[i] = job->cosine ? inverse_norm(votes + i * D) : all(1);
        }
        add(votes + from * D, e, to - from, z, 1);
    }
    for (long i = 0; job->iterations == 1 && i < inputs; i++) e[i] = all(1);

    for (long r = 1; r < job->iterations; r++) {
        lanes most = all(job->flat ? 0 : -INFINITY);
        for (int d = 0; d < D; d++) z[d] /= total;
        listen(job, z, heard);
        memset(z, 0, sizeof z);
        lanes lost = total = all(0);
        for (long from = 0, to; from < inputs; from = to) {
            to = least(from + TILE, inputs);
            lanes *u = job->keeps ? votes + from * D : votes;
            for (long i = from; !job->keeps && i < to; i++) {
                fetch(w + least(i + AHEAD, inputs - 1) * row);
                vote(w + i * row, x + i * K, u + (i - from) * D);
                size[i] = job->cosine ? inverse_norm(u + (i - from) * D) : all(1);
            }
            agree(u, heard, to - from, e + from);
            if (job->flat) {
                for (long i = from; i < to; i++) gain(&total, &lost, e[i] = exponential(e[i] * size[i]));
                add(u, e + from, to - from, z, 0);
            } else
                for (long i = from; i < to; i++) {
                    e[i] *= size[i];
                    most = where(most < e[i], e[i], most);
                }
        }
        if (!job->flat) {
            for (long i = 0; i < inputs; i++) gain(&total, &lost, e[i] = exponential(e[i] - most));
            for (long from = 0; from < inputs; from += TILE) {
                long some = least(TILE, inputs - from);
                if (job->keeps) add(votes + from * D, e + from, some, z, 0);
                else up(w + from * row, row, x + from * K, e + from, some, z, 0);
            }
        }
    }
    keep(job, group, j, z, total);
    tell(job, group, j, 0, inputs, total);
}

/* Where experts share, an input shares its vote among all of them, so z_j grows by one piece of the inputs after the
   other and is known once all are in: pieces send and then gather, in each iteration. */

static void piece_of(const struct job *job, long n, long *from, long *to)
{
    *from = job->inputs * n / job->pieces;
    *to = job->inputs * (n + 1) / job->pieces;
}

static lanes *part_of(const struct job *job, long piece, long group)
{
    return job->parts + (piece * job->groups + group) * job->experts * D;
}

/* Add what one piece of the inputs sends to all experts, with c_ij = 1/J. */
static void send_evenly(const struct job *job, long n, lanes *own)
{
    (void)own;
    long experts = job->experts, piece = n / job->groups, group = n % job->groups, row = experts * D * K, from, to;
    piece_of(job, piece, &from, &to);
    lanes *z = part_of(job, piece, group);
    memset(z, 0, sizeof(lanes) * experts * D);
    for (long i = from, end; i < to; i = end) {
        end = least(i + TILE, to);
        const lanes *x = job->capsules + (group * job->inputs + i) * K;
        for (long j = 0; j < experts; j++) up(job->w + i * row + j * D * K, row, x, 0, end - i, z + j * D, 1);
    }
    for (long n = 0; n < experts * D; n++) z[n] /= (float)experts;
    for (long j = 0; job->iterations == 1 && j < experts; j++) {
        for (long i = from; i < to; i++) job->e[(group * experts + j) * job->inputs + i] = all(1.0f / experts);
        tell(job, group, j, from, to, all(1));
    }
}

/* The same with c_ij = softmax_j of how far votes agree with what was heard. own: c (J, TILE), votes (J, TILE, D). */
static void send(const struct job *job, long n, lanes *own)
{
    long experts = job->experts, piece = n / job->groups, group = n % job->groups, row = experts * D * K, from, to;
    piece_of(job, piece, &from, &to);
    lanes *z = part_of(job, piece, group), *c = own, *votes = own + experts * TILE;
    const lanes *heard = job->y + group * experts * D;
    memset(z, 0, sizeof(lanes) * experts * D);
    for (long first = from, end; first < to; first = end) {
        end = least(first + TILE, to);
        for (long i = first; i < end; i++) {
            const lanes *x = job->capsules + (group * job->inputs + i) * K;
            lanes most = all(-INFINITY), total = all(0), lost = all(0), *c_i = c + i - first;
            for (long j = 0; j < experts; j++) {
                lanes *u = votes + (j * TILE + i - first) * D;
                fetch(job->w + least(i + 1, job->inputs - 1) * row + j * D * K);
                vote(job->w + i * row + j * D * K, x, u);
                lanes b = inner(u, heard + j * D, D);
                if (job->cosine) b *= inverse_norm(u);
                most = where(most < b, b, most);
                c_i[j * TILE] = b;
            }
            for (long j = 0; j < experts; j++)
                gain(&total, &lost, c_i[j * TILE] = exponential(c_i[j * TILE] - most));
            total = 1 / total;
            for (long j = 0; j < experts; j++) c_i[j * TILE] *= total;
        }
        for (long j = 0; j < experts; j++) {
            add(votes + j * TILE * D, c + j * TILE, end - first, z + j * D, 0);
            lanes *e = job->e + (group * experts + j) * job->inputs + first;
            memcpy(e, c + j * TILE, sizeof(lanes) * (end - first));
        }
    }
    for (long j = 0; j < experts; j++) tell(job, group, j, from, to, all(1));
}

/* Σ over the pieces, of one expert. */
static void sum_parts(const struct job *job, long group, long j, lanes *z)
{
    memcpy(z, part_of(job, 0, group) + j * D, sizeof(lanes) * D);
    for (long piece = 1; piece < job->pieces; piece++)
        for (int d = 0; d < D; d++) z[d] += part_of(job, piece, group)[j * D + d];
}

static void gather(const struct job *job, long n, lanes *own)
{
    (void)own;
    long group = n / job->experts, j = n % job->experts;
    lanes z[D];
    sum_parts(job, group, j, z);
    listen(job, z, job->y + n * D);
    keep(job, group, j, z, all(1));
}

static void hear_nothing(const struct job *job, long group, lanes *own)
{
    (void)own;
    memset(job->y + group * job->experts * D, 0, sizeof(lanes) * job->experts * D);
}

/* ---------------------------------------------------------------------------------------------------------
   Learning, with the coefficients held */

/* 2 share z_j/(1+‖z_j‖²) c_ij/e_ij, of experts that may fire, image after image; and what they add to ±F. */
static void pull(const struct job *job, long n, const lanes *z, float share, float sign, lanes *pulls)
{
    long group = n / job->experts, j = n % job->experts;
    lanes square = inner(z, z, D), on = job->on ? job->on[n] : all(1);
    lanes factor = on * (2 * share / (1 + square)) / job->total[n];
    float *to = (float *)(pulls + (j * job->groups + group) * L * WIDE);
    for (int l = 0; l < L; l++) {
        job->gap[n][l] += sign * on[l] * log1pf(square[l]);
        for (int d = 0; d < WIDE * L; d++) to[l * WIDE * L + d] = d < D ? z[d][l] * factor[l] : 0;
    }
}

/* y_j = squash(z_j) c_ij/e_ij, of experts that may fire. */
static void speak(const struct job *job, long n, const lanes *z)
{
    lanes *y = job->y + n * D, factor = (job->on ? job->on[n] : all(1)) / job->total[n];
    squash(z, y);
    for (int d = 0; d < D; d++) y[d] *= factor;
}

static void begin(const struct job *job, long n, lanes *own)
{
    (void)own;
    const lanes *z = job->z + n * D;
    job->gap[n] = all(0);
    pull(job, n, z, -job->share, -1, job->p);
    speak(job, n, z);
}

/* x̃_i = squash(Σ_j e_ij W_ijᵀ y_j) of one piece of the inputs, and what they send up to all experts. */
static void mix(const struct job *job, long n, lanes *own)
{
    (void)own;
    long experts = job->experts, piece = n / job->groups, group = n % job->groups, row = experts * D * K, from, to;
    piece_of(job, piece, &from, &to);
    lanes *z = part_of(job, piece, group), *model = job->model + group * job->inputs * K;
    const lanes *y = job->y + group * experts * D, *e = job->e + group * experts * job->inputs;
    memset(z, 0, sizeof(lanes) * experts * D);
    for (long first = from, end; first < to; first = end) {
        end = least(first + TILE, to);
        lanes *x = model + first * K;
        const float *w = job->w + first * row;
        memset(x, 0, sizeof(lanes) * (end - first) * K);
        for (long j = 0; j < experts; j++)
            for (long i = 0; i < end - first; i++) {
                fetch(w + least(i + TILE, job->inputs - 1 - first) * row + j * D * K);
                down(w + i * row + j * D * K, y + j * D, e[j * job->inputs + first + i], x + i * K);
            }
        for (long i = 0; i < end - first; i++) {
            lanes square = inner(x + i * K, x + i * K, K), factor = root(square) / (1 + square);
            for (int k = 0; k < K; k++) x[i * K + k] *= factor;
        }
        for (long j = 0; j < experts; j++)
            up(w + j * D * K, row, x, e + j * job->inputs + first, end - first, z + j * D, 0);
    }
}

static void mixed(const struct job *job, long n, lanes *z)
{
    sum_parts(job, n / job->experts, n % job->experts, z);
    for (int d = 0; d < D; d++) z[d] /= job->total[n];
}

static void go_on(const struct job *job, long n, lanes *own)
{
    (void)own;
    lanes z[D];
    mixed(job, n, z);
    speak(job, n, z);
}

static void end(const struct job *job, long n, lanes *own)
{
    (void)own;
    lanes z[D];
    mixed(job, n, z);
    pull(job, n, z, job->share, 1, job->q);
}

/* Σ_b e_ijb (x_ib p_jbᵀ + x̃_ib q_jbᵀ) of one input and two experts, n components k from `first` on and one vector of
   components d: what is read of x serves both experts. */
INLINE void collect_part(const struct job *job, long i, const long j[2], int first, int wide, int n)
{
    long inputs = job->inputs, experts = job->experts;
    lanes sum[2][8];
    lanes *grown[2];
    for (int a = 0; a < 2; a++) {
        grown[a] = job->grown + ((i * experts + j[a]) * K + first) * WIDE + wide;
        UNROLL for (int k = 0; k < n; k++) sum[a][k] = job->first ? all(0) : grown[a][k * WIDE];
    }
    for (long group = 0; group < job->groups; group++) {
        const float *x = (const float *)(job->capsules + (group * inputs + i) * K + first);
        const float *back = (const float *)(job->model + (group * inputs + i) * K + first);
        const float *e0 = (const float *)(job->e + (group * experts + j[0]) * inputs + i);
        const float *e1 = (const float *)(job->e + (group * experts + j[1]) * inputs + i);
        const lanes *p0 = job->p + (j[0] * job->groups + group) * L * WIDE + wide;
        const lanes *p1 = job->p + (j[1] * job->groups + group) * L * WIDE + wide;
        const lanes *q0 = job->q + (j[0] * job->groups + group) * L * WIDE + wide;
        const lanes *q1 = job->q + (j[1] * job->groups + group) * L * WIDE + wide;
        long there = least(L, job->images - group * L);
        __builtin_prefetch(e0 + L); /* of the next input */
        __builtin_prefetch(e1 + L);
        for (long l = 0; l < there; l++) {
            lanes a = e0[l] * p0[l * WIDE], b = e1[l] * p1[l * WIDE];
            UNROLL for (int k = 0; k < n; k++) {
                sum[0][k] += x[k * L + l] * a;
                sum[1][k] += x[k * L + l] * b;
            }
            a = e0[l] * q0[l * WIDE], b = e1[l] * q1[l * WIDE];
            UNROLL for (int k = 0; k < n; k++) {
                sum[0][k] += back[k * L + l] * a;
                sum[1][k] += back[k * L + l] * b;
            }
        }
    }
    for (int a = 0; a < 2; a++) {
        if (!job->last) {
            UNROLL for (int k = 0; k < n; k++) grown[a][k * WIDE] = sum[a][k];
            continue;
        }
        float *slope = job->slope + ((i * experts + j[a]) * D + wide * L) * K + first;
        for (int d = 0; d < least(L, D - wide * L); d++)
            for (int k = 0; k < n; k++) slope[d * K + k] = sum[a][k][d];
    }
}

static void collect(const struct job *job, long n, lanes *own)
{
    (void)own;
    for (long i = n * TILE; i < least((n + 1) * TILE, job->inputs); i++)
        for (long pair = 0; pair < job->experts; pair += 2) {
            long j[2] = {pair, least(pair + 1, job->experts - 1)}; /* the last one twice, if they are odd */
            for (int wide = 0; wide < WIDE; wide++) {
                for (int k = 0; k + 8 <= K; k += 8) collect_part(job, i, j, k, wide, 8);
                if (K % 8) collect_part(job, i, j, K / 8 * 8, wide, K % 8);
            }
        }
}

/* ---------------------------------------------------------------------------------------------------------
   Threads: any number may call the same function with the same job. Tasks are numbered through all stages and taken in
   order; those of a stage begin when all before them are done. Nobody waits for a thread that has taken nothing. */

static struct worker join(struct job *job)
{
    long number = __atomic_fetch_add(&job->joined, 1, __ATOMIC_RELAXED);
    long next = __atomic_fetch_add(&job->taken, 1, __ATOMIC_RELAXED);
    return (struct worker){job, job->own + number * job->own_size, 0, next};
}

static void stage(struct worker *worker, task *what, long count)
{
    struct job *job = worker->job;
    while (worker->next < worker->first + count) {
        while (__atomic_load_n(&job->done, __ATOMIC_ACQUIRE) < worker->first) sched_yield();
        what(job, worker->next - worker->first, worker->own);
        __atomic_fetch_add(&job->done, 1, __ATOMIC_RELEASE);
        worker->next = __atomic_fetch_add(&job->taken, 1, __ATOMIC_RELAXED);
    }
    worker->first += count;
}

/* Route a block of images. */
void route(struct job *job)
{
    struct worker worker = join(job);
    stage(&worker, pack, job->groups);
    if (!job->experts_share) {
        stage(&worker, route_expert, job->experts * job->groups);
        return;
    }
    stage(&worker, hear_nothing, job->groups);
    for (long r = 0; r < job->iterations; r++) {
        stage(&worker, r ? send : send_evenly, job->pieces * job->groups);
        stage(&worker, gather, job->groups * job->experts);
    }
}

/* Mix a block of images that was routed, and add its part of the gradient. */
void learn(struct job *job)
{
    struct worker worker = join(job);
    stage(&worker, begin, job->groups * job->experts);
    for (long k = 0; k < job->mixings; k++) {
        stage(&worker, mix, job->pieces * job->groups);
        stage(&worker, k + 1 < job->mixings ? go_on : end, job->groups * job->experts);
    }
    if (job->slope) stage(&worker, collect, (job->inputs + TILE - 1) / TILE);
}

/* So that who calls can tell whether it means the same by a job. */
long job_size(void) { return sizeof(struct job); }
