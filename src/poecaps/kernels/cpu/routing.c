/* Routing by agreement, its gradient, and contrastive divergence on a CPU, LANES images at a time.

   A variable of type `vec` (lanes.h) holds one number of each of LANES images. LANES, D, K and TILE
   (inputs that are processed together) are constants of the compilation. The letters are those of
   the equations: inputs i, experts j, components k of an input capsule and d of a vote. A block of
   images is `groups` of LANES, the last one padded with zeros. Two memory layouts occur. "Batch
   first" is the layout of the caller, with the image as the slowest axis. "Batch last" is the
   layout of all vectors here, with the images of a group as the lanes:

       x, x_model (x̃)            (groups, I, K)       z, y, agreement sums     (groups, J, D)
       exponentials e            (groups, J, I)       softmax denominators     (groups, J)

   If the coefficients are normalized over the inputs, Σ_i c_ij = 1, they are stored unnormalized as
   e_ij with c_ij = e_ij / denominator_j. The division is applied to z_j, y_j and the gradients of
   z_j, which are fewer numbers. If they are normalized over the outputs, Σ_j c_ij = 1, then
   e_ij = c_ij and denominator_j = 1.

   The work is split into tasks. The result of a task depends neither on the thread that runs it nor
   on the time, so the number of threads does not change a bit of any result. */

#include <stdint.h>

#include "lanes.h"

#ifdef _WIN32
#define NOMINMAX
#include <windows.h>
#define EXPORT __declspec(dllexport)
#define yield_thread() SwitchToThread()
#else
#include <sched.h>
#include <time.h>
#define EXPORT
#define yield_thread() sched_yield()
#endif

#define FULL_D (D / BLOCK_D * BLOCK_D) /* components d and k in full blocks */
#define FULL_K (K / BLOCK_K * BLOCK_K)
#define FULL_PAIR_K (K / PAIR_K * PAIR_K)
#define PREFETCH 3 /* inputs whose maps are prefetched: hides latency, and fits the L1 cache */
#define CACHE_LINE 16 /* floats */
#define WIDE ((D + LANES - 1) / LANES) /* vectors filled by the D numbers of one image and expert */
#define NO_TASK PTRDIFF_MAX
#ifndef MAX_SECONDS
#define MAX_SECONDS 0.1 /* after which a call returns, so that its caller notices an interrupt */
#endif

/* One block of images. `Job` in job.py has the same fields in the same order. */
struct job {
    size inputs, experts, images, groups;
    size chunks;                   /* parts of the inputs that different threads can mix */
    size iterations, mixing_steps; /* R of the routing, k of CD-k */
    size normalize_outputs;        /* whether Σ_j c_ij = 1; otherwise Σ_i c_ij = 1 */
    size cosine;                   /* whether the agreement is the cosine; otherwise inner */
    size skip_max;                 /* whether the softmax is safe without subtracting the maximum */
    size cache_votes;              /* whether the votes for an expert are kept while it is routed */
    size first_block, last_block;  /* whether this is the first, the last block of the batch */
    float sharpness;
    float inverse_batch;           /* 1 / number of images of all blocks */
    const float *x_batch_first;    /* (images, I, K) */
    const float *weight;           /* (I, J, D, K) */
    float *c;                      /* output: coefficients, or NULL */
    size c_image, c_input;         /* strides of c; if c_image is 1, c has space for whole groups */
    size c_expert;
    float *z_batch_first;          /* preactivations (R, images, J, D) of all iterations */
    size z_iteration;              /* its stride from one iteration to the next */
    const float *grad_z_batch_first;   /* ∂L/∂z of the last iteration (images, J, D) */
    const vec *grad_c;             /* ∂L/∂c of the last iteration (groups, J, I), or NULL for 0 */
    float *grad_x_batch_first;     /* output: gradient (images, I, K), or NULL */
    float *grad_weight;            /* output: gradient (I, J, D, K), or NULL */
    const vec *on;                 /* (groups, J): 1 if an expert may fire, else 0; NULL: all may */
    vec *free_energy_gap;          /* output: (groups, J), the part of an expert in F(x) − F(x̃) */
    vec *x, *x_model, *e, *denominator, *z;
    vec *y;                        /* agreement sums while routing over outputs, later states; in
                                      the backward pass, the gradients of agreement vectors */
    vec *partial_z;                /* (chunks, groups, J, D): the part of each chunk in z */
    vec *grad_z, *grad_z_model;    /* (J, groups, LANES, WIDE): image by image, of x and of x̃ */
    vec *grad_sum;                 /* (I, J, K, WIDE): the gradient of the blocks so far */
    vec *h, *grad_z_record;        /* (R, groups, J, D): agreement sums, ∂L/∂z of each iteration */
    vec *maximum, *sum, *mean_g;   /* (R, groups, J): statistics of a softmax over the inputs */
    size tile;                     /* inputs whose gradients are computed together */
    vec *scratch;                  /* `scratch_size` vectors for each thread */
    size scratch_size;
    size taken, done;              /* shared by the threads: tasks taken, tasks done */
};

