// Softmax attention over KV pages: what is the same on every ISA. `attention.cpp` holds the loops.
//
// Numerics: a query's keys are cut at absolute multiples of a page (64) and of a span (512 tokens). Inside a span pages are
// folded in order (running maximum, Milakov and Gimelshein 2018); spans are folded in order the same way. Both cuts are at
// absolute positions, so neither chunked prefill nor splitting spans over threads changes a bit.
#pragma once
#include "../simd.h"
#include "kernels.h"
#include <math.h>

namespace MOORAGE_ISA {

// Running softmax of one query: the largest score, the sum of exp(score - max), and the weighted values [dim].
struct Fold {
    float most, total;
    float* values;
};

inline float exp1(float x) {
    const F e = exp(splat(x));
    float out;
    memcpy(&out, &e, 4);
    return out;
}

// into = into (+) from, `from` standing behind it. An empty side (most = -inf) leaves the other as it is.
inline void fold(Fold& into, const Fold& from, int dim) {
    if (from.most == -INFINITY) return;
    const float most = into.most > from.most ? into.most : from.most;
    const float a = into.most == -INFINITY ? 0.0f : exp1(into.most - most), b = exp1(from.most - most);
    into.most = most;
    into.total = fma(splat(into.total), splat(a), splat(from.total * b)).r[0][0];
    const F fa = splat(a), fb = splat(b);
    int d = 0;
    for (; d + 16 <= dim; d += 16) store(into.values + d, fma(load(into.values + d), fa, load(from.values + d) * fb));
    if (d < dim) {
        const int n = dim - d;
        store_part(into.values + d, fma(load_part(into.values + d, n), fa, load_part(from.values + d, n) * fb), n);
    }
}

inline void finish(const Fold& f, float* out, int dim) {
    const float r = 1.0f / f.total;
    for (int d = 0; d < dim; d++) out[d] = f.values[d] * r;
}

// Rows of query i of a task in q, counted in heads.
inline int64_t query_row(const AttentionJob& j, const AttentionTask& t, int i) {
    return (t.row + i / j.group) * j.heads + t.heads * j.group + i % j.group;
}

// Where page `number` of the pool starts for the KV head of a task.
inline int64_t page_at(const AttentionJob& j, const AttentionTask& t, int64_t page) {
    return ((int64_t)t.pages[page] * j.kv_heads + t.heads / j.split) * PAGE * j.dim;
}

// Keys [first, last) of page `page` that a query at `position` sees, as offsets in the page.
inline void visible(const AttentionJob& j, int64_t position, int64_t page, int& first, int& last) {
    const int64_t from = j.window ? position + 1 - j.window : 0, base = page * PAGE;
    first = (int)(from > base ? (from - base < PAGE ? from - base : PAGE) : 0);
    last = (int)(position + 1 - base < PAGE ? position + 1 - base : PAGE);
    if (last < first) last = first;
}

} // namespace MOORAGE_ISA
