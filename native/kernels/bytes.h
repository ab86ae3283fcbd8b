// Formats of 4 to 6 bits, AVX2: stored rows -> unsigned bytes, and the scales of their groups.
//
// 256 weights are four pairs of vectors of 32 bytes. Lane i of a pair's sums holds bytes 4i to 4i + 3 of both vectors, all of one group.
// A format says where the 8 weights of piece q of vector v begin (`piece`; any order will do, x is packed in the same one), gives a pair's
// numbers, and its scales lane by lane. OFFSET is what makes numbers unsigned; PLUS: p is added to number times d (-1: taken from it),
// eight groups in one register, of which `group` says the order. Numbers are at most 63: four products with a digit of x fit 16 bits.
#pragma once
#include "groups.h"
#include "kscales.h"

namespace MOORAGE_ISA {

constexpr int64_t STEP = 256; // weights of a row that are multiplied at once

inline void nibbles(__m256i bytes, __m256i& low, __m256i& high) {
    const __m256i mask = _mm256_set1_epi8(15);
    low = _mm256_and_si256(bytes, mask), high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask);
}
inline __m256i two(const uint8_t* low, const uint8_t* high) { // 16 bytes each
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)low)), _mm_loadu_si128((const __m128i*)high), 1);
}
inline __m256i both(const uint8_t* p) { return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p)); }
inline __m256i looked_up(__m128i table, __m256i nibble) { return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibble); }
inline __m256i e2m1(__m256i nibble) { // doubled, plus 12
    return looked_up(_mm_set_epi8(0, 4, 6, 8, 9, 10, 11, 12, 24, 20, 18, 16, 15, 14, 13, 12), nibble);
}

template <int NUMBER_OFFSET, int P = 0> struct Whole {
    static constexpr bool KNOWN = true;
    static constexpr int PLUS = P;
    static constexpr int OFFSET = NUMBER_OFFSET;
};
// Lane by lane, of the four pairs; p of eight groups.
struct Scales {
    __m256 d[4], p;
};
// Eight groups of 32: `eight` gives their scales, those of the pairs' lower lanes first.
struct Eights {
    static constexpr bool EIGHT = true;
    static void spread(__m256 s, __m256* to) {
        to[0] = _mm256_permute_ps(s, 0x00), to[1] = _mm256_permute_ps(s, 0x55);
        to[2] = _mm256_permute_ps(s, 0xaa), to[3] = _mm256_permute_ps(s, 0xff);
    }
};

// Blocks of 32, in pairs of number i and i + 4: low nibbles are the first half, high ones the last.
template <int BLOCK_BYTES, int AT> struct SmallPairs : Eights {
    static constexpr int BYTES = 8 * BLOCK_BYTES;
    static constexpr int group(int j) { return j; }
    static constexpr int piece(int pair, int v, int q) { return 32 * (pair + q / 2 * 4) + 16 * v + q % 2 * 8; }
    static void numbers(const uint8_t* b, int pair, __m256i& v0, __m256i& v1) {
        nibbles(two(b + pair * BLOCK_BYTES + AT, b + (pair + 4) * BLOCK_BYTES + AT), v0, v1);
    }
    // Words that lie a block apart, each in all of a register: two meet in a dword, and four dwords in a register, by blends.
    static __m128i all(const uint8_t* p) { return _mm_set1_epi32((int)u32(p)); }
    static __m128i four(__m128i a, __m128i b, __m128i c, __m128i d) { return _mm_blend_epi32(_mm_blend_epi32(a, b, 2), _mm_blend_epi32(c, d, 8), 12); }
    static __m256 eight(const uint8_t* b, __m256&) { // one half in front of every block
        const auto words = [&](int i) { return _mm_blend_epi16(all(b + i * BLOCK_BYTES), all(b + (i + 1) * BLOCK_BYTES - 2), 0xaa); };
        return _mm256_cvtph_ps(four(words(0), words(2), words(4), words(6)));
    }
    static __m256 two_eights(const uint8_t* b, __m256& p) { // two halves
        const auto at = [&](int i) { return all(b + i * BLOCK_BYTES); };
        const __m256 low = _mm256_cvtph_ps(four(at(0), at(1), at(4), at(5))), high = _mm256_cvtph_ps(four(at(2), at(3), at(6), at(7)));
        p = _mm256_shuffle_ps(low, high, 0xdd);
        return _mm256_shuffle_ps(low, high, 0x88);
    }
    // Bit j of a block's 32 bits at HIGH belongs to weight j.
    static __m256i sixteens(const uint8_t* b, int pair, int high, int v) {
        const int low = (int)u32(b + pair * BLOCK_BYTES + high), up = (int)u32(b + (pair + 4) * BLOCK_BYTES + high);
        const __m256i bits = _mm256_inserti128_si256(_mm256_set1_epi32(low), _mm_set1_epi32(up), 1);
        const __m256i which = _mm256_set_epi64x(0x0101010101010101, 0, 0x0101010101010101, 0), bit = _mm256_set1_epi64x((long long)0x8040201008040201);
        const __m256i bytes = _mm256_shuffle_epi8(bits, _mm256_add_epi8(which, _mm256_set1_epi8((char)(2 * v))));
        return _mm256_and_si256(_mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit), _mm256_set1_epi8(16));
    }
};