struct worker {
    struct job *job;
    vec *scratch;
    double end;       /* time after which no further task is taken */
    size first, next; /* numbers of tasks: the first of this stage, the next of this worker */
};

typedef void task(const struct job *, size n, vec *scratch);

INLINE size min(size a, size b) { return a < b ? a : b; }

/* ------------------------------------------------------------------------------------------------
   Capsules */

/* Return ‖v‖ and write v/‖v‖, 0 for v = 0.

   Dividing by the largest component first keeps every square from over- and underflowing. */
static vec norm_and_direction(const vec *v, vec *direction)
{
    vec scale = broadcast(0);
    for (int d = 0; d < D; d++) {
        vec magnitude = blend(v[d] < 0, -v[d], v[d]);
        scale = blend(magnitude > scale, magnitude, scale);
    }
    vec divisor = blend(scale == 0, broadcast(1), scale), square = broadcast(0);
    for (int d = 0; d < D; d++) {
        direction[d] = v[d] / divisor;
        square += direction[d] * direction[d];
    }
    vec norm = square_root(square), by = blend(norm == 0, broadcast(1), norm);
    for (int d = 0; d < D; d++) direction[d] /= by;
    return divisor * norm;
}

/* y = squash(z) = ‖z‖²/(1+‖z‖²) z/‖z‖. Unlike in `functional.squash`, rounding may make ‖y‖ = 1. */
static void squash(const vec *z, vec *y)
{
    vec norm = norm_and_direction(z, y), inverse = 1 / norm, square = norm * norm;
    vec p = blend(norm > 1, 1 / (1 + inverse * inverse), square / (1 + square));
    for (int d = 0; d < D; d++) y[d] *= p;
}

/* 1/‖u‖, and 0 for u = 0 and where ‖u‖² overflows. */
INLINE vec inverse_norm(const vec *u) { return inverse_square_root(inner(u, u, D)); }

/* ------------------------------------------------------------------------------------------------
   Votes of a few inputs for one expert. Each function processes BLOCK_D or BLOCK_K components at a
   time, whose number n the compiler knows, so that the accumulators stay in registers. */

/* Prefetch the map W_ij. */
INLINE void prefetch(const float *w)
{
    for (int line = 0; line < D * K; line += CACHE_LINE) __builtin_prefetch(w + line);
}

/* u_d = Σ_k W_dk x_k, n components d. */
INLINE void vote_part(const float *w, const vec *x, vec *u, int n)
{
    vec acc[BLOCK_D];
    UNROLL for (int d = 0; d < n; d++) acc[d] = w[d * K] * x[0];
    for (int k = 1; k < K; k++) UNROLL for (int d = 0; d < n; d++) acc[d] += w[d * K + k] * x[k];
    UNROLL for (int d = 0; d < n; d++) u[d] = acc[d];
}

/* u = W x */
INLINE void vote(const float *w, const vec *x, vec *u)
{
    for (int d = 0; d + BLOCK_D <= D; d += BLOCK_D) vote_part(w + d * K, x, u + d, BLOCK_D);
    if (D % BLOCK_D) vote_part(w + FULL_D * K, x, u + FULL_D, D % BLOCK_D);
}

/* z_d += Σ_i e_i Σ_k W_idk x_ik, n components d. */
INLINE void add_forward_part(
    const float *w, size stride, const vec *x, const vec *e, size inputs, vec *z, int n,
    int uniform)
{
    vec acc[BLOCK_D];
    UNROLL for (int d = 0; d < n; d++) acc[d] = broadcast(0);
    for (size i = 0; i < inputs; i++, w += stride, x += K)
        for (int k = 0; k < K; k++) {
            vec weighted = x[k];
            if (!uniform) weighted *= e[i];
            UNROLL for (int d = 0; d < n; d++) acc[d] += w[d * K + k] * weighted;
        }
    UNROLL for (int d = 0; d < n; d++) z[d] += acc[d];
}

