/* The gradient of a loss L through all iterations of the routing. A part of routing.c.

   torch_routing/backward.py derives the equations. With a(z) = z/‖z‖ (cosine) or squash(z) (inner)
   and û = u/‖u‖ (cosine) or u (inner), iteration r = 0, …, R−1 of the routing is

       h_j = β Σ a(z_j) over the iterations before r,   b_ij = ⟨û_ij, h_j⟩,   c = softmax(b),
       z_j = Σ_i c_ij u_ij

   and back through it, from the last iteration to the first, with ⟨g⟩ the mean of g over the axis
   of the softmax, weighted by c:

       g_ij     = ⟨∂L/∂z_j, u_ij⟩, plus ∂L/∂c_ij in the last iteration
       ∂L/∂b_ij = c_ij (g_ij − ⟨g⟩)
       ∂L/∂h_j  = Σ_i ∂L/∂b_ij û_ij
       ∂L/∂z_j  = a'(z_j)ᵀ β Σ ∂L/∂h_j          of iteration r − 1; the sum is over r and later ones

   When ∂L/∂z_j of every iteration is known, all of them together give

       ∂L/∂u_ij = Σ_r (c_ij ∂L/∂z_j + s_ij h_j) − t_ij u_ij,   s_ij = ∂L/∂b_ij / ‖u_ij‖,
       t_ij     = Σ_r s_ij b_ij / ‖u_ij‖                       (‖u‖ = 1 and t = 0 for inner)
       ∂L/∂x_i  = Σ_j W_ijᵀ ∂L/∂u_ij,   ∂L/∂W_ij = Σ_images ∂L/∂u_ij x_iᵀ

   Votes are recomputed. z of every iteration is what `route` recorded. */

/* The place of (R, groups, J, D) vectors of iteration r; n is group · J + j. */
INLINE vec *of_iteration(const struct job *job, vec *vectors, size r, size n)
{
    return vectors + (r * job->groups * job->experts + n) * D;
}

/* The place of one of the (R, groups, J) numbers. */
INLINE vec *statistic(const struct job *job, vec *numbers, size r, size n)
{
    return numbers + r * job->groups * job->experts + n;
}

/* (images, J, D), batch first, of one expert and group to D vectors. */
static void load_expert(const struct job *job, const float *batch_first, size n, vec *z)
{
    size group = n / job->experts, j = n % job->experts;
    const float *from = batch_first + (group * LANES * job->experts + j) * D;
    memset(z, 0, sizeof(vec) * D);
    for (size l = 0; l < min(LANES, job->images - group * LANES); l++)
        for (int d = 0; d < D; d++) z[d][l] = from[l * job->experts * D + d];
}

/* h_j of every iteration, and ∂L/∂z_j of the last one. */
static void start_backward(const struct job *job, size n, vec *scratch)
{
    (void)scratch;
    vec h[D], z[D];
    memset(h, 0, sizeof h);
    for (size r = 1; r < job->iterations; r++) {
        load_expert(job, job->z_batch_first + (r - 1) * job->z_iteration, n, z);
        update_agreement_sum(job, z, h);
        memcpy(of_iteration(job, job->h, r, n), h, sizeof h);
    }
    vec *grad_z = of_iteration(job, job->grad_z_record, job->iterations - 1, n);
    load_expert(job, job->grad_z_batch_first, n, grad_z);
    memset(job->y + n * D, 0, sizeof h);
}

/* ∂L/∂z = a'(z)ᵀ ∂L/∂a, for a direction (cosine) or a squashed vector.

   Across z, the derivative is 1/‖z‖ or p/‖z‖, and along z it is 0 or dp/d‖z‖, with
   p = ‖z‖²/(1+‖z‖²). Above ‖z‖ = 1 they are written in 1/‖z‖, because ‖z‖² could overflow. */
