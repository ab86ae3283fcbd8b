// Attention of several queries over a page with AVX2: keys and values are widened to float32 once for all of them.
//
// Included by attention.cpp, inside its namespace. The same sums in the same order as attend_page has: widening is exact, so which of the two
// computes a query changes no bit. 2 x 3 scores (queries by keys), or 3 queries' values of 32, are in
// registers together.

constexpr int MANY = 4; // queries from which on widening pays

// to[i] = sum(f[i]) for eight, of which lanes k and k + 8 are added already: the additions of `sum`.
static inline void eight_sums(const __m256* f, float* to) {
    __m256 fours[4], twos[2];
    for (int i = 0; i < 4; i++) fours[i] = _mm256_add_ps(_mm256_permute2f128_ps(f[i], f[i + 4], 0x20), _mm256_permute2f128_ps(f[i], f[i + 4], 0x31));
    const auto halves = [](__m256 a, __m256 b) { return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee)); };
    for (int i = 0; i < 2; i++) twos[i] = halves(fours[2 * i], fours[2 * i + 1]);
    _mm256_storeu_ps(to, _mm256_add_ps(_mm256_shuffle_ps(twos[0], twos[1], 0x88), _mm256_shuffle_ps(twos[0], twos[1], 0xdd)));
}

// score[m * PAGE + n] = query m times widened key n.
template <int Q, int N> static inline void scores_of(const float* q, const float* keys, int ld, float* score) {
    __m256 acc[Q * N * 2];
#pragma GCC unroll 12
    for (int i = 0; i < Q * N * 2; i++) acc[i] = _mm256_setzero_ps();
    for (int d = 0; d < ld; d += 16) {
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) { // half after half: fifteen registers
            __m256 a[Q];
#pragma GCC unroll 2
            for (int m = 0; m < Q; m++) {
                a[m] = _mm256_loadu_ps(q + m * ld + d + 8 * h);
                __asm__("" : "+x"(a[m])); // loaded here: as an operand it would be loaded by every product
            }
#pragma GCC unroll 3
            for (int n = 0; n < N; n++) {
                __m256 key = _mm256_loadu_ps(keys + n * ld + d + 8 * h);
                if (Q > 1) __asm__("" : "+x"(key));
#pragma GCC unroll 2
                for (int m = 0; m < Q; m++) acc[(m * N + n) * 2 + h] = _mm256_fmadd_ps(a[m], key, acc[(m * N + n) * 2 + h]);
            }
        }
    }
    __m256 f[8];
    alignas(32) float sums[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) f[i] = _mm256_setzero_ps();
#pragma GCC unroll 6
    for (int i = 0; i < Q * N; i++) f[i / N * 4 + i % N] = _mm256_add_ps(acc[2 * i], acc[2 * i + 1]);
    eight_sums(f, sums);
#pragma GCC unroll 6
    for (int i = 0; i < Q * N; i++) score[i / N * PAGE + i % N] = sums[i / N * 4 + i % N];
}
template <int Q> static void some_scores(const float* q, const float* keys, int ld, int n, float* score) {
    int i = 0;
    for (; n - i > 4 || n - i == 3; i += 3) scores_of<Q, 3>(q, keys + i * ld, ld, score + i);
    for (; n - i >= 2; i += 2) scores_of<Q, 2>(q, keys + i * ld, ld, score + i);
    if (i < n) scores_of<Q, 1>(q, keys + i * ld, ld, score + i);
}

