// out = x W^T on AMX tiles. Weights are the A operand, row-major as stored; activations are packed once as the B operand.
//
// Numerics: x = xh + xl, two bf16 that hold 16 of its 24 bits (error 2^-17). A bf16 weight is used as it is, numbers with scales
// exactly (kernels/gemm_codes.h); any other format is its float32 value (kernels/dequant.h) cut into wh + wl (error 2^-16, none for
// f16). Every 32 k a tile product adds wh xh, then wh xl, then wl xh, in float32. One row, sixteen or a thousand run the same
// instructions in the same order on other columns of a tile, so a row's bits depend on nothing else; decode is prefill with one live column.
#pragma once
#include "dequant.h"
#include "kernels.h"
#include "dequant_tiles.h"
#include "gemm_codes.h"
#include "tiles.h"

namespace MOORAGE_ISA {

constexpr int BLOCK = BLOCK_ROWS; // rows of a panel block, and weight rows of one gemm call: two tiles each

inline int64_t padded(int64_t cols) { return (cols + DEPTH - 1) / DEPTH * DEPTH; }

// Tile columns of a panel: a short one is as narrow as its rows, so that decode reads no padding; otherwise whole tiles.
inline int columns(int64_t rows) { return rows < TILE ? (int)rows : TILE; }
// Rows 16i.. of a panel start at 16i * padded * 4 bytes: [K / 32][high, low][16 pairs of k][columns][2] bf16,
// the 32 k of a step in the order of the weights' format; then the sums of each 32 k, [K / 32][columns] float32, if the format has a p.
inline size_t group_bytes(int64_t cols, int columns) { return columns * padded(cols) * 4 + sums_bytes(padded(cols), columns); }
inline size_t panel_bytes(int64_t rows, int64_t cols) {
    return rows < TILE ? group_bytes(cols, (int)rows) : (rows + TILE - 1) / TILE * group_bytes(cols, TILE);
}

constexpr bool has_sums(Format f) {
    return f == Format::Q4_1 || f == Format::Q5_1 || f == Format::Q4_K || f == Format::Q5_K;
}
inline void pack_sums(float* to, int n, int columns, int64_t cols, const float* const* x) {
    for (int64_t k = 0; k < cols; k += DEPTH, to += columns)
        for (int i = 0; i < columns; i++)
            to[i] = i < n ? _mm512_reduce_add_ps(_mm512_loadu_ps(x[i] + k) + _mm512_loadu_ps(x[i] + k + 16)) : 0.0f;
}

template <Order ORDER> inline void arrange(__m512& a, __m512& b) {
    if (ORDER == Order::NATURAL) return;
    alignas(64) static constexpr struct Positions {
        int32_t at[32];
        constexpr Positions() : at() {
            for (int p = 0; p < 32; p++) at[p] = element_at(ORDER, p);
        }
    } positions;
    const __m512 first = _mm512_permutex2var_ps(a, _mm512_load_si512(positions.at), b);
    b = _mm512_permutex2var_ps(a, _mm512_load_si512(positions.at + 16), b);
    a = first;
}

// n rows of x into `columns` tile columns, zeros in the rest.
template <Order ORDER> inline void pack_columns(uint8_t* to, int n, int columns, int64_t cols, const float* const* x) {
    const __mmask16 live = (__mmask16)((1u << columns) - 1);
    for (int64_t k = 0; k < cols; k += DEPTH, to += 2 * DEPTH * 2 * columns) {
        __m512i high[16] = {}, low[16] = {};
        for (int i = 0; i < n; i++) {
            const int64_t left = cols - k;
            const __mmask32 live_k = left >= DEPTH ? ~0u : (1u << left) - 1;
            __m512 a = _mm512_maskz_loadu_ps((__mmask16)live_k, x[i] + k), b = _mm512_maskz_loadu_ps((__mmask16)(live_k >> 16), x[i] + k + 16);
            arrange<ORDER>(a, b);
            split_round(a, b, high[i], low[i]);
        }
        if (columns == 1) { // sixteen pairs of one row already stand in order
            _mm512_storeu_si512(to, high[0]), _mm512_storeu_si512(to + 64, low[0]);
            continue;
        }
        transpose16(high), transpose16(low);
        for (int i = 0; i < 16; i++) {
            _mm512_mask_storeu_epi32(to + i * 4 * columns, live, high[i]);
            _mm512_mask_storeu_epi32(to + (16 + i) * 4 * columns, live, low[i]);
        }
    }
}

inline void pack(void* panel, Format format, int64_t rows, int64_t cols, int64_t b, const float* x, const int32_t* index) {
    for (int64_t first = b * BLOCK; first < rows && first < (b + 1) * BLOCK; first += 16) {
        const float* from[16];
        const int n = (int)(rows - first < 16 ? rows - first : 16);
        for (int i = 0; i < n; i++) from[i] = x + (index ? index[first + i] : first + i) * cols;
        uint8_t* to = (uint8_t*)panel + first / TILE * group_bytes(cols, TILE);
        if (has_sums(format)) pack_sums((float*)(to + columns(rows) * padded(cols) * 4), n, columns(rows), cols, from);
        switch (order_of(format)) {
        case Order::NATURAL: pack_columns<Order::NATURAL>(to, n, columns(rows), cols, from); break;
        case Order::HALVES: pack_columns<Order::HALVES>(to, n, columns(rows), cols, from); break;
        case Order::PARITY: pack_columns<Order::PARITY>(to, n, columns(rows), cols, from); break;
        case Order::QUARTERS: pack_columns<Order::QUARTERS>(to, n, columns(rows), cols, from); break;
        case Order::SIXTEENS: pack_columns<Order::SIXTEENS>(to, n, columns(rows), cols, from); break;
        }
    }
}

// Where the A tiles of 32 weight rows lie: tile (row half h, step s) at data + h * half + s * step.
struct Tiles {
    const uint8_t *high, *low; // low null: the format has none
    int64_t stride, half, step;
};

constexpr size_t BLOCK_BYTES = 4 * TILE_BYTES;

// Scratch: 32 converted weight rows, high and low parts; one block of products in and out of its transpose.
inline size_t gemm_scratch(Format, int64_t cols) {
    const size_t rows = (size_t)(padded(cols) / DEPTH * 2 + 8) * STEP_BYTES + 2 * BLOCK_BYTES;
    return rows > codes_scratch() ? rows : codes_scratch();
}

// One tile step of weights times panel columns b0 (and b1, the block's second half) into tiles 0..3: tile 2g + h is row half
// h, column half g. In three parts, so that work between them hides the tile unit's latency.
template <int HALVES> struct Step {
    const uint8_t *b0, *b1;
    int64_t row, tile; // bytes of a panel row and tile
    Step(const uint8_t* first, const uint8_t* second, int columns) : b0(first), b1(second), row(4 * columns), tile(TILE * row) {}

    void weights(const uint8_t* w, const Tiles& a) const { tile_load<4>(w, a.stride), tile_load<5>(w + a.half, a.stride); }
    void times_high() const {
        tile_load<6>(b0, row);
        tile_dot<0, 4, 6>(), tile_dot<1, 5, 6>();
        if (HALVES == 2) {
            tile_load<7>(b1, row);
            tile_dot<2, 4, 7>(), tile_dot<3, 5, 7>();
        }
    }
    void times_low() const {
        tile_load<6>(b0 + tile, row);
        tile_dot<0, 4, 6>(), tile_dot<1, 5, 6>();
        if (HALVES == 2) {
            tile_load<7>(b1 + tile, row);
            tile_dot<2, 4, 7>(), tile_dot<3, 5, 7>();
        }
    }
};

template <int HALVES, bool LOW> inline void multiply(const Tiles& a, int64_t steps, const uint8_t* b0, const uint8_t* b1, int columns) {
    Step<HALVES> p(b0, b1, columns);
    for (int64_t s = 0; s < steps; s++, p.b0 += 2 * p.tile, p.b1 += 2 * p.tile) {
        p.weights(a.high + s * a.step, a);
        p.times_high();
        p.times_low();
        if (LOW) {
            p.weights(a.low + s * a.step, a);
            p.times_high();
        }
    }
}

inline void multiply(const Tiles& a, int64_t steps, const uint8_t* b0, const uint8_t* b1, int columns) {
    if (a.low)
        b1 ? multiply<2, true>(a, steps, b0, b1, columns) : multiply<1, true>(a, steps, b0, b0, columns);
    else
        b1 ? multiply<2, false>(a, steps, b0, b1, columns) : multiply<1, false>(a, steps, b0, b0, columns);
}

inline void clear_tiles() { tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>(); }
inline void store_tiles(uint8_t* p) {
    tile_store<0>(p, 64), tile_store<1>(p + TILE_BYTES, 64);
    tile_store<2>(p + 2 * TILE_BYTES, 64), tile_store<3>(p + 3 * TILE_BYTES, 64);
}

struct Product { // one block of 32 weight rows against panel rows
    const uint8_t *b, *next;
    int64_t n, steps, group, step; // panel rows; tile steps; bytes of 16 panel rows and of one of their tile steps
    int width;
    uint8_t* out; // BLOCK_BYTES of tiles, then as much for their transpose
};

template <class Sink> inline void hand_over(const Product& p, int64_t t0, const Sink& sink) {
    if (p.width == 1) { // a single column stands in order
        tile_store<0>(p.out, 4), tile_store<1>(p.out + 64, 4);
        sink(0, 1, (const float*)p.out);
        return;
    }
    store_tiles(p.out);
    float* c = (float*)(p.out + BLOCK_BYTES);
    const int nt = (int)(p.n - t0 < BLOCK ? p.n - t0 : BLOCK);
    transpose_block(p.out, nt, c);
    sink(t0, nt, (const float*)c);
}

// All blocks of panel rows against weights that lie as tiles.
template <class Sink> inline void multiply_all(const Product& p, const Tiles& w, const Sink& sink) {
    for (int64_t t = 0; t < p.n; t += BLOCK) {
        const uint8_t* b0 = p.b + t / TILE * p.group;
        clear_tiles();
        multiply(w, p.steps, b0, p.n - t > TILE ? b0 + p.group : nullptr, p.width);
        hand_over(p, t, sink);
    }
}

// Few rows of x: weights are converted one step ahead of the tile products, through a ring in L1, in quarters of their rows.
template <Format FORMAT, int HALVES> inline void convert_ahead(const Product& p, Steps<FORMAT>& w, uint8_t* scratch) {
    constexpr bool LOW = FORMAT != Format::BF16;
    constexpr int RING = 4, QUARTER = BLOCK / 4;
    uint8_t* low = scratch + RING * STEP_BYTES;
    const Tiles tiles{scratch, low, 64, TILE_BYTES, STEP_BYTES};
    Step<HALVES> step(p.b, p.b + p.group, p.width);
    clear_tiles();
    w.convert(0, 0, BLOCK, scratch, low);
    for (int64_t s = 0; s < p.steps; s++, step.b0 += p.step, step.b1 += p.step) {
        const int64_t at = s % RING * STEP_BYTES, ahead = (s + 1) % RING * STEP_BYTES;
        const auto convert = [&](int quarter) __attribute__((always_inline)) {
            if (s + 1 < p.steps) w.convert(s + 1, quarter * QUARTER, (quarter + 1) * QUARTER, scratch + ahead, low + ahead);
        };
        convert(0);
        step.weights(scratch + at, tiles);
        step.times_high();
        convert(1);
        step.times_low();
        convert(2);
        if (LOW) {
            step.weights(low + at, tiles);
            step.times_high();
        }
        convert(3);
    }
}

template <Format FORMAT, class Sink>
void convert_multiply(const Product& p, const Matrix& m, int64_t r0, int nr, uint8_t* scratch, const Sink& sink) {
    Steps<FORMAT> w(m, r0, nr, p.next);
    if (p.n > BLOCK) { // many rows: all weights first
        uint8_t* low = scratch + p.steps * STEP_BYTES;
        for (int64_t s = 0; s < p.steps; s++) w.convert(s, 0, BLOCK, scratch + s * STEP_BYTES, low + s * STEP_BYTES);
        multiply_all(p, Tiles{scratch, FORMAT == Format::BF16 ? nullptr : low, 64, TILE_BYTES, STEP_BYTES}, sink);
    } else {
        p.n > TILE ? convert_ahead<FORMAT, 2>(p, w, scratch) : convert_ahead<FORMAT, 1>(p, w, scratch);
        hand_over(p, 0, sink);
    }
}

template <Format FORMAT, class Sink> void multiply_format(Product& p, const Matrix& m, int64_t r0, int nr, uint8_t* scratch, const Sink& sink) {
    if constexpr (Codes<FORMAT>::HELD) {
        uint8_t* c = scratch + 2 * CHUNK_BYTES;
        codes_times<FORMAT>(CodesProduct{p.b, p.n, p.steps, p.group, p.step, p.width, scratch, c, (float*)(c + 2 * 4 * TILE_BYTES)}, m, r0, nr,
                            p.next, sink);
        return;
    }
    p.out = scratch;
    if (FORMAT == Format::BF16 && nr == BLOCK && m.cols % DEPTH == 0) // straight from the stored rows
        return multiply_all(p, Tiles{m.data + r0 * m.stride, nullptr, m.stride, TILE * m.stride, 64}, sink);
    convert_multiply<FORMAT>(p, m, r0, nr, scratch + 2 * BLOCK_BYTES, sink);
}

// Any sink, called by its address: a call is nothing beside a block of 32 x 32 products, and each format's kernel is compiled once
// instead of once for each of the four sinks (which took a third of the time of the whole build).
struct AnySink {
    const void* sink;
    void (*call)(const void* sink, int64_t t0, int nt, const float* c);
    template <class Sink> explicit AnySink(const Sink& s) : sink(&s), call([](const void* p, int64_t t0, int nt, const float* c) { (*(const Sink*)p)(t0, nt, c); }) {}
    void operator()(int64_t t0, int nt, const float* c) const { call(sink, t0, nt, c); }
};

// Calls sink(t0, nt, c) for blocks of at most 32 of the panel's n <= TOKENS rows from row `at`; c[t * 32 + r] is panel row
// at + t0 + t times weight row r0 + r, r < nr <= 32. `next` is the row block this thread reads after this one, if known.
template <class Sink>
void gemm(const Matrix& m, int64_t r0, int nr, const void* panel, int64_t rows, int64_t at, int64_t n, void* scratch, const uint8_t* next,
          const Sink& sink) {
    Product p{};
    p.width = columns(rows), p.n = n, p.next = next;
    p.steps = padded(m.cols) / DEPTH, p.group = group_bytes(m.cols, TILE), p.step = 2 * TILE * 4 * p.width;
    p.b = (const uint8_t*)panel + at / TILE * p.group;
    TileConfig config;
    for (int i = 0; i < 8; i++) config.shape(i, i == 4 || i == 5 ? DEPTH / 2 : p.width);
    config.use();
    with_format(m.format, [&]<Format FORMAT>() { multiply_format<FORMAT>(p, m, r0, nr, (uint8_t*)scratch, AnySink(sink)); });
}

} // namespace MOORAGE_ISA