static void agreement_vector_backward(
    const struct job *job, const vec *z, const vec *grad_a, vec *grad_z)
{
    vec unit[D], one = broadcast(1), n = norm_and_direction(z, unit);
    vec across = 1 / blend(n == 0, one, n), along = broadcast(0);
    if (!job->cosine) {
        vec inverse = across, low = 1 / (1 + n * n), high = 1 / (1 + inverse * inverse);
        across = blend(n > 1, inverse * high, n * low);
        along = 2 * blend(n > 1, inverse * inverse * inverse * high * high, n * low * low);
    }
    vec radial = inner(grad_a, unit, D);
    for (int d = 0; d < D; d++)
        grad_z[d] = across * (grad_a[d] - radial * unit[d]) + along * radial * unit[d];
}

/* From ∂L/∂h_j of iteration r to ∂L/∂z_j of the iteration before; y adds up β ∂L/∂h_j. */
static void back_to_previous(const struct job *job, size r, size n, const vec *grad_h)
{
    vec z[D], *grad_a = job->y + n * D;
    for (int d = 0; d < D; d++) grad_a[d] += job->sharpness * grad_h[d];
    load_expert(job, job->z_batch_first + (r - 1) * job->z_iteration, n, z);
    agreement_vector_backward(job, z, grad_a, of_iteration(job, job->grad_z_record, r - 1, n));
}

/* 1/‖u‖ for the cosine, else 1. At u = 0, which has no direction, a'(0) v = v. */
INLINE vec scale_of_vote(const struct job *job, const vec *u)
{
    if (!job->cosine) return broadcast(1);
    vec square = inner(u, u, D);
    return blend(square == 0, broadcast(1), inverse_square_root(square));
}

/* ∂L/∂z_j of all iterations, for one expert and group, if Σ_i c_ij = 1.

   scratch: 1/‖u_i‖, b_i and g_i (I each), then votes (I, D), or (TILE, D) if not cached. */
static void back_through_expert(const struct job *job, size task, vec *scratch)
{
    size inputs = job->inputs, j = task / job->groups, group = task % job->groups;
    size n = group * job->experts + j, stride = job->experts * D * K, last = job->iterations - 1;
    const vec *x = job->x + group * inputs * K;
    const float *w = job->weight + j * D * K;
    vec *scales = scratch, *b = scales + inputs, *g = b + inputs, *votes = g + inputs;
    const vec *grad_c = job->grad_c ? job->grad_c + n * inputs : 0;

    for (size r = last; r > 0; r--) {
        const vec *h = of_iteration(job, job->h, r, n);
        const vec *grad_z = of_iteration(job, job->grad_z_record, r, n);
        vec maximum = broadcast(-INFINITY), sum = broadcast(0), compensation = broadcast(0);
        for (size from = 0, to; from < inputs; from = to) {
            to = min(from + TILE, inputs);
            vec *u = job->cache_votes ? votes + from * D : votes;
            for (size i = from; (!job->cache_votes || r == last) && i < to; i++) {
                prefetch(w + min(i + PREFETCH, inputs - 1) * stride);
                vote(w + i * stride, x + i * K, u + (i - from) * D);
                scales[i] = scale_of_vote(job, u + (i - from) * D);
            }
            agreement(u, h, to - from, b + from);
            agreement(u, grad_z, to - from, g + from);
            for (size i = from; i < to; i++) {
                b[i] *= scales[i];
                if (grad_c && r == last) g[i] += grad_c[i];
                maximum = blend(maximum < b[i], b[i], maximum);
            }
        }
        vec mean = broadcast(0), grad_h[D];
        for (size i = 0; i < inputs; i++) {
            b[i] = exponential(b[i] - maximum);
            compensated_add(&sum, &compensation, b[i]);
            mean += b[i] * g[i];
        }
        mean /= sum;
        memset(grad_h, 0, sizeof grad_h);
        for (size i = 0; i < inputs; i++) b[i] *= (g[i] - mean) * scales[i] / sum;
        for (size from = 0; from < inputs; from += TILE) {
            size count = min(TILE, inputs - from);
            if (job->cache_votes) add_votes(votes + from * D, b + from, count, grad_h, 0);
            else add_forward(w + from * stride, stride, x + from * K, b + from, count, grad_h, 0);
        }
        *statistic(job, job->maximum, r, n) = maximum;
        *statistic(job, job->sum, r, n) = sum;
        *statistic(job, job->mean_g, r, n) = mean;
        back_to_previous(job, r, n, grad_h);
    }
}

