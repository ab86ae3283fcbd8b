// Formats whose weights are whole numbers of few bits times scales: stored rows -> unsigned bytes, and the scales of their groups.
//
// A format says which 256 weights its four vectors of 64 numbers hold (`piece`: where the 8 bytes q of vector v begin; any order
// will do, x is packed in the same one), how many sums they make (SUMS; the vectors of one sum are added as they come), how `fold` brings the sums
// of two rows into HELD registers (one for both, or one a row), which weights lane `lane` of such a register then sums (`begins`),
// and its scales lane by lane. OFFSET is what makes stored numbers unsigned; PLUS: p is added to number times d; WIDE: a
// sum of numbers of 8 bits times X would not fit 32 bits, so that of c is kept apart.
#pragma once
#include "groups.h"
#include <immintrin.h>

namespace MOORAGE_ISA {

constexpr int64_t STEP = 256; // weights of a row that are multiplied at once

// Lanes of four -> sums: a, b give (a, b, a, b) of lanes i and i + 2, those give (a, b, c, d).
inline __m512i pair_sums(__m512i a, __m512i b) { return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)); }
inline __m512i four_of(__m512i ab, __m512i cd) { return _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd)); }
inline void nibbles(__m512i bytes, __m512i& low, __m512i& high) {
    const __m512i mask = _mm512_set1_epi8(15);
    low = _mm512_and_si512(bytes, mask), high = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask);
}

struct alignas(64) Payloads { // four blocks' 16 bytes of nibbles at AT, as words of two loads: at 0 and at the end
    uint16_t at[32];
    constexpr Payloads(int bytes, int first) : at() {
        for (int i = 0; i < 32; i++) {
            const int byte = i / 8 * bytes + first + i % 8 * 2;
            at[i] = (uint16_t)(byte + 2 <= 64 ? byte / 2 : 32 + (byte - (4 * bytes - 64)) / 2);
        }
    }
};
struct alignas(16) Turned { // blocks 0 4 1 5 2 6 3 7: what `fold` leaves of a row, as bytes for pshufb
    uint8_t at[16];
    constexpr Turned() : at() {
        for (int i = 0; i < 8; i++) at[2 * i] = (uint8_t)(2 * (i / 2 + i % 2 * 4)), at[2 * i + 1] = (uint8_t)(at[2 * i] + 1);
    }
};
inline constexpr Turned TURNED;

template <int NUMBER_OFFSET, bool P = false, bool W = false> struct Whole {
    static constexpr bool KNOWN = true, PLUS = P, WIDE = W;
    static constexpr int OFFSET = NUMBER_OFFSET;
};

// Sixteen lanes of two rows: lane 4q + i belongs to row i / 2 and group `group(q, i % 2)`. Two sums a row, each of two vectors whose
// 16 bytes q are half a group.
struct Quads {
    static constexpr int GROUP = 32, SUMS = 2, HELD = 1;
    static void fold(const __m512i (&s)[2][2], __m512i* to) { to[0] = four_of(pair_sums(s[0][0], s[0][1]), pair_sums(s[1][0], s[1][1])); }
    static void totals(const float* acc, float* two) {
        const __m512 a = _mm512_load_ps(acc);
        const __m256 s = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
        const __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
        const __m128 u = _mm_add_ps(t, _mm_movehdup_ps(t));
        two[0] = _mm_cvtss_f32(u), two[1] = _mm_cvtss_f32(_mm_movehl_ps(u, u));
    }
};

