#include "halves.h"
#include "ops.h"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace {

// Scratch of halves, by what lies in it. What a half holds at once has names of its own.
enum Role { NORMED, WIDE, HEADS, FIRST, SECOND, THIRD, FOURTH, MIXED, RESULT, IDS, ROLES };
static_assert(ROLES <= Ops::ROLES);

constexpr int SIGMOID = 2;
constexpr int64_t PIECE = 1024; // elements of a task of a plain sum

} // namespace

float* Ops::room(int role, int64_t count) { return (float*)half_[role].need(count * sizeof(float)); }

// `added` into x, then the norm of x.
float* Ops::normed(const Norm& norm, const Stream& s) {
    float* out = room(NORMED, s.n * norm.width);
    if (s.added)
        add_norm(s.x, s.added, norm.weight, norm.eps, out, s.n, norm.width);
    else
        rms_norm(s.x, norm.weight, norm.eps, false, out, s.n, norm.width);
    return out;
}

float* Ops::fan(const Fan& f, const float* x, int64_t n) {
    float* out = room(WIDE, n * f.width);
    side_by_side(x, n, f.parts.data(), f.biases.data(), (int64_t)f.parts.size(), out, f.width);
    return out;
}

// Columns [first, first + count) of rows of `width`, one behind the other; where they lie when they do so already.
const float* Ops::columns(int role, const float* wide, int64_t n, int64_t width, int64_t first, int64_t count) {
    if (n == 1 || width == count) return wide + first;
    float* out = room(role, n * count);
    auto held = pool_.hold();
    rows("columns", n, count, [&](int64_t r) { memcpy(out + r * count, wide + r * width + first, count * sizeof(float)); });
    return out;
}

void Ops::add(float* x, const float* y, int64_t n) {
    auto held = pool_.hold();
    rows("add", (n + PIECE - 1) / PIECE, PIECE, [&](int64_t p) {
        for (int64_t i = p * PIECE; i < std::min(n, (p + 1) * PIECE); i++) x[i] += y[i];
    });
}

void Ops::attention_half(const AttentionHalf& a, const Stream& s, const Rotation& rope, uint16_t* k_pages, uint16_t* v_pages,
                         const Sequences& seq) {
    std::lock_guard held(halves_);
    const int64_t n = s.n, dim = a.dim, q_width = a.heads * dim, kv_width = a.kv_heads * dim, width = q_width + 2 * kv_width;
    float* wide = fan(a.in, normed(a.norm, s), n);
    float* heads = wide;
    if (a.gate) {
        heads = room(HEADS, n * width);
        auto pool = pool_.hold();
        rows("gate", n, width, [&](int64_t r) {
            const float* from = wide + r * a.in.width;
            float* to = heads + r * width;
            for (int h = 0; h < a.heads; h++) memcpy(to + h * dim, from + 2 * h * dim, dim * sizeof(float));
            memcpy(to + q_width, from + 2 * q_width, 2 * kv_width * sizeof(float));
        });
    }
    if (a.q_norm || rope.cos)
        turn_heads(heads, n, width, a.heads, a.kv_heads, a.dim, a.q_norm, a.k_norm, a.norm.eps, rope.cos, rope.sin, a.interleaved, rope.rot);
    const float* q = columns(FIRST, heads, n, width, 0, q_width);
    const float* k = columns(SECOND, heads, n, width, q_width, kv_width);
    const float* v = columns(THIRD, heads, n, width, q_width + kv_width, kv_width);
    float* mixed = room(MIXED, n * q_width);
    attention(AttentionJob{q, k_pages, v_pages, mixed, a.heads, a.kv_heads, a.dim, a.scale, a.window}, k, v, seq);
    if (a.gate) {
        auto pool = pool_.hold();
        rows("gate", n, q_width, [&](int64_t r) {
            for (int h = 0; h < a.heads; h++) {
                float* out = mixed + r * q_width + h * dim;
                kernels_.gate_mul(wide + r * a.in.width + (2 * h + 1) * dim, out, SIGMOID, out, dim);
            }
        });
    }
    float* result = room(RESULT, n * a.norm.width);
    linear(mixed, n, a.out, a.out_bias, result);
    add(s.x, result, n * a.norm.width);
}

