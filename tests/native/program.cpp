// The kernels of native/ as a plain program: cases from stdin, results to stdout, so that another machine's build runs under an emulator.
//
// A case is an int32 code and its int32 numbers, then its arrays as bytes, as program.py writes them; a result is float32. Every array
// ends where a page ends that nobody may touch the next of: a kernel that reads or writes too far dies.
#include "../../native/ops.h"
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <sys/mman.h>

namespace {

template <class T> class Array {
public:
    explicit Array(size_t n) : size_(n), bytes_((n * sizeof(T) + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES + PAGE_BYTES) {
        pages_ = (uint8_t*)mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (pages_ == MAP_FAILED || mprotect(pages_ + bytes_ - PAGE_BYTES, PAGE_BYTES, PROT_NONE)) exit(4);
    }
    Array(const Array&) = delete;
    ~Array() { munmap(pages_, bytes_); }
    T* data() const { return (T*)(pages_ + bytes_ - PAGE_BYTES) - size_; }
    size_t size() const { return size_; }

private:
    static constexpr size_t PAGE_BYTES = 4096;
    size_t size_, bytes_;
    uint8_t* pages_;
};

template <class T> struct Taken : Array<T> {
    explicit Taken(size_t n) : Array<T>(n) {
        if (n && fread(this->data(), sizeof(T), n, stdin) != n) exit(2);
    }
};
int number() {
    int32_t n;
    if (fread(&n, sizeof n, 1, stdin) != 1) exit(2);
    return n;
}
void give(const Array<float>& v) {
    if (fwrite(v.data(), sizeof(float), v.size(), stdout) != v.size()) exit(3);
}
Matrix matrix(Format f, const Array<uint8_t>& data, int64_t rows, int64_t cols) {
    return Matrix{f, data.data(), rows, cols, row_bytes(f, cols)};
}

void dequantize(Ops& ops) {
    const Format f = (Format)number();
    const int rows = number(), cols = number();
    const Taken<uint8_t> data(rows * row_bytes(f, cols));
    Array<float> out((size_t)rows * cols);
    ops.dequantize(matrix(f, data, rows, cols), out.data());
    give(out);
}

void linear(Ops& ops) {
    const Format f = (Format)number();
    const int n = number(), rows = number(), cols = number();
    const Taken<float> x((size_t)n * cols);
    const Taken<uint8_t> data(rows * row_bytes(f, cols));
    Array<float> out((size_t)n * rows);
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
    const Taken<float> x((size_t)n * hidden);
    const Taken<int32_t> ids((size_t)n * k);
    const Taken<float> weights((size_t)n * k);
    const Taken<uint8_t> up(experts * 2 * inter * row_bytes(f, hidden)), down(experts * hidden * row_bytes(f, inter));
    Array<float> out((size_t)n * hidden);
    const Experts ups = in_a_row(matrix(f, up, 2 * inter, hidden)), downs = in_a_row(matrix(f, down, hidden, inter));
    ops.moe(x.data(), n, ids.data(), weights.data(), k, experts, nullptr, ups, downs, 0, out.data());
    give(out);
}

// One sequence from position 0, `steps` tokens at a time.
void attention(Ops& ops) {
    const int tokens = number(), steps = number(), heads = number(), kv_heads = number(), dim = number(), window = number();
    const Taken<float> q((size_t)tokens * heads * dim);
    const Taken<float> k((size_t)tokens * kv_heads * dim), v((size_t)tokens * kv_heads * dim);
    const int count = (tokens + PAGE - 1) / PAGE;
    Array<uint16_t> kp((size_t)count * kv_heads * PAGE * dim), vp(kp.size());
    Array<int32_t> pages(count);
    for (int i = 0; i < count; i++) pages.data()[i] = count - 1 - i;
    Array<float> out(q.size());
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
    const Taken<float> q((size_t)tokens * heads * dim), latent((size_t)tokens * dim);
    const int count = (tokens + PAGE - 1) / PAGE;
    Array<uint16_t> held((size_t)count * PAGE * dim);
    Array<int32_t> pages(count);
    for (int i = 0; i < count; i++) pages.data()[i] = count - 1 - i;
    Array<float> out((size_t)tokens * heads * rank);
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
    const Taken<float> x((size_t)n * heads * cols);
    const Taken<uint8_t> data(heads * rows * row_bytes(f, cols));
    Array<float> out((size_t)n * heads * rows);
    ops.heads_linear(x.data(), n, heads, matrix(f, data, rows, cols), out.data());
    give(out);
}

// One sequence from an empty state, `steps` tokens at a time; behind its rows the state and the convolution's.
void delta(Ops& ops) {
    const int tokens = number(), steps = number(), key_heads = number(), value_heads = number(), key_dim = number(), value_dim = number();
    const int taps = number(), channels = 2 * key_heads * key_dim + value_heads * value_dim;
    const Taken<float> qkv((size_t)tokens * channels), a((size_t)tokens * value_heads), b((size_t)tokens * value_heads);
    const Taken<float> conv((size_t)channels * taps), dt_bias(value_heads), a_log(value_heads);
    Array<float> out((size_t)tokens * value_heads * value_dim), past((size_t)channels * (taps - 1)), state((size_t)value_heads * key_dim * value_dim);
    Array<float> mixed((size_t)tokens * channels), decay((size_t)tokens * value_heads), beta((size_t)tokens * value_heads);
    for (int t = 0; t < tokens; t += steps) {
        const int32_t n = tokens - t < steps ? tokens - t : steps, cu[2] = {0, n}, slot = 0;
        ops.delta_net(DeltaJob{qkv.data() + (size_t)t * channels, a.data() + t * value_heads, b.data() + t * value_heads, conv.data(), dt_bias.data(),
                               a_log.data(), past.data(), state.data(), mixed.data(), decay.data(), beta.data(),
                               out.data() + (size_t)t * value_heads * value_dim, key_heads, value_heads, key_dim, value_dim, taps, cu, &slot, 1,
                               nullptr},
                      n);
    }
    give(out), give(state), give(past);
}

void norms(Ops& ops) {
    const int n = number(), width = number(), plus_one = number();
    const Taken<float> x((size_t)n * width), z((size_t)n * width), w(width);
    Array<float> plain((size_t)n * width), gated((size_t)n * width);
    ops.rms_norm(x.data(), w.data(), 1e-6f, plus_one, plain.data(), n, width);
    ops.gated_norm(x.data(), z.data(), w.data(), 1e-6f, gated.data(), n, width);
    give(plain), give(gated);
}

void rope(Ops& ops) {
    const int n = number(), heads = number(), dim = number(), rot = number(), interleaved = number();
    const Taken<float> x((size_t)n * heads * dim), cos((size_t)n * rot / 2), sin((size_t)n * rot / 2);
    Array<float> out(x.size());
    ops.rope(x.data(), cos.data(), sin.data(), interleaved, out.data(), n, heads, dim, rot);
    give(out);
}

void gate_mul(Ops& ops) {
    const int n = number(), act = number();
    const Taken<float> gate(n), up(n);
    Array<float> out(n);
    ops.gate_mul(gate.data(), up.data(), act, out.data(), n);
    give(out);
}

void route(Ops& ops) {
    const int n = number(), experts = number(), k = number(), sigmoid = number(), groups = number(), top_groups = number();
    const Taken<float> logits((size_t)n * experts), bias(experts);
    Array<int32_t> ids((size_t)n * k);
    Array<float> weights(ids.size()), chosen(ids.size());
    ops.route(logits.data(), n, RouteRule{experts, k, sigmoid != 0, true, 2.5f, groups, top_groups, 2, bias.data()}, ids.data(), weights.data());
    for (size_t i = 0; i < ids.size(); i++) chosen.data()[i] = (float)ids.data()[i];
    give(chosen), give(weights);
}

// Half layers one behind the other, `steps` rows of a sequence a call: attention, a gated product, DeltaNet, experts with a shared one,
// latent attention.
void halves(Ops& ops) {
    const Format f = (Format)number();
    const int tokens = number(), steps = number(), hidden = number(), heads = number(), kv_heads = number(), dim = number(), inter = number();
    const int key_heads = number(), value_heads = number(), key_dim = number(), taps = number(), experts = number(), k = number();
    const int mix = (2 * key_heads + value_heads) * key_dim, values = value_heads * key_dim, count = (tokens + PAGE - 1) / PAGE;
    std::deque<Taken<float>> floats;
    std::deque<Taken<uint8_t>> bytes;
    const auto vector = [&](size_t n) { return (const float*)floats.emplace_back(n).data(); };
    const auto weight = [&](int rows, int cols) { return matrix(f, bytes.emplace_back(rows * row_bytes(f, cols)), rows, cols); };
    const auto fan = [&](std::initializer_list<int> rows) {
        Fan all;
        for (int r : rows) all.parts.push_back(weight(r, hidden)), all.biases.push_back(nullptr), all.width += r;
        return all;
    };
    const auto norm = [&] { return Norm{vector(hidden), hidden, 1e-6f}; };

    Taken<float> x((size_t)tokens * hidden), cos((size_t)tokens * dim / 2), sin((size_t)tokens * dim / 2);
    AttentionHalf a{};
    a.norm = norm(), a.in = fan({2 * heads * dim, kv_heads * dim, kv_heads * dim}), a.q_norm = vector(dim), a.k_norm = vector(dim);
    a.out = weight(hidden, heads * dim), a.heads = heads, a.kv_heads = kv_heads, a.dim = dim, a.scale = 0.125f, a.gate = true;
    MlpHalf m{};
    m.norm = norm(), m.in = fan({inter, inter}), m.down = weight(hidden, inter);
    DeltaHalf d{};
    d.norm = norm(), d.in = fan({mix, values, value_heads, value_heads}), d.conv = vector((size_t)mix * taps), d.dt_bias = vector(value_heads);
    d.a_log = vector(value_heads), d.out_norm = vector(key_dim), d.out = weight(hidden, values);
    d.key_heads = key_heads, d.value_heads = value_heads, d.key_dim = d.value_dim = key_dim, d.taps = taps;
    MoeHalf e{};
    e.norm = norm(), e.in = fan({experts, 1, inter, inter}), e.experts = experts, e.k = k, e.renorm = true, e.scale = 1, e.groups = e.top_groups = 1;
    e.group_best = 2, e.shared = inter, e.shared_switch = true, e.shared_down = weight(hidden, inter);
    const Matrix up = weight(experts * 2 * inter, hidden), down = weight(experts * hidden, inter);
    e.up = in_a_row(Matrix{f, up.data, 2 * inter, hidden, up.stride}), e.down = in_a_row(Matrix{f, down.data, hidden, inter, down.stride});

    LatentHalf l{};
    const int rank = 2 * dim; // of keys and values; queries come from a latent of `inter`
    l.norm = norm(), l.in = fan({inter, rank + dim}), l.q_norm = vector(inter), l.q = weight(heads * 2 * dim, inter), l.kv_norm = vector(rank);
    const Matrix keys = weight(heads * rank, dim), parts = weight(heads * dim, rank);
    l.keys = Matrix{f, keys.data, rank, dim, keys.stride}, l.values = Matrix{f, parts.data, dim, rank, parts.stride};
    l.out = weight(hidden, heads * dim), l.heads = heads, l.rank = rank, l.plain = l.turned = dim, l.eps = 1e-6f, l.scale = 0.125f;
    l.interleaved = true;

    Array<uint16_t> kp((size_t)count * kv_heads * PAGE * dim), vp(kp.size()), latents((size_t)count * PAGE * (rank + dim));
    Array<int32_t> pages(count);
    for (int i = 0; i < count; i++) pages.data()[i] = i;
    Array<float> past((size_t)mix * (taps - 1)), state((size_t)value_heads * key_dim * key_dim);
    for (int t = 0; t < tokens; t += steps) {
        const int32_t n = tokens - t < steps ? tokens - t : steps, cu[2] = {0, n}, start = t, slot = 0;
        const Stream s{x.data() + (size_t)t * hidden, nullptr, n};
        const Rotation rope{cos.data() + (size_t)t * dim / 2, sin.data() + (size_t)t * dim / 2, dim};
        const Sequences seq{cu, &start, pages.data(), nullptr, 1, count};
        ops.attention_half(a, s, rope, kp.data(), vp.data(), seq);
        ops.mlp_half(m, s);
        ops.delta_half(d, s, past.data(), state.data(), cu, &slot, 1, nullptr);
        ops.moe_half(e, s);
        ops.latent_half(l, s, rope, latents.data(), seq);
    }
    give(x);
}

void best(Ops& ops) {
    Array<float> isa(1);
    isa.data()[0] = (float)(int)ops.isa();
    give(isa);
}

} // namespace

int main(int arguments, char** argument) { // one: threads
    Ops ops(arguments > 1 ? atoi(argument[1]) : 2, best_isa());
    void (*const cases[])(Ops&) = {dequantize, linear, moe, attention, latent_attention, heads_linear, delta,
                                   norms, rope, gate_mul, route, best, halves};
    for (int code; (code = number()) >= 0;) cases[code](ops);
}
