// One row of x against weight rows of small whole numbers with AVX2: what the next part of a row stores is read and transposed between the products
// of this one.
//
// The products want two of Zen 3's four pipes, what brings the numbers into their dwords the two others, and 64 operations wait at most: one
// after the other they do not overlap (31 cycles for 256 weights of Q4_0, interleaved 28). gcc would sort and spill them; `here` says where they stand. The
// sums are those of `few_rows`: integers know no order.
#pragma once
#include "bytes_steps.h"

namespace MOORAGE_ISA {

inline __attribute__((always_inline)) __m256i here(__m256i v) { // computed here, neither before nor after
    __asm__ volatile("" : "+x"(v));
    return v;
}

// t: four registers, of a whole step or of one of its parts.
template <class C> concept Pieced = requires(const uint8_t* b) {
    C::row(b, 0, 0);
    requires C::RAW <= 4;
};
template <class C> constexpr int TURNS = C::PARTS; // of a step
template <Pieced C> constexpr int TURNS<C> = C::RAW == C::ROWS ? C::PARTS : 1;
template <class C> constexpr int PIECES = C::ROWS == 4 ? 8 : 3;

// Piece i of what t is made of: two instructions, three at most.
template <class C> inline __attribute__((always_inline)) void piece(int i, const uint8_t* b, int turn, __m256i* t) {
    const auto read = [&](int to, int row) { t[to] = here(C::row(b, turn, row)); };
    const auto both = [&](int k, int l, const auto& low, const auto& high) { // of two registers: low halves to k, high ones to l
        const __m256i a = here(low(t[k], t[l]));
        t[l] = here(high(t[k], t[l])), t[k] = a;
    };
    const auto low32 = [](__m256i a, __m256i b) { return _mm256_unpacklo_epi32(a, b); }, high32 = [](__m256i a, __m256i b) { return _mm256_unpackhi_epi32(a, b); };
    const auto low64 = [](__m256i a, __m256i b) { return _mm256_unpacklo_epi64(a, b); }, high64 = [](__m256i a, __m256i b) { return _mm256_unpackhi_epi64(a, b); };
    const auto even = [](__m256i a, __m256i b) { return dwords(a, b, 0); }, odd = [](__m256i a, __m256i b) { return dwords(a, b, 1); };
    if (i < 2) return read(i, i);
    if (C::ROWS == 2) return both(0, 1, even, odd);
    i == 2 ? both(0, 1, low32, high32) : i == 5 ? both(2, 3, low32, high32) : i == 6 ? both(0, 2, low64, high64) : i < 5 ? read(i - 1, i - 1) : both(1, 3, low64, high64);
    if (i == 7) {
        const __m256i one = t[1];
        t[1] = t[2], t[2] = one;
    }
}
template <class C> inline __attribute__((always_inline)) void all_pieces(const uint8_t* b, __m256i* t) { // of the first turn
#pragma GCC unroll 8
    for (int i = 0; i < PIECES<C>; i++) piece<C>(i, b, 0, t);
}

struct alignas(32) Words {
    int16_t at[16];
    constexpr explicit Words(int n) : at() {
        for (int16_t& w : at) w = (int16_t)n;
    }
};
inline constexpr Words ONE{1};
template <int N> inline constexpr Words UP{N};
// What a digit's sums are multiplied by as they are widened.
template <class C> constexpr const Words& up(int d) { return d == 2 ? ONE : d == 1 ? UP<1 << 7> : C::DIGIT == 8 ? UP<-(1 << 15)> : UP<1 << 14>; }

// The sums of a part's numbers times x.
template <class C> struct Sums {
    __m256i words[3], sum;
    // Digit d of vector `at` of a step, the `in`-th of its part.
    inline __attribute__((always_inline)) void add(__m256i number, const XStep& x, int at, int in, int d) {
        const __m256i pairs = _mm256_maddubs_epi16(number, _mm256_load_si256((const __m256i*)x.digits[d][at]));
        words[d] = here(in % C::ADDED == 0 ? pairs : _mm256_add_epi16(words[d], pairs));
        if (in % C::ADDED < C::ADDED - 1) return;
        const __m256i fours = _mm256_madd_epi16(words[d], _mm256_load_si256((const __m256i*)up<C>(d).at));
        sum = d == 0 && in < C::ADDED ? fours : in < C::ADDED ? _mm256_add_epi32(sum, fours) : here(_mm256_add_epi32(sum, fours));
    }
    inline __attribute__((always_inline)) __m256 meet(const Scales<C>& scales, const XStep& x, int part, __m256 acc) {
        if (!C::PLUS) sum = _mm256_sub_epi32(sum, _mm256_load_si256((const __m256i*)x.offset[part]));
        return plus<C>(scales, x, part, _mm256_fmadd_ps(scaled<C>(scales, x, part), _mm256_cvtepi32_ps(sum), acc));
    }
};

// acc and the products of what t holds with x; what the next turn's products are of comes into t meanwhile.
template <class C> inline __attribute__((always_inline)) __m256 turn_then(const uint8_t* b, int turn, __m256i* t, const XStep& x, const uint8_t* next, Scales<C>& scales, __m256 acc) {
    constexpr int VECTORS = 8 / C::PARTS, HERE = 8 / TURNS<C>;
    // Products before the first piece, between pieces and before the scales: as measured. What stands late finds the registers of t free.
    constexpr int FIRST = C::ROWS == 2 ? 5 : TURNS<C> == 1 ? 7 : 2, EVERY = C::ROWS == 2 ? 3 : TURNS<C> == 1 ? 2 : 1;
    constexpr int SCALES = C::PARTS == 1 ? (C::PLUS ? 19 : 1) : TURNS<C> == 1 ? 5 : 3 * VECTORS - 1;
    Sums<C> sums;
    __m256i then[4], soon = here(C::number(b, t, 0));
#pragma GCC unroll 8
    for (int v = 0; v < HERE; v++) {
        const int part = v / VECTORS, in = v % VECTORS;
        const __m256i number = soon; // the next one comes before the products of this one
        if (v + 1 < HERE) soon = here(C::number(b, t + (v + 1) / VECTORS * C::RAW, (v + 1) % VECTORS));
#pragma GCC unroll 3
        for (int d = 0; d < 3; d++) {
            sums.add(number, x, turn * HERE + v, in, d);
            const int done = 3 * v + d;
            if (done >= FIRST && (done - FIRST) % EVERY == 0 && (done - FIRST) / EVERY < PIECES<C>) piece<C>((done - FIRST) / EVERY, next, (turn + 1) % TURNS<C>, then);
            if (done == SCALES && turn == 0) C::scales(b, scales);
        }
        if (in < VECTORS - 1) continue;
        acc = sums.meet(scales, x, turn + part, acc);
    }
#pragma GCC unroll 4
    for (int i = 0; i < C::ROWS; i++) t[i] = then[i];
    return acc;
}

// What is known of the numbers that come next.
template <class C> struct Ahead {
    __m256i t[4];
    inline __attribute__((always_inline)) explicit Ahead(const uint8_t* b) { all_pieces<C>(b, t); }
    inline __attribute__((always_inline)) __m256 turn(const uint8_t* b, int turn, const XStep& x, const uint8_t* next, Scales<C>& scales, __m256 acc) {
        return turn_then<C>(b, turn, t, x, next, scales, acc);
    }
};
// Of code books: a pair of vectors. The next one is looked up before the products of this one, and gets its signs behind them.
template <Booked C> struct Ahead<C> {
    __m256i signs[C::SIGNS], numbers[2];
    inline __attribute__((always_inline)) explicit Ahead(const uint8_t* b) {
        C::signs(b, 0, signs), C::looked(b, 0, 0, numbers);
        for (int i = 0; i < 2; i++) numbers[i] = C::number(numbers[i], signs, i);
    }
    inline __attribute__((always_inline)) __m256 turn(const uint8_t* b, int part, const XStep& x, const uint8_t* next, Scales<C>& scales, __m256 acc) {
        constexpr int VECTORS = 8 / C::PARTS;
        const int then = (part + 1) % C::PARTS;
        Sums<C> sums;
        __m256i plus[2];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            const bool last = v + 2 >= VECTORS;
            if (v == VECTORS - 2) {
                C::signs(next, then, signs);
                for (__m256i& s : signs) s = here(s);
            }
            if (v % 2 == 0) {
                C::looked(last ? next : b, last ? then : part, (v + 2) % VECTORS / 2, plus);
                for (__m256i& p : plus) p = here(p);
            }
            if (v == 1 && part == 0) C::scales(b, scales);
#pragma GCC unroll 3
            for (int d = 0; d < 3; d++) sums.add(numbers[v % 2], x, part * VECTORS + v, v, d);
            numbers[v % 2] = here(C::number(plus[v % 2], signs, (v + 2) % VECTORS));
        }
        return sums.meet(scales, x, part, acc);
    }
};

