// out = x W^T with float32 FMA: every machine without AMX.
//
// Numerics: a weight is its float32 value (kernels/dequant.h); the dot product of a row pair is sixteen partial sums, index k
// to lane k % 16, k ascending, folded by `sum`. Neither the number of rows nor their neighbours enter it: few rows of x and many
// run the same additions in the same order, blocked differently.
#pragma once
#include "groups.h"
#include "kernels.h"
#include "panel.h"
#if defined(__AVX512VNNI__)
#include "gemm_integers.h"
#define MOORAGE_INTEGERS
#elif defined(__AVX2__) && !defined(__AVX512F__)
#include "bytes_words.h"
#include "gemm_f8.h"
#include "gemm_few.h"
#define MOORAGE_INTEGERS
#define MOORAGE_F8
#define MOORAGE_LANES
#elif defined(__ARM_FEATURE_MATMUL_INT8)
#include "gemm_bf16.h"
#include "gemm_i8mm.h"
#define MOORAGE_INTEGERS
#define MOORAGE_BF16
#endif

namespace MOORAGE_ISA {

constexpr int64_t PIECE = 512; // columns of weights that are unpacked at a time
constexpr int HELD = 8;      // rows of them: 16 KB of float32, half of a small L1
constexpr int FEW = NREG == 1 ? 16 : NREG == 2 ? 4 : 2; // rows of x that are multiplied, four at most, while weights are in registers

inline int64_t piece_of(int64_t ld, int64_t k) { return ld - k < PIECE ? ld - k : PIECE; } // columns of the piece that begins with k
inline int64_t padded(int64_t cols) { return (cols + GROUP - 1) / GROUP * GROUP; }

// A panel holds activation rows, each padded with zeros to whole groups. More than FEW of them lie PIECE columns at a time, and there as the
// tiles of ABREAST rows that `dots` multiplies (kernels/panel.h). Or it holds steps of whole numbers (kernels/steps.h). With AVX2 rows that meet floats
// lie otherwise, a few of them (kernels/gemm_few.h) and MANY (kernels/gemm_lanes.h).
inline size_t panel_bytes(int64_t rows, int64_t cols) {
    size_t row = padded(cols) * sizeof(float);
#if defined(MOORAGE_INTEGERS)
    const size_t steps = steps_of(cols) * sizeof(XStep);
    row = row > steps ? row : steps;
#endif
#if defined(MOORAGE_F8) || defined(MOORAGE_BF16)
    row += sizeof(float); // behind all rows, what takes a row's sums down to their size
#endif
    return rows * row;
}

// Packs block number `b` (rows 32b..32b+31) of a panel of `rows` rows; row i is x[index[i]], or x[i] without an index.
inline void pack(void* panel, [[maybe_unused]] Format format, int64_t rows, int64_t cols, int64_t b, const float* x, const int32_t* index) {
#if defined(MOORAGE_INTEGERS)
    if (with_integers(format, [&]<class C>() { pack_integers<C>((XStep*)panel, rows, cols, b, x, index); })) return;
#endif
#if defined(MOORAGE_BF16)
    if (format == Format::BF16 || format == Format::F8_E4M3) return pack_bf16((bfloat16x8_t*)panel, rows, cols, b, x, index);
#endif
    const int64_t ld = padded(cols);
#if defined(MOORAGE_LANES)
    if (is_float(format) && (rows <= FEW || rows > MANY)) return pack_floats((float*)panel, format, rows, cols, b, x, index);
#endif
    for (int64_t i = b * BLOCK; i < rows && i < (b + 1) * BLOCK; i++) {
        const float* from = x + (index ? index[i] : i) * cols;
#if defined(MOORAGE_F8)
        float up, more;
        if (format == Format::F8_E4M3) ((float*)panel)[rows * ld + i] = exponent_f8(from, cols, up, more);
#endif
        for (int64_t k = 0, some; k < ld; k += some) {
            some = rows > FEW ? piece_of(ld, k) : ld;
            float row[PIECE], *to = rows > FEW ? row : (float*)panel + i * ld;
#if defined(MOORAGE_F8)
            if (format == Format::F8_E4M3)
                pack_f8(to, from + k, some, up, more);
            else
#endif
            {
                const int64_t there = cols - k < some ? cols - k : some;
                memcpy(to, from + k, there * sizeof(float));
                memset(to + there, 0, (some - there) * sizeof(float));
            }
            if (rows > FEW) lay_row((float*)panel + k * rows, rows, i, some, row);
        }
    }
}

struct Scratch {
    float w[HELD * PIECE];         // unpacked weights
    float acc[TOKENS][HELD][LANES]; // partial sums
#if defined(MOORAGE_LANES)
    float c[WAITING * TOKENS * BLOCK];
    alignas(64) float lanes[]; // unpacked weights of kernels/gemm_lanes.h
};
inline size_t gemm_scratch(Format format, int64_t cols) { return sizeof(Scratch) + (is_float(format) ? lane_floats(cols) * sizeof(float) : 0); }
#else
    float c[TOKENS * BLOCK];       // products
};
inline size_t gemm_scratch(Format, int64_t) { return sizeof(Scratch); }
#endif

