// Attention on AMX tiles: sixteen queries are the columns of a tile, so a softmax runs down sixteen lanes at once.
//
// Numerics, on top of attention.h: q * scale and the weights p are two bf16 each (2^-17 and 2^-16), keys and values are the bf16 of
// their pages; scores are S^T = K Q^T and the page's values O^T = V^T P^T, summed in float32 with k ascending by 32. A page that a
// query does not see multiplies its sums by one and adds zero.
#pragma once
#include "attention.h"
#include "gemm_amx.h"

namespace MOORAGE_ISA {

constexpr int GROUPS = QUERIES / TILE;

// Sixteen running softmaxes, one a lane: values [dim][16].
struct Folds {
    __m512 most, total;
    float* values;
    void clear(int dim) {
        most = _mm512_set1_ps(-INFINITY), total = _mm512_setzero_ps();
        memset(values, 0, sizeof(float) * TILE * dim);
    }
};

inline __m512 vexp(__m512 x) {
    F f;
    f.r[0] = (VF)x;
    return (__m512)exp(f).r[0];
}

// `fold` of attention.h, sixteen at a time with the same operations.
inline void fold(Folds& into, const Folds& from, int dim) {
    const __m512 none = _mm512_set1_ps(-INFINITY);
    const __mmask16 live = _mm512_cmp_ps_mask(from.most, none, _CMP_NEQ_OQ);
    if (!live) return;
    const __m512 most = _mm512_max_ps(into.most, from.most);
    const __m512 a = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(into.most, none, _CMP_NEQ_OQ), vexp(into.most - most));
    const __m512 b = vexp(from.most - most);
    into.most = _mm512_mask_mov_ps(into.most, live, most);
    into.total = _mm512_mask_mov_ps(into.total, live, _mm512_fmadd_ps(into.total, a, from.total * b));
    for (int d = 0; d < dim; d++) {
        const __m512 old = _mm512_load_ps(into.values + d * TILE), fresh = _mm512_load_ps(from.values + d * TILE) * b;
        _mm512_store_ps(into.values + d * TILE, _mm512_mask_mov_ps(old, live, _mm512_fmadd_ps(old, a, fresh)));
    }
}

// Values of a page, the first of its rows [64][dim] bf16 -> [values][64]; tokens past `valid` are zero. Meanwhile prefetches the page's keys `k` and, when
// there is one, the values after these, `next`: evenly and in address order (see dequant_tiles.h).
inline void transpose_values(const uint16_t* v, int valid, int dim, int values, const uint16_t* k, const uint16_t* next, uint16_t* to) {
    const char *ahead_k = (const char*)k, *ahead_v = (const char*)next;
    for (int t = 0; t < PAGE; t += DEPTH)
        for (int d = 0; d < values; d += TILE) {
            __m512i r[16];
            for (int i = 0; i < 16; i++) {
                const uint16_t* p = v + (t + 2 * i) * dim + d;
                const int left = valid - t - 2 * i;
                _mm_prefetch(ahead_k, _MM_HINT_T1), ahead_k += 64; // 2 * dim / 16 * 16 lines are a page of keys
                if (next) _mm_prefetch(ahead_v, _MM_HINT_T1), ahead_v += 64;
                const __m256i a = left > 0 ? _mm256_loadu_si256((const __m256i*)p) : _mm256_setzero_si256();
                const __m256i b = left > 1 ? _mm256_loadu_si256((const __m256i*)(p + dim)) : _mm256_setzero_si256();
                r[i] = _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
            }
            transpose16(r);
            for (int i = 0; i < 16; i++) _mm512_store_si512(to + (d + i) * PAGE + t, r[i]);
        }
}

