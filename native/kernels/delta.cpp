// Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): short causal convolution, gates, and the delta rule token by token.
//
// The recurrence is run as written, one token after another, because its result then cannot depend on chunk borders. It is
// cut over columns of the state, which never mix: a [Dk, 16] part of a head stays in L1 while all tokens pass.
#include "isa.h"
#include "../simd.h"
#include "kernels.h"
#include <math.h>

namespace MOORAGE_ISA {

static int64_t channels(const DeltaJob& j) { return 2 * (int64_t)j.key_heads * j.key_dim + (int64_t)j.value_heads * j.value_dim; }

// SiLU of the convolution for channels [c0, c0 + n), n <= CONV_COLS, of every sequence; then their conv state moves on.
void delta_conv(const DeltaJob& j, int64_t c0, int n) {
    constexpr int MAX_TAPS = 8;
    const int taps = j.taps, past = taps - 1;
    const int64_t width = channels(j);
    float w[MAX_TAPS][CONV_COLS] = {}, old[MAX_TAPS][CONV_COLS] = {};
    for (int c = 0; c < n; c++)
        for (int i = 0; i < taps; i++) w[i][c] = j.conv[(c0 + c) * taps + i];
    for (int s = 0; s < j.sequences; s++) {
        const int64_t len = j.cu[s + 1] - j.cu[s];
        const float* x = j.qkv + j.cu[s] * width + c0;
        float *out = j.mixed + j.cu[s] * width + c0, *state = j.conv_state + (j.slot[s] * width + c0) * past;
        for (int c = 0; c < n; c++)
            for (int i = 0; i < past; i++) old[i][c] = state[c * past + i];
        for (int64_t t = 0; t < len; t++)
            for (int c = 0; c < n; c += 16) {
                const int m = n - c < 16 ? n - c : 16;
                F acc = zero();
                for (int i = 0; i < taps; i++) {
                    const int64_t at = t - past + i;
                    const F v = at < 0 ? load(old[past + at] + c) : m == 16 ? load(x + at * width + c) : load_part(x + at * width + c, m);
                    acc = fma(v, load(w[i] + c), acc);
                }
                const F y = activate(acc, SILU);
                m == 16 ? store(out + t * width + c, y) : store_part(out + t * width + c, y, m);
            }
        const auto leave = [&](int64_t rows, float* to) {
            for (int i = 0; i < past; i++) {
                const int64_t at = rows - past + i;
                for (int c = 0; c < n; c++) to[c * past + i] = at < 0 ? old[past + at][c] : x[at * width + c];
            }
        };
        if (j.kept && j.kept[2 * s + 1] >= 0) leave(j.kept[2 * s], j.conv_state + (j.kept[2 * s + 1] * width + c0) * past);
        leave(len, state);
    }
}

static void l2_norm(float* x, int n, float scale) {
    F acc = zero();
    int i = 0;
    for (; i + 16 <= n; i += 16) acc = fma(load(x + i), load(x + i), acc);
    if (i < n) acc = fma(load_part(x + i, n - i), load_part(x + i, n - i), acc);
    const float r = scale / sqrtf(sum(acc) + 1e-6f); // 1e-6: the value DeltaNet models are trained with
    for (i = 0; i < n; i++) x[i] *= r;
}

// Norms of q and k, decay = exp(-exp(a_log) softplus(a + dt_bias)) and beta = sigmoid(b) of one token.
void delta_gates(const DeltaJob& j, int64_t t) {
    const int64_t width = channels(j);
    float* x = j.mixed + t * width;
    for (int h = 0; h < j.key_heads; h++) l2_norm(x + h * j.key_dim, j.key_dim, 1.0f / sqrtf((float)j.key_dim));
    for (int h = j.key_heads; h < 2 * j.key_heads; h++) l2_norm(x + h * j.key_dim, j.key_dim, 1.0f);
    for (int h = 0; h < j.value_heads; h++) {
        const int64_t i = t * j.value_heads + h;
        const double dt = (double)j.a[i] + (double)j.dt_bias[h], soft = dt > 30 ? dt : log1p(::exp(dt));
        j.decay[i] = (float)::exp(-::exp((double)j.a_log[h]) * soft);
        j.beta[i] = (float)(1.0 / (1.0 + ::exp(-(double)j.b[i])));
    }
}

constexpr int PART = LANES; // columns whose sums are in registers together

// What two parts of the state, [2][dk, PART], have of k. Sums over dk run in two interleaved halves (even, odd rows), added at the end.
static void recall(const float* s, int dk, const float* k, F* known) {
    F sums[2][2] = {{zero(), zero()}, {zero(), zero()}};
    const auto add = [&](int d, int half) __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int p = 0; p < 2; p++) sums[p][half] = fma(load(s + (p * dk + d) * PART), splat(k[d]), sums[p][half]);
    };
    int d = 0;
    for (; d + 2 <= dk; d += 2) add(d, 0), add(d + 1, 1);
    if (d < dk) add(d, 0);
    known[0] = sums[0][0] + sums[0][1], known[1] = sums[1][0] + sums[1][1];
}