// Blocks of 32: vectors 2h and 2h + 1 are the first and last halves of blocks 4h to 4h + 3.
struct Blocks32 : Quads {
    static constexpr int piece(int v, int q) { return 32 * (4 * (v / 2) + q / 2) + 16 * (v % 2) + 8 * (q % 2); }
    static constexpr int begins(int lane) { return 32 * (lane / 4 + lane % 2 * 4); }
    static __m256i both_words(__m128i a, __m128i b) { // of eight blocks of two rows, in the lanes' order
        const __m128i order = _mm_load_si128((const __m128i*)TURNED.at);
        a = _mm_shuffle_epi8(a, order), b = _mm_shuffle_epi8(b, order);
        return _mm256_set_m128i(_mm_unpackhi_epi32(a, b), _mm_unpacklo_epi32(a, b));
    }
    static __m512 both(__m128i a, __m128i b) { return _mm512_cvtph_ps(both_words(a, b)); }
};
// Their low nibbles are the first half, the high ones the last.
template <int BLOCK_BYTES, int AT> struct FourBlocks : Blocks32 {
    static constexpr int BYTES = 8 * BLOCK_BYTES;
    static constexpr Payloads WHERE{BLOCK_BYTES, AT};
    static void numbers(const uint8_t* b, __m512i* w) {
        for (int h = 0; h < 2; h++, b += 4 * BLOCK_BYTES) {
            const __m512i first = _mm512_loadu_si512(b), second = _mm512_loadu_si512(b + 4 * BLOCK_BYTES - 64);
            nibbles(_mm512_permutex2var_epi16(first, _mm512_load_si512(WHERE.at), second), w[2 * h], w[2 * h + 1]);
        }
    }
};
template <int BLOCK_BYTES> struct HalfScales {
    __m512 d[1], p[1];
    HalfScales(const uint8_t* a, const uint8_t* b) { d[0] = Blocks32::both(eight_words<BLOCK_BYTES, 0>(a), eight_words<BLOCK_BYTES, 0>(b)); }
};
template <int BLOCK_BYTES> struct TwoScales : HalfScales<BLOCK_BYTES> {
    TwoScales(const uint8_t* a, const uint8_t* b) : HalfScales<BLOCK_BYTES>(a, b) {
        this->p[0] = Blocks32::both(eight_words<BLOCK_BYTES, 2>(a), eight_words<BLOCK_BYTES, 2>(b));
    }
};
// The 16 bytes at AT of blocks 4h to 4h + 3, where words of one load do not hold them.
template <int BLOCK_BYTES> inline __m512i four_pieces(const uint8_t* b) {
    const auto at = [&](int i) { return _mm_loadu_si128((const __m128i*)(b + i * BLOCK_BYTES)); };
    return _mm512_inserti32x4(_mm512_inserti32x4(_mm512_inserti32x4(_mm512_castsi128_si512(at(0)), at(1), 1), at(2), 2), at(3), 3);
}
inline __m512i looked_up(__m128i table, __m512i nibble) { return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibble); }

template <Format> struct Integers {
    static constexpr bool KNOWN = false;
};
template <> struct Integers<Format::Q4_0> : FourBlocks<18, 2>, Whole<8> {
    using Scales = HalfScales<18>;
};
template <> struct Integers<Format::Q4_1> : FourBlocks<20, 4>, Whole<0, true> {
    using Scales = TwoScales<20>;
};
template <> struct Integers<Format::Q8_0> : Blocks32, Whole<128, false, true> {
    static constexpr int BYTES = 8 * 34;
    using Scales = HalfScales<34>;
    static void numbers(const uint8_t* b, __m512i* w) {
        for (int v = 0; v < 4; v++) w[v] = _mm512_xor_si512(four_pieces<34>(b + v / 2 * 4 * 34 + 2 + v % 2 * 16), _mm512_set1_epi8((char)0x80));
    }
};
inline __m512i iq4(__m512i nibble) { // IQ4_VALUES plus 127
    return looked_up(_mm_set_epi8((char)240, (char)216, (char)196, (char)180, (char)165, (char)152, (char)140, (char)128, 117, 105, 92, 78, 62, 44, 23, 0), nibble);
}
template <> struct Integers<Format::IQ4_NL> : FourBlocks<18, 2>, Whole<127, false, true> {
    using Scales = HalfScales<18>;
    static void numbers(const uint8_t* b, __m512i* w) {
        FourBlocks::numbers(b, w);
        for (int v = 0; v < 4; v++) w[v] = iq4(w[v]);
    }
};
template <> struct Integers<Format::IQ4_XS> : Blocks32, Whole<127, false, true> {
    static constexpr int BYTES = 136;
    struct Scales {
        __m512 d[1], p[1];
        Scales(const uint8_t* a, const uint8_t* b) {
            const __m512i order = _mm512_set_epi32(23, 19, 7, 3, 22, 18, 6, 2, 21, 17, 5, 1, 20, 16, 4, 0);
            d[0] = _mm512_permutex2var_ps(_mm512_castps256_ps512(eight_scales_iq4_xs(a)), order, _mm512_castps256_ps512(eight_scales_iq4_xs(b)));
        }
    };
    static void numbers(const uint8_t* b, __m512i* w) {
        for (int h = 0; h < 2; h++) {
            nibbles(_mm512_loadu_si512(b + 8 + 64 * h), w[2 * h], w[2 * h + 1]);
            w[2 * h] = iq4(w[2 * h]), w[2 * h + 1] = iq4(w[2 * h + 1]);
        }
    }
};

