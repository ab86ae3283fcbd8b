// out = x W^T for formats that are numbers times scales (kernels/codes.h): tiles sum the numbers of a group, float32 applies scales.
//
// Numerics: S = sum over a group's k of v (xh + xl), in a tile from zero: 32 k a step, all `v xh` of a step, then `v xl`. Then, group
// after group, acc = fma(d, S, acc) and, where the format has a p, acc = fma(p, X, acc), X = the group's sum of x in float32. These are the
// same operations for one row of x, sixteen or a thousand.
#pragma once
#include "codes.h"
#include "kernels.h"

namespace MOORAGE_ISA {

constexpr int CHUNK = 4; // steps converted ahead: 32 rows of them, twice, and the sums of 128 tokens fit L1
constexpr int64_t CHUNK_BYTES = CHUNK * STEP_BYTES;
constexpr int SCALES = 16; // groups whose scales are kept: eight are written at once, a chunk ahead of the oldest that is read

// Sums over the groups of 32 k: [groups][columns] behind a panel's tiles.
inline int64_t sums_bytes(int64_t padded_cols, int columns) { return padded_cols / DEPTH * 4 * columns; }

// Converts rows r0.. of a matrix step by step, in ascending order of steps. Rows past `rows` are left as they are: nobody reads their
// products. Also prefetches, evenly and in address order, the rows that come next: the hardware's streams cannot follow several rows
// inside one page, and a burst of prefetches would hold all fill buffers of L1 for a memory latency.
template <Format FORMAT> struct Coder {
    using C = Codes<FORMAT>;
    static constexpr int64_t PER_SPAN = C::SPAN / DEPTH, BYTES = C::SPAN * FORMATS[(int)FORMAT].bytes / FORMATS[(int)FORMAT].elements;
    static constexpr int QUARTER = BLOCK_ROWS / 4;
    const uint8_t *base, *ahead;
    int64_t stride;
    int rows;
    __m512i first, second; // byte offsets of rows 0..15 and 16..31; the last real one again past it
    alignas(64) float d[SCALES][BLOCK_ROWS], p[SCALES][BLOCK_ROWS], eight[BLOCK_ROWS][16];

    Coder(const Matrix& m, int64_t r0, int nr, const uint8_t* following)
        : base(m.data + r0 * m.stride), ahead(following ? following : base), stride(m.stride), rows(nr) {
        const __m512i row = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), last = _mm512_set1_epi32(nr - 1);
        const __m512i bytes = _mm512_set1_epi32((int)stride);
        first = _mm512_mullo_epi32(_mm512_min_epi32(row, last), bytes);
        second = _mm512_mullo_epi32(_mm512_min_epi32(_mm512_add_epi32(row, _mm512_set1_epi32(16)), last), bytes);
    }

    // The scales of the group (or the eight groups) that begin with `step`.
    inline __attribute__((always_inline)) void scales(int64_t step) {
        const uint8_t* b = base + step / PER_SPAN * BYTES;
        if constexpr (C::EIGHT) {
            if (step % PER_SPAN) return;
            for (int r = 0; r < rows; r++) C::eight(b + r * stride, eight[r]);
            for (int h = 0; h < 2; h++) {
                __m512i t[16];
                memcpy(t, eight[16 * h], sizeof t);
                transpose16(t);
                for (int j = 0; j < 8; j++) {
                    _mm512_store_si512(d[(step + j) % SCALES] + 16 * h, t[j]);
                    if (C::PLUS) _mm512_store_si512(p[(step + j) % SCALES] + 16 * h, t[8 + j]);
                }
            }
        } else {
            if (step % C::GROUP) return;
            const int64_t group = step / C::GROUP % SCALES;
            for (int h = 0; h < 2; h++) {
                __m512 scale, plus;
                C::one(_mm512_i32gather_epi32(h ? second : first, b, 1), scale, plus);
                _mm512_store_ps(d[group] + 16 * h, scale);
                if (C::PLUS) _mm512_store_ps(p[group] + 16 * h, plus);
            }
        }
    }