void Ops::latent_half(const LatentHalf& a, const Stream& s, const Rotation& rope, uint16_t* pages, const Sequences& seq) {
    std::lock_guard held(halves_);
    const int64_t n = s.n, heads = a.heads, rank = a.rank, row = rank + a.turned, head = a.plain + a.turned, half = rope.rot / 2;
    const int64_t width = a.in.width, first = width - row;
    const float* wide = fan(a.in, normed(a.norm, s), n);
    const float* q = wide;
    if (a.q_norm) {
        float* latent = room(FIRST, n * first);
        {
            auto pool = pool_.hold();
            rows("norm", n, first, [&](int64_t r) { kernels_.rms_norm(wide + r * width, a.q_norm, a.eps, false, latent + r * first, first); });
        }
        float* made = room(SECOND, n * a.q.rows);
        linear(latent, n, a.q, nullptr, made);
        q = made;
    }
    const int64_t apart = a.q_norm ? a.q.rows : width; // rows of q
    float *key = room(THIRD, n * row), *plain = room(FOURTH, n * heads * a.plain), *queries = room(HEADS, n * heads * row);
    {
        auto pool = pool_.hold();
        rows("turn", n, heads * head + row, [&](int64_t r) {
            auto turn = [&](const float* from, float* to) {
                kernels_.rope(from, rope.cos + r * half, rope.sin + r * half, a.interleaved, to, 1, a.turned, rope.rot);
            };
            const float *latent = wide + r * width + first, *own = q + r * apart;
            kernels_.rms_norm(latent, a.kv_norm, a.eps, false, key + r * row, rank);
            turn(latent + rank, key + r * row + rank);
            for (int64_t h = 0; h < heads; h++, own += head) {
                memcpy(plain + (r * heads + h) * a.plain, own, a.plain * sizeof(float));
                turn(own + a.plain, queries + (r * heads + h) * row + rank);
            }
        });
    }
    heads_linear(plain, n, a.heads, a.keys, queries, row);
    float* mixed = room(MIXED, n * heads * rank);
    attention(AttentionJob{queries, pages, pages, mixed, a.heads, 1, (int)row, a.scale, 0, a.rank}, key, nullptr, seq);
    float *values = room(FIRST, n * heads * a.values.rows), *result = room(RESULT, n * a.norm.width);
    heads_linear(mixed, n, a.heads, a.values, values);
    linear(values, n, a.out, nullptr, result);
    add(s.x, result, n * a.norm.width);
}

void Ops::delta_half(const DeltaHalf& d, const Stream& s, float* conv_state, float* state, const int32_t* cu, const int32_t* slot,
                     int sequences, const int32_t* kept) {
    std::lock_guard held(halves_);
    const int64_t n = s.n, values = (int64_t)d.value_heads * d.value_dim, mix = 2 * (int64_t)d.key_heads * d.key_dim + values;
    const float* wide = fan(d.in, normed(d.norm, s), n);
    const int64_t width = d.in.width;
    const float* qkv = columns(FIRST, wide, n, width, 0, mix);
    const float* z = columns(SECOND, wide, n, width, mix, values);
    const float* b = columns(THIRD, wide, n, width, mix + values, d.value_heads);
    const float* a = columns(FOURTH, wide, n, width, mix + values + d.value_heads, d.value_heads);
    float* mixed = room(MIXED, n * values);
    delta_net(DeltaJob{qkv, a, b, d.conv, d.dt_bias, d.a_log, conv_state, state, nullptr, nullptr, nullptr, mixed, d.key_heads, d.value_heads,
                       d.key_dim, d.value_dim, d.taps, cu, slot, sequences, kept},
              n);
    gated_norm(mixed, z, d.out_norm, d.norm.eps, mixed, n * d.value_heads, d.value_dim);
    if (d.tiled) {
        float* tiles = room(HEADS, n * values);
        const int repeat = d.value_heads / d.key_heads;
        auto pool = pool_.hold();
        rows("columns", n, values, [&](int64_t r) {
            for (int h = 0; h < d.value_heads; h++) {
                const int to = h % repeat * d.key_heads + h / repeat;
                memcpy(tiles + r * values + to * d.value_dim, mixed + r * values + h * d.value_dim, d.value_dim * sizeof(float));
            }
        });
        mixed = tiles;
    }
    float* result = room(RESULT, n * d.norm.width);
    linear(mixed, n, d.out, nullptr, result);
    add(s.x, result, n * d.norm.width);
}

