// What the products of whole numbers share (kernels/gemm_integers.h, kernels/gemm_bytes.h): a panel of steps of 256 values of x.
#pragma once
#include "kernels.h"
#include "panel.h"

namespace MOORAGE_ISA {

// f.operator()<Integers<FORMAT>>() if the format is one; says whether it is.
template <class Body> bool with_integers(Format format, const Body& f) {
    bool known = false;
    with_format(format, [&]<Format FORMAT>() {
        if constexpr (Integers<FORMAT>::KNOWN) known = true, f.template operator()<Integers<FORMAT>>();
    });
    return known;
}

inline int64_t steps_of(int64_t cols) { return (cols + STEP - 1) / STEP; }

// Panel rows of block `b` as steps, each packed by `pack(256 values, step)`; zeros behind the last column. Step s of all rows lies side by
// side: rows that meet the same weights are one stream.
template <class Step, class Pack>
void pack_steps(Step* to, int64_t rows, int64_t cols, int64_t b, const float* x, const int32_t* index, const Pack& pack) {
    const int64_t steps = steps_of(cols);
    for (int64_t i = b * BLOCK; i < rows && i < (b + 1) * BLOCK; i++) {
        const float* from = x + (index ? index[i] : i) * cols;
        for (int64_t s = 0; s < steps; s++) {
            if ((s + 1) * STEP <= cols) {
                pack(from + s * STEP, to[s * rows + i]);
                continue;
            }
            float last[STEP] = {};
            memcpy(last, from + s * STEP, (cols - s * STEP) * sizeof(float));
            pack(last, to[s * rows + i]);
        }
    }
}

// The same out of a panel of `total` rows that are packed already.
template <class Step> void gather_steps(Step* to, int64_t rows, int64_t cols, int64_t b, const Step* from, int64_t total, const int32_t* index) {
    for (int64_t s = 0; s < steps_of(cols); s++)
        for (int64_t i = b * BLOCK; i < rows && i < (b + 1) * BLOCK; i++) memcpy(&to[s * rows + i], &from[s * total + index[i]], sizeof(Step));
}

} // namespace MOORAGE_ISA