// values = keep values + sum of p[i] v[i], for W registers of the head.
template <int Q, int W> static void some_values(const float* p, const float* keep, const float* v, int first, int last, int at, Fold* f) {
    __m256 acc[Q * W];
#pragma GCC unroll 12
    for (int i = 0; i < Q * W; i++) acc[i] = _mm256_setzero_ps();
    for (int i = first; i < last; i++) {
        __m256 weight[Q];
#pragma GCC unroll 3
        for (int m = 0; m < Q; m++) weight[m] = _mm256_broadcast_ss(p + m * PAGE + i);
#pragma GCC unroll 4
        for (int w = 0; w < W; w++) {
            const __m256 value = _mm256_loadu_ps(v + i * 8 * W + 8 * w);
#pragma GCC unroll 3
            for (int m = 0; m < Q; m++) acc[m * W + w] = _mm256_fmadd_ps(weight[m], value, acc[m * W + w]);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < Q * W; i++) {
        float* to = f[i / W].values + at + i % W * 8;
        _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm256_loadu_ps(to), _mm256_set1_ps(keep[i / W]), acc[i]));
    }
}
template <int W> static void page_values(const AttentionJob& j, const AttentionTask& t, const uint16_t* v, int64_t page, const float* scores, const float* keep, int at, Fold* f) {
    const int ld = whole(j.dim), group = j.group;
    int low, high, first, last, unused;
    visible(j, t.position, page, low, unused), visible(j, t.position + t.nt - 1, page, unused, high);
    alignas(32) float values[PAGE * 8 * W];
    for (int i = low; i < high; i++)
        for (int d = 0; d < 8 * W; d += 16) store(values + i * 8 * W + d, load_bf16(v + i * ld + at + d));
    for (int token = 0; token < t.nt; token++) {
        visible(j, t.position + token, page, first, last);
        if (first >= last) continue;
        int i = token * group, left = group;
        for (; left > 4 || left == 3; i += 3, left -= 3) some_values<3, W>(scores + i * PAGE, keep + i, values, first, last, at, f + i);
        for (; left >= 2; i += 2, left -= 2) some_values<2, W>(scores + i * PAGE, keep + i, values, first, last, at, f + i);
        if (left) some_values<1, W>(scores + i * PAGE, keep + i, values, first, last, at, f + i);
    }
}

// All queries of a task over one page: as attend_queries.
static void attend_together(const AttentionJob& j, const AttentionTask& t, const float* q, const uint16_t* k, const uint16_t* v, int64_t page,
                            const uint16_t* next, float* widened, float* scores, Fold* f) {
    const int ld = whole(j.dim), width = whole(j.values), group = j.group, queries = t.nt * group;
    const int together = KEY_ELEMENTS / ld < KEYS ? KEY_ELEMENTS / ld : KEYS;
    const uint16_t* read_next = v == k ? nullptr : v;
    int low, high, first, last, unused;
    visible(j, t.position, page, low, unused), visible(j, t.position + t.nt - 1, page, unused, high);
    for (int i = 0; i < queries * PAGE; i += 16) store(scores + i, splat(-INFINITY));
    for (int k0 = low; k0 < high; k0 += together) {
        const int some = high - k0 < together ? high - k0 : together;
        for (int i = 0; i < some; i++) {
            come_nearer(read_next, ld, k0 + i);
            for (int d = 0; d < ld; d += 16) store(widened + i * ld + d, load_bf16(k + (k0 + i) * ld + d));
        }
        for (int token = 0; token < t.nt; token++) {
            visible(j, t.position + token, page, first, last);
            const int from = first > k0 ? first : k0, to = last < k0 + some ? last : k0 + some;
            if (from >= to) continue;
            int i = token * group;
            const float* keys = widened + (from - k0) * ld;
            for (; i + 2 <= (token + 1) * group; i += 2) some_scores<2>(q + i * ld, keys, ld, to - from, scores + i * PAGE + from);
            if (i < (token + 1) * group) some_scores<1>(q + i * ld, keys, ld, to - from, scores + i * PAGE + from);
        }
    }
    float keep[QUERIES];
    for (int token = 0; token < t.nt; token++) {
        visible(j, t.position + token, page, first, last);
        for (int i = token * group; first < last && i < (token + 1) * group; i++) keep[i] = weigh(scores + i * PAGE, f[i]);
    }
    for (int d = 0, some; d < width; d += some) {
        some = width - d >= 32 ? 32 : 16;
        for (int i = PAGE * d / width; i < PAGE * (d + some) / width; i++) come_nearer(next, ld, i);
        some == 32 ? page_values<4>(j, t, v, page, scores, keep, d, f) : page_values<2>(j, t, v, page, scores, keep, d, f);
    }
}