/* z += Σ_i e_i W_i x_i; the maps are `stride` numbers apart. uniform: all e_i are 1. */
INLINE void add_forward(
    const float *w, size stride, const vec *x, const vec *e, size inputs, vec *z, int uniform)
{
    for (int d = 0; d + BLOCK_D <= D; d += BLOCK_D)
        add_forward_part(w + d * K, stride, x, e, inputs, z + d, BLOCK_D, uniform);
    if (D % BLOCK_D)
        add_forward_part(w + FULL_D * K, stride, x, e, inputs, z + FULL_D, D % BLOCK_D, uniform);
}

/* x_k += e Σ_d W_dk y_d, n components k. */
INLINE void add_backward_part(const float *w, const vec *y, vec e, vec *x, int n)
{
    vec acc[BLOCK_K];
    UNROLL for (int k = 0; k < n; k++) acc[k] = w[k] * y[0];
    for (int d = 1; d < D; d++) UNROLL for (int k = 0; k < n; k++) acc[k] += w[d * K + k] * y[d];
    UNROLL for (int k = 0; k < n; k++) x[k] += e * acc[k];
}

/* x += e Wᵀ y */
INLINE void add_backward(const float *w, const vec *y, vec e, vec *x)
{
    for (int k = 0; k + BLOCK_K <= K; k += BLOCK_K) add_backward_part(w + k, y, e, x + k, BLOCK_K);
    if (K % BLOCK_K) add_backward_part(w + FULL_K, y, e, x + FULL_K, K % BLOCK_K);
}

/* b_i = Σ_d u_id h_d, n components d, added to the components before if `accumulate`. */
INLINE void agreement_part(const vec *u, const vec *h, size inputs, vec *b, int n, int accumulate)
{
    vec h_block[BLOCK_D];
    UNROLL for (int d = 0; d < n; d++) h_block[d] = h[d];
    for (size i = 0; i < inputs; i++, u += D) {
        if (accumulate) b[i] += inner(u, h_block, n);
        else b[i] = inner(u, h_block, n);
    }
}

/* b_i = ⟨u_i, h⟩ */
INLINE void agreement(const vec *u, const vec *h, size inputs, vec *b)
{
    for (int d = 0; d + BLOCK_D <= D; d += BLOCK_D)
        agreement_part(u + d, h + d, inputs, b, BLOCK_D, d);
    if (D % BLOCK_D)
        agreement_part(u + FULL_D, h + FULL_D, inputs, b, D % BLOCK_D, FULL_D);
}

/* z_d += Σ_i e_i u_id, n components d. */
INLINE void add_votes_part(const vec *u, const vec *e, size inputs, vec *z, int n, int uniform)
{
    vec acc[BLOCK_D];
    UNROLL for (int d = 0; d < n; d++) acc[d] = broadcast(0);
    for (size i = 0; i < inputs; i++, u += D)
        UNROLL for (int d = 0; d < n; d++) {
            if (uniform) acc[d] += u[d];
            else acc[d] += e[i] * u[d];
        }
    UNROLL for (int d = 0; d < n; d++) z[d] += acc[d];
}

/* z += Σ_i e_i u_i; uniform: all e_i are 1. */
INLINE void add_votes(const vec *u, const vec *e, size inputs, vec *z, int uniform)
{
    for (int d = 0; d + BLOCK_D <= D; d += BLOCK_D)
        add_votes_part(u + d, e, inputs, z + d, BLOCK_D, uniform);
    if (D % BLOCK_D) add_votes_part(u + FULL_D, e, inputs, z + FULL_D, D % BLOCK_D, uniform);
}

/* ------------------------------------------------------------------------------------------------
   Routing. The functions from here on are tasks of `run_stage` or parts of tasks. */

/* x, batch first to batch last: (LANES, I, K) → (I, K) vectors, of one group. */
static void load_batch_last(const struct job *job, size group, vec *scratch)
{
    (void)scratch;
    size row = job->inputs * K, present = min(LANES, job->images - group * LANES);
    float *to = (float *)(job->x + group * row);
    const float *x = job->x_batch_first + group * LANES * row;
    if (present < LANES) memset(to, 0, sizeof(vec) * row);
    for (size start = 0; start < row; start += LANES)
        for (size l = 0; l < present; l++)
            for (size n = start; n < min(start + LANES, row); n++)
                to[n * LANES + l] = x[l * row + n];
}

/* h_j += sharpness · z_j/‖z_j‖ (cosine) or sharpness · squash(z_j) (inner).

   The logits are b_ij = ⟨u_ij, h_j⟩, divided by ‖u_ij‖ for the cosine: the sum of the agreements of
   all iterations is the agreement with the sum h_j, the "agreement sum". */
