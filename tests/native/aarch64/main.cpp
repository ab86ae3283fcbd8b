// The kernels of native/ as a plain program: cases from stdin, results to stdout, so that another machine's build runs under an emulator.
//
// A case is an int32 code and its int32 numbers, then its arrays as bytes, as test_aarch64.py writes them; a result is float32.
#include "../../../native/ops.h"
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

template <class T> std::vector<T> take(size_t n) {
    std::vector<T> v(n);
    if (n && fread(v.data(), sizeof(T), n, stdin) != n) exit(2);
    return v;
}
int number() { return take<int32_t>(1)[0]; }
void give(const std::vector<float>& v) {
    if (fwrite(v.data(), sizeof(float), v.size(), stdout) != v.size()) exit(3);
}
Matrix matrix(Format f, const std::vector<uint8_t>& data, int64_t rows, int64_t cols) {
    return Matrix{f, data.data(), rows, cols, row_bytes(f, cols)};
}

void dequantize(Ops& ops) {
    const Format f = (Format)number();
    const int rows = number(), cols = number();
    const auto data = take<uint8_t>(rows * row_bytes(f, cols));
    std::vector<float> out((size_t)rows * cols);
    ops.dequantize(matrix(f, data, rows, cols), out.data());
    give(out);
}

void linear(Ops& ops) {
    const Format f = (Format)number();
    const int n = number(), rows = number(), cols = number();
    const auto x = take<float>((size_t)n * cols);
    const auto data = take<uint8_t>(rows * row_bytes(f, cols));
    std::vector<float> out((size_t)n * rows);
    ops.linear(x.data(), n, matrix(f, data, rows, cols), nullptr, out.data());
    give(out);
}

// One behind the other, each in one piece.
Experts in_a_row(const Matrix& first) {
    return {first, first.rows * first.stride, first.rows / 2 * first.stride};
}

void moe(Ops& ops) {
    const Format f = (Format)number();
    const int n = number(), k = number(), experts = number(), hidden = number(), inter = number();
    const auto x = take<float>((size_t)n * hidden);
    const auto ids = take<int32_t>((size_t)n * k);
    const auto weights = take<float>((size_t)n * k);
    const auto up = take<uint8_t>(experts * 2 * inter * row_bytes(f, hidden)), down = take<uint8_t>(experts * hidden * row_bytes(f, inter));
    std::vector<float> out((size_t)n * hidden);
    const Experts ups = in_a_row(matrix(f, up, 2 * inter, hidden)), downs = in_a_row(matrix(f, down, hidden, inter));
    ops.moe(x.data(), n, ids.data(), weights.data(), k, experts, nullptr, ups, downs, 0, out.data());
    give(out);
}

// One sequence from position 0, `steps` tokens at a time.
void attention(Ops& ops) {
    const int tokens = number(), steps = number(), heads = number(), kv_heads = number(), dim = number(), window = number();
    const auto q = take<float>((size_t)tokens * heads * dim);
    const auto k = take<float>((size_t)tokens * kv_heads * dim), v = take<float>((size_t)tokens * kv_heads * dim);
    const int count = (tokens + PAGE - 1) / PAGE;
    std::vector<uint16_t> kp((size_t)count * kv_heads * PAGE * dim), vp(kp.size());
    std::vector<int32_t> pages(count);
    for (int i = 0; i < count; i++) pages[i] = count - 1 - i;
    std::vector<float> out(q.size());
    for (int t = 0; t < tokens; t += steps) {
        const int32_t n = tokens - t < steps ? tokens - t : steps, cu[2] = {0, n}, start = t;
        const size_t at = (size_t)t * heads * dim, kv = (size_t)t * kv_heads * dim;
        ops.attention(AttentionJob{q.data() + at, kp.data(), vp.data(), out.data() + at, heads, kv_heads, dim, 0.125f, window}, k.data() + kv,
                      v.data() + kv, Sequences{cu, &start, pages.data(), nullptr, 1, count});
    }
    give(out);
}

// One sequence from position 0, `steps` tokens at a time.
void latent_attention(Ops& ops) {
    const int tokens = number(), steps = number(), heads = number(), dim = number(), rank = number();
    const auto q = take<float>((size_t)tokens * heads * dim), latent = take<float>((size_t)tokens * dim);
    const int count = (tokens + PAGE - 1) / PAGE;
    std::vector<uint16_t> held((size_t)count * PAGE * dim);
    std::vector<int32_t> pages(count);
    for (int i = 0; i < count; i++) pages[i] = count - 1 - i;
    std::vector<float> out((size_t)tokens * heads * rank);
    for (int t = 0; t < tokens; t += steps) {
        const int32_t n = tokens - t < steps ? tokens - t : steps, cu[2] = {0, n}, start = t;
        const AttentionJob job{q.data() + (size_t)t * heads * dim, held.data(), held.data(), out.data() + (size_t)t * heads * rank, heads, 1, dim,
                               0.125f, 0, rank};
        ops.attention(job, latent.data() + (size_t)t * dim, nullptr, Sequences{cu, &start, pages.data(), nullptr, 1, count});
    }
    give(out);
}

void heads_linear(Ops& ops) {
    const Format f = (Format)number();
    const int n = number(), heads = number(), rows = number(), cols = number();
    const auto x = take<float>((size_t)n * heads * cols);
    const auto data = take<uint8_t>(heads * rows * row_bytes(f, cols));
    std::vector<float> out((size_t)n * heads * rows);
    ops.heads_linear(x.data(), n, heads, matrix(f, data, rows, cols), out.data());
    give(out);
}

} // namespace

int main() {
    Ops ops(2, best_isa());
    void (*const cases[])(Ops&) = {dequantize, linear, moe, attention, latent_attention, heads_linear};
    for (int code; (code = number()) >= 0;) cases[code](ops);
}