template <Format> struct Integers {
    static constexpr bool KNOWN = false;
};
template <> struct Integers<Format::Q4_0> : SmallPairs<18, 2>, Whole<8> {};
template <> struct Integers<Format::Q4_1> : SmallPairs<20, 4>, Whole<0, 1> {
    static __m256 eight(const uint8_t* b, __m256& p) { return two_eights(b, p); }
};
template <> struct Integers<Format::Q5_0> : SmallPairs<22, 6>, Whole<16> {
    static void numbers(const uint8_t* b, int pair, __m256i& v0, __m256i& v1) {
        SmallPairs::numbers(b, pair, v0, v1);
        v0 = _mm256_or_si256(v0, sixteens(b, pair, 2, 0)), v1 = _mm256_or_si256(v1, sixteens(b, pair, 2, 1));
    }
};
template <> struct Integers<Format::Q5_1> : SmallPairs<24, 8>, Whole<0, 1> {
    static __m256 eight(const uint8_t* b, __m256& p) { return two_eights(b, p); }
    static void numbers(const uint8_t* b, int pair, __m256i& v0, __m256i& v1) {
        SmallPairs::numbers(b, pair, v0, v1);
        v0 = _mm256_or_si256(v0, sixteens(b, pair, 4, 0)), v1 = _mm256_or_si256(v1, sixteens(b, pair, 4, 1));
    }
};
template <> struct Integers<Format::MXFP4> : SmallPairs<17, 1>, Whole<12> {
    static void numbers(const uint8_t* b, int pair, __m256i& v0, __m256i& v1) {
        SmallPairs::numbers(b, pair, v0, v1);
        v0 = e2m1(v0), v1 = e2m1(v1);
    }
    static __m256 eight(const uint8_t* b, __m256&) {
        const auto byte = [&](int i, int at) { return _mm_and_si128(all(b + 17 * i - at), _mm_set1_epi32(255 << 8 * at)); };
        const auto bytes = [&](int i) { return _mm_or_si128(_mm_or_si128(byte(i, 0), byte(i + 1, 1)), _mm_or_si128(byte(i + 2, 2), byte(i + 3, 3))); };
        const __m256i e = _mm256_cvtepu8_epi32(_mm_unpacklo_epi32(bytes(0), bytes(4))), one = _mm256_set1_epi32(1);
        const __m256i usual = _mm256_slli_epi32(_mm256_sub_epi32(e, one), 23), small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), e);
        return (__m256)_mm256_blendv_epi8(small, usual, _mm256_cmpgt_epi32(e, one));
    }
};

// Two groups of 32 in 32 bytes: low nibbles are one, high ones the other. A pair is both groups' first halves and both groups' last.
struct KPairs : Eights, Whole<0, -1> {
    static constexpr int group(int j) { return j % 4 * 2 + j / 4; }
    static constexpr int piece(int pair, int v, int q) { return 64 * pair + q / 2 * 32 + 16 * v + q % 2 * 8; }
    static __m256i half_of(const uint8_t* qs) {
        return _mm256_and_si256(_mm256_srlv_epi32(both(qs), _mm256_set_epi32(4, 4, 4, 4, 0, 0, 0, 0)), _mm256_set1_epi8(15));
    }
    static __m256 eight(const uint8_t* b, __m256& p) {
        const __m128i raw = _mm_loadu_si128((const __m128i*)b);
        const __m128i sorted = _mm_shuffle_epi8(k_numbers(raw), _mm_set_epi8(15, 13, 11, 9, 14, 12, 10, 8, 7, 5, 3, 1, 6, 4, 2, 0));
        const __m128 d = _mm_cvtph_ps(raw);
        const auto times = [](__m128i bytes, __m128 by) { return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)), _mm256_broadcastss_ps(by)); };
        p = times(_mm_srli_si128(sorted, 8), _mm_movehdup_ps(d));
        return times(sorted, d);
    }
};
template <> struct Integers<Format::Q4_K> : KPairs {
    static constexpr int BYTES = 144;
    static void numbers(const uint8_t* b, int pair, __m256i& v0, __m256i& v1) { v0 = half_of(b + 16 + 32 * pair), v1 = half_of(b + 32 + 32 * pair); }
};
template <> struct Integers<Format::Q5_K> : KPairs {
    static constexpr int BYTES = 176;
    static __m256i fifths(const uint8_t* qh, int pair) { // bits 2 pair and 2 pair + 1, as sixteens
        const int low = 2 * pair - 4, high = low + 1;
        const __m256i by = pair < 2 ? _mm256_set_epi32(-high, -high, -high, -high, -low, -low, -low, -low) : _mm256_set_epi32(high, high, high, high, low, low, low, low);
        return _mm256_and_si256(pair < 2 ? _mm256_sllv_epi32(both(qh), by) : _mm256_srlv_epi32(both(qh), by), _mm256_set1_epi8(16));
    }
    static void numbers(const uint8_t* b, int pair, __m256i& v0, __m256i& v1) {
        v0 = _mm256_or_si256(half_of(b + 48 + 32 * pair), fifths(b + 16, pair));
        v1 = _mm256_or_si256(half_of(b + 64 + 32 * pair), fifths(b + 32, pair));
    }
};