    // A quarter of a step's rows.
    inline __attribute__((always_inline)) void values(int64_t step, int quarter, uint8_t* tiles) {
        constexpr int LINES = (int)(QUARTER * BYTES / PER_SPAN + 63) / 64; // of the next rows: as many bytes as these
        const uint8_t* p = ahead + (step * 4 + quarter) * (QUARTER * BYTES / PER_SPAN);
        for (int i = 0; i < LINES; i++) _mm_prefetch((const char*)p + 64 * i, _MM_HINT_T1);
        const int j = (int)(step % PER_SPAN), from = quarter * QUARTER, to = from + QUARTER < rows ? from + QUARTER : rows;
        const uint8_t* b = base + step / PER_SPAN * BYTES;
        if (to == from + QUARTER) {
#pragma GCC unroll 8
            for (int r = 0; r < QUARTER; r++) _mm512_store_si512(tiles + (from + r) * DEPTH * 2, C::values(b + (from + r) * stride, j));
        } else {
            for (int r = from; r < to; r++) _mm512_store_si512(tiles + r * DEPTH * 2, C::values(b + r * stride, j));
        }
    }
};

struct CodesProduct { // one block of 32 weight rows against panel rows
    const uint8_t* b; // panel
    int64_t n, steps, group, step; // panel rows; tile steps; bytes of 16 panel rows and of one of their steps
    int width;
    uint8_t *a, *c; // scratch: tiles of numbers; tile sums
    float* acc;     // [blocks of 32 panel rows][4 tiles][16][16], tile 2g + h is row half h, column half g
    const float* sums(int64_t first) const { return (const float*)(b + first / TILE * group + steps * step); }
};

constexpr size_t codes_scratch() { return 2 * CHUNK_BYTES + 2 * 4 * TILE_BYTES + (size_t)(TOKENS + BLOCK_ROWS) / BLOCK_ROWS * 4 * TILE_BYTES; }

// One step into C tiles T and T + 1 (row halves): 16 panel rows.
template <int T, class Between> inline void step_of_16(const uint8_t* a, const uint8_t* b, int width, bool begins, const Between& between) {
    const int64_t row = 4 * width, tile = TILE * row;
    if (begins) tile_zero<T>(), tile_zero<T + 1>();
    tile_load<4>(a, 64), tile_load<5>(a + TILE_BYTES, 64), tile_load<6>(b, row);
    tile_dot<T, 4, 6>(), tile_dot<T + 1, 5, 6>();
    between(0);
    between(1);
    tile_load<7>(b + tile, row);
    tile_dot<T, 4, 7>(), tile_dot<T + 1, 5, 7>();
    between(2);
    between(3);
}

// One step into C tiles 0..3: 32 panel rows.
template <class Between> inline void step_of_32(const uint8_t* a, const uint8_t* b0, const uint8_t* b1, bool begins, const Between& between) {
    if (begins) tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    tile_load<4>(a, 64), tile_load<5>(a + TILE_BYTES, 64), tile_load<6>(b0, 64);
    tile_dot<0, 4, 6>(), tile_dot<1, 5, 6>();
    between(0);
    tile_load<7>(b1, 64);
    tile_dot<2, 4, 7>(), tile_dot<3, 5, 7>();
    between(1);
    tile_load<6>(b0 + TILE_BYTES, 64);
    tile_dot<0, 4, 6>(), tile_dot<1, 5, 6>();
    between(2);
    tile_load<7>(b1 + TILE_BYTES, 64);
    tile_dot<2, 4, 7>(), tile_dot<3, 5, 7>();
    between(3);
}

