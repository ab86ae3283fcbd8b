// A page's scores and values by panels of float32. Included by attention_page.h.
//
// Scores and weighted values are the same product: rows of numbers, one of which at a time is broadcast, times the rows of a panel. Keys and values are
// widened once for all queries.

#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int TILE_QUERIES = 4; // 32 registers: 16 hold sums
#else
constexpr int TILE_QUERIES = 3; // 16 registers: 12 hold sums
#endif
#if defined(__AVX512F__)
#define MOORAGE_KEPT "+v"
#elif defined(__ARM_NEON)
#define MOORAGE_KEPT "+w"
#else
#define MOORAGE_KEPT "+x"
#endif

template <int W> constexpr int PIECE = PANEL_FLOATS / (W * RLANES); // elements of W registers of keys that a panel holds
template <int W> static inline void put_pair(float* panel, int d, int w, VU pair) {
    store_reg(panel + (d * W + w) * RLANES, first_of(pair)), store_reg(panel + ((d + 1) * W + w) * RLANES, second_of(pair));
}

// acc[m][w] += a[m][i] row(i, w), i < n, ascending.
template <int Q, int W, class Row>
__attribute__((always_inline)) static inline void multiply(const float* a, int ld, int n, Sums<Q, W>& acc, Soon& page, const Row& row) {
    Soon soon = page;
    for (int i = 0; i < n; i++) {
        if (!(i & soon.rest)) soon.nearer();
        VF number[Q];
#pragma GCC unroll 4
        for (int m = 0; m < Q; m++) number[m] = a[m * ld + i] - VF{};
#pragma GCC unroll 4
        for (int w = 0; w < W; w++) {
            VF b = row(i, w);
            __asm__("" : MOORAGE_KEPT(b)); // as an operand it would be loaded by every product
#pragma GCC unroll 4
            for (int m = 0; m < Q; m++) acc[m][w] = fma_reg(number[m], b, acc[m][w]);
        }
    }
    page = soon;
}
// Each tile a function: inlined into its loops gcc 12 keeps one of twelve sums in memory, and products wait for its stores.
template <int Q, int W>
__attribute__((noinline)) static void score_tile(const float* q, int ld, const float* panel, int n, bool more, Soon& soon, float* scores) {
    Sums<Q, W> acc;
#pragma GCC unroll 16
    for (int i = 0; i < Q * W; i++) acc[i / W][i % W] = more ? load_reg(scores + i / W * PAGE + i % W * RLANES) : VF{};
    multiply<Q, W>(q, ld, n, acc, soon, [&](int i, int w) { return load_reg(panel + (i * W + w) * RLANES); });
#pragma GCC unroll 16
    for (int i = 0; i < Q * W; i++) store_reg(scores + i / W * PAGE + i % W * RLANES, acc[i / W][i % W]);
}

// call(Q, i) for tiles of Q queries that begin at i, in [from, to).
template <class Call> static inline void tiles(int from, int to, const Call& call) {
    for (int left = to - from; left > 0; left = to - from) {
        int n = left < TILE_QUERIES ? left : TILE_QUERIES;
        if (TILE_QUERIES == 3 && left == 4) n = 2; // two of two: fewer sums than two products in flight would be slow
        switch (n) {
        case 1: call(std::integral_constant<int, 1>{}, from); break;
        case 2: call(std::integral_constant<int, 2>{}, from); break;
        case 3: call(std::integral_constant<int, 3>{}, from); break;
        default: call(std::integral_constant<int, TILE_QUERIES>{}, from);
        }
        from += n;
    }
}

// values = keep values + weights times v, for W registers of the head that begin at `at`. FRESH: the panel is made meanwhile.
template <int Q, int W, bool FRESH>
__attribute__((noinline)) static void value_tile(Page& p, int query, Seen seen, const float* keep, int at, Fold* f) {
    constexpr int STEP = W * RLANES;
    const int64_t ld = p.ld;
    float* panel = p.panel + seen.first * STEP;
    const uint16_t* v = p.v + seen.first * ld + at;
    Sums<Q, W> acc;
#pragma GCC unroll 16
    for (int i = 0; i < Q * W; i++) acc[i / W][i % W] = VF{};
    multiply<Q, W>(p.scores + query * PAGE + seen.first, PAGE, seen.last - seen.first, acc, p.soon, [&](int i, int w) __attribute__((always_inline)) {
        float* row = panel + (i * W + w) * RLANES;
        if (!FRESH) return load_reg(row);
        const VF value = widen(v + i * ld + w * RLANES);
        store_reg(row, value);
        return value;
    });
#pragma GCC unroll 16
    for (int i = 0; i < Q * W; i++) {
        float* value = f[query + i / W].values + at + i % W * RLANES;
        store_reg(value, fma_reg(load_reg(value), keep[query + i / W] - VF{}, acc[i / W][i % W]));
    }
}
template <int W> static void some_values(Page& p, const float* keep, int at, Fold* f) {
    constexpr int STEP = W * RLANES;
    const bool made = p.seen[0] == p.seen[p.queries - 1]; // else the first queries may not see all of it
    for (int i = p.low; !made && i < p.high; i++)
        for (int w = 0; w < W; w++) store_reg(p.panel + i * STEP + w * RLANES, widen(p.v + i * p.ld + at + w * RLANES));
    for (int from = 0, to; from < p.queries; from = to) {
        const Seen seen = p.seen[from];
        for (to = from + 1; to < p.queries && p.seen[to] == seen;) to++;
        if (seen.first < seen.last)
            tiles(from, to, [&](auto tile, int i) {
                constexpr int Q = decltype(tile)::value;
                if (made && i == 0) value_tile<Q, W, true>(p, i, seen, keep, at, f);
                else value_tile<Q, W, false>(p, i, seen, keep, at, f);
            });
    }
}

static void page_values(Page& p, const float* keep, Fold* f) {
    p.soon = {p.next, p.next + PAGE * p.ld, p.queries > 4};
    for (int at = 0, w; at < p.width; at += w * RLANES) {
        const int left = (p.width - at) / RLANES;
        w = left >= WIDE ? WIDE : left >= 2 ? 2 : 1;
        if (w == WIDE) some_values<WIDE>(p, keep, at, f);
        else if (w == 2) some_values<NREG <= 2 ? 2 : WIDE>(p, keep, at, f);
        else some_values<NREG == 1 ? 1 : WIDE>(p, keep, at, f); // a width is a multiple of sixteen
    }
}

static inline void in_order(float*, int) {} // values lie as they are
