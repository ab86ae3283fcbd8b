// Queries over one page of keys and values. Included by attention.cpp, inside its namespace.
//
// Keys have their place in the lanes of registers (their elements are transposed as pairs of bf16), so there are no lanes to fold: a score is one sum over
// the elements, ascending. Values have their elements in the lanes: a value is one sum over the page's keys, ascending. Where in a tile a query or a key
// stands changes no addition.

constexpr int WIDE = 4; // registers of keys that are transposed together
constexpr int PANEL_FLOATS = 4096; // of a panel: half of a first cache of 32 KB

// Keys of a page that a query sees.
struct Seen {
    int first, last;
    bool operator==(const Seen&) const = default;
};

// Keys or values that are read soon come nearer, in address order: pages lie anywhere, so no hardware stream leads there.
struct Soon {
    const uint16_t *at, *end;
    int rest; // 1: every other time
    void nearer() {
        if (at < end) __builtin_prefetch(at, 0, 2), at += 32;
    }
};

template <int Q, int W> using Sums = VF[Q][W];

static inline VF load_reg(const float* p) {
    VF r;
    memcpy(&r, p, REG);
    return r;
}
static inline void store_reg(float* p, VF r) { memcpy(p, &r, REG); }

// Two bf16 a lane, the first one in the lower half, as float32.
static inline VF first_of(VU pair) { return (VF)(pair << 16); }
static inline VF second_of(VU pair) { return (VF)(pair & 0xffff0000u); }

// In every 128 bits: the lower (HALF 0) or the upper elements of both, in turn.
typedef int64_t VL __attribute__((vector_size(REG)));
template <int HALF, class V, int... L> static inline V in_turn(V a, V b, std::integer_sequence<int, L...>) {
    constexpr int ALL = sizeof...(L), SOME = ALL * 16 / REG;
    return __builtin_shufflevector(a, b, (L / SOME * SOME + HALF * SOME / 2 + L % SOME / 2 + L % 2 * ALL)...);
}
template <int HALF> static inline VI dwords(VI a, VI b) { return in_turn<HALF>(a, b, std::make_integer_sequence<int, RLANES>{}); }
template <int HALF> static inline VI qwords(VI a, VI b) { return (VI)in_turn<HALF>((VL)a, (VL)b, std::make_integer_sequence<int, RLANES / 2>{}); }

// Eight elements of keys 0, 4, 8, ...
static inline VI eight_elements(const uint16_t* k, int64_t ld) {
    const auto key = [&](int i) { return k + 4 * i * ld; };
#if defined(__AVX512F__)
    __m512i r = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)key(0)));
    r = _mm512_inserti32x4(r, _mm_loadu_si128((const __m128i*)key(1)), 1);
    r = _mm512_inserti32x4(r, _mm_loadu_si128((const __m128i*)key(2)), 2);
    return (VI)_mm512_inserti32x4(r, _mm_loadu_si128((const __m128i*)key(3)), 3);
#elif defined(__AVX2__)
    return (VI)_mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)key(0))), _mm_loadu_si128((const __m128i*)key(1)), 1);
#else
    VI r;
    memcpy(&r, key(0), sizeof r);
    return r;
#endif
}

// Elements [0, n) of W registers of keys: use(d, w, elements d and d + 1 of those keys). As much of `soon` comes nearer.
template <int W, class Use>
__attribute__((always_inline)) static inline void keys_in_lanes(const uint16_t* k, int64_t ld, int n, Soon soon, const Use& use) {
    for (int d = 0; d < n; d += 8) {
#pragma GCC unroll 4
        for (int w = 0; w < W; w++) {
            const uint16_t* key0 = k + w * RLANES * ld + d;
            __asm__("" : "+r"(key0)); // gcc would keep a pointer to every key, in memory
            VI key[4];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) key[i] = eight_elements(key0 + i * ld, ld);
            const VI a = dwords<0>(key[0], key[1]), b = dwords<0>(key[2], key[3]), c = dwords<1>(key[0], key[1]), e = dwords<1>(key[2], key[3]);
            const VI pair[4] = {qwords<0>(a, b), qwords<1>(a, b), qwords<0>(c, e), qwords<1>(c, e)};
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) use(d + 2 * i, w, (VU)pair[i]);
            for (int i = 0; i < RLANES / 4; i++) soon.nearer();
        }
    }
}

// A page and the queries that meet it.
struct Page {
    const uint16_t *k, *v, *next;      // [PAGE][ld]; next: the keys that are read after these
    int ld, width, queries, low, high; // some query sees keys [low, high)
    const float* q;                    // [queries][ld]
    float *panel, *scores;             // [PANEL_FLOATS], [QUERIES][PAGE]
    Soon soon;
    Seen seen[QUERIES];
};