/* A few inputs of one group, with all experts. The arrays have the shape (J, tile), or (R, J, tile)
   without the first iteration. */
struct tile {
    size group, first, count;
    vec *votes;  /* (J, tile, D) */
    vec *scales; /* 1/‖u_ij‖ */
    vec *c;      /* first b_ij, then c_ij */
    vec *s;      /* first g_ij, then s_ij */
    vec *t;      /* t_ij, or NULL */
};

INLINE size pair_of(const struct job *job, size j, size i) { return j * job->tile + i; }

/* Divide `scratch` into the arrays of a tile; `iterations` of them are processed together. */
static struct tile new_tile(
    const struct job *job, size group, size first, size end, size iterations, vec *scratch)
{
    size pairs = job->experts * job->tile;
    vec *scales = scratch + pairs * D, *c = scales + pairs, *s = c + iterations * pairs;
    return (struct tile){group, first, end - first, scratch, scales, c, s, s + iterations * pairs};
}

/* u_ij, 1/‖u_ij‖, and b_ij and g_ij of the iterations from `low` to `high`. */
static void compare(const struct job *job, const struct tile *tile, size low, size high)
{
    size experts = job->experts, stride = experts * D * K;
    const vec *x = job->x + (tile->group * job->inputs + tile->first) * K;
    for (size j = 0; j < experts; j++) {
        size n = tile->group * experts + j;
        for (size i = 0; i < tile->count; i++) {
            const float *w = job->weight + (tile->first + i) * stride + j * D * K;
            size pair = pair_of(job, j, i);
            vec *u = tile->votes + pair * D;
            prefetch(w + (i + PREFETCH < tile->count ? PREFETCH * stride : 0));
            vote(w, x + i * K, u);
            vec scale = tile->scales[pair] = scale_of_vote(job, u);
            for (size r = low; r < high; r++) {
                size at = (r - low) * experts * job->tile + pair;
                tile->c[at] = inner(u, of_iteration(job, job->h, r, n), D) * scale;
                tile->s[at] = inner(u, of_iteration(job, job->grad_z_record, r, n), D);
                if (job->grad_c && r == job->iterations - 1)
                    tile->s[at] += job->grad_c[n * job->inputs + tile->first + i];
            }
        }
    }
}

/* s = c (g − ⟨g⟩)/‖u‖, t += s b/‖u‖. */
INLINE void finish_pair(
    const struct job *job, const struct tile *tile, size pair, size at, vec b, vec mean)
{
    vec scale = tile->scales[pair], s = tile->c[at] * (tile->s[at] - mean) * scale;
    tile->s[at] = s;
    if (job->cosine) tile->t[pair] += s * b * scale;
}

/* From b and g to c, s and t, of one iteration: the softmax and back. `at` is its first pair. */
static void softmax_backward(const struct job *job, const struct tile *tile, size r, size at)
{
    for (size i = 0; job->normalize_outputs && i < tile->count; i++) {
        vec maximum = broadcast(-INFINITY), sum = broadcast(0), mean = broadcast(0);
        for (size j = 0; j < job->experts; j++) {
            vec b = tile->c[at + pair_of(job, j, i)];
            maximum = blend(maximum < b, b, maximum);
        }
        for (size j = 0; j < job->experts; j++) {
            size pair = pair_of(job, j, i);
            vec e = exponential(tile->c[at + pair] - maximum);
            sum += e;
            mean += e * tile->s[at + pair];
        }
        mean /= sum;
        for (size j = 0; j < job->experts; j++) {
            size pair = pair_of(job, j, i);
            vec b = tile->c[at + pair];
            tile->c[at + pair] = exponential(b - maximum) / sum;
            finish_pair(job, tile, pair, at + pair, b, mean);
        }
    }
    for (size j = 0; !job->normalize_outputs && j < job->experts; j++) {
        size n = tile->group * job->experts + j;
        vec maximum = *statistic(job, job->maximum, r, n);
        vec inverse_sum = 1 / *statistic(job, job->sum, r, n);
        vec mean = *statistic(job, job->mean_g, r, n);
        for (size i = 0; i < tile->count; i++) {
            size pair = pair_of(job, j, i);
            vec b = tile->c[at + pair];
            tile->c[at + pair] = exponential(b - maximum) * inverse_sum;
            finish_pair(job, tile, pair, at + pair, b, mean);
        }
    }
}