static void update_agreement_sum(const struct job *job, const vec *z, vec *h)
{
    vec v[D];
    if (job->cosine) norm_and_direction(z, v);
    else squash(z, v);
    for (int d = 0; d < D; d++) h[d] += job->sharpness * v[d];
}

/* z_j of iteration r, for the caller and the backward pass. */
static void record_preactivation(const struct job *job, size r, size group, size j, const vec *z)
{
    float *to = job->z_batch_first + r * job->z_iteration + (group * LANES * job->experts + j) * D;
    for (size l = 0; l < min(LANES, job->images - group * LANES); l++)
        for (int d = 0; d < D; d++) to[l * job->experts * D + d] = z[d][l];
}

/* z_j = Σ_i e_ij u_ij / denominator_j, stored batch last and, for the caller, batch first. */
static void store_preactivation(
    const struct job *job, size r, size group, size j, const vec *z, vec denominator)
{
    vec *stored = job->z + (group * job->experts + j) * D;
    job->denominator[group * job->experts + j] = denominator;
    for (int d = 0; d < D; d++) stored[d] = z[d] / denominator;
    record_preactivation(job, r, group, j, stored);
}

/* c_ij = e_ij / denominator_j of the inputs from `from` to `to`, if the caller asks for it. */
static void store_coefficients(
    const struct job *job, size group, size j, size from, size to, vec denominator)
{
    const vec *e = job->e + (group * job->experts + j) * job->inputs;
    for (size i = from; job->c && i < to; i++) {
        vec c = e[i] / denominator;
        float *at = job->c + j * job->c_expert + i * job->c_input + group * LANES * job->c_image;
        if (job->c_image == 1) *(vec *)at = c;
        else
            for (size l = 0; l < min(LANES, job->images - group * LANES); l++)
                at[l * job->c_image] = c[l];
    }
}

/* c_j = softmax_i(b_ij), z_j = Σ_i c_ij u_ij, R times, for one expert and group; Σ_i c_ij = 1.

   No other expert enters. scratch: 1/‖u_i‖ (I), then votes (I, D), or (TILE, D) if not cached. */
static void route_expert(const struct job *job, size n, vec *scratch)
{
    size inputs = job->inputs, j = n / job->groups, group = n % job->groups;
    size stride = job->experts * D * K;
    const vec *x = job->x + group * inputs * K;
    const float *w = job->weight + j * D * K;
    vec *e = job->e + (group * job->experts + j) * inputs;
    vec *inverse_norms = scratch, *votes = scratch + inputs;
    vec h[D], z[D], denominator = broadcast(inputs);
    memset(h, 0, sizeof h);
    memset(z, 0, sizeof z);

    for (size from = 0; !job->cache_votes && from < inputs; from += TILE)
        add_forward(w + from * stride, stride, x + from * K, e, min(TILE, inputs - from), z, 1);
    for (size from = 0, to; job->cache_votes && from < inputs; from = to) {
        to = min(from + TILE, inputs);
        for (size i = from; i < to; i++) {
            prefetch(w + min(i + PREFETCH, inputs - 1) * stride);
            vote(w + i * stride, x + i * K, votes + i * D);
            inverse_norms[i] = job->cosine ? inverse_norm(votes + i * D) : broadcast(1);
        }
        add_votes(votes + from * D, e, to - from, z, 1);
    }
    for (size i = 0; job->iterations == 1 && i < inputs; i++) e[i] = broadcast(1);

    for (size r = 1; r < job->iterations; r++) {
        vec maximum = broadcast(job->skip_max ? 0 : -INFINITY);
        for (int d = 0; d < D; d++) z[d] /= denominator;
        record_preactivation(job, r - 1, group, j, z);
        update_agreement_sum(job, z, h);
        memset(z, 0, sizeof z);
        vec compensation = denominator = broadcast(0);
        for (size from = 0, to; from < inputs; from = to) {
            to = min(from + TILE, inputs);
            vec *u = job->cache_votes ? votes + from * D : votes;
            for (size i = from; !job->cache_votes && i < to; i++) {
                prefetch(w + min(i + PREFETCH, inputs - 1) * stride);
                vote(w + i * stride, x + i * K, u + (i - from) * D);
                inverse_norms[i] = job->cosine ? inverse_norm(u + (i - from) * D) : broadcast(1);
            }
            agreement(u, h, to - from, e + from);
            if (job->skip_max) {
                for (size i = from; i < to; i++)
                    compensated_add(&denominator, &compensation,
                                    e[i] = exponential(e[i] * inverse_norms[i]));
                add_votes(u, e + from, to - from, z, 0);
            } else
                for (size i = from; i < to; i++) {
                    e[i] *= inverse_norms[i];
                    maximum = blend(maximum < e[i], e[i], maximum);
                }
        }
        if (!job->skip_max) {
            for (size i = 0; i < inputs; i++)
                compensated_add(&denominator, &compensation, e[i] = exponential(e[i] - maximum));
            for (size from = 0; from < inputs; from += TILE) {
                size count = min(TILE, inputs - from);
                if (job->cache_votes) add_votes(votes + from * D, e + from, count, z, 0);
                else add_forward(w + from * stride, stride, x + from * K, e + from, count, z, 0);
            }
        }
    }
    store_preactivation(job, job->iterations - 1, group, j, z, denominator);
    store_coefficients(job, group, j, 0, inputs, denominator);
}