// One row of x: the sums of sixteen weight rows are one register.
template <Format FORMAT, class Sink> void codes_times_one(const CodesProduct& p, Coder<FORMAT>& w, const Sink& sink) {
    using C = Codes<FORMAT>;
    constexpr int RING = 4;
    const float* sums = p.sums(0);
    __m512 acc0 = _mm512_setzero_ps(), acc1 = _mm512_setzero_ps();
    const auto fold = [&](int64_t g) {
        const float *c = (const float*)(p.c + g % 2 * 128), *d = w.d[g % SCALES], *plus = w.p[g % SCALES];
        acc0 = _mm512_fmadd_ps(_mm512_load_ps(d), _mm512_load_ps(c), acc0);
        acc1 = _mm512_fmadd_ps(_mm512_load_ps(d + 16), _mm512_load_ps(c + 16), acc1);
        if (C::PLUS) {
            const __m512 x = _mm512_set1_ps(sums[g]);
            acc0 = _mm512_fmadd_ps(_mm512_load_ps(plus), x, acc0);
            acc1 = _mm512_fmadd_ps(_mm512_load_ps(plus + 16), x, acc1);
        }
    };
    const auto step = [&](int64_t s, auto tile) __attribute__((always_inline)) {
        constexpr int T = decltype(tile)::value;
        const int64_t g = s / C::GROUP;
        const bool begins = s % C::GROUP == 0, ends = (s + 1) % C::GROUP == 0;
        uint8_t* next = p.a + (s + 1) % RING * STEP_BYTES;
        if (s + 1 < p.steps) w.scales(s + 1);
        step_of_16<T>(p.a + s % RING * STEP_BYTES, p.b + s * p.step, 1, begins, [&](int quarter) __attribute__((always_inline)) {
            if (s + 1 < p.steps) w.values(s + 1, quarter, next);
        });
        if (begins && g > 0) fold(g - 1);
        if (ends) tile_store<T>(p.c + g % 2 * 128, 4), tile_store<T + 1>(p.c + g % 2 * 128 + 64, 4);
    };
    w.scales(0);
    for (int q = 0; q < 4; q++) w.values(0, q, p.a);
    for (int64_t s = 0; s < p.steps; s++)
        s / C::GROUP & 1 ? step(s, std::integral_constant<int, 2>()) : step(s, std::integral_constant<int, 0>());
    fold(p.steps / C::GROUP - 1);
    alignas(64) float out[BLOCK_ROWS];
    _mm512_store_ps(out, acc0), _mm512_store_ps(out + 16, acc1);
    sink(0, 1, (const float*)out);
}

// acc += d C (+ p X) of rows 8q..8q+7 of the block for one group.
template <bool PLUS, int HALVES>
inline __attribute__((always_inline)) void fold_rows(int q, const float* d, const float* plus, const uint8_t* c, const __m512* x, float* acc) {
    for (int r = 8 * q; r < 8 * q + 8; r++) {
        const __m512 scale = _mm512_set1_ps(d[r]);
        for (int g = 0; g < HALVES; g++) {
            const int64_t at = (2 * g + r / TILE) * TILE * TILE + r % TILE * TILE;
            __m512 sum = _mm512_fmadd_ps(scale, _mm512_load_ps((const float*)c + at), _mm512_load_ps(acc + at));
            if (PLUS) sum = _mm512_fmadd_ps(_mm512_set1_ps(plus[r]), x[g], sum);
            _mm512_store_ps(acc + at, sum);
        }
    }
}

// The group whose sums wait in `c`: they are added while the next step's products run.
struct Waiting {
    int64_t group = -1;
    int halves = 0, slot = 0;
    const uint8_t* c;
    float* acc;
    __m512 x[2];
};
template <Format FORMAT, int HALVES> inline __attribute__((always_inline)) void fold(const Coder<FORMAT>& w, const Waiting& g, int quarter) {
    const int64_t at = g.group % SCALES;
    fold_rows<Codes<FORMAT>::PLUS, HALVES>(quarter, w.d[at], w.p[at], g.c, g.x, g.acc);
}
template <Format FORMAT> inline void finish(const Coder<FORMAT>& w, Waiting& g) {
    for (int q = 0; q < 4 && g.group >= 0; q++) g.halves == 2 ? fold<FORMAT, 2>(w, g, q) : fold<FORMAT, 1>(w, g, q);
    g.group = -1;
}

