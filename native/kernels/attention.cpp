// Attention of a tile of queries over the spans of one sequence, one KV head at a time.
#include "isa.h"
#include "attention.h"
#if defined(__AMX_BF16__)
#include "attention_amx.h"
#endif

namespace MOORAGE_ISA {

constexpr int KEYS = 16; // of a page, that are widened together, at most: with two queries they stay in L1
constexpr int KEY_ELEMENTS = 4096;

static int whole(int dim) { return (dim + 15) / 16 * 16; }

// Scratch: queries, span values and final values [QUERIES, D'] float32; K page, V page [PAGE, D'] bf16 for head sizes with a rest; and what
// kernels/attention_avx2.h widens.
size_t attention_scratch(const AttentionJob& j) {
    const size_t bytes = sizeof(float) * (whole(j.dim) * (PAGE + 3 * QUERIES + KEYS) + QUERIES * PAGE);
#if defined(__AMX_BF16__)
    const size_t tiles = amx_attention_scratch(j.dim);
    return tiles > bytes ? tiles : bytes;
#else
    return bytes;
#endif
}

// Rows of bf16 whose length is a multiple of 16: the page itself, or a copy with zeros behind every row.
static const uint16_t* whole_rows(const uint16_t* from, int rows, int dim, uint16_t* copy) {
    const int ld = whole(dim);
    if (ld == dim) return from;
    for (int r = 0; r < rows; r++) {
        memcpy(copy + r * ld, from + r * dim, dim * sizeof *from);
        memset(copy + r * ld + dim, 0, (ld - dim) * sizeof *from);
    }
    return copy;
}

constexpr int SIDE = NREG == 1 ? 4 : 2; // queries, and keys, whose products are in registers together

// Row i of a page that is read soon: a page's rows follow each other, but the next page lies elsewhere and no hardware stream leads there.
static void come_nearer(const uint16_t* page, int ld, int i) {
    for (int d = 0; page && d < ld; d += 32) __builtin_prefetch(page + i * ld + d, 0, 2);
}

// score[q][i] = query q times key i for keys [first, last). The rows of `soon` come nearer meanwhile.
template <int Q>
static void score_page(const float* q, const uint16_t* k, int ld, int first, int last, const uint16_t* soon, float (*score)[PAGE]) {
    for (int i = first; i < last; i += SIDE) {
        for (int n = i; n < i + SIDE && n < last; n++) come_nearer(soon, ld, n);
        const uint16_t* row[SIDE];
        for (int n = 0; n < SIDE; n++) row[n] = k + (i + n < last ? i + n : last - 1) * ld;
        F acc[4 * Q];
        for (F& a : acc) a = zero();
        for (int d = 0; d < ld; d += 16) {
            F a[Q];
            for (int m = 0; m < Q; m++) a[m] = load(q + m * ld + d);
            for (int n = 0; n < SIDE; n++) {
                const F key = load_bf16(row[n] + d);
                for (int m = 0; m < Q; m++) acc[4 * m + n] = fma(a[m], key, acc[4 * m + n]);
            }
        }
        for (int m = 0; m < Q; m++) {
            float sums[4];
            four_sums(acc + 4 * m, sums);
            for (int n = 0; n < SIDE && i + n < last; n++) score[m][i + n] = sums[n];
        }
    }
}

// values = keep values + sum of p[i] v[i], i in [first, last), for D sixteens of the head.
template <int Q, int D>
static void add_values(const float (*p)[PAGE], const float* keep, const uint16_t* v, int ld, int first, int last, int at, const uint16_t* soon, Fold* f) {
    F acc[Q][D];
    for (int m = 0; m < Q; m++)
        for (int d = 0; d < D; d++) acc[m][d] = zero();
    for (int i = first; i < last; i++) {
        if (at == 0) come_nearer(soon, ld, i);
        F value[D];
        for (int d = 0; d < D; d++) value[d] = load_bf16(v + i * ld + at + 16 * d);
        for (int m = 0; m < Q; m++) {
            const F weight = splat(p[m][i]);
            for (int d = 0; d < D; d++) acc[m][d] = fma(weight, value[d], acc[m][d]);
        }
    }
    for (int m = 0; m < Q; m++)
        for (int d = 0; d < D; d++) {
            float* to = f[m].values + at + 16 * d;
            store(to, fma(load(to), splat(keep[m]), acc[m][d]));
        }
}

// A page's scores of one query become its weights; the share of what came before that is kept.
static float weigh(float* score, Fold& f) {
    F most = load(score);
    for (int i = 16; i < PAGE; i += 16) most = max(most, load(score + i));
    const float now = top(most), next = now > f.most ? now : f.most;
    const float keep = f.most == -INFINITY ? 0.0f : exp1(f.most - next);
    F total = zero();
    for (int i = 0; i < PAGE; i += 16) {
        const F p = exp(load(score + i) - splat(next));
        store(score + i, p);
        total = total + p;
    }
    f.most = next;
    f.total = f.total * keep + sum(total);
    return keep;
}

// One page into the running softmax of Q queries that see the same keys [first, last) of it. `next`: the keys that are read after it,
// or null; only the first queries of a page have it.
template <int Q>
static void attend_page(const float* q, const uint16_t* k, const uint16_t* v, int ld, int width, int first, int last, const uint16_t* next,
                        Fold* f) {
    float score[Q][PAGE], keep[Q];
    for (int m = 0; m < Q; m++)
        for (int i = 0; i < PAGE; i++) score[m][i] = -INFINITY;
    score_page<Q>(q, k, ld, first, last, next && v != k ? v : nullptr, score);
    for (int m = 0; m < Q; m++) keep[m] = weigh(score[m], f[m]);
    int d = 0;
    for (; d + 16 * SIDE <= width; d += 16 * SIDE) add_values<Q, SIDE>(score, keep, v, ld, first, last, d, next, f);
    for (; d < width; d += 16) add_values<Q, 1>(score, keep, v, ld, first, last, d, next, f);
}

// All queries of a task; those of one token see the same keys.
static void attend_queries(const AttentionJob& j, const AttentionTask& t, const float* q, const uint16_t* k, const uint16_t* v, int64_t page,
                           const uint16_t* next, Fold* f) {
    const int ld = whole(j.dim), width = whole(j.values), group = j.group;
    for (int token = 0; token < t.nt; token++) {
        int first, last, i = token * group;
        visible(j, t.position + token, page, first, last);
        if (first >= last) continue;
        for (; i + SIDE <= (token + 1) * group; i += SIDE, next = nullptr) attend_page<SIDE>(q + i * ld, k, v, ld, width, first, last, next, f + i);
        switch ((token + 1) * group - i) {
        case 3: attend_page<SIDE == 4 ? 3 : 1>(q + i * ld, k, v, ld, width, first, last, next, f + i); break;
        case 2: attend_page<2>(q + i * ld, k, v, ld, width, first, last, next, f + i); break;
        case 1: attend_page<1>(q + i * ld, k, v, ld, width, first, last, next, f + i); break;
        default: break;
        }
        next = nullptr;
    }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
#include "attention_avx2.h"
#endif

static void clear(Fold& f, int ld) {
    f.most = -INFINITY, f.total = 0;
    memset(f.values, 0, ld * sizeof(float));
}

void attention(const AttentionJob& j, const AttentionTask& t, void* scratch) {
#if defined(__AMX_BF16__)
    if (j.dim % DEPTH == 0 && j.values % TILE == 0) return amx_attention(j, t, scratch); // other head sizes have no whole tiles
#endif
    const int ld = whole(j.dim), width = whole(j.values), queries = t.nt * j.group;
    float* at = (float*)scratch;
    auto take = [&](int64_t n) { float* p = at; at += n * ld; return p; };
    uint16_t *k_copy = (uint16_t*)take(PAGE / 2), *v_copy = (uint16_t*)take(PAGE / 2);
    float* q = take(QUERIES);
    [[maybe_unused]] float *widened = take(KEYS), *scores = at;
    at += QUERIES * PAGE;
    Fold span[QUERIES], all[QUERIES];
    for (int i = 0; i < queries; i++) {
        const float* from = j.q + query_row(j, t, i) * j.dim;
        for (int d = 0; d < ld; d++) q[i * ld + d] = d < j.dim ? from[d] * j.scale : 0.0f;
        span[i].values = take(1), all[i].values = take(1);
        clear(all[i], width);
    }
    for (int s = t.span0; s < t.span1; s++) {
        for (int i = 0; i < queries; i++) clear(span[i], width);
        for (int64_t page = (int64_t)s * SPAN_PAGES; page < (int64_t)(s + 1) * SPAN_PAGES; page++) {
            int first, last, unused;
            visible(j, t.position, page, first, unused);                // the first query sees furthest back
            visible(j, t.position + t.nt - 1, page, unused, last);      // the last one furthest ahead
            if (last <= first) continue;
            const bool more = page + 1 < (int64_t)t.span1 * SPAN_PAGES && (page + 1) * PAGE < t.position + t.nt;
            const int64_t offset = page_at(j, t, page);
            const uint16_t* k = whole_rows(j.k + offset, last, j.dim, k_copy);
            const uint16_t* v = j.v == j.k ? k : whole_rows(j.v + offset, last, j.dim, v_copy);
            const uint16_t* soon = j.k + (more ? page_at(j, t, page + 1) : offset);
#if defined(__AVX2__) && !defined(__AVX512F__)
            if (queries >= MANY) {
                attend_together(j, t, q, k, v, page, soon, widened, scores, span);
                continue;
            }
#endif
            attend_queries(j, t, q, k, v, page, soon, span);
        }
        for (int i = 0; i < queries && !t.partial; i++) fold(all[i], span[i], width);
    }
    for (int i = 0; i < queries; i++) {
        if (t.partial) {
            float* to = t.partial + i * (int64_t)(j.values + 2);
            to[0] = span[i].most, to[1] = span[i].total;
            memcpy(to + 2, span[i].values, j.values * sizeof(float));
        } else {
            finish(all[i], j.out + query_row(j, t, i) * j.values, j.values);
        }
    }
}

// partials: [spans][stride floats], each [nt * G][values + 2] as `attention` leaves them.
void attention_merge(const AttentionJob& j, const AttentionTask& t, const float* partials, int64_t stride, int spans) {
    for (int i = 0; i < t.nt * j.group; i++) {
        float* out = j.out + query_row(j, t, i) * j.values;
        Fold all{-INFINITY, 0, out};
        memset(out, 0, j.values * sizeof(float));
        for (int s = 0; s < spans; s++) {
            const float* from = partials + s * stride + i * (int64_t)(j.values + 2);
            fold(all, Fold{from[0], from[1], const_cast<float*>(from + 2)}, j.values);
        }
        finish(all, out, j.values);
    }
}

void write_kv(const float* from, uint16_t* to, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store_bf16(to + i, load(from + i));
    for (; i < n; i++) to[i] = float_bf16(from[i]);
}

void fill_attention(Kernels& k) {
    k.write_kv = write_kv, k.attention_scratch = attention_scratch, k.attention = attention, k.attention_merge = attention_merge;
}

} // namespace MOORAGE_ISA