/* If Σ_j c_ij = 1, the softmax of an input needs all experts, and z_j needs all inputs. So each
   iteration has two stages: chunks of the inputs are routed, then the parts of each z_j added. */

/* The inputs of a chunk: from I·n/chunks to I·(n+1)/chunks. */
static void chunk_bounds(const struct job *job, size n, size *from, size *to)
{
    *from = job->inputs * n / job->chunks;
    *to = job->inputs * (n + 1) / job->chunks;
}

/* The place of a chunk's part of z: (J, D). */
static vec *partial_z_of(const struct job *job, size chunk, size group)
{
    return job->partial_z + (chunk * job->groups + group) * job->experts * D;
}

/* z_j += Σ_i u_ij / J over a chunk of inputs: the first iteration, with c_ij = 1/J. */
static void route_chunk_uniformly(const struct job *job, size n, vec *scratch)
{
    (void)scratch;
    size experts = job->experts, chunk = n / job->groups, group = n % job->groups;
    size stride = experts * D * K, from, to;
    chunk_bounds(job, chunk, &from, &to);
    vec *z = partial_z_of(job, chunk, group);
    memset(z, 0, sizeof(vec) * experts * D);
    for (size i = from, end; i < to; i = end) {
        end = min(i + TILE, to);
        const vec *x = job->x + (group * job->inputs + i) * K;
        for (size j = 0; j < experts; j++)
            add_forward(job->weight + i * stride + j * D * K, stride, x, 0, end - i, z + j * D, 1);
    }
    for (size n = 0; n < experts * D; n++) z[n] /= (float)experts;
    for (size j = 0; job->iterations == 1 && j < experts; j++) {
        for (size i = from; i < to; i++)
            job->e[(group * experts + j) * job->inputs + i] = broadcast(1.0f / experts);
        store_coefficients(job, group, j, from, to, broadcast(1));
    }
}

/* c_ij = softmax_j(b_ij), z_j += Σ_i c_ij u_ij over a chunk of inputs.

   scratch: c (J, TILE), then votes (J, TILE, D). */
static void route_chunk(const struct job *job, size n, vec *scratch)
{
    size experts = job->experts, chunk = n / job->groups, group = n % job->groups;
    size stride = experts * D * K, from, to;
    chunk_bounds(job, chunk, &from, &to);
    vec *z = partial_z_of(job, chunk, group), *c = scratch, *votes = scratch + experts * TILE;
    const vec *h = job->y + group * experts * D;
    memset(z, 0, sizeof(vec) * experts * D);
    for (size first = from, end; first < to; first = end) {
        end = min(first + TILE, to);
        for (size i = first; i < end; i++) {
            const vec *x = job->x + (group * job->inputs + i) * K;
            vec maximum = broadcast(-INFINITY), denominator = broadcast(0);
            vec compensation = broadcast(0), *c_i = c + i - first;
            for (size j = 0; j < experts; j++) {
                vec *u = votes + (j * TILE + i - first) * D;
                prefetch(job->weight + min(i + 1, job->inputs - 1) * stride + j * D * K);
                vote(job->weight + i * stride + j * D * K, x, u);
                vec b = inner(u, h + j * D, D);
                if (job->cosine) b *= inverse_norm(u);
                maximum = blend(maximum < b, b, maximum);
                c_i[j * TILE] = b;
            }
            for (size j = 0; j < experts; j++)
                compensated_add(&denominator, &compensation,
                                c_i[j * TILE] = exponential(c_i[j * TILE] - maximum));
            denominator = 1 / denominator;
            for (size j = 0; j < experts; j++) c_i[j * TILE] *= denominator;
        }
        for (size j = 0; j < experts; j++) {
            add_votes(votes + j * TILE * D, c + j * TILE, end - first, z + j * D, 0);
            vec *e = job->e + (group * experts + j) * job->inputs + first;
            memcpy(e, c + j * TILE, sizeof(vec) * (end - first));
        }
    }
    for (size j = 0; j < experts; j++) store_coefficients(job, group, j, from, to, broadcast(1));
}

