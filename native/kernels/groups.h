// Stored weight rows as float32, 32 at a time, in registers: what the float32 products read (kernels/gemm.h).
//
// Bit-equal to kernels/dequant.h. A reader is one row; `group(g, a, b)` gives weights 32g..32g+31 as two F, after `begin` of the eight
// groups it belongs to. Loops over groups are unrolled UNROLL times, so that what depends on g % UNROLL is known when compiled; a row
// holds a multiple of it. A reader with an `odd` flag reads the eight groups by `odd_group` where it is set. Where no better way is known
// whole blocks are decoded into a buffer. With AVX-512 a group of 4-bit numbers is a register of its sixteen possible float32 values (scale times number, and the minimum), and a weight is one lookup by the low four bits of a lane: no masks, no
// conversions. The scales of eight groups are converted at once and come back as broadcasts from memory, which cost no shuffle.
#pragma once
#include "dequant.h"

namespace MOORAGE_ISA {

constexpr int GROUP = 32;

struct Half16 {
    uint16_t bits;
};
struct Brain16 {
    uint16_t bits;
};

struct BlockReader { // any block format, eight groups ahead through memory
    static constexpr int UNROLL = 1;
    const Format format;
    const uint8_t* row;
    int64_t cols;
    alignas(64) float values[256];

    BlockReader(Format f, const uint8_t* p, int64_t n) : format(f), row(p), cols(n) {}
    void begin(int64_t g) {
        const FormatInfo& f = info(format);
        const uint8_t* b = row + g * GROUP / f.elements * f.bytes;
        const int64_t left = cols - g * GROUP;
        for (int i = 0; i < 256 && i < left; i += f.elements, b += f.bytes) block(format, b, values + i);
    }
    void group(int64_t g, F& a, F& b) const { a = load(values + g % 8 * GROUP), b = load(values + g % 8 * GROUP + 16); }
};

// Plain floats: a row may end anywhere; zeros stand behind its end.
template <class T> struct FloatReader {
    static constexpr int UNROLL = 1;
    const T* row;
    int64_t cols;

    FloatReader(Format, const uint8_t* p, int64_t n) : row((const T*)p), cols(n) {}
    static F sixteen(const float* p) { return load(p); }
    static F sixteen(const Half16* p) { return load_f16((const uint16_t*)p); }
    static F sixteen(const Brain16* p) { return load_bf16((const uint16_t*)p); }
    void begin(int64_t) const {}
    F some(int64_t k) const {
        if (k + 16 <= cols) return sixteen(row + k);
        T last[16] = {};
        if (k < cols) memcpy(last, row + k, (cols - k) * sizeof(T));
        return sixteen(last);
    }
    void group(int64_t g, F& a, F& b) const {
        if (GROUP * (g + 1) <= cols)
            a = sixteen(row + GROUP * g), b = sixteen(row + GROUP * g + 16);
        else
            a = some(GROUP * g), b = some(GROUP * g + 16);
    }
};

template <Format> struct Best { using Reader = BlockReader; };
template <> struct Best<Format::F32> { using Reader = FloatReader<float>; };
template <> struct Best<Format::F16> { using Reader = FloatReader<Half16>; };
template <> struct Best<Format::BF16> { using Reader = FloatReader<Brain16>; };

} // namespace MOORAGE_ISA

#if defined(__AVX512F__) && !defined(__AMX_BF16__)
#include "groups_avx512.h"
#elif defined(__AVX2__) && !defined(__AVX512F__)
#include "groups_avx2.h"
#endif

namespace MOORAGE_ISA {

// f.operator()<R>() for the reader R of `format`.
template <class Body> void with_reader(Format format, const Body& f) {
    with_format(format, [&]<Format FORMAT>() { f.template operator()<typename Best<FORMAT>::Reader>(); });
}

} // namespace MOORAGE_ISA