// Rows [r0, r0 + nr), step after step: where the next one lies. `edge` is the step that has none behind it in memory.
template <class C> struct Walk {
    const int64_t whole, rest, stride;
    const uint8_t *row, *end, *edge;                // the row that is read; behind the last row
    alignas(32) uint8_t last[2][2 * C::BYTES] = {}; // a step that is not whole, before zeros: of a row and of the one behind it
    int which = 0;
    Walk(const Matrix& m, int64_t r0, int nr)
        : whole(m.cols / STEP), rest(m.stride - whole * C::BYTES), stride(m.stride), row(m.data + r0 * stride), end(row + nr * stride),
          edge((rest ? row + stride - rest : end) - C::BYTES) {}
    const uint8_t* first() { return whole ? row : part(); }
    const uint8_t* part() {
        uint8_t* to = last[which] + C::BYTES;
        if (whole)
            memcpy(last[which] + rest, row + stride - C::BYTES, C::BYTES); // with what is in front of it: a copy whose size is known
        else
            memcpy(to, row, rest);
        return edge = to;
    }
    __attribute__((noinline, cold)) const uint8_t* behind_edge() {
        if (!rest) return edge;
        if (edge != last[which] + C::BYTES) return part();
        if (row + stride == end) return edge;
        row += stride;
        if (!whole) return which = 1 - which, part();
        edge = row + (whole - 1) * C::BYTES;
        return row;
    }
};

