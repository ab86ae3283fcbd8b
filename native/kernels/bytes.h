// Formats of small whole numbers, AVX2: stored rows -> unsigned bytes, and the scales of their groups.
//
// 256 weights are eight vectors of 32 bytes. Dword `lane` of a vector holds four weights of the group that this lane of the sums belongs to:
// all eight vectors belong to eight groups of 32 (one part), or four each to eight groups of 16 (two parts). A format says where the four
// weights of a dword begin (`first`; any order will do, x is packed in the same one), gives a part's vectors and its scales lane by lane.
// What is read of a part is ROWS registers (`row`), which a transposition turns into the RAW ones that numbers are taken from (`raw`: both).
// (Code books: kernels/bytes_grids.h.) OFFSET is what makes numbers unsigned; PLUS: p is added to number times d (-1: taken from it).
#pragma once
#include "groups.h"
#include "kscales.h"
#include <bit>

namespace MOORAGE_ISA {

constexpr int64_t STEP = 256; // weights of a row that are multiplied at once

struct alignas(32) Vector {
    uint32_t at[8];
    constexpr explicit Vector(uint32_t all) : at{all, all, all, all, all, all, all, all} {}
    __m256i get() const { return _mm256_load_si256((const __m256i*)at); }
};
inline constexpr Vector NIBBLES{0x0f0f0f0f}, FIFTHS{0x10101010};

inline __m256i low_nibbles(__m256i bytes) { return _mm256_and_si256(bytes, NIBBLES.get()); }
inline __m256i high_nibbles(__m256i bytes) { return low_nibbles(_mm256_srli_epi16(bytes, 4)); }
inline __m256i nibbles_of(__m256i bytes, int high) { return high ? high_nibbles(bytes) : low_nibbles(bytes); }
inline __m256i thirty_two_bytes(const uint8_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline __m256i two(const uint8_t* low, const uint8_t* high) { // 16 bytes each; 16 in front of the second are read too
    // a blend loads its second operand itself, an insertion from memory takes a whole cycle of Zen 3
    return _mm256_blend_epi32(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)low)), thirty_two_bytes(high - 16), 0xf0);
}
inline __m256i looked_up(__m128i table, __m256i nibble) { return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibble); }
inline __m256i e2m1(__m256i nibble) { // doubled, plus 12
    return looked_up(_mm_set_epi8(0, 4, 6, 8, 9, 10, 11, 12, 24, 20, 18, 16, 15, 14, 13, 12), nibble);
}
inline __m256i iq4(__m256i nibble) { // IQ4_VALUES
    return looked_up(_mm_set_epi8(113, 89, 69, 53, 38, 25, 13, 1, -10, -22, -35, -49, -65, -83, -104, -127), nibble);
}
// Dword 2 half + i of four vectors' lanes comes to vector i.
inline void transpose_half(__m256i r0, __m256i r1, __m256i r2, __m256i r3, int half, __m256i* to) {
    const __m256i a = half ? _mm256_unpackhi_epi32(r0, r1) : _mm256_unpacklo_epi32(r0, r1), b = half ? _mm256_unpackhi_epi32(r2, r3) : _mm256_unpacklo_epi32(r2, r3);
    to[0] = _mm256_unpacklo_epi64(a, b), to[1] = _mm256_unpackhi_epi64(a, b);
}
inline void transpose(__m256i* r) { // in place, all four dwords
    const __m256i r0 = r[0], r1 = r[1], r2 = r[2], r3 = r[3];
    transpose_half(r0, r1, r2, r3, 0, r), transpose_half(r0, r1, r2, r3, 1, r + 2);
}
template <class C> inline void four_rows(const uint8_t* b, int part, __m256i* t) { // what a format reads of a part, before and after its transposition
    for (int i = 0; i < 4; i++) t[i] = C::row(b, part, i);
    transpose(t);
}
inline __m256i dwords(__m256i a, __m256i b, int odd) { // the even or odd ones of both
    const __m256 x = _mm256_castsi256_ps(a), y = _mm256_castsi256_ps(b);
    return _mm256_castps_si256(odd ? _mm256_shuffle_ps(x, y, 0xdd) : _mm256_shuffle_ps(x, y, 0x88));
}