/* ∂L/∂h_j += Σ_i s_ij u_ij over a chunk of inputs, if Σ_j c_ij = 1. */
static void back_through_chunk(const struct job *job, size task, vec *scratch)
{
    size count = job->chunks * job->groups, r = task / count, experts = job->experts, from, to;
    size chunk = task % count / job->groups, group = task % count % job->groups;
    chunk_bounds(job, chunk, &from, &to);
    vec *grad_h = partial_z_of(job, chunk, group);
    memset(grad_h, 0, sizeof(vec) * experts * D);
    for (size first = from; first < to; first += job->tile) {
        struct tile tile = new_tile(job, group, first, min(first + job->tile, to), 1, scratch);
        memset(tile.t, 0, sizeof(vec) * experts * job->tile);
        compare(job, &tile, r, r + 1);
        softmax_backward(job, &tile, r, 0);
        for (size j = 0; j < experts; j++) {
            size pair = pair_of(job, j, 0);
            add_votes(tile.votes + pair * D, tile.s + pair, tile.count, grad_h + j * D, 0);
        }
    }
}

/* ∂L/∂h_j = Σ over the chunks, and from there to ∂L/∂z_j of the iteration before. */
static void back_from_chunks(const struct job *job, size task, vec *scratch)
{
    (void)scratch;
    size count = job->groups * job->experts, r = task / count, n = task % count;
    vec grad_h[D];
    sum_chunks(job, n / job->experts, n % job->experts, grad_h);
    back_to_previous(job, r, n, grad_h);
}

/* ∂L/∂u = Σ_r (c ∂L/∂z + s h) − t u of one vote, n components from `first` on. */
INLINE void vote_gradient_part(
    const struct job *job, const struct tile *tile, size j, size pair, int first, int n,
    vec *grad_u)
{
    size expert = tile->group * job->experts + j, pairs = job->experts * job->tile;
    float uniform = 1.0f / (job->normalize_outputs ? job->experts : job->inputs);
    const vec *u = tile->votes + pair * D + first;
    const vec *grad_z = of_iteration(job, job->grad_z_record, 0, expert) + first;
    vec acc[BLOCK_D];
    UNROLL for (int d = 0; d < n; d++) acc[d] = uniform * grad_z[d];
    for (size r = 1; r < job->iterations; r++) {
        const vec *h = of_iteration(job, job->h, r, expert) + first;
        grad_z = of_iteration(job, job->grad_z_record, r, expert) + first;
        vec c = tile->c[(r - 1) * pairs + pair], s = tile->s[(r - 1) * pairs + pair];
        UNROLL for (int d = 0; d < n; d++) acc[d] += c * grad_z[d] + s * h[d];
    }
    if (job->cosine && job->iterations > 1) {
        vec t = tile->t[pair];
        UNROLL for (int d = 0; d < n; d++) acc[d] -= t * u[d];
    }
    UNROLL for (int d = 0; d < n; d++) grad_u[first + d] = acc[d];
}