// Four tile products side by side: tiles 0..3 += A_i B over `steps`; A_i at a + i * a_tile, B as [step][high, low] tiles.
inline void four_products(const uint8_t* a, int64_t a_tile, int64_t a_stride, int steps, const uint8_t* b) {
    clear_tiles();
    for (int s = 0; s < steps; s++, a += DEPTH * 2, b += 2 * TILE_BYTES) {
        tile_load<6>(b, 64), tile_load<7>(b + TILE_BYTES, 64);
        tile_load<4>(a, a_stride), tile_load<5>(a + a_tile, a_stride);
        tile_dot<0, 4, 6>(), tile_dot<1, 5, 6>(), tile_dot<0, 4, 7>(), tile_dot<1, 5, 7>();
        tile_load<4>(a + 2 * a_tile, a_stride), tile_load<5>(a + 3 * a_tile, a_stride);
        tile_dot<2, 4, 6>(), tile_dot<3, 5, 6>(), tile_dot<2, 4, 7>(), tile_dot<3, 5, 7>();
    }
}

// scores [64][16] -> p as B tiles [2 steps of 32 tokens][high, low][16 pairs][16][2]; updates most and total, returns what the
// values so far are multiplied by. Lane q sees tokens [first[q], last[q]).
inline __m512 soften(float* scores, __m512i first, __m512i last, bool whole, Folds& f, uint8_t* p) {
    __m512 now = f.most;
    for (int i = 0; i < PAGE; i++) {
        __m512 s = _mm512_load_ps(scores + i * TILE);
        if (!whole) {
            const __m512i at = _mm512_set1_epi32(i);
            const __mmask16 seen = _mm512_cmpge_epi32_mask(at, first) & _mm512_cmplt_epi32_mask(at, last);
            s = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen, s);
            _mm512_store_ps(scores + i * TILE, s);
        }
        now = _mm512_max_ps(now, s);
    }
    const __m512 base = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(now, _mm512_set1_ps(-INFINITY), _CMP_NEQ_OQ), now);
    const __m512 keep = vexp(f.most - base);
    __m512 total = _mm512_setzero_ps();
    for (int i = 0; i < PAGE; i += 2) {
        const __m512 a = vexp(_mm512_load_ps(scores + i * TILE) - base), b = vexp(_mm512_load_ps(scores + (i + 1) * TILE) - base);
        total = total + a;
        total = total + b;
        uint8_t* to = p + i / DEPTH * 2 * TILE_BYTES + i % DEPTH / 2 * 64;
        _mm512_store_si512(to, uppers(a, b));
        _mm512_store_si512(to + TILE_BYTES, uppers(rest(a), rest(b)));
    }
    f.most = now;
    f.total = _mm512_fmadd_ps(f.total, keep, total);
    return keep;
}

struct Lanes { // a group of sixteen queries
    Folds span, all;
    const uint8_t* q; // packed
    __m512i position;
};

inline void attend_page_amx(const AttentionJob& j, int64_t page, const uint16_t* k, const uint16_t* vt, int valid, Lanes& g, float* scores,
                            uint8_t* p) {
    const int dim = j.dim;
    const __m512i last = _mm512_sub_epi32(g.position, _mm512_set1_epi32((int)(page * PAGE) - 1));
    const __m512i first = j.window ? _mm512_sub_epi32(last, _mm512_set1_epi32(j.window)) : _mm512_setzero_si512();
    const bool whole = valid == PAGE && _mm512_cmpge_epi32_mask(last, _mm512_set1_epi32(PAGE)) == 0xffff &&
                       _mm512_cmple_epi32_mask(first, _mm512_setzero_si512()) == 0xffff;
    four_products((const uint8_t*)k, TILE * dim * 2, dim * 2, dim / DEPTH, g.q);
    store_tiles((uint8_t*)scores);
    const __m512 keep = soften(scores, first, last, whole, g.span, p);
    alignas(64) float out[4 * TILE * TILE];
    for (int d = 0; d < j.values; d += 4 * TILE) { // rows past them are scratch
        four_products((const uint8_t*)(vt + d * PAGE), TILE * PAGE * 2, PAGE * 2, PAGE / DEPTH, p);
        store_tiles((uint8_t*)out);
        for (int i = 0; i < 4 * TILE && d + i < j.values; i++) {
            float* v = g.span.values + (d + i) * TILE;
            _mm512_store_ps(v, _mm512_fmadd_ps(_mm512_load_ps(v), keep, _mm512_load_ps(out + i * TILE)));
        }
    }
}