#if defined(__AVX2__) && !defined(__AVX512F__)
#include "attention_pairs.h"
#else
#include "attention_panel.h"
#endif

// Scores of keys [at, at + W registers). One or two queries take no panel, more of them share one.
template <int Q, int W> __attribute__((noinline)) static void few_scores(Page& p, int at) {
    Sums<Q, W> acc;
#pragma GCC unroll 8
    for (int i = 0; i < Q * W; i++) acc[i / W][i % W] = VF{};
    const uint16_t* v = p.v + at * p.ld;
    const Soon soon{v, p.v == p.k ? v : v + W * RLANES * p.ld, 0}; // not between the products: those of a key are few
    keys_in_lanes<W>(p.k + at * p.ld, p.ld, p.ld, soon, [&](int d, int w, VU pair) __attribute__((always_inline)) {
        const VF first = first_of(pair), second = second_of(pair);
#pragma GCC unroll 2
        for (int m = 0; m < Q; m++) {
            acc[m][w] = fma_reg(p.q[m * p.ld + d] - VF{}, first, acc[m][w]);
            acc[m][w] = fma_reg(p.q[m * p.ld + d + 1] - VF{}, second, acc[m][w]);
        }
    });
#pragma GCC unroll 8
    for (int i = 0; i < Q * W; i++) store_reg(p.scores + i / W * PAGE + at + i % W * RLANES, acc[i / W][i % W]);
}
template <int W> __attribute__((noinline)) static void some_scores(Page& p, int at) {
    if (p.queries == 1) return few_scores<1, W>(p, at);
    if (p.queries == 2) return few_scores<2, W>(p, at);
    for (int d0 = 0; d0 < p.ld; d0 += PIECE<W>) {
        const int n = p.ld - d0 < PIECE<W> ? p.ld - d0 : PIECE<W>, from = at * p.ld + d0;
        float* panel = p.panel;
        keys_in_lanes<W>(p.k + from, p.ld, n, Soon{}, [=](int d, int w, VU pair) { put_pair<W>(panel, d, w, pair); });
        tiles(0, p.queries, [&](auto tile, int i) {
            constexpr int Q = decltype(tile)::value;
            if (p.seen[i + Q - 1].last <= at || p.seen[i].first >= at + W * RLANES) return; // none of these keys is seen
            score_tile<Q, W>(p.q + i * p.ld + d0, p.ld, p.panel, n, d0 > 0, p.soon, p.scores + i * PAGE + at);
        });
    }
}

static void page_scores(Page& p) {
    p.soon = {p.v, p.v == p.k ? p.v : p.v + p.high * p.ld, p.queries > 4};
    for (int at = p.low / RLANES * RLANES, w; at < p.high; at += w * RLANES) {
        const int left = (p.high - at + RLANES - 1) / RLANES;
        w = left >= WIDE ? WIDE : left >= 2 ? 2 : 1;
        if (w == WIDE) some_scores<WIDE>(p, at);
        else if (w == 2) some_scores<2>(p, at);
        else some_scores<1>(p, at);
    }
}

// Scores become weights; keep: the share of what came before that is kept.
static void weigh(const Page& p, float* keep, Fold* f) {
    float next[QUERIES];
    for (int i = 0; i < p.queries; i++) {
        keep[i] = 0, next[i] = f[i].most;
        if (p.seen[i].first >= p.seen[i].last) continue;
        float* score = p.scores + i * PAGE;
        for (int n = 0; n < p.seen[i].first; n++) score[n] = -INFINITY;
        for (int n = p.seen[i].last; n < PAGE; n++) score[n] = -INFINITY;
        const float now = top(max(max(load(score), load(score + 16)), max(load(score + 32), load(score + 48))));
        next[i] = now > f[i].most ? now : f[i].most;
        keep[i] = f[i].most - next[i];
    }
    for (int i = 0; i < p.queries; i += 16) store(keep + i, exp(load(keep + i)));
    for (int i = 0; i < p.queries; i++) {
        if (p.seen[i].first >= p.seen[i].last) continue;
        float* score = p.scores + i * PAGE;
        F total = zero();
        for (int n = 0; n < PAGE; n += 16) {
            const F e = exp(load(score + n) - splat(next[i]));
            store(score + n, e);
            total = total + e;
        }
        f[i].most = next[i];
        f[i].total = f[i].total * keep[i] + sum(total);
    }
}