// MOST: the largest number. PARTS: 2 where groups have 16 weights. DIGIT: bits of a digit of x; ADDED: vectors
// whose products are added in 16 bits.
template <int NUMBERS_MOST, int NUMBER_OFFSET, int PART_COUNT = 1, int P = 0> struct Whole {
    static constexpr bool KNOWN = true;
    static constexpr int OFFSET = NUMBER_OFFSET, PARTS = PART_COUNT, PLUS = P;
    static constexpr float UNIT = 1; // of d and p: x has it in its scales
    static constexpr int fits(int digit) { // vectors that fit
        int n = 8 / PARTS;
        while (NUMBERS_MOST * (1 << (digit - 1)) * 2 * n > 32767) n /= 2;
        return n;
    }
    static constexpr int DIGIT = fits(8) == 8 / PARTS ? 8 : 7, ADDED = fits(DIGIT);
};
template <class C> struct Scales { // lane by lane
    __m256 d[C::PARTS], p[C::PARTS];
};

template <class C> concept Booked = requires { C::SIGNS; }; // magnitudes stand in code books

inline __m128i all(const uint8_t* p) { return _mm_castps_si128(_mm_broadcast_ss((const float*)p)); } // a load alone; gcc 12 shuffles _mm_set1_epi32
inline __m256 half_everywhere(const uint8_t* p) { return _mm256_broadcastss_ps(_mm_cvtph_ps(all(p))); } // 32 bits are read

// Eight blocks of 32, a lane each: low nibbles are the first half, high ones the last.
template <int BLOCK_BYTES, int AT> struct SmallBlocks {
    static constexpr int BYTES = 8 * BLOCK_BYTES, ROWS = 4, RAW = 4;
    static constexpr int first(int v, int lane) { return 32 * lane + 4 * (v / 2) + 16 * (v % 2); }
    static __m256i row(const uint8_t* b, int, int i) { return two(b + i * BLOCK_BYTES + AT, b + (i + 4) * BLOCK_BYTES + AT); }
    static void raw(const uint8_t* b, int part, __m256i* t) { four_rows<SmallBlocks>(b, part, t); }
    static __m256i number(const uint8_t*, const __m256i* t, int v) { return nibbles_of(t[v / 2], v % 2); }
    // Words that lie a block apart, each in all of a register: two meet in a dword, and four dwords in a register, by blends.
    static __m128i four(__m128i a, __m128i b, __m128i c, __m128i d) { return _mm_blend_epi32(_mm_blend_epi32(a, b, 2), _mm_blend_epi32(c, d, 8), 12); }
    static __m256 eight(const uint8_t* b) { // one half in front of every block: word i of the sixteen bytes that begin at i (BLOCK_BYTES - 2)
        const auto at = [&](int i) { return _mm_loadu_si128((const __m128i*)(b + i * (BLOCK_BYTES - 2))); };
        __m128i d = _mm_blend_epi16(at(0), at(1), 2);
        d = _mm_blend_epi16(d, at(2), 4), d = _mm_blend_epi16(d, at(3), 8), d = _mm_blend_epi16(d, at(4), 16);
        d = _mm_blend_epi16(d, at(5), 32), d = _mm_blend_epi16(d, at(6), 64), d = _mm_blend_epi16(d, at(7), 128);
        return _mm256_cvtph_ps(d);
    }
    static __m256 two_eights(const uint8_t* b, __m256& p) { // two halves
        const auto at = [&](int i) { return all(b + i * BLOCK_BYTES); };
        const __m256 low = _mm256_cvtph_ps(four(at(0), at(1), at(4), at(5))), high = _mm256_cvtph_ps(four(at(2), at(3), at(6), at(7)));
        p = _mm256_shuffle_ps(low, high, 0xdd);
        return _mm256_shuffle_ps(low, high, 0x88);
    }
    // Bit j of a block's 32 bits at HIGH belongs to weight j.
    static __m256i bits(const uint8_t* b, int high) {
        const auto at = [&](int i) { return all(b + i * BLOCK_BYTES + high); };
        return _mm256_set_m128i(four(at(4), at(5), at(6), at(7)), four(at(0), at(1), at(2), at(3)));
    }
    static __m256i with_fifth(__m256i number, __m256i bits, int v) {
        const int byte = v / 4 + v % 2 * 2; // which bytes of a dword, and there which half, belong to vector v
        const __m256i where = _mm256_setr_epi32(0, 0x04040404, 0x08080808, 0x0c0c0c0c, 0, 0x04040404, 0x08080808, 0x0c0c0c0c);
        const __m256i bit = _mm256_set1_epi32(v / 2 % 2 ? (int)0x80402010 : 0x08040201);
        const __m256i bytes = _mm256_shuffle_epi8(bits, _mm256_add_epi8(where, _mm256_set1_epi8((char)byte)));
        return _mm256_or_si256(number, _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit), _mm256_set1_epi8(16)));
    }
};