// Group g of a reader whose eight groups have begun.
template <bool ODD, class Reader> inline void read(Reader& w, int64_t g, F& a, F& b) {
    if constexpr (ODD)
        w.odd_group(g, a, b);
    else
        w.group(g, a, b);
}
template <class Reader> constexpr bool HAS_ODD = requires(Reader r) { r.odd; };

#if !defined(MOORAGE_LANES)
// T rows of x against rows [r0, r0 + nr): every weight goes from its stored bits into the product without touching memory.
template <class Reader, int T>
__attribute__((noinline)) void stream(const Matrix& m, int64_t r0, int nr, const float* x, const uint8_t* next, float* c) {
    constexpr int R = NREG == 1 ? 4 : 2, UNROLL = Reader::UNROLL; // sums fit registers
    const int64_t ld = padded(m.cols), groups = ld / GROUP, step = R * m.stride / groups;
    for (int r = 0; r < nr; r += R) {
        const uint8_t *base = m.data + (r0 + r) * m.stride, *ahead = rows_ahead(base - r * m.stride, m.stride, r, nr, R, next);
        const auto row = [&](int i) { return Reader(m.format, base + (r + i < nr ? i : nr - 1 - r) * m.stride, m.cols); };
        Reader w[4] = {row(0), row(1), row(2), row(3)};
        F acc[16];
        for (F& a : acc) a = zero();
        const uint8_t* line = ahead;
        for (int64_t eight = 0; eight < groups; eight += 8) {
            for (int i = 0; i < R; i++) w[i].begin(eight);
            const auto multiply = [&]<bool ODD>() __attribute__((always_inline)) {
                for (int64_t g0 = eight; g0 < groups && g0 < eight + 8; g0 += UNROLL) {
#pragma GCC unroll 8
                    for (int u = 0; u < UNROLL; u++) {
                        const int64_t g = g0 + u;
                        prefetch(line, ahead + (g + 1) * step);
                        in_order();
#pragma GCC unroll 8
                        for (int i = 0; i < R; i++) {
                            F a, b;
                            read<ODD>(w[i], g, a, b);
#pragma GCC unroll 4
                            for (int t = 0; t < T; t++) {
                                F& sum = acc[t * 4 + i];
                                sum = fma(b, load(x + t * ld + GROUP * g + 16), fma(a, load(x + t * ld + GROUP * g), sum));
                            }
                        }
                    }
                }
            };
            if constexpr (HAS_ODD<Reader>) {
                bool odd = false;
                for (int i = 0; i < R; i++) odd |= w[i].odd; // of those that have begun
                if (odd) {
                    multiply.template operator()<true>();
                    continue;
                }
            }
            multiply.template operator()<false>();
        }
        for (int t = 0; t < T; t++) {
            float sums[4];
            if (R == 4)
                four_sums(acc + t * 4, sums);
            else
                for (int i = 0; i < R; i++) sums[i] = sum(acc[t * 4 + i]);
            for (int i = 0; i < R && r + i < nr; i++) c[t * BLOCK + r + i] = sums[i];
        }
    }
}
#endif