inline __m512i e2m1(__m512i nibble) { // doubled, plus 12
    return looked_up(_mm_set_epi8(0, 4, 6, 8, 9, 10, 11, 12, 24, 20, 18, 16, 15, 14, 13, 12), nibble);
}
template <> struct Integers<Format::MXFP4> : Blocks32, Whole<12> {
    static constexpr int BYTES = 8 * 17;
    static void numbers(const uint8_t* b, __m512i* w) {
        for (int h = 0; h < 2; h++) {
            nibbles(four_pieces<17>(b + 4 * 17 * h + 1), w[2 * h], w[2 * h + 1]);
            w[2 * h] = e2m1(w[2 * h]), w[2 * h + 1] = e2m1(w[2 * h + 1]);
        }
    }
    struct Scales {
        __m512 d[1], p[1];
        Scales(const uint8_t* a, const uint8_t* b) {
            const __m128i low = _mm_set_epi16(8, 0, 8, 0, 8, 0, 8, 0);
            const auto bytes = [&](const uint8_t* p) { return _mm_and_si128(_mm_srlv_epi16(eight_words<17, 0>(p), low), _mm_set1_epi16(255)); };
            const __m512i e = _mm512_cvtepu16_epi32(both_words(bytes(a), bytes(b))), one = _mm512_set1_epi32(1);
            const __m512i usual = _mm512_slli_epi32(_mm512_sub_epi32(e, one), 23), small = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), e);
            d[0] = (__m512)_mm512_mask_mov_epi32(usual, _mm512_cmple_epu32_mask(e, one), small);
        }
    };
};

// NVFP4: vectors 2h and 2h + 1 are the low and high nibbles of two blocks of 64; two lanes a group, and `fold` leaves in lane 4q + i
// group 2q + i of the first two blocks, or 2q + i - 2 of the others.
template <int BLOCK_BYTES, int AT> struct Sixteens : Whole<12> {
    static constexpr int BYTES = STEP / 64 * 36 + 2 * AT, GROUP = 16, SUMS = 2, HELD = 2;
    static constexpr int piece(int v, int q) { return 128 * (v / 2) + 16 * q + 8 * (v % 2); }
    static constexpr int begins(int lane) { return 128 * (lane % 4 / 2) + 16 * (lane / 4 * 2 + lane % 2); }
    static const uint8_t* block(const uint8_t* b, int i) { return b + i / 2 * BLOCK_BYTES + AT + i % 2 * 36; } // its four scales
    static void numbers(const uint8_t* b, __m512i* w) {
        const auto half_of = [&](int i) { return _mm256_loadu_si256((const __m256i*)(block(b, i) + 4)); };
        for (int h = 0; h < 2; h++) {
            nibbles(_mm512_inserti64x4(_mm512_castsi256_si512(half_of(2 * h)), half_of(2 * h + 1), 1), w[2 * h], w[2 * h + 1]);
            w[2 * h] = e2m1(w[2 * h]), w[2 * h + 1] = e2m1(w[2 * h + 1]);
        }
    }
    static void fold(const __m512i (&s)[2][2], __m512i* to) {
        for (int r = 0; r < 2; r++) {
            const __m512 a = (__m512)s[r][0], b = (__m512)s[r][1];
            to[r] = _mm512_add_epi32((__m512i)_mm512_shuffle_ps(a, b, 0x88), (__m512i)_mm512_shuffle_ps(a, b, 0xdd));
        }
    }
    static __m512 scales(const uint8_t* b) {
        const __m128i bytes = _mm_set_epi32((int)u32(block(b, 3)), (int)u32(block(b, 2)), (int)u32(block(b, 1)), (int)u32(block(b, 0)));
        return sixteen_scales(_mm_shuffle_epi8(bytes, _mm_set_epi8(15, 14, 7, 6, 13, 12, 5, 4, 11, 10, 3, 2, 9, 8, 1, 0)));
    }
    static void totals(const float* acc, float* two) {
        for (int r = 0; r < 2; r++) two[r] = _mm512_reduce_add_ps(_mm512_load_ps(acc + 16 * r));
    }
};
template <> struct Integers<Format::NVFP4> : Sixteens<72, 0> {
    struct Scales {
        __m512 d[2], p[1];
        Scales(const uint8_t* a, const uint8_t* b) { d[0] = scales(a), d[1] = scales(b); }
    };
};
template <> struct Integers<Format::NVFP4_SCALED> : Sixteens<76, 4> {
    struct Scales {
        __m512 d[2], p[1];
        static __m512 all(const uint8_t* b) { return _mm512_mask_mov_ps(_mm512_set1_ps(f32(b)), 0xcccc, _mm512_set1_ps(f32(b + 76))); }
        Scales(const uint8_t* a, const uint8_t* b) {
            d[0] = _mm512_mul_ps(scales(a), all(a)), d[1] = _mm512_mul_ps(scales(b), all(b));
        }
    };
};