// Steps [from, to) against 16 (HALVES 1) or 32 panel rows from row t. With `ahead`, converts those a chunk later meanwhile.
template <Format FORMAT, int HALVES>
void codes_steps(const CodesProduct& p, Coder<FORMAT>& w, int64_t from, int64_t to, int64_t t, bool ahead, Waiting& waiting) {
    using C = Codes<FORMAT>;
    const __mmask16 live = (__mmask16)((1u << p.width) - 1);
    const uint8_t *b0 = p.b + t / TILE * p.group, *b1 = b0 + p.group;
    if (waiting.halves != HALVES) finish(w, waiting);
    const auto step = [&](int64_t s, auto tile) __attribute__((always_inline)) {
        constexpr int T = decltype(tile)::value;
        const int64_t next = s + CHUNK;
        uint8_t* tiles = p.a + next / CHUNK % 2 * CHUNK_BYTES + next % CHUNK * STEP_BYTES;
        const bool convert = ahead && next < p.steps, add = waiting.group >= 0;
        if (convert) w.scales(next);
        const auto between = [&](int quarter) __attribute__((always_inline)) {
            if (convert) w.values(next, quarter, tiles);
            if (add) fold<FORMAT, HALVES>(w, waiting, quarter);
        };
        const uint8_t* a = p.a + s / CHUNK % 2 * CHUNK_BYTES + s % CHUNK * STEP_BYTES;
        if constexpr (HALVES == 2)
            step_of_32(a, b0 + s * p.step, b1 + s * p.step, s % C::GROUP == 0, between);
        else
            step_of_16<T>(a, b0 + s * p.step, p.width, s % C::GROUP == 0, between);
        waiting.group = -1;
        if ((s + 1) % C::GROUP) return;
        waiting.group = s / C::GROUP, waiting.halves = HALVES, waiting.slot ^= 1;
        uint8_t* c = p.c + waiting.slot * 4 * TILE_BYTES;
        waiting.c = c, waiting.acc = p.acc + t / BLOCK_ROWS * 4 * TILE * TILE;
        tile_store<T>(c, 64), tile_store<T + 1>(c + TILE_BYTES, 64);
        if (HALVES == 2) tile_store<2>(c + 2 * TILE_BYTES, 64), tile_store<3>(c + 3 * TILE_BYTES, 64);
        for (int i = 0; i < HALVES && C::PLUS; i++) waiting.x[i] = _mm512_maskz_loadu_ps(live, p.sums(t + i * TILE) + waiting.group * p.width);
    };
    for (int64_t s = from; s < to; s++) // two pairs of C tiles in turn, where there are two
        HALVES == 1 && s / C::GROUP & 1 ? step(s, std::integral_constant<int, 4 - 2 * HALVES>()) : step(s, std::integral_constant<int, 0>());
}

template <Format FORMAT, class Sink> void codes_times(const CodesProduct& p, const Matrix& m, int64_t r0, int nr, const uint8_t* next, const Sink& sink) {
    static_assert(CHUNK % Codes<FORMAT>::GROUP == 0);
    Coder<FORMAT> w(m, r0, nr, next);
    if (p.width == 1) return codes_times_one(p, w, sink);
    memset(p.acc, 0, (p.n + BLOCK_ROWS - 1) / BLOCK_ROWS * 4 * TILE_BYTES);
    for (int64_t s = 0; s < CHUNK && s < p.steps; s++) {
        w.scales(s);
        for (int q = 0; q < 4; q++) w.values(s, q, p.a + s * STEP_BYTES);
    }
    Waiting waiting;
    const int64_t chunk = p.n > BLOCK_ROWS ? CHUNK : p.steps;
    for (int64_t from = 0; from < p.steps; from += chunk) {
        const int64_t to = from + chunk < p.steps ? from + chunk : p.steps;
        for (int64_t t = 0; t < p.n; t += BLOCK_ROWS)
            p.n - t > TILE ? codes_steps<FORMAT, 2>(p, w, from, to, t, t == 0, waiting) : codes_steps<FORMAT, 1>(p, w, from, to, t, t == 0, waiting);
    }
    finish(w, waiting);
    for (int64_t t = 0; t < p.n; t += BLOCK_ROWS) {
        float* c = (float*)p.c; // the tile sums are no longer needed
        const int nt = (int)(p.n - t < BLOCK_ROWS ? p.n - t : BLOCK_ROWS);
        transpose_block((const uint8_t*)(p.acc + t / BLOCK_ROWS * 4 * TILE * TILE), nt, c);
        sink(t, nt, (const float*)c);
    }
}

} // namespace MOORAGE_ISA