template <Format> struct Integers {
    static constexpr bool KNOWN = false;
};
template <> struct Integers<Format::Q4_0> : SmallBlocks<18, 2>, Whole<15, 8> {
    template <class S> static void scales(const uint8_t* b, S& s) { s.d[0] = eight(b); }
};
template <> struct Integers<Format::Q4_1> : SmallBlocks<20, 4>, Whole<15, 0, 1, 1> {
    template <class S> static void scales(const uint8_t* b, S& s) { s.d[0] = two_eights(b, s.p[0]); }
};
template <> struct Integers<Format::Q5_0> : SmallBlocks<22, 6>, Whole<31, 16> {
    static constexpr int RAW = 5;
    static void raw(const uint8_t* b, int, __m256i* t) { SmallBlocks::raw(b, 0, t), t[4] = bits(b, 2); }
    static __m256i number(const uint8_t* b, const __m256i* t, int v) { return with_fifth(SmallBlocks::number(b, t, v), t[4], v); }
    template <class S> static void scales(const uint8_t* b, S& s) { s.d[0] = eight(b); }
};
template <> struct Integers<Format::Q5_1> : SmallBlocks<24, 8>, Whole<31, 0, 1, 1> {
    static constexpr int RAW = 5;
    static void raw(const uint8_t* b, int, __m256i* t) { SmallBlocks::raw(b, 0, t), t[4] = bits(b, 4); }
    static __m256i number(const uint8_t* b, const __m256i* t, int v) { return with_fifth(SmallBlocks::number(b, t, v), t[4], v); }
    template <class S> static void scales(const uint8_t* b, S& s) { s.d[0] = two_eights(b, s.p[0]); }
};
struct E8m0Halves { // half of 2^(e - 127) at 8 + e
    float at[8 + 256 + 8];
    constexpr E8m0Halves() : at() {
        for (uint32_t e = 0; e < 256; e++) at[8 + e] = std::bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    }
};
alignas(64) inline constexpr E8m0Halves E8M0_HALVES;
template <> struct Integers<Format::MXFP4> : SmallBlocks<17, 1>, Whole<24, 12> {
    static __m256i number(const uint8_t* b, const __m256i* t, int v) { return e2m1(SmallBlocks::number(b, t, v)); }
    template <class S> static void scales(const uint8_t* b, S& s) { // a blend loads eight entries, of which the lane's is the one asked for
        const auto at = [&](int i) { return _mm256_loadu_ps(E8M0_HALVES.at + 8 + b[17 * i] - i); };
        __m256 d = _mm256_blend_ps(at(0), at(1), 2);
        d = _mm256_blend_ps(d, at(2), 4), d = _mm256_blend_ps(d, at(3), 8), d = _mm256_blend_ps(d, at(4), 16);
        s.d[0] = _mm256_blend_ps(_mm256_blend_ps(_mm256_blend_ps(d, at(5), 32), at(6), 64), at(7), 128);
    }
};
// Two groups of 32 in 32 bytes: low nibbles are one, high ones the other. Lanes: groups 0 2 4 6 1 3 5 7.
template <int MOST> struct KGroups : Whole<MOST, 0, 1, -1> {
    static constexpr int first(int v, int lane) { return 64 * (lane % 4) + 32 * (lane / 4) + 4 * (v / 2) + 16 * ((v % 2) ^ (lane / 4)); }
    static constexpr int ROWS = 4, RAW = 4, BYTES = MOST > 15 ? 176 : 144;
    static constexpr float UNIT = 1.0f / 16;
    static __m256i row(const uint8_t* b, int, int i) { return thirty_two_bytes(b + BYTES - 128 + 32 * i); }
    static void raw(const uint8_t* b, int part, __m256i* t) { four_rows<KGroups>(b, part, t); }
    // Low numbers of the lower lanes and high ones of the others; then the rest.
    static __m256i of_both(__m256i low, __m256i high, int rest) { return rest ? _mm256_permute2x128_si256(low, high, 0x21) : _mm256_blend_epi32(low, high, 0xf0); }
    static __m256i number(const uint8_t*, const __m256i* t, int v) { return of_both(low_nibbles(t[v / 2]), high_nibbles(t[v / 2]), v % 2); }
    template <class S> static void scales(const uint8_t* b, S& s) {
        const __m256i raw = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)b));
        // A dword of a lane: two bytes that hold the bits of its scale, and two of its minimum. What the bits are worth makes 16 times both.
        const __m256i where = _mm256_setr_epi8(4, -1, 8, -1, 6, -1, 10, -1, 12, 4, 12, 8, 14, 6, 14, 10, 5, -1, 9, -1, 7, -1, 11, -1, 13, 5, 13, 9, 15, 7, 15, 11);
        const int first = 0x003f003f, last = (int)0xc0f0c00f, by = 0x00100010, by_last = 0x04010410;
        const __m256i bits = _mm256_and_si256(_mm256_shuffle_epi8(raw, where), _mm256_setr_epi32(first, first, last, last, first, first, last, last));
        const __m256i both = _mm256_maddubs_epi16(bits, _mm256_setr_epi32(by, by, by_last, by_last, by, by, by_last, by_last));
        const __m256 d = _mm256_cvtph_ps(all(b)); // and dmin, in turn
        s.p[0] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(both, 16)), _mm256_movehdup_ps(d));
        s.d[0] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_and_si256(both, _mm256_set1_epi32(0xffff))), _mm256_moveldup_ps(d));
    }
};
template <> struct Integers<Format::Q4_K> : KGroups<15> {};
template <> struct Integers<Format::Q5_K> : KGroups<31> {
    static __m256i number(const uint8_t* b, const __m256i* t, int v) {
        // Bit g of a byte of fifth bits belongs to group g: a lane's two come to bits 6 and 7.
        const __m256i all = thirty_two_bytes(b + 16);
        const __m256i k = v / 2 == 0 ? _mm256_shuffle_epi32(all, 0) : v / 2 == 1 ? _mm256_shuffle_epi32(all, 0x55) : v / 2 == 2 ? _mm256_shuffle_epi32(all, 0xaa) : _mm256_shuffle_epi32(all, 0xff);
        const __m256i bits = _mm256_sllv_epi32(k, _mm256_setr_epi32(6, 4, 2, 0, 6, 4, 2, 0));
        const __m256i low = _mm256_and_si256(_mm256_srli_epi16(bits, 2), FIFTHS.get()), high = _mm256_and_si256(_mm256_srli_epi16(bits, 3), FIFTHS.get());
        return of_both(_mm256_or_si256(low_nibbles(t[v / 2]), low), _mm256_or_si256(high_nibbles(t[v / 2]), high), v % 2);
    }
};