/* z_j = Σ over the chunks of their parts of z_j. */
static void sum_chunks(const struct job *job, size group, size j, vec *z)
{
    memcpy(z, partial_z_of(job, 0, group) + j * D, sizeof(vec) * D);
    for (size chunk = 1; chunk < job->chunks; chunk++)
        for (int d = 0; d < D; d++) z[d] += partial_z_of(job, chunk, group)[j * D + d];
}

/* z_j = Σ over the chunks, then h_j += sharpness · direction or squash of z_j. */
static void finish_iteration(const struct job *job, size task, vec *scratch)
{
    (void)scratch;
    size count = job->groups * job->experts, r = task / count, n = task % count;
    size group = n / job->experts, j = n % job->experts;
    vec z[D];
    sum_chunks(job, group, j, z);
    update_agreement_sum(job, z, job->y + n * D);
    store_preactivation(job, r, group, j, z, broadcast(1));
}

/* h_j = 0 of one group. */
static void clear_agreement_sums(const struct job *job, size group, vec *scratch)
{
    (void)scratch;
    memset(job->y + group * job->experts * D, 0, sizeof(vec) * job->experts * D);
}

/* ------------------------------------------------------------------------------------------------
   Contrastive divergence, with the coefficients held */

/* ∂(±mean F)/∂z_j · c_ij/e_ij = ±2/B z_j/(1+‖z_j‖²) / denominator_j, and ±log(1+‖z_j‖²) of the gap.

   Both are 0 for an expert that may not fire. The gradient is written image by image, which is the
   order in which `weight_gradient` reads it. */
static void free_energy_gradient(
    const struct job *job, size n, const vec *z, float scale, float sign, vec *grad_z)
{
    size group = n / job->experts, j = n % job->experts;
    vec square = inner(z, z, D), on = job->on ? job->on[n] : broadcast(1);
    vec factor = on * (2 * scale / (1 + square)) / job->denominator[n];
    float *to = (float *)(grad_z + (j * job->groups + group) * LANES * WIDE);
    for (int l = 0; l < LANES; l++) {
        job->free_energy_gap[n][l] += sign * on[l] * log1pf(square[l]);
        for (int d = 0; d < WIDE * LANES; d++)
            to[l * WIDE * LANES + d] = d < D ? z[d][l] * factor[l] : 0;
    }
}

/* y_j = squash(z_j) c_ij/e_ij = squash(z_j) / denominator_j; 0 for an expert that may not fire. */
static void expert_state(const struct job *job, size n, const vec *z)
{
    vec *y = job->y + n * D;
    vec factor = (job->on ? job->on[n] : broadcast(1)) / job->denominator[n];
    squash(z, y);
    for (int d = 0; d < D; d++) y[d] *= factor;
}

/* Positive phase: −∂ mean log(1+‖z_j‖²)/∂z_j at the data, and the state y_j that starts mixing. */
static void positive_phase(const struct job *job, size n, vec *scratch)
{
    (void)scratch;
    const vec *z = job->z + n * D;
    job->free_energy_gap[n] = broadcast(0);
    free_energy_gradient(job, n, z, -job->inverse_batch, -1, job->grad_z);
    expert_state(job, n, z);
}

/* x̃_i = squash(Σ_j e_ij W_ijᵀ y_j) of a chunk of inputs, then z̃_j += Σ_i e_ij W_ij x̃_i. */
static void mix_chunk(const struct job *job, size n, vec *scratch)
{
    (void)scratch;
    size experts = job->experts, chunk = n / job->groups, group = n % job->groups;
    size stride = experts * D * K, from, to;
    chunk_bounds(job, chunk, &from, &to);
    vec *z = partial_z_of(job, chunk, group), *x_model = job->x_model + group * job->inputs * K;
    const vec *y = job->y + group * experts * D, *e = job->e + group * experts * job->inputs;
    memset(z, 0, sizeof(vec) * experts * D);
    for (size first = from, end; first < to; first = end) {
        end = min(first + TILE, to);
        vec *x = x_model + first * K;
        const float *w = job->weight + first * stride;
        memset(x, 0, sizeof(vec) * (end - first) * K);
        for (size j = 0; j < experts; j++)
            for (size i = 0; i < end - first; i++) {
                prefetch(w + min(i + TILE, job->inputs - 1 - first) * stride + j * D * K);
                add_backward(w + i * stride + j * D * K, y + j * D,
                             e[j * job->inputs + first + i], x + i * K);
            }
        for (size i = 0; i < end - first; i++) {
            vec square = inner(x + i * K, x + i * K, K);
            vec factor = square_root(square) / (1 + square);
            for (int k = 0; k < K; k++) x[i * K + k] *= factor;
        }
        for (size j = 0; j < experts; j++)
            add_forward(w + j * D * K, stride, x, e + j * job->inputs + first, end - first,
                        z + j * D, 0);
    }
}