// s [dk, PART] = decay s + k change; returns what it has of q then. MORE: what it has of the next token's k is known meanwhile.
template <bool MORE> static F step(float* s, int dk, const float* q, const float* k, const float* next, F change, F decay, F& known) {
    F out[2] = {zero(), zero()}, sums[2] = {zero(), zero()};
    const auto advance = [&](int d, int half) __attribute__((always_inline)) {
        const F fresh = fma(load(s + d * PART), decay, splat(k[d]) * change);
        store(s + d * PART, fresh);
        out[half] = fma(fresh, splat(q[d]), out[half]);
        if (MORE) sums[half] = fma(fresh, splat(next[d]), sums[half]);
    };
    int d = 0;
    for (; d + 2 <= dk; d += 2) advance(d, 0), advance(d + 1, 1);
    if (d < dk) advance(d, 0);
    known = sums[0] + sums[1];
    return out[0] + out[1];
}

// PART columns, or the n that there are.
static F some(const float* from, int n) { return n < PART ? load_part(from, n) : load(from); }
static void keep(float* to, F f, int n) { n < PART ? store_part(to, f, n) : store(to, f); }

// [DELTA_COLS / PART][Dk, PART]: all columns of a task come and go together, a row of the state at a time.
size_t delta_scratch(const DeltaJob& j) { return sizeof(float) * DELTA_COLS * j.key_dim; }

// A part of a head, its columns from c0, over all tokens of a sequence. Before token `keep_at` leave() is called.
template <class Leave>
static void part_rule(const DeltaJob& j, int seq, int head, int c0, int n, float* s, F known, int64_t keep_at, const Leave& leave) {
    const int dk = j.key_dim, dv = j.value_dim, key = head / (j.value_heads / j.key_heads);
    const int64_t width = channels(j);
    const float* x = j.mixed + j.cu[seq] * width;
    for (int64_t t = j.cu[seq]; t < j.cu[seq + 1]; t++, x += width) {
        if (t == keep_at) leave();
        const float *q = x + key * dk, *k = q + j.key_heads * dk, *v = x + 2 * j.key_heads * dk + head * dv + c0;
        const F decay = splat(j.decay[t * j.value_heads + head]), beta = splat(j.beta[t * j.value_heads + head]);
        const F change = beta * (some(v, n) - decay * known);
        const F out = t + 1 < j.cu[seq + 1] ? step<true>(s, dk, q, k, k + width, change, decay, known) : step<false>(s, dk, q, k, k, change, decay, known);
        keep(j.out + (t * j.value_heads + head) * dv + c0, out, n);
    }
}

void delta_rule(const DeltaJob& j, int seq, int head, int c0, int columns, void* scratch) {
    if (j.cu[seq] == j.cu[seq + 1]) return;
    const int dk = j.key_dim, dv = j.value_dim;
    const float* k = j.mixed + j.cu[seq] * channels(j) + (j.key_heads + head / (j.value_heads / j.key_heads)) * dk;
    float* s = (float*)scratch;
    const auto state = [&](int slot) { return j.s + ((int64_t)slot * j.value_heads + head) * dk * dv + c0; };
    const auto leave = [&](int slot, int from, int to) { // parts of these columns
        float* rows = state(slot);
        for (int d = 0; d < dk; d++)
            for (int p = from; p < to; p += PART) keep(rows + (int64_t)d * dv + p, load(s + p * dk + d * PART), columns - p);
    };
    const float* rows = state(j.slot[seq]);
    for (int d = 0; d < dk; d++)
        for (int p = 0; p < columns; p += PART) store(s + p * dk + d * PART, some(rows + (int64_t)d * dv + p, columns - p));
    const int64_t keep_at = j.kept && j.kept[2 * seq + 1] >= 0 ? j.cu[seq] + j.kept[2 * seq] : -1;
    F known[DELTA_COLS / PART];
    for (int p = 0; p < columns; p += PART) {
        if (p % (2 * PART) == 0) recall(s + p * dk, dk, k, known + p / PART);
        part_rule(j, seq, head, c0 + p, columns - p, s + p * dk, known[p / PART], keep_at, [&] { leave(j.kept[2 * seq + 1], p, p + 1); });
    }
    leave(j.slot[seq], 0, columns);
}

void fill_delta(Kernels& k) {
    k.delta_conv = delta_conv, k.delta_gates = delta_gates, k.delta_scratch = delta_scratch, k.delta_rule = delta_rule;
}

} // namespace MOORAGE_ISA