/* Σ_images ∂L/∂u x_kᵀ += the part of one group, n components k, for the d of `rows`. */
INLINE void add_outer_part(const vec *rows, const vec *x, vec *grad, int n, int is_first)
{
    vec acc[BLOCK_K];
    UNROLL for (int k = 0; k < n; k++) acc[k] = is_first ? broadcast(0) : grad[k * WIDE];
    for (int l = 0; l < LANES; l++)
        UNROLL for (int k = 0; k < n; k++) acc[k] += ((const float *)(x + k))[l] * rows[l];
    UNROLL for (int k = 0; k < n; k++) grad[k * WIDE] = acc[k];
}

/* ∂L/∂W_ij += Σ_images ∂L/∂u_ij x_iᵀ of one group. */
static void add_outer(const struct job *job, size group, size i, size j, const vec *grad_u)
{
    const vec *x = job->x + (group * job->inputs + i) * K;
    vec *grad = job->grad_sum + (i * job->experts + j) * K * WIDE;
    int is_first = job->first_block && group == 0;
    for (int wide = 0; wide < WIDE; wide++) {
        vec rows[LANES];
        UNROLL for (int d = 0; d < LANES; d++)
            rows[d] = wide * LANES + d < D ? grad_u[wide * LANES + d] : broadcast(0);
        transpose(rows);
        for (int k = 0; k + BLOCK_K <= K; k += BLOCK_K)
            add_outer_part(rows, x + k, grad + k * WIDE + wide, BLOCK_K, is_first);
        if (K % BLOCK_K)
            add_outer_part(rows, x + FULL_K, grad + FULL_K * WIDE + wide, K % BLOCK_K, is_first);
    }
}

/* Write ∂L/∂W_ij, (K, WIDE) vectors, as (D, K) numbers. */
static void store_weight_gradient(const struct job *job, size i, size j)
{
    const float *grad = (const float *)(job->grad_sum + (i * job->experts + j) * K * WIDE);
    float *to = job->grad_weight + (i * job->experts + j) * D * K;
    for (int d = 0; d < D; d++)
        for (int k = 0; k < K; k++) to[d * K + k] = grad[k * WIDE * LANES + d];
}

/* ∂L/∂x_i and ∂L/∂W_ij of a few inputs, all experts and all images.

   scratch: ∂L/∂x (tile, K), then the arrays of a tile. */
static void back_through_votes(const struct job *job, size task, vec *scratch)
{
    size experts = job->experts, again = job->iterations - 1;
    size first = task * job->tile, end = min(first + job->tile, job->inputs), count = end - first;
    vec *grad_x = scratch, grad_u[D];
    for (size group = 0; group < job->groups; group++) {
        struct tile tile = new_tile(job, group, first, end, again, scratch + job->tile * K);
        memset(grad_x, 0, sizeof(vec) * count * K);
        memset(tile.t, 0, sizeof(vec) * experts * job->tile);
        if (again) compare(job, &tile, 1, job->iterations);
        for (size r = 1; r <= again; r++)
            softmax_backward(job, &tile, r, (r - 1) * experts * job->tile);
        for (size j = 0; j < experts; j++)
            for (size i = 0; i < count; i++) {
                const float *w = job->weight + ((first + i) * experts + j) * D * K;
                size pair = pair_of(job, j, i);
                for (int d = 0; d + BLOCK_D <= D; d += BLOCK_D)
                    vote_gradient_part(job, &tile, j, pair, d, BLOCK_D, grad_u);
                if (D % BLOCK_D)
                    vote_gradient_part(job, &tile, j, pair, FULL_D, D % BLOCK_D, grad_u);
                if (job->grad_x_batch_first)
                    add_backward(w, grad_u, broadcast(1), grad_x + i * K);
                if (job->grad_weight) add_outer(job, group, first + i, j, grad_u);
            }
        size row = job->inputs * K, present = min(LANES, job->images - group * LANES);
        float *to = job->grad_x_batch_first + group * LANES * row + first * K;
        for (size l = 0; job->grad_x_batch_first && l < present; l++)
            for (size k = 0; k < count * K; k++) to[l * row + k] = grad_x[k][l];
    }
    for (size i = first; job->grad_weight && job->last_block && i < end; i++)
        for (size j = 0; j < experts; j++) store_weight_gradient(job, i, j);
}