// Groups of 16, blocks of 64: four groups, each 8 bytes whose low nibbles come first. Lanes: groups 0 1 of two blocks, then groups 2 3.
template <int BLOCK_BYTES, int AT> struct NvBlocks : Whole<24, 12, 2> {
    static constexpr int BYTES = STEP / 64 * 36 + 2 * AT;
    static constexpr float UNIT = 0x1p29f;
    static constexpr int first(int v, int lane) {
        return 128 * (v / 4) + 64 * (lane % 4 / 2) + 32 * (lane / 4) + 16 * (lane % 2) + 4 * (v % 4 / 2) + 8 * (v % 2);
    }
    static const uint8_t* block(const uint8_t* b, int i) { return b + i / 2 * BLOCK_BYTES + AT + i % 2 * 36; } // its four scales
    static constexpr int RAW = 2, ROWS = 2;
    static __m256i row(const uint8_t* b, int part, int i) { return thirty_two_bytes(block(b, 2 * part + i) + 4); }
    static void raw(const uint8_t* b, int part, __m256i* t) {
        const __m256i one = row(b, part, 0), other = row(b, part, 1);
        t[0] = dwords(one, other, 0), t[1] = dwords(one, other, 1);
    }
    static __m256i number(const uint8_t*, const __m256i* t, int v) { return e2m1(nibbles_of(t[v / 2], v % 2)); }
    // Sixteen e4m3_half, 2^-90 of them: their bits where a float has its own are 2^-119 of them. `low`, `high`: what belongs to the parts.
    static void sixteen(const uint8_t* b, __m256 low, __m256 high, __m256* d) {
        const auto four = [&](int i) { return _mm_loadu_si128((const __m128i*)(block(b, i) - 4 * i)); };
        const __m128i raw = _mm_blend_epi32(_mm_blend_epi32(_mm_blend_epi32(four(0), four(1), 2), four(2), 4), four(3), 8), most = _mm_set1_epi8(0x7f);
        const __m256i valid = _mm256_broadcastsi128_si256(_mm_andnot_si128(_mm_cmpeq_epi8(raw, most), _mm_and_si128(raw, most)));
        const __m256i where = _mm256_setr_epi32(0x00ffffff, 0x01ffffff, 0x04ffffff, 0x05ffffff, 0x02ffffff, 0x03ffffff, 0x06ffffff, 0x07ffffff);
        const auto eight = [&](__m256i where) { return _mm256_castsi256_ps(_mm256_srli_epi32(_mm256_shuffle_epi8(valid, where), 4)); };
        // an FMA: it takes subnormals at full speed, a product does not
        d[0] = _mm256_fmadd_ps(eight(where), low, _mm256_setzero_ps());
        d[1] = _mm256_fmadd_ps(eight(_mm256_or_si256(where, _mm256_set1_epi32(0x08000000))), high, _mm256_setzero_ps());
    }
};
template <> struct Integers<Format::NVFP4> : NvBlocks<72, 0> {
    template <class S> static void scales(const uint8_t* b, S& s) { sixteen(b, _mm256_set1_ps(0x1p90f), _mm256_set1_ps(0x1p90f), s.d); }
};
template <> struct Integers<Format::NVFP4_SCALED> : NvBlocks<76, 4> {
    template <class S> static void scales(const uint8_t* b, S& s) {
        const auto of = [&](int part) { return _mm256_mul_ps(_mm256_broadcast_ss((const float*)(b + 76 * part)), _mm256_set1_ps(0x1p90f)); };
        sixteen(b, of(0), of(1), s.d);
    }
};