// Q4_K and Q5_K: vectors 0 and 1 are the halves of groups 0, 2, 4, 6, in low nibbles; 2 and 3 those of groups 1, 3, 5, 7.
struct KIntegers : Quads, Whole<0, true> {
    static constexpr int group(int q, int n) { return 2 * q + n; }
    static constexpr int piece(int v, int q) { return 32 * group(q / 2, v / 2) + 16 * (v % 2) + 8 * (q % 2); }
    static constexpr int begins(int lane) { return 32 * group(lane / 4, lane % 2); }
    static void nibbles_of(const uint8_t* qs, __m512i* w) {
        const __m512i a = _mm512_loadu_si512(qs), b = _mm512_loadu_si512(qs + 64);
        nibbles(_mm512_shuffle_i32x4(a, b, 0x88), w[0], w[2]), nibbles(_mm512_shuffle_i32x4(a, b, 0xdd), w[1], w[3]);
    }
    struct Scales {
        __m512 d[1], p[1];
        Scales(const uint8_t* a, const uint8_t* b) {
            alignas(64) float first[16], second[16];
            KBlocks::scales(a, first), KBlocks::scales(b, second);
            const __m512i order = _mm512_set_epi32(23, 22, 7, 6, 21, 20, 5, 4, 19, 18, 3, 2, 17, 16, 1, 0);
            const __m512 f = _mm512_load_ps(first), s = _mm512_load_ps(second);
            d[0] = _mm512_permutex2var_ps(f, order, s);
            p[0] = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_permutex2var_ps(f, _mm512_add_epi32(order, _mm512_set1_epi32(8)), s));
        }
    };
};
template <> struct Integers<Format::Q4_K> : KIntegers {
    static constexpr int BYTES = 144;
    static void numbers(const uint8_t* b, __m512i* w) { nibbles_of(b + 16, w); }
};
template <> struct Integers<Format::Q5_K> : KIntegers {
    static constexpr int BYTES = 176;
    static void numbers(const uint8_t* b, __m512i* w) {
        nibbles_of(b + 48, w);
        const __m512i bits = _mm512_set_epi64(0x4040404040404040, 0x4040404040404040, 0x1010101010101010, 0x1010101010101010, 0x0404040404040404,
                                              0x0404040404040404, 0x0101010101010101, 0x0101010101010101); // of groups 0, 2, 4, 6
        for (int v = 0; v < 4; v++) {
            const __m512i fifths = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)(b + 16 + v % 2 * 16)));
            const __mmask64 set = _mm512_test_epi8_mask(fifths, v / 2 ? _mm512_add_epi8(bits, bits) : bits);
            w[v] = _mm512_mask_add_epi8(w[v], set, w[v], _mm512_set1_epi8(16));
        }
    }
};

// Q6_K: as they come, four lanes to each of sixteen groups.
template <> struct Integers<Format::Q6_K> : Whole<32> {
    static constexpr int BYTES = 210, GROUP = 16, SUMS = 4, HELD = 2;
    static constexpr int piece(int v, int q) { return 64 * v + 8 * q; }
    static constexpr int begins(int lane) { return 64 * (lane % 4) + 16 * (lane / 4); }
    static void numbers(const uint8_t* b, __m512i* w) {
        const __m512i high = _mm512_set1_epi8(0x30);
        const __m512i by_42 = _mm512_inserti64x4(_mm512_set1_epi16(4), _mm256_set1_epi16(2), 1), by_02 = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(2), 1);
        for (int h = 0; h < 2; h++) {
            const __m512i two = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)(b + 128 + 32 * h)));
            nibbles(_mm512_loadu_si512(b + 64 * h), w[2 * h], w[2 * h + 1]);
            w[2 * h] = _mm512_or_si512(w[2 * h], _mm512_and_si512(_mm512_sllv_epi16(two, by_42), high));
            w[2 * h + 1] = _mm512_or_si512(w[2 * h + 1], _mm512_and_si512(_mm512_srlv_epi16(two, by_02), high));
        }
    }
    static void fold(const __m512i (&s)[2][4], __m512i* to) {
        for (int r = 0; r < 2; r++) to[r] = four_of(pair_sums(s[r][0], s[r][1]), pair_sums(s[r][2], s[r][3]));
    }
    struct Scales {
        __m512 d[2], p[1];
        Scales(const uint8_t* a, const uint8_t* b) {
            const __m128i order = _mm_set_epi8(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
            const auto scales = [&](const uint8_t* p) {
                const __m128i s = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i*)(p + 192)), order);
                return _mm512_mul_ps(_mm512_set1_ps(half(p + 208)), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(s)));
            };
            d[0] = scales(a), d[1] = scales(b);
        }
    };
    static void totals(const float* acc, float* two) {
        for (int r = 0; r < 2; r++) two[r] = _mm512_reduce_add_ps(_mm512_load_ps(acc + 16 * r));
    }
};

} // namespace MOORAGE_ISA