// Formats with groups of 16: four of them in a pair, two lanes each.
struct Sixteens {
    static constexpr bool EIGHT = false;
    static constexpr int group(int j) { return j; }
};
// Blocks of 64: four groups, each 8 bytes whose low nibbles come first.
template <int BLOCK_BYTES, int AT> struct NvBlocks : Sixteens, Whole<12> {
    static constexpr int BYTES = STEP / 64 * 36 + 2 * AT;
    static constexpr int piece(int pair, int v, int q) { return 64 * pair + 16 * q + 8 * v; }
    static const uint8_t* block(const uint8_t* b, int i) { return b + i / 2 * BLOCK_BYTES + AT + i % 2 * 36; } // its four scales
    static void numbers(const uint8_t* b, int pair, __m256i& v0, __m256i& v1) {
        nibbles(_mm256_loadu_si256((const __m256i*)(block(b, pair) + 4)), v0, v1);
        v0 = e2m1(v0), v1 = e2m1(v1);
    }
    // Sixteen e4m3_half, each in two lanes: the bits of a half that is 2^-8 of a number. `low`, `high`: 128 times what belongs to
    // the first two blocks and to the others.
    static void scales(const uint8_t* b, __m256 low, __m256 high, __m256* d) {
        const auto all = [&](int i) { return _mm_set1_epi32((int)u32(block(b, i))); };
        const __m128i bytes = _mm_blend_epi32(_mm_blend_epi32(all(0), all(1), 2), _mm_blend_epi32(all(2), all(3), 8), 12);
        const __m128i most = _mm_set1_epi8(0x7f), number = _mm_and_si128(bytes, most), valid = _mm_andnot_si128(_mm_cmpeq_epi8(bytes, most), number);
        const __m256i bits = _mm256_slli_epi16(_mm256_cvtepu8_epi16(valid), 7);
        const __m256i even = _mm256_unpacklo_epi16(bits, bits), odd = _mm256_unpackhi_epi16(bits, bits);
        d[0] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(even)), low), d[1] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(odd)), low);
        d[2] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(even, 1)), high), d[3] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(odd, 1)), high);
    }
};
template <> struct Integers<Format::NVFP4> : NvBlocks<72, 0> {
    static void sixteen(const uint8_t* b, __m256* d) { scales(b, _mm256_set1_ps(128.0f), _mm256_set1_ps(128.0f), d); }
};
template <> struct Integers<Format::NVFP4_SCALED> : NvBlocks<76, 4> {
    static void sixteen(const uint8_t* b, __m256* d) { scales(b, _mm256_set1_ps(128.0f * f32(b)), _mm256_set1_ps(128.0f * f32(b + 76)), d); }
};

// Q6_K: 32 weights are two groups of 16; the first halves of four groups meet in one vector, the last in the other.
template <> struct Integers<Format::Q6_K> : Sixteens, Whole<32> {
    static constexpr int BYTES = 210;
    static constexpr int piece(int pair, int v, int q) { return 64 * pair + 32 * (q % 2) + 16 * (q / 2) + 8 * v; }
    static __m256i thirty_two_of(const uint8_t* b, int j) {
        const int upper = j / 4, q = j & 3;
        const __m256i low = _mm256_loadu_si256((const __m256i*)(b + 64 * upper + 32 * (q & 1))), two = _mm256_loadu_si256((const __m256i*)(b + 128 + 32 * upper));
        const __m256i high = q < 2 ? _mm256_slli_epi16(two, 4 - 2 * q) : _mm256_srli_epi16(two, 2 * q - 4);
        return _mm256_or_si256(_mm256_and_si256(q < 2 ? low : _mm256_srli_epi16(low, 4), _mm256_set1_epi8(15)), _mm256_and_si256(high, _mm256_set1_epi8(48)));
    }
    static void numbers(const uint8_t* b, int pair, __m256i& v0, __m256i& v1) {
        const __m256i first = thirty_two_of(b, 2 * pair), second = thirty_two_of(b, 2 * pair + 1);
        v0 = _mm256_unpacklo_epi64(first, second), v1 = _mm256_unpackhi_epi64(first, second);
    }
    static void sixteen(const uint8_t* b, __m256* d) {
        const __m128i s = _mm_loadu_si128((const __m128i*)(b + 192));
        const __m256 all = _mm256_set1_ps(half(b + 208));
        for (int pair = 0; pair < 4; pair++) {
            const int k = 0x01010101 * 4 * pair;
            const __m128i order = _mm_set_epi32(0, 0, 0x03030101 + k, 0x02020000 + k);
            d[pair] = _mm256_mul_ps(all, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_shuffle_epi8(s, order))));
        }
    }
};

} // namespace MOORAGE_ISA