// K-quants with groups of 16: 32 weights are two groups. Lanes: groups 0 2 4 6 1 3 5 7 of eight.
struct Sixteens {
    static constexpr int first(int v, int lane) { return 128 * (v / 4) + 32 * (lane % 4) + 16 * (lane / 4) + 4 * (v % 4); }
    static constexpr int ROWS = 4, RAW = 4;
    static __m256i number(const uint8_t*, const __m256i* t, int v) { return t[v]; }
    static __m128i in_order(__m128i bytes) { // sixteen bytes, one of a group: in the lanes' order of both parts
        return _mm_shuffle_epi8(bytes, _mm_set_epi8(15, 13, 11, 9, 14, 12, 10, 8, 7, 5, 3, 1, 6, 4, 2, 0));
    }
    static __m256 times(__m128i bytes, int part, float d) {
        return _mm256_mul_ps(_mm256_set1_ps(d), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(part ? _mm_srli_si128(bytes, 8) : bytes)));
    }
    static __m256i pair(const uint8_t* qs, int i) { return _mm256_and_si256(_mm256_srli_epi16(thirty_two_bytes(qs), 2 * i), _mm256_set1_epi8(3)); } // of bits
};
template <> struct Integers<Format::Q6_K> : Sixteens, Whole<63, 32, 2> {
    static constexpr int BYTES = 210;
    static __m256i row(const uint8_t* b, int part, int i) {
        const __m256i high = thirty_two_bytes(b + 128 + 32 * part), bytes = thirty_two_bytes(b + 64 * part + i % 2 * 32);
        const __m256i pairs = i < 2 ? _mm256_slli_epi16(high, 4 - 2 * i) : _mm256_srli_epi16(high, 2 * i - 4);
        return _mm256_or_si256(nibbles_of(bytes, i / 2), _mm256_and_si256(pairs, _mm256_set1_epi8(48)));
    }
    static void raw(const uint8_t* b, int part, __m256i* v) { four_rows<Integers>(b, part, v); }
    template <class S> static void scales(const uint8_t* b, S& s) {
        const __m128i bytes = in_order(_mm_loadu_si128((const __m128i*)(b + 192)));
        for (int part = 0; part < 2; part++) s.d[part] = times(bytes, part, half(b + 208));
    }
};
template <> struct Integers<Format::Q2_K> : Sixteens, Whole<3, 0, 2, -1> {
    static constexpr int BYTES = 84;
    static __m256i row(const uint8_t* b, int part, int i) { return pair(b + 16 + 32 * part, i); }
    static void raw(const uint8_t* b, int part, __m256i* v) { four_rows<Integers>(b, part, v); }
    template <class S> static void scales(const uint8_t* b, S& s) {
        const __m128i bytes = in_order(_mm_loadu_si128((const __m128i*)b)), mask = _mm_set1_epi8(15);
        const __m128i d = _mm_and_si128(bytes, mask), p = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
        for (int part = 0; part < 2; part++) s.d[part] = times(d, part, half(b + 80)), s.p[part] = times(p, part, half(b + 82));
    }
};
template <> struct Integers<Format::Q3_K> : Sixteens, Whole<7, 4, 2> {
    static constexpr int BYTES = 110;
    static __m256i row(const uint8_t* b, int part, int i) { // bit 4 part + i
        const __m256i all = thirty_two_bytes(b), high = part ? _mm256_srli_epi16(all, 2 + i) : i < 2 ? _mm256_slli_epi16(all, 2 - i) : _mm256_srli_epi16(all, i - 2);
        return _mm256_or_si256(pair(b + 32 + 32 * part, i), _mm256_and_si256(high, _mm256_set1_epi8(4)));
    }
    static void raw(const uint8_t* b, int part, __m256i* v) { four_rows<Integers>(b, part, v); }
    template <class S> static void scales(const uint8_t* b, S& s) { // as scale_q3_k reads them
        const __m128i raw = _mm_loadu_si128((const __m128i*)(b + 94)); // its last twelve bytes
        const __m128i eight = _mm_shuffle_epi8(raw, _mm_set_epi8(9, 8, 7, 6, 5, 4, 3, 2, 9, 8, 7, 6, 5, 4, 3, 2));
        const __m128i low = _mm_and_si128(_mm_srlv_epi64(eight, _mm_set_epi64x(4, 0)), _mm_set1_epi8(15));
        const __m128i fours = _mm_shuffle_epi8(raw, _mm_set_epi8(13, 12, 11, 10, 13, 12, 11, 10, 13, 12, 11, 10, 13, 12, 11, 10));
        const __m128i upper = _mm_and_si128(_mm_srlv_epi32(fours, _mm_set_epi32(6, 4, 2, 0)), _mm_set1_epi8(3));
        const __m128i bytes = in_order(_mm_sub_epi8(_mm_or_si128(low, _mm_slli_epi16(upper, 4)), _mm_set1_epi8(32)));
        for (int part = 0; part < 2; part++) s.d[part] = times(bytes, part, half(b + 108));
    }
};

} // namespace MOORAGE_ISA
