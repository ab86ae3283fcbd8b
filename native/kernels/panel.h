// What every way to multiply without tiles shares: the size of a block of rows, how the next rows of weights come nearer, what stays in memory.
#pragma once
#include "../simd.h"
#include "kernels.h"

namespace MOORAGE_ISA {

constexpr int BLOCK = 32; // rows of a panel block, and weight rows of one gemm call

// Brings the rows that come next nearer, evenly and in address order: the hardware's streams cannot follow several rows inside one
// page, and a burst would hold all fill buffers of L1 for a memory latency. Every line once: one asked for again holds a buffer too.
inline void prefetch(const uint8_t*& line, const uint8_t* to) {
    for (; line < to; line += 64) __builtin_prefetch(line, 0, 2);
}

// Where the rows begin whose lines come while `together` rows from row r of nr are multiplied: behind those at least 4 KB, what a core reads in
// 250 ns, two latencies of a memory that is not busy; in the next block where this one ends. Closer, lines came late on Zen 3.
inline const uint8_t* rows_ahead(const uint8_t* base, int64_t stride, int r, int nr, int together, const uint8_t* next, int64_t read = 0) {
    const int64_t once = together * (read ? read : stride), row = r + together * (1 + (4095 + once) / once); // `read` bytes of every row, or all
    return row < nr ? base + row * stride : next ? next + (row - nr) * stride : base;
}

// The same where rows are read that lie far apart in a block: each goes on where the one before it ended, a stream that the hardware follows. `behind` rows of it
// are left behind this one, then it goes on at `next`. On Zen 3 1 to 4 KB are as good; without, F8_E4M3 lost 8 %.
inline const uint8_t* stream_ahead(const uint8_t* row, int64_t stride, int behind, const uint8_t* next) {
    constexpr int64_t AHEAD = 2048;
    const int64_t over = AHEAD - behind * stride; // in the next stream, once this row is read
    return over > 0 && next ? next + (over > stride ? over - stride : 0) : row + AHEAD;
}

// What is in memory stays there and comes back as operands where it is needed: scales kept in registers would need a shuffle each, and what
// is read early is spilled.
inline void in_order() { __asm__ volatile("" ::: "memory"); }

// Tiles: what a product reads together lies together, one stream for the rows of x and one for those of the weights. A register of sixteen
// columns of R rows is followed by the next sixteen columns', and these by the next register. Rows side by side, a stream each, are multiplied
// at 0.84 of Zen 3's FMA peak in L1, tiles at 0.93; rows a multiple of 4 KB apart, which meet in the same sets of L1, at 0.6.
constexpr int ABREAST = 3; // rows of x of a tile; the last tile of TOKENS rows, or of all, has what is left
template <int R> struct TileRow { // one of R rows of a tile, sixteen columns at a time
    float* to;
    int64_t apart; // from one register of a row to the next
    TileRow(float* tile, int64_t cols, int row) : to(tile + row * RLANES), apart(cols / NREG * R) {}
    void operator()(int64_t sixteen, F f) const { MOORAGE_EACH memcpy(to + i_ * apart + sixteen * R * RLANES, &f.r[i_], REG); }
};
// Row i of `rows` of a panel into their tiles.
inline void lay_row(float* tiles, int64_t rows, int64_t i, int64_t cols, const float* row) {
    const int64_t first = i / TOKENS * TOKENS, at = (i - first) / ABREAST * ABREAST, left = (rows - first < TOKENS ? rows - first : TOKENS) - at;
    const auto copy = [&](auto to) {
        for (int64_t g = 0; g < cols / LANES; g++) to(g, load(row + g * LANES));
    };
    float* tile = tiles + (first + at) * cols;
    const int which = (int)(i - first - at);
    left >= 3 ? copy(TileRow<3>(tile, cols, which)) : left == 2 ? copy(TileRow<2>(tile, cols, which)) : copy(TileRow<1>(tile, cols, which));
}

} // namespace MOORAGE_ISA
