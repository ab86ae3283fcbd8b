// Weight formats as data: a row is a run of equal blocks, each `elements` weights in `bytes` bytes.
//
// Block layouts are ggml's; `kernels/dequant.h` gives every format its one meaning, bit-equal in float32 to the `gguf` package.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum class Format : int { F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, Q2_K, Q3_K, IQ2_XXS, IQ2_XS, IQ3_XXS,
                          IQ4_NL, IQ4_XS, MXFP4, NVFP4, NVFP4_SCALED, F8_E4M3, COUNT };

struct FormatInfo {
    const char* name; // ggml's type name, or one of ours (`engine/kernels/blocks.py`)
    int elements;
    int bytes;
};

constexpr FormatInfo FORMATS[] = {
    {"F32", 1, 4},    {"F16", 1, 2},    {"BF16", 1, 2},     {"Q8_0", 32, 34},   {"Q4_0", 32, 18},   {"Q4_1", 32, 20},
    {"Q5_0", 32, 22}, {"Q5_1", 32, 24}, {"Q4_K", 256, 144}, {"Q5_K", 256, 176}, {"Q6_K", 256, 210},
    {"Q2_K", 256, 84}, {"Q3_K", 256, 110}, {"IQ2_XXS", 256, 66}, {"IQ2_XS", 256, 74}, {"IQ3_XXS", 256, 98}, {"IQ4_NL", 32, 18}, {"IQ4_XS", 256, 136},
    {"MXFP4", 32, 17}, {"NVFP4", 64, 36}, // ggml's
    {"NVFP4_SCALED", 128, 76},            // float32 of the whole matrix, then two NVFP4 blocks
    {"F8_E4M3", 128, 132},                // float32 scale, then the numbers (e4m3fn)
};
static_assert(sizeof(FORMATS) / sizeof(FORMATS[0]) == (size_t)Format::COUNT);

inline const FormatInfo& info(Format f) { return FORMATS[(int)f]; }
inline int64_t row_bytes(Format f, int64_t cols) { return cols / info(f).elements * info(f).bytes; }

// `rows` x `cols` weights, row-major, as stored.
struct Matrix {
    Format format;
    const uint8_t* data;
    int64_t rows, cols, stride; // stride: bytes from row to row
};

// Matrices of one shape: expert e lies at one.data + e * stride. Its lower half of rows (up, below gate) lies `half` bytes behind
// the upper one, which is half of `rows` where they are one matrix and something else where a file keeps them apart.
struct Experts {
    Matrix one;
    int64_t stride, half;
};

// f.operator()<FORMAT>() for the format that `format` names.
template <int I = 0, class Body> void with_format(Format format, const Body& f) {
    if constexpr (I < (int)Format::COUNT) (int)format == I ? f.template operator()<(Format)I>() : with_format<I + 1>(format, f);
}