// Scratch: V^T with room for whole groups of four tiles, packed queries, the values of two folds a group, scores, p.
inline size_t amx_attention_scratch(int dim) {
    return (size_t)(dim + 3 * TILE) * PAGE * 2 + (size_t)GROUPS * TILE * dim * (4 + 2 * 4) + PAGE * TILE * 4 + 4 * TILE_BYTES + TILE * dim * 4;
}

inline void amx_attention(const AttentionJob& j, const AttentionTask& t, void* scratch) {
    const int dim = j.dim, width = j.values, queries = t.nt * j.group, groups = (queries + TILE - 1) / TILE;
    uint8_t* at = (uint8_t*)scratch;
    auto take = [&](size_t bytes) { uint8_t* p = at; at += bytes; return p; };
    uint16_t* vt = (uint16_t*)take((size_t)(dim + 3 * TILE) * PAGE * 2);
    float *scores = (float*)take(PAGE * TILE * 4), *scaled = (float*)take((size_t)TILE * dim * 4);
    uint8_t* p = take(4 * TILE_BYTES);
    Lanes lanes[GROUPS];
    for (int g = 0; g < groups; g++) {
        const int n = queries - g * TILE < TILE ? queries - g * TILE : TILE;
        const float* from[TILE];
        alignas(64) int32_t position[TILE];
        for (int i = 0; i < TILE; i++) {
            position[i] = i < n ? (int32_t)(t.position + (g * TILE + i) / j.group) : -1;
            from[i] = scaled + i * dim;
            for (int d = 0; i < n && d < dim; d++) scaled[i * dim + d] = j.q[query_row(j, t, g * TILE + i) * dim + d] * j.scale;
        }
        uint8_t* q = take((size_t)TILE * dim * 4);
        pack_columns<Order::NATURAL>(q, n, TILE, dim, from);
        lanes[g].q = q, lanes[g].position = _mm512_load_si512(position);
        lanes[g].span.values = (float*)take((size_t)TILE * dim * 4), lanes[g].all.values = (float*)take((size_t)TILE * dim * 4);
        lanes[g].all.clear(width);
    }
    TileConfig config;
    for (int i = 0; i < 8; i++) config.shape(i, TILE);
    config.use();
    for (int s = t.span0; s < t.span1; s++) {
        for (int g = 0; g < groups; g++) lanes[g].span.clear(width);
        for (int64_t page = (int64_t)s * SPAN_PAGES; page < (int64_t)(s + 1) * SPAN_PAGES; page++) {
            int first, last, unused;
            visible(j, t.position, page, first, unused);
            visible(j, t.position + t.nt - 1, page, unused, last);
            if (last <= first) continue;
            const int64_t offset = page_at(j, t, page);
            const bool more = page * PAGE + PAGE <= t.position + t.nt - 1;
            const uint16_t* next = more ? j.v + page_at(j, t, page + 1) : nullptr;
            transpose_values(j.v + offset, last, dim, width, j.k + offset, next, vt);
            for (int g = 0; g < groups; g++) attend_page_amx(j, page, j.k + offset, vt, last, lanes[g], scores, p);
        }
        for (int g = 0; g < groups && !t.partial; g++) fold(lanes[g].all, lanes[g].span, width);
    }
    for (int g = 0; g < groups; g++) {
        const Folds& f = t.partial ? lanes[g].span : lanes[g].all;
        alignas(64) float most[TILE], total[TILE];
        _mm512_store_ps(most, f.most), _mm512_store_ps(total, f.total);
        for (int i = 0; i < TILE && g * TILE + i < queries; i++) {
            const int64_t q = g * TILE + i;
            float* to = t.partial ? t.partial + q * (width + 2) + 2 : j.out + query_row(j, t, (int)q) * width;
            if (t.partial) to[-2] = most[i], to[-1] = total[i];
            const float r = t.partial ? 1.0f : 1.0f / total[i];
            for (int d = 0; d < width; d++) to[d] = f.values[d * TILE + i] * r;
        }
    }
}

} // namespace MOORAGE_ISA