/* z̃_j = Σ over the chunks / denominator_j. */
static void mixed_preactivation(const struct job *job, size n, vec *z)
{
    sum_chunks(job, n / job->experts, n % job->experts, z);
    for (int d = 0; d < D; d++) z[d] /= job->denominator[n];
}

/* Between two mixing steps: y_j = squash(z̃_j) / denominator_j. */
static void continue_mixing(const struct job *job, size n, vec *scratch)
{
    (void)scratch;
    vec z[D];
    mixed_preactivation(job, n, z);
    expert_state(job, n, z);
}

/* Negative phase: ∂ mean log(1+‖z̃_j‖²)/∂z̃_j where mixing ended. */
static void negative_phase(const struct job *job, size n, vec *scratch)
{
    (void)scratch;
    vec z[D];
    mixed_preactivation(job, n, z);
    free_energy_gradient(job, n, z, job->inverse_batch, 1, job->grad_z_model);
}

/* ∂L/∂W_ij = Σ_b e_ijb (∂L/∂z_jb x_ibᵀ + ∂L/∂z̃_jb x̃_ibᵀ), for one input and two experts.

   n components k from `first` on and the d of one vector; each value of x serves both experts. */
INLINE void weight_gradient_part(
    const struct job *job, size i, const size j[2], int first, int wide, int n)
{
    size inputs = job->inputs, experts = job->experts;
    vec acc[2][PAIR_K];
    vec *grad_sum[2];
    for (int a = 0; a < 2; a++) {
        grad_sum[a] = job->grad_sum + ((i * experts + j[a]) * K + first) * WIDE + wide;
        UNROLL for (int k = 0; k < n; k++)
            acc[a][k] = job->first_block ? broadcast(0) : grad_sum[a][k * WIDE];
    }
    for (size group = 0; group < job->groups; group++) {
        const float *x = (const float *)(job->x + (group * inputs + i) * K + first);
        const float *x_model = (const float *)(job->x_model + (group * inputs + i) * K + first);
        const float *e0 = (const float *)(job->e + (group * experts + j[0]) * inputs + i);
        const float *e1 = (const float *)(job->e + (group * experts + j[1]) * inputs + i);
        const vec *p0 = job->grad_z + (j[0] * job->groups + group) * LANES * WIDE + wide;
        const vec *p1 = job->grad_z + (j[1] * job->groups + group) * LANES * WIDE + wide;
        const vec *q0 = job->grad_z_model + (j[0] * job->groups + group) * LANES * WIDE + wide;
        const vec *q1 = job->grad_z_model + (j[1] * job->groups + group) * LANES * WIDE + wide;
        size present = min(LANES, job->images - group * LANES);
        __builtin_prefetch(e0 + LANES); /* of the next input */
        __builtin_prefetch(e1 + LANES);
        for (size l = 0; l < present; l++) {
            vec a = e0[l] * p0[l * WIDE], b = e1[l] * p1[l * WIDE];
            UNROLL for (int k = 0; k < n; k++) {
                acc[0][k] += x[k * LANES + l] * a;
                acc[1][k] += x[k * LANES + l] * b;
            }
            a = e0[l] * q0[l * WIDE], b = e1[l] * q1[l * WIDE];
            UNROLL for (int k = 0; k < n; k++) {
                acc[0][k] += x_model[k * LANES + l] * a;
                acc[1][k] += x_model[k * LANES + l] * b;
            }
        }
    }
    for (int a = 0; a < 2; a++) {
        if (!job->last_block) {
            UNROLL for (int k = 0; k < n; k++) grad_sum[a][k * WIDE] = acc[a][k];
            continue;
        }
        float *grad = job->grad_weight + ((i * experts + j[a]) * D + wide * LANES) * K + first;
        for (int d = 0; d < min(LANES, D - wide * LANES); d++)
            for (int k = 0; k < n; k++) grad[d * K + k] = acc[a][k][d];
    }
}