// The steps of all rows are one loop, and rows are summed up eight at a time behind it. A loop over the three or eight steps of a row inside of one over rows, which
// ended with its sum, took 25 cycles more for every row: a sixth of Q4_0's rows of 768 columns.
template <class C> __attribute__((noinline)) void one_row(const Matrix& m, int64_t r0, int nr, const XStep* x, int64_t rows, const uint8_t* next, float* c) {
    constexpr int LINES = (C::BYTES + 63) / 64;
    alignas(32) float sums[BLOCK][8];
    Walk<C> walk(m, r0, nr);
    const XStep *step = x, *end = x + steps_of(m.cols) * rows;
    const uint8_t *b = walk.first(), *line = rows_ahead(walk.row, m.stride, 0, nr, 1, next), *line_row = line, *last_line = walk.end;
    Ahead<C> ahead(b);
    __m256 acc = _mm256_setzero_ps();
    for (float* to = sums[0];; line += C::BYTES) {
#pragma GCC unroll 8
        for (int i = 0; i < LINES; i++) __builtin_prefetch(line + 64 * i, 0, 2);
        const uint8_t* then = b + C::BYTES;
        if (__builtin_expect(b == walk.edge, 0)) then = walk.behind_edge();
        Scales<C> scales;
#pragma GCC unroll 2
        for (int turn = 0; turn < TURNS<C>; turn++) acc = ahead.turn(b, turn, *step, turn + 1 < TURNS<C> ? b : then, scales, acc);
        b = then, step += rows;
        if (__builtin_expect(step != end, 1)) continue;
        _mm256_store_ps(to, acc);
        if ((to += 8) == sums[nr]) break;
        acc = _mm256_setzero_ps(), step = x, line_row += m.stride;
        if (line_row == last_line && next) line_row = next;
        line = line_row - C::BYTES;
    }
    for (int r = 0; r < nr; r += 8) eight_totals(sums[r], 8, c + r); // rows past nr write where nobody reads
}

} // namespace MOORAGE_ISA
