// Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464): short causal convolution, gates, and the delta rule token by token.
//
// The recurrence is run as written, one token after another, because its result then cannot depend on chunk borders. It is
// cut over columns of the state, which never mix: the [Dk, 64] piece of a head stays in L1 while all tokens pass.
#include "isa.h"
#include "../simd.h"
#include "kernels.h"
#include <math.h>

namespace MOORAGE_ISA {

// SiLU of the convolution for channels [c0, c0 + n), n <= CONV_COLS, of every sequence; then their conv state moves on.
void delta_conv(const DeltaJob& j, int64_t c0, int n) {
    constexpr int MAX_TAPS = 8;
    const int taps = j.taps, past = taps - 1;
    const int64_t width = 2 * (int64_t)j.key_heads * j.key_dim + (int64_t)j.value_heads * j.value_dim;
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
    const int64_t width = 2 * (int64_t)j.key_heads * j.key_dim + (int64_t)j.value_heads * j.value_dim;
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

// s [dk, ld] is the state piece. Sums over dk run in two interleaved halves (even, odd rows), added at the end.
template <int N>
static void step(float* s, int64_t ld, int dk, const float* q, const float* k, const float* v, float decay, float beta, float* o) {
    F even[N], odd[N], change[N];
    for (int n = 0; n < N; n++) even[n] = odd[n] = zero();
    int d = 0;
    for (; d + 2 <= dk; d += 2)
        for (int n = 0; n < N; n++) {
            even[n] = fma(load(s + d * ld + 16 * n), splat(k[d]), even[n]);
            odd[n] = fma(load(s + (d + 1) * ld + 16 * n), splat(k[d + 1]), odd[n]);
        }
    if (d < dk)
        for (int n = 0; n < N; n++) even[n] = fma(load(s + d * ld + 16 * n), splat(k[d]), even[n]);
    const F g = splat(decay);
    for (int n = 0; n < N; n++) {
        change[n] = splat(beta) * (load(v + 16 * n) - g * (even[n] + odd[n]));
        even[n] = odd[n] = zero();
    }
    const auto advance = [&](int row, F* acc) __attribute__((always_inline)) {
        for (int n = 0; n < N; n++) {
            const F fresh = fma(load(s + row * ld + 16 * n), g, splat(k[row]) * change[n]);
            store(s + row * ld + 16 * n, fresh);
            acc[n] = fma(fresh, splat(q[row]), acc[n]);
        }
    };
    for (d = 0; d + 2 <= dk; d += 2) advance(d, even), advance(d + 1, odd);
    if (d < dk) advance(d, even);
    for (int n = 0; n < N; n++) store(o + 16 * n, even[n] + odd[n]);
}

size_t delta_scratch(const DeltaJob& j) { return sizeof(float) * DELTA_COLS * j.key_dim; }

void delta_rule(const DeltaJob& j, int seq, int head, int c0, int columns, void* scratch) {
    const int dk = j.key_dim, dv = j.value_dim, key = head / (j.value_heads / j.key_heads);
    const int64_t width = 2 * (int64_t)j.key_heads * dk + (int64_t)j.value_heads * dv;
    float* s = (float*)scratch;
    const float* state = j.s + ((int64_t)j.slot[seq] * j.value_heads + head) * dk * dv + c0;
    for (int d = 0; d < dk; d++) {
        memcpy(s + d * DELTA_COLS, state + (int64_t)d * dv, columns * sizeof(float));
        memset(s + d * DELTA_COLS + columns, 0, (DELTA_COLS - columns) * sizeof(float));
    }
    const auto leave = [&](int slot) {
        float* to = j.s + ((int64_t)slot * j.value_heads + head) * dk * dv + c0;
        for (int d = 0; d < dk; d++) memcpy(to + (int64_t)d * dv, s + d * DELTA_COLS, columns * sizeof(float));
    };
    const int64_t keep_at = j.kept && j.kept[2 * seq + 1] >= 0 ? j.cu[seq] + j.kept[2 * seq] : -1;
    for (int64_t t = j.cu[seq]; t < j.cu[seq + 1]; t++) {
        if (t == keep_at) leave(j.kept[2 * seq + 1]);
        const float* x = j.mixed + t * width;
        const float *q = x + key * dk, *k = x + (j.key_heads + key) * dk;
        const float decay = j.decay[t * j.value_heads + head], beta = j.beta[t * j.value_heads + head];
        float v[DELTA_COLS] = {}, o[DELTA_COLS];
        memcpy(v, x + 2 * j.key_heads * dk + head * dv + c0, columns * sizeof(float));
        switch ((columns + 15) / 16) {
        case 1: step<1>(s, DELTA_COLS, dk, q, k, v, decay, beta, o); break;
        case 2: step<2>(s, DELTA_COLS, dk, q, k, v, decay, beta, o); break;
        case 3: step<3>(s, DELTA_COLS, dk, q, k, v, decay, beta, o); break;
        default: step<4>(s, DELTA_COLS, dk, q, k, v, decay, beta, o);
        }
        memcpy(j.out + (t * j.value_heads + head) * dv + c0, o, columns * sizeof(float));
    }
    leave(j.slot[seq]);
}

void fill_delta(Kernels& k) {
    k.delta_conv = delta_conv, k.delta_gates = delta_gates, k.delta_scratch = delta_scratch, k.delta_rule = delta_rule;
}

} // namespace MOORAGE_ISA