// Columns [k0, k1) of a row as float32, sixteen at a time to put(which, sixteen); k0 is a multiple of 256, k1 one of 32.
template <class Reader, class Put>
__attribute__((noinline)) void unpack(const Matrix& m, int64_t row, int64_t k0, int64_t k1, const Put put) {
    constexpr int UNROLL = Reader::UNROLL;
    Reader w(m.format, m.data + row * m.stride, m.cols);
    for (int64_t eight = k0 / GROUP, at = 0; eight < k1 / GROUP; eight += 8) {
        w.begin(eight);
        in_order();
        const auto some = [&]<bool ODD>() __attribute__((always_inline)) {
            for (int64_t g0 = eight; g0 < k1 / GROUP && g0 < eight + 8; g0 += UNROLL)
#pragma GCC unroll 8
                for (int u = 0; u < UNROLL; u++, at += 2) {
                    F a, b;
                    read<ODD>(w, g0 + u, a, b);
                    put(at, a), put(at + 1, b);
                }
        };
        if constexpr (HAS_ODD<Reader>)
            if (w.odd) {
                some.template operator()<true>();
                continue;
            }
        some.template operator()<false>();
    }
}

// to[t][r] += the products of k columns of a tile of R rows of weights and one of T rows of x, register after register of their lanes: then
// 4 x 3 sums are in registers where the lanes are two.
template <int R, int T> __attribute__((noinline)) void dots(const float* w, const float* x, int64_t k, float (*to)[HELD][LANES]) {
    for (int lane = 0; lane < LANES; lane += RLANES) {
        VF acc[T][R];
        const auto each = [&](const auto& f) __attribute__((always_inline)) {
#pragma GCC unroll 4
            for (int t = 0; t < T; t++)
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) f(acc[t][r], &to[t][r][lane]);
        };
        each([&](VF& sum, float* at) { memcpy(&sum, at, REG); });
        const float* end = x + k / NREG * T; // k is not 0: a test before the first turn would keep a copy of all sums for a loop without turns
        do {
            VF a[T];
#pragma GCC unroll 4
            for (int t = 0; t < T; t++) memcpy(&a[t], x + t * RLANES, REG);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                VF row;
                memcpy(&row, w + r * RLANES, REG);
#if defined(__AVX2__)
                __asm__("" : "+v"(row)); // loaded once, not by every product: loads are as scarce as products
#endif
#pragma GCC unroll 4
                for (int t = 0; t < T; t++) acc[t][r] = fma_reg(row, a[t], acc[t][r]);
            }
            x += T * RLANES, w += R * RLANES;
        } while (x < end);
        each([&](VF& sum, float* at) { memcpy(at, &sum, REG); });
    }
}

// n rows of a panel of `rows`, from row `at`, against rows [r0, r0 + nr): eight rows of weights are unpacked a piece at a time and meet all
// of x while they are in L1.
template <class Reader>
__attribute__((noinline)) void blocked(const Matrix& m, int64_t r0, int nr, const float* x, int64_t rows, int64_t at, int64_t n, const uint8_t* next, Scratch& s) {
    constexpr int R = NREG == 1 ? HELD : NREG == 2 ? 4 : 2;
    const int64_t ld = padded(m.cols);
    for (int r = 0; r < nr; r += HELD) {
        const uint8_t* ahead = r + HELD < nr ? m.data + (r0 + r + HELD) * m.stride : next ? next : m.data;
        const int64_t bytes = HELD * m.stride / ((ld + PIECE - 1) / PIECE * ((n + ABREAST - 1) / ABREAST)) + 1;
        memset(s.acc, 0, n * sizeof s.acc[0]);
        for (int64_t k = 0; k < ld; k += PIECE) {
            const int64_t some = piece_of(ld, k);
            for (int i = 0; i < HELD; i++)
                unpack<Reader>(m, r0 + (r + i < nr ? r + i : nr - 1), k, k + some, TileRow<R>(s.w + i / R * R * PIECE, some, i % R));
            for (int64_t t = 0; t < n; t += ABREAST) {
                const uint8_t* to = ahead + bytes;
                prefetch(ahead, to);
                const float* a = x + k * rows + (at + t) * some;
                for (int i = 0; i < HELD; i += R) {
                    const float* w = s.w + i * PIECE;
                    const auto to = (float(*)[HELD][LANES])s.acc[t][i];
                    n - t >= 3 ? dots<R, 3>(w, a, some, to) : n - t == 2 ? dots<R, 2>(w, a, some, to) : dots<R, 1>(w, a, some, to);
                }
            }
        }
        for (int64_t t = 0; t < n; t++) // rows past nr write where nobody reads
            for (int i = 0; i < HELD; i += 4) four_sums((const F*)s.acc[t][i], s.c + t * BLOCK + r + i);
    }
}