// act(gate) * up of columns of `wide` -> [n, inter]
float* Ops::gated(const float* wide, int64_t n, int64_t width, int64_t first, int64_t inter, int act) {
    float* out = room(HEADS, n * inter);
    auto held = pool_.hold();
    rows("gate", n, inter, [&](int64_t r) {
        const float* gate = wide + r * width + first;
        kernels_.gate_mul(gate, gate + inter, act, out + r * inter, inter);
    });
    return out;
}

void Ops::mlp_half(const MlpHalf& m, const Stream& s) {
    std::lock_guard held(halves_);
    const float* wide = fan(m.in, normed(m.norm, s), s.n);
    const float* hidden = gated(wide, s.n, m.in.width, 0, m.down.cols, m.act);
    float* result = room(RESULT, s.n * m.norm.width);
    linear(hidden, s.n, m.down, nullptr, result);
    add(s.x, result, s.n * m.norm.width);
}

// Who is chosen, and what the expert every row passes says (left alone when there is none).
void Ops::route_half(const MoeHalf& m, const float* x, int64_t n, int32_t* ids, float* weights, float* always) {
    const float* wide = fan(m.in, x, n);
    const int64_t width = m.in.width, hidden = m.norm.width;
    const RouteRule rule{m.experts, m.k, m.sigmoid, m.renorm, m.scale, m.groups, m.top_groups, m.group_best, m.bias};
    route(columns(FIRST, wide, n, width, 0, m.experts), n, rule, ids, weights);
    if (!m.shared) return;
    linear(gated(wide, n, width, m.experts + m.shared_switch, m.shared, m.act), n, m.shared_down, nullptr, always);
    if (!m.shared_switch) return;
    auto held = pool_.hold();
    rows("gate", n, hidden, [&](int64_t r) {
        const float one = 1.0f;
        float open;
        kernels_.gate_mul(wide + r * width + m.experts, &one, SIGMOID, &open, 1);
        for (int64_t i = 0; i < hidden; i++) always[r * hidden + i] *= open;
    });
}

void Ops::choose_half(const MoeHalf& m, const Stream& s, float* out, int32_t* ids, float* weights, float* always) {
    std::lock_guard held(halves_);
    const float* x = normed(m.norm, s);
    memcpy(out, x, s.n * m.norm.width * sizeof(float));
    route_half(m, x, s.n, ids, weights, always);
}

std::vector<int32_t> Ops::moe_half(const MoeHalf& m, const Stream& s) {
    std::lock_guard held(halves_);
    const int64_t n = s.n, hidden = m.norm.width;
    const float* x = normed(m.norm, s);
    int32_t* ids = (int32_t*)room(IDS, 2 * n * m.k);
    float* weights = (float*)ids + n * m.k;
    float* always = m.shared ? room(MIXED, n * hidden) : nullptr;
    route_half(m, x, n, ids, weights, always);
    std::vector<int32_t> barred;
    if (m.sound) std::copy_if(ids, ids + n * m.k, std::back_inserter(barred), [&](int32_t e) { return !m.sound[e]; });
    if (!barred.empty()) {
        std::sort(barred.begin(), barred.end());
        barred.erase(std::unique(barred.begin(), barred.end()), barred.end());
        return barred;
    }
    float* out = room(RESULT, n * hidden);
    moe(x, n, ids, weights, m.k, m.experts, nullptr, m.up, m.down, m.act, out);
    if (always) add(out, always, n * hidden);
    add(s.x, out, n * hidden);
    return barred;
}
