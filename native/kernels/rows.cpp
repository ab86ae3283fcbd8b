// Operations on single rows: norms, rotary embedding, gates, routing.
#include "isa.h"
#include "../simd.h"
#include "kernels.h"
#include <float.h>
#include <math.h>

namespace MOORAGE_ISA {

static float squares(const float* x, int64_t n) {
    F acc = zero();
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const F v = load(x + i);
        acc = fma(v, v, acc);
    }
    if (i < n) {
        const F v = load_part(x + i, (int)(n - i));
        acc = fma(v, v, acc);
    }
    return sum(acc);
}

template <class Body> static void each(int64_t n, const Body& body) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) body(i, 16);
    if (i < n) body(i, (int)(n - i));
}
static F part(const float* p, int n) { return n == 16 ? load(p) : load_part(p, n); }
static void put(float* p, F f, int n) { n == 16 ? store(p, f) : store_part(p, f, n); }

void rms_norm(const float* x, const float* w, float eps, bool plus_one, float* out, int64_t n) {
    const F r = splat(1.0f / sqrtf(squares(x, n) / (float)n + eps));
    const F one = splat(plus_one ? 1.0f : 0.0f);
    each(n, [&](int64_t i, int m) { put(out + i, part(x + i, m) * r * (one + part(w + i, m)), m); });
}

void gated_norm(const float* x, const float* z, const float* w, float eps, float* out, int64_t n) {
    const F r = splat(1.0f / sqrtf(squares(x, n) / (float)n + eps));
    each(n, [&](int64_t i, int m) { put(out + i, part(x + i, m) * r * part(w + i, m) * activate(part(z + i, m), SILU), m); });
}

void rope(const float* x, const float* cos, const float* sin, bool interleaved, float* out, int heads, int dim, int rot) {
    const int pairs = rot / 2;
    for (int h = 0; h < heads; h++, x += dim, out += dim) {
        if (interleaved) {
            for (int i = 0; i < pairs; i++) {
                const float a = x[2 * i], b = x[2 * i + 1];
                out[2 * i] = a * cos[i] - b * sin[i];
                out[2 * i + 1] = b * cos[i] + a * sin[i];
            }
        } else {
            each(pairs, [&](int64_t i, int m) {
                const F a = part(x + i, m), b = part(x + pairs + i, m), c = part(cos + i, m), s = part(sin + i, m);
                put(out + i, a * c - b * s, m);
                put(out + pairs + i, b * c + a * s, m);
            });
        }
        if (out != x) memcpy(out + rot, x + rot, (dim - rot) * sizeof(float));
    }
}

void gate_mul(const float* gate, const float* up, int act, float* out, int64_t n) {
    each(n, [&](int64_t i, int m) { put(out + i, activate(part(gate + i, m), act) * part(up + i, m), m); });
}

// Everything that is not NaN or taken is above -inf; NaN counts as the lowest.
static float ranked(float x) { return x > -FLT_MAX ? x : -FLT_MAX; }
static int best_of(const float* x, int n) { // the lowest of equals
    int best = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

// Leaves only the experts of the best groups (by their best or the sum of their two best) in the running.
static void limit_groups(float* choice, const RouteRule& r) {
    const int size = r.experts / r.groups;
    float score[MAX_GROUPS];
    for (int g = 0; g < r.groups; g++) {
        float first = -INFINITY, second = -INFINITY;
        for (int e = g * size; e < (g + 1) * size; e++) {
            const float c = choice[e];
            if (c > first)
                second = first, first = c;
            else if (c > second)
                second = c;
        }
        score[g] = ranked(r.group_best == 1 ? first : first + second);
    }
    for (int i = 0; i < r.top_groups; i++) score[best_of(score, r.groups)] = -INFINITY;
    for (int g = 0; g < r.groups; g++)
        for (int e = g * size; score[g] != -INFINITY && e < (g + 1) * size; e++) choice[e] = -INFINITY;
}

void route(const float* logits, const RouteRule& r, int32_t* ids, float* weights, float* scratch) {
    float *scores = scratch, *choice = scratch + r.experts, most = -INFINITY;
    for (int e = 0; e < r.experts; e++) most = logits[e] > most ? logits[e] : most;
    each(r.experts, [&](int64_t i, int m) {
        const F v = part(logits + i, m);
        put(scores + i, r.sigmoid ? sigmoid(v) : exp(v - splat(most)), m);
    });
    if (!r.sigmoid) {
        F acc = zero();
        each(r.experts, [&](int64_t i, int m) { acc = acc + part(scores + i, m); });
        const float total = sum(acc);
        for (int e = 0; e < r.experts; e++) scores[e] /= total;
    }
    for (int e = 0; e < r.experts; e++) {
        if (scores[e] != scores[e]) scores[e] = 0;
        choice[e] = ranked(r.bias ? scores[e] + r.bias[e] : scores[e]);
    }
    if (r.groups > 1) limit_groups(choice, r);
    float total = 0;
    for (int j = 0; j < r.k; j++) {
        ids[j] = best_of(choice, r.experts);
        choice[ids[j]] = -INFINITY; // taken
        weights[j] = scores[ids[j]];
        total += weights[j];
    }
    for (int j = 0; j < r.k; j++) weights[j] = (r.renorm ? weights[j] / total : weights[j]) * r.scale;
}

void moe_merge(const float* parts, const int32_t* ids, const float* weights, int k, float* out, int64_t n) {
    memset(out, 0, n * sizeof(float));
    for (int64_t last = -1, done = 0; done < k;) {
        int64_t next = INT32_MAX;
        for (int j = 0; j < k; j++) next = ids[j] > last && ids[j] < next ? ids[j] : next;
        for (int j = 0; j < k; j++) {
            if (ids[j] != next) continue;
            const F weight = splat(weights[j]);
            each(n, [&](int64_t i, int m) { put(out + i, fma(weight, part(parts + j * n + i, m), part(out + i, m)), m); });
            done++;
        }
        last = next;
    }
}

void fill_rows(Kernels& k) {
    k.moe_merge = moe_merge;
    k.rms_norm = rms_norm, k.gated_norm = gated_norm, k.rope = rope, k.gate_mul = gate_mul, k.route = route;
}

} // namespace MOORAGE_ISA
