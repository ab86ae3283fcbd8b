// Dense and routed matrix products: what happens to a block of products once `gemm` has it.
#include "isa.h"
#if defined(__AMX_BF16__)
#include "gemm_amx.h"
#else
#include "gemm.h"
#endif
#include "kernels.h"

namespace MOORAGE_ISA {

// Rows [row0, row0 + rows) of a matrix in blocks: f(row, rows of the block, where the next block lies); `next` follows the last.
template <class Body> static void blocks(const Matrix& m, int64_t row0, int rows, const uint8_t* next, const Body& f) {
    for (int r = 0; r < rows; r += BLOCK) {
        const bool last = r + BLOCK >= rows;
        f(row0 + r, last ? rows - r : BLOCK, last ? next : m.data + (row0 + r + BLOCK) * m.stride);
    }
}

void linear(const LinearJob& j, int64_t at, int64_t tokens, int64_t row0, int rows, const uint8_t* next, void* scratch) {
    blocks(j.w, row0, rows, next, [&](int64_t r0, int nr, const uint8_t* following) {
        gemm(j.w, r0, nr, j.panel, j.n, at, tokens, scratch, following, [&](int64_t t0, int nt, const float* c) {
            for (int t = 0; t < nt; t++, c += BLOCK) {
                float* out = j.out + (at + t0 + t) * j.ld + r0;
                for (int r = 0; r < nr; r++) out[r] = j.bias ? c[r] + j.bias[r0 + r] : c[r];
            }
        });
    });
}

// Scratch: gemm's own, then the gate products of one block [TOKENS, 32].
size_t moe_scratch(const MoeJob& j) {
    const size_t up = gemm_scratch(j.up.one.format, j.up.one.cols), down = gemm_scratch(j.down.one.format, j.down.one.cols);
    return (up > down ? up : down) + (size_t)TOKENS * BLOCK * sizeof(float);
}

static Matrix of_expert(const Experts& all, int64_t expert) {
    Matrix m = all.one;
    m.data += expert * all.stride;
    return m;
}

// hidden = act(gate) * up for rows [row0, row0 + rows) of the intermediate dimension.
void moe_up(const MoeJob& j, int64_t g, int64_t row0, int rows, const uint8_t* next, void* scratch) {
    const Matrix w = of_expert(j.up, j.expert[g]);
    Matrix up = w;
    up.data += j.up.half;
    const int64_t n = j.offset[g + 1] - j.offset[g], inter = w.rows / 2;
    const void* panel = j.panel + j.panel_at[g];
    float* gate = (float*)((uint8_t*)scratch + moe_scratch(j)) - TOKENS * BLOCK;
    for (int64_t at = 0; at < n; at += TOKENS)
        blocks(w, row0, rows, next, [&](int64_t r0, int nr, const uint8_t* following) {
            const int64_t tokens = n - at < TOKENS ? n - at : TOKENS;
            gemm(w, r0, nr, panel, n, at, tokens, scratch, up.data + r0 * up.stride,
                 [&](int64_t t0, int nt, const float* c) { memcpy(gate + t0 * BLOCK, c, sizeof(float) * nt * BLOCK); });
            gemm(up, r0, nr, panel, n, at, tokens, scratch, following, [&](int64_t t0, int nt, const float* c) {
                for (int t = 0; t < nt; t++, c += BLOCK) {
                    const float* a = gate + (t0 + t) * BLOCK;
                    float* out = j.hidden + (j.offset[g] + at + t0 + t) * inter + r0;
                    for (int r = 0; r < nr; r += 16) {
                        const F h = activate(load(a + r), j.act) * load(c + r);
                        nr - r >= 16 ? store(out + r, h) : store_part(out + r, h, nr - r);
                    }
                }
            });
        });
}

// A row's experts are summed in ascending expert order, from zero.
void moe_down(const MoeJob& j, int64_t row0, int rows, int64_t tokens, const uint8_t* next, void* scratch) {
    const int64_t ld = j.down.one.rows;
    for (int64_t t = 0; t < tokens; t++) memset(j.out + t * ld + row0, 0, rows * sizeof(float));
    for (int64_t g = 0; g < j.groups; g++) {
        const Matrix w = of_expert(j.down, j.expert[g]);
        const int64_t n = j.offset[g + 1] - j.offset[g];
        const uint8_t* after = g + 1 < j.groups ? of_expert(j.down, j.expert[g + 1]).data + row0 * w.stride : next;
        for (int64_t at = 0; at < n; at += TOKENS)
            blocks(w, row0, rows, after, [&](int64_t r0, int nr, const uint8_t* following) {
                gemm(w, r0, nr, j.hidden_panel + j.hidden_at[g], n, at, n - at < TOKENS ? n - at : TOKENS, scratch, following,
                     [&](int64_t t0, int nt, const float* c) {
                         for (int t = 0; t < nt; t++, c += BLOCK) {
                             const int64_t slot = j.offset[g] + at + t0 + t;
                             const F weight = splat(j.weight[slot]);
                             float* out = j.out + j.token[slot] * ld + r0;
                             for (int r = 0; r < nr; r += 16)
                                 if (nr - r >= 16)
                                     store(out + r, fma(weight, load(c + r), load(out + r)));
                                 else
                                     store_part(out + r, fma(weight, load(c + r), load_part(out + r, nr - r)), nr - r);
                         }
                     });
            });
    }
}

#if defined(MOORAGE_INTEGERS)
bool packs_once(Format format) { return with_integers(format, []<class C>() {}); }
void gather(void* panel, int64_t rows, int64_t cols, int64_t block, const void* packed, int64_t total, const int32_t* index) {
    gather_steps((XStep*)panel, rows, cols, block, (const XStep*)packed, total, index);
}
#else
bool packs_once(Format) { return false; }
void gather(void*, int64_t, int64_t, int64_t, const void*, int64_t, const int32_t*) {}
#endif

float read(const uint8_t* p, int64_t bytes) {
    F acc[4] = {zero(), zero(), zero(), zero()};
    int64_t i = 0;
    for (; i + 256 <= bytes; i += 256)
        for (int a = 0; a < 4; a++) acc[a] = max(acc[a], load((const float*)(p + i + 64 * a)));
    float last = 0;
    for (; i < bytes; i++) last += p[i];
    return top(max(max(acc[0], acc[1]), max(acc[2], acc[3]))) + last;
}

void fill_linear(Kernels& k) {
#if defined(__AMX_BF16__)
    k.dequant = dequant;
#else
    k.dequant = read_row;
#endif
    k.read = read;
    k.panel_bytes = panel_bytes, k.pack = pack, k.packs_once = packs_once, k.gather = gather;
    k.linear_scratch = gemm_scratch, k.linear = linear;
    k.moe_scratch = moe_scratch, k.moe_up = moe_up, k.moe_down = moe_down;
}

} // namespace MOORAGE_ISA