// Weights [first, first + n) of a stored row as float32; `first` is a multiple of 256.
inline void read_row(Format format, const uint8_t* row, int64_t first, int64_t n, float* out) {
    const Matrix m{format, row, 1, first + n, 0};
    with_reader(format, [&]<class Reader>() {
        const auto put = [out](int64_t sixteen, F f) { store(out + 16 * sixteen, f); };
        if (n % GROUP == 0) return unpack<Reader>(m, 0, first, first + n, put);
        const int64_t whole = n / GROUP * GROUP;
        float last[GROUP];
        unpack<Reader>(m, 0, first, first + whole, put);
        Reader w(format, row, first + n); // plain floats: they need no `begin`
        F a, b;
        w.group((first + whole) / GROUP, a, b);
        store(last, a), store(last + 16, b);
        memcpy(out + whole, last, (n - whole) * sizeof(float));
    });
}

// c[t * 32 + r] = panel row at + t times weight row r0 + r.
static __attribute__((noinline)) void products(const Matrix& m, int64_t r0, int nr, const float* x, int64_t rows, int64_t at, int64_t n, const uint8_t* next, Scratch& s) {
#if defined(MOORAGE_F8)
    if (m.format == Format::F8_E4M3) {
        const float* down = x + rows * m.cols + at;
        if (rows > FEW) return many_f8<HELD, PIECE>(m, r0, nr, x, down, rows, at, n, next, s);
        x += at * m.cols;
        const auto few = n == 1 ? few_f8<1> : n == 2 ? few_f8<2> : n == 3 ? few_f8<3> : few_f8<4>;
        return few(m, r0, nr, x, down, next, s.c);
    }
#endif
#if defined(MOORAGE_BF16)
    if (m.format == Format::BF16) return products_bf16<false>(m, r0, nr, (const bfloat16x8_t*)x, rows, at, n, next, s.c);
    if (m.format == Format::F8_E4M3) return products_bf16<true>(m, r0, nr, (const bfloat16x8_t*)x, rows, at, n, next, s.c);
#endif
#if defined(MOORAGE_LANES)
    if (is_float(m.format) && rows > MANY) return many_floats(m, r0, nr, x + at * padded(m.cols), n, next, s.c, s.lanes);
    if (is_float(m.format) && rows <= FEW) return few_floats(m, r0, nr, x, n, next, s.c);
#endif
    with_reader(m.format, [&]<class Reader>() {
#if !defined(MOORAGE_LANES)
        if (rows <= FEW) {
            const int64_t ld = padded(m.cols);
            int64_t t = 0;
            x += at * ld;
            for (; NREG == 1 && t + 4 <= n; t += 4) stream<Reader, NREG == 1 ? 4 : 1>(m, r0, nr, x + t * ld, next, s.c + t * BLOCK);
            for (; t + 2 <= n; t += 2) stream<Reader, 2>(m, r0, nr, x + t * ld, next, s.c + t * BLOCK);
            if (t < n) stream<Reader, 1>(m, r0, nr, x + t * ld, next, s.c + t * BLOCK);
            return;
        }
#endif
        blocked<Reader>(m, r0, nr, x, rows, at, n, next, s);
    });
}

// Calls sink(t0, nt, c) for blocks of at most 32 of the panel's n <= TOKENS rows from row `at`; c[t * 32 + r] is panel row
// at + t0 + t times weight row r0 + r, r < nr <= 32. `next`: the weight rows this thread reads after these, if known.
template <class Sink>
void gemm(const Matrix& m, int64_t r0, int nr, const void* panel, int64_t rows, int64_t at, int64_t n, void* scratch, const uint8_t* next,
          const Sink& sink) {
    Scratch& s = *(Scratch*)scratch;
    bool done = false;
#if defined(MOORAGE_INTEGERS)
    done = with_integers(m.format, [&]<class C>() { integer_products<C>(m, r0, nr, (const XStep*)panel + at, rows, n, next, s.c); });
#endif
    if (!done) products(m, r0, nr, (const float*)panel, rows, at, n, next, s);
    for (int64_t t = 0; t < n; t += BLOCK) sink(t, (int)(n - t < BLOCK ? n - t : BLOCK), (const float*)s.c + t * BLOCK);
}

} // namespace MOORAGE_ISA
