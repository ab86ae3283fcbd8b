// Attention of a tile of queries over the spans of one sequence, one KV head at a time.
#include "isa.h"
#include "attention.h"
#if defined(__AMX_BF16__)
#include "attention_amx.h"
#endif
#include <utility>

namespace MOORAGE_ISA {

#include "attention_page.h"

static int whole(int dim) { return (dim + 15) / 16 * 16; }

// Scratch: queries, span values and final values [QUERIES, D'] float32; K page, V page [PAGE, D'] bf16 for head sizes with a rest; a panel and
// the scores of a page.
size_t attention_scratch(const AttentionJob& j) {
    const size_t bytes = sizeof(float) * (whole(j.dim) * (PAGE + 3 * QUERIES) + PANEL_FLOATS + QUERIES * PAGE);
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
    auto take = [&](int64_t n) { float* p = at; at += n; return p; };
    uint16_t *k_copy = (uint16_t*)take(PAGE / 2 * ld), *v_copy = (uint16_t*)take(PAGE / 2 * ld);
    float *q = take(QUERIES * ld), keep[QUERIES] = {};
    Fold span[QUERIES], all[QUERIES];
    for (int i = 0; i < queries; i++) {
        const float* from = j.q + query_row(j, t, i) * j.dim;
        for (int d = 0; d < ld; d++) q[i * ld + d] = d < j.dim ? from[d] * j.scale : 0.0f;
        span[i].values = take(ld), all[i].values = take(ld);
        clear(all[i], width);
    }
    Page p;
    p.ld = ld, p.width = width, p.queries = queries, p.q = q, p.panel = take(PANEL_FLOATS), p.scores = take(QUERIES * PAGE);
    for (int s = t.span0; s < t.span1; s++) {
        for (int i = 0; i < queries; i++) clear(span[i], width);
        for (int64_t page = (int64_t)s * SPAN_PAGES; page < (int64_t)(s + 1) * SPAN_PAGES; page++) {
            for (int i = 0; i < queries; i++) visible(j, t.position + i / j.group, page, p.seen[i].first, p.seen[i].last);
            p.low = p.seen[0].first, p.high = p.seen[queries - 1].last; // the first query sees furthest back, the last one furthest ahead
            if (p.high <= p.low) continue;
            const bool more = (page + 1) * PAGE < t.position + t.nt; // also behind these spans: their neighbour is the thread's next task
            const int64_t offset = page_at(j, t, page);
            p.k = whole_rows(j.k + offset, p.high, j.dim, k_copy);
            p.v = j.v == j.k ? p.k : whole_rows(j.v + offset, p.high, j.dim, v_copy);
            p.next = j.k + (more ? page_at(j, t, page + 1) : offset);
            page_scores(p);
            weigh(p, keep, span);
            page_values(p, keep, span);
        }
        for (int i = 0; i < queries && !t.partial; i++) fold(all[i], span[i], width);
    }
    for (int i = 0; i < queries; i++) {
        in_order((t.partial ? span[i] : all[i]).values, width);
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
