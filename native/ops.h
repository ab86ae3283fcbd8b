// The operations of `engine/kernels/ops.py` over plain pointers: cut into tasks here, computed by one ISA's kernels.
//
// Inputs are already checked (tensors.h). Methods may be called from several threads; one runs at a time.
#pragma once
#include "halves.h"
#include "kernels/kernels.h"
#include "pool.h"
#include "reader.h"

#include <algorithm>
#include <functional>

struct Sequences {
    const int32_t *cu, *start, *pages, *slot; // [n + 1], [n], [n, width], [n]
    int n, width;
};

class Ops {
public:
    Ops(int threads, Isa isa, std::vector<int> cpus = {})
        : isa_(isa), kernels_(kernels(isa)), pool_(threads, std::move(cpus)) {}
    Isa isa() const { return isa_; }
    int threads() const { return pool_.threads(); }

    void dequantize(const Matrix& m, float* out);
    void embed(const Matrix& table, const int32_t* ids, int64_t n, float* out);
    // rows of out lie `ld` apart, 0: one behind the other
    void linear(const float* x, int64_t n, const Matrix& w, const float* bias, float* out, int64_t ld = 0);
    // products with several matrices of the same columns, one behind the other in rows of `ld`; a bias may be null
    void side_by_side(const float* x, int64_t n, const Matrix* parts, const float* const* biases, int64_t count, float* out, int64_t ld);
    // up [B, 2I, H], down [B, H, I]: shapes of one expert; expert e lies at place[e] of these banks (null: at e)
    void moe(const float* x, int64_t n, const int32_t* ids, const float* weights, int k, int64_t experts, const int32_t* place,
             const Experts& up, const Experts& down, int act, float* out);
    // As `moe`, into slots of `reader`: each of `coming` is computed as far as it is read, the others before. Every result is that of
    // the expert alone, merged: bit for bit what `moe` makes of them. Some that did not come leave `out` as it is.
    struct Coming {
        int32_t expert;
        int64_t key; // of the reader
    };
    struct Came {
        std::vector<int64_t> lost; // keys
        double waited = 0;         // seconds
    };
    Came moe_arriving(const float* x, int64_t n, const int32_t* ids, const float* weights, int k, int64_t experts, const int32_t* place,
                      const Experts& up, const Experts& down, int act, std::vector<Coming> coming, Reader& reader, float* out);
    // parts [n, k, width] of a token's experts -> their weighted sum, bit for bit what `moe` makes of them
    void moe_merge(const float* parts, const int32_t* ids, const float* weights, int64_t n, int k, int64_t width, float* out);
    // v null: values are part of the keys, see AttentionJob
    void attention(AttentionJob job, const float* k, const float* v, const Sequences& s);
    // a matrix for each head: x [n, heads, w.cols] -> out [n, heads, w.rows]; w is that of head 0, the others follow it; heads of out
    // lie `apart` apart, 0: one behind the other
    void heads_linear(const float* x, int64_t n, int heads, const Matrix& w, float* out, int64_t apart = 0);
    void delta_net(DeltaJob job, int64_t tokens);
    void rms_norm(const float* x, const float* w, float eps, bool plus_one, float* out, int64_t rows, int64_t n);
    void gated_norm(const float* x, const float* z, const float* w, float eps, float* out, int64_t rows, int64_t n);
    void rope(const float* x, const float* cos, const float* sin, bool interleaved, float* out, int64_t rows, int heads, int dim,
              int rot);
    // x += added, out = rms_norm(x): a residual and the norm behind it
    void add_norm(float* x, const float* added, const float* w, float eps, float* out, int64_t rows, int64_t n);
    // the heads of q and k in x [rows, width], one behind the other: norm of each (w null: none), rotation (cos null: none), in place
    void turn_heads(float* x, int64_t rows, int64_t width, int q_heads, int k_heads, int dim, const float* q_w, const float* k_w,
                    float eps, const float* cos, const float* sin, bool interleaved, int rot);
    void gate_mul(const float* gate, const float* up, int act, float* out, int64_t n);
    void route(const float* logits, int64_t rows, const RouteRule& rule, int32_t* ids, float* weights);
    float read(const uint8_t* data, int64_t bytes);
    std::vector<Pool::Traced> trace(bool on) {
        auto held = pool_.hold();
        return pool_.trace(on);
    }

    // halves.h
    static constexpr int ROLES = 10;
    void attention_half(const AttentionHalf& a, const Stream& s, const Rotation& rope, uint16_t* k_pages, uint16_t* v_pages,
                        const Sequences& seq);
    void latent_half(const LatentHalf& a, const Stream& s, const Rotation& rope, uint16_t* pages, const Sequences& seq);
    void delta_half(const DeltaHalf& d, const Stream& s, float* conv_state, float* state, const int32_t* cu, const int32_t* slot,
                    int sequences, const int32_t* kept);
    void mlp_half(const MlpHalf& m, const Stream& s);
    // Experts it needs that are not sound: x then has what was added to it, not the result.
    std::vector<int32_t> moe_half(const MoeHalf& m, const Stream& s);
    // As far as the routed experts: out [n, hidden] is what they get; x is left without their result.
    void choose_half(const MoeHalf& m, const Stream& s, float* out, int32_t* ids, float* weights, float* always);

private:
    static constexpr int64_t TASK_ELEMENTS = 8192; // elementwise work below ~2 us is cheaper than waking a thread

    // f(row) for every row, several rows a task so that a task is worth waking a thread for.
    template <class Body> void rows(const char* name, int64_t n, int64_t row_elements, const Body& f) {
        const int64_t step = std::max<int64_t>(1, TASK_ELEMENTS / std::max<int64_t>(1, row_elements));
        pool_.run({name}, (n + step - 1) / step, [&](int64_t task, int) {
            for (int64_t r = task * step; r < std::min(n, (task + 1) * step); r++) f(r);
        });
    }

    // How many bytes of an expert are there: more than these, or it waits; -1: they will not come.
    using Beyond = std::function<int64_t(int64_t)>;
    // `beyond`: of the only expert of `ids`. False: it did not come.
    bool moe_as_far(const float* x, int64_t n, const int32_t* ids, const float* weights, int k, int64_t experts, const int32_t* place,
                    const Experts& up, const Experts& down, int act, const Beyond* beyond, float* out);
    float* room(int role, int64_t count);
    float* normed(const Norm& norm, const Stream& s);
    float* fan(const Fan& f, const float* x, int64_t n);
    const float* columns(int role, const float* wide, int64_t n, int64_t width, int64_t first, int64_t count);
    float* gated(const float* wide, int64_t n, int64_t width, int64_t first, int64_t inter, int act);
    void route_half(const MoeHalf& m, const float* x, int64_t n, int32_t* ids, float* weights, float* always);
    void add(float* x, const float* y, int64_t n);

    const Isa isa_;
    const Kernels& kernels_;
    Pool pool_;
    std::mutex halves_;         // taken before the pool's: scratch of a half lives longer than one operation
    Pool::Buffer half_[ROLES]; // kept: the next layer needs the same
    std::mutex arriving_;      // likewise
    Pool::Buffer parts_, rows_, results_;
};