/* ∂L/∂W_ij of TILE inputs and all experts. */
static void weight_gradient(const struct job *job, size n, vec *scratch)
{
    (void)scratch;
    for (size i = n * TILE; i < min((n + 1) * TILE, job->inputs); i++)
        for (size pair = 0; pair < job->experts; pair += 2) {
            size j[2] = {pair, min(pair + 1, job->experts - 1)}; /* odd J: the last twice */
            for (int wide = 0; wide < WIDE; wide++) {
                for (int k = 0; k + PAIR_K <= K; k += PAIR_K)
                    weight_gradient_part(job, i, j, k, wide, PAIR_K);
                if (K % PAIR_K) weight_gradient_part(job, i, j, FULL_PAIR_K, wide, K % PAIR_K);
            }
        }
}

/* ------------------------------------------------------------------------------------------------
   Gradient through the routing */

#include "backward.h"

/* ------------------------------------------------------------------------------------------------
   Threads. Any number of threads may call `route`, `learn` or `backward` with the same job, each
   with a `number` of its own, from 0 on. Tasks are numbered across all stages and taken in order;
   the tasks of a stage start when all tasks before them are done. No thread waits for a thread that
   has not taken a task.

   A call returns 0 if no task is left, and 1 after MAX_SECONDS. It has then finished the tasks that
   it took, so that the caller may give up, or call it again. */

static double seconds(void)
{
#ifdef _WIN32
    return GetTickCount64() * 1e-3;
#else
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec * 1e-9;
#endif
}

static struct worker join(struct job *job, size number)
{
    vec *scratch = job->scratch + number * job->scratch_size;
    size next = __atomic_fetch_add(&job->taken, 1, __ATOMIC_RELAXED);
    return (struct worker){job, scratch, seconds() + MAX_SECONDS, 0, next};
}

/* Run `count` tasks of the same function. Those of a later step have the numbers after them. */
static void run_stage(struct worker *worker, task *function, size step, size count)
{
    struct job *job = worker->job;
    while (worker->next < worker->first + count) {
        while (__atomic_load_n(&job->done, __ATOMIC_ACQUIRE) < worker->first) yield_thread();
        function(job, step * count + worker->next - worker->first, worker->scratch);
        __atomic_fetch_add(&job->done, 1, __ATOMIC_RELEASE);
        if (seconds() < worker->end)
            worker->next = __atomic_fetch_add(&job->taken, 1, __ATOMIC_RELAXED);
        else
            worker->next = NO_TASK;
    }
    worker->first += count;
}

/* Route a block of images: write z and, if asked for, c. */
EXPORT int route(struct job *job, size number)
{
    struct worker worker = join(job, number);
    run_stage(&worker, load_batch_last, 0, job->groups);
    if (!job->normalize_outputs)
        run_stage(&worker, route_expert, 0, job->experts * job->groups);
    else
        run_stage(&worker, clear_agreement_sums, 0, job->groups);
    for (size r = 0; job->normalize_outputs && r < job->iterations; r++) {
        run_stage(&worker, r ? route_chunk : route_chunk_uniformly, 0, job->chunks * job->groups);
        run_stage(&worker, finish_iteration, r, job->groups * job->experts);
    }
    return worker.next == NO_TASK;
}

/* Mix a block of images after `route`, and add its part of the gradient. */
EXPORT int learn(struct job *job, size number)
{
    struct worker worker = join(job, number);
    run_stage(&worker, positive_phase, 0, job->groups * job->experts);
    for (size k = 0; k < job->mixing_steps; k++) {
        run_stage(&worker, mix_chunk, 0, job->chunks * job->groups);
        run_stage(&worker, k + 1 < job->mixing_steps ? continue_mixing : negative_phase, 0,
                  job->groups * job->experts);
    }
    if (job->grad_weight) run_stage(&worker, weight_gradient, 0, (job->inputs + TILE - 1) / TILE);
    return worker.next == NO_TASK;
}

/* Compute the gradients of a block of images in x and in the weight; `route` recorded z. */
EXPORT int backward(struct job *job, size number)
{
    struct worker worker = join(job, number);
    size pairs = job->groups * job->experts;
    run_stage(&worker, load_batch_last, 0, job->groups);
    run_stage(&worker, start_backward, 0, pairs);
    if (!job->normalize_outputs) run_stage(&worker, back_through_expert, 0, pairs);
    for (size r = job->iterations - 1; job->normalize_outputs && r > 0; r--) {
        run_stage(&worker, back_through_chunk, r, job->chunks * job->groups);
        run_stage(&worker, back_from_chunks, r, pairs);
    }
    run_stage(&worker, back_through_votes, 0, (job->inputs + job->tile - 1) / job->tile);
    return worker.next == NO_TASK;
}

/* Let the caller check that its structure has the layout of this one. */
EXPORT size job_size(void) { return sizeof(struct job); }
