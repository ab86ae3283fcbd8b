// A page's scores and values with AVX2's sixteen registers. Included by attention_page.h.
//
// bf16 stay pairs, a dword each, until a product wants them: a shift makes the first of a pair a float32, a mask the second. Four queries and two
// registers are 8 FMAs and 7 other instructions, which Zen 3 does in 4.02 cycles; a panel of float32 would be 6 others, but a store beside
// FMAs takes the turn of more than one of them (12 FMAs and 4 stores: 8.6 cycles). Values lie as the pairs come, until `in_order`.

template <int W> constexpr int PIECE = 2 * PANEL_FLOATS / (W * RLANES); // elements of W registers of keys that a panel holds
template <int W> static inline void put_pair(float* panel, int d, int w, VU pair) { store_reg(panel + (d / 2 * W + w) * RLANES, (VF)pair); }
static inline VU load_pairs(const void* p) {
    VU r;
    memcpy(&r, p, REG);
    return r;
}

// Scores of Q queries and W registers of keys; a row of the panel has ROW of them. Each tile a function: inlined, gcc 12 keeps sums in memory.
template <int Q, int W, int ROW>
__attribute__((noinline)) static void pair_scores(const float* q, int ld, const float* panel, int n, bool more, Soon& page, float* scores) {
    Sums<Q, W> acc;
#pragma GCC unroll 16
    for (int i = 0; i < Q * W; i++) acc[i / W][i % W] = more ? load_reg(scores + i / W * PAGE + i % W * RLANES) : VF{};
    Soon soon = page;
    for (int d = 0; d < n; d += 2, panel += ROW * RLANES) {
        if (!(d / 2 & soon.rest)) soon.nearer();
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) { // all queries with the first, then with the second: a sum's products are apart
            const float* from = panel;
            if (Q > 4) __asm__ volatile("" : "+r"(from)); // read again: kept as well, five queries' sums would not all have a register
            VF part[W];
#pragma GCC unroll 2
            for (int w = 0; w < W; w++) {
                const VU pair = load_pairs(from + w * RLANES);
                part[w] = half ? second_of(pair) : first_of(pair);
                __asm__("" : "+x"(part[w]));
            }
#pragma GCC unroll 5
            for (int m = 0; m < Q; m++) {
                const VF number = q[m * ld + d + half] - VF{};
#pragma GCC unroll 2
                for (int w = 0; w < W; w++) add_product(acc[m][w], number, part[w]);
            }
        }
    }
    page = soon;
#pragma GCC unroll 16
    for (int i = 0; i < Q * W; i++) store_reg(scores + i / W * PAGE + i % W * RLANES, acc[i / W][i % W]);
}
template <int Q, int W>
static inline void score_tile(const float* q, int ld, const float* panel, int n, bool more, Soon& soon, float* scores) {
    constexpr int SOME = W < 2 ? W : 2;
    for (int w = 0; w < W; w += SOME) pair_scores<Q, SOME, W>(q, ld, panel + w * RLANES, n, more, soon, scores + w * RLANES);
}

// call(Q, i) for tiles of Q queries that begin at i, in [from, to): fours, at last five or what is left.
template <class Call> static inline void tiles(int from, int to, const Call& call) {
    for (int left = to - from; left > 0; left = to - from) {
        const int n = left == 5 ? 5 : left < 4 ? left : 4;
        switch (n) {
        case 1: call(std::integral_constant<int, 1>{}, from); break;
        case 2: call(std::integral_constant<int, 2>{}, from); break;
        case 3: call(std::integral_constant<int, 3>{}, from); break;
        case 4: call(std::integral_constant<int, 4>{}, from); break;
        default: call(std::integral_constant<int, 5>{}, from);
        }
        from += n;
    }
}

// acc += the weights of Q queries for a key times P pairs of registers of its value.
template <int Q, int P>
__attribute__((always_inline)) static inline void add_key(const uint16_t* v, const float* weight, Sums<Q, 2 * P>& acc) {
#pragma GCC unroll 4
    for (int w = 0; w < 2 * P; w += 2) {
        const VU pair = load_pairs(v + w * RLANES);
        VF first = first_of(pair), second = second_of(pair);
        __asm__("" : "+x"(first), "+x"(second));
#pragma GCC unroll 5
        for (int m = 0; m < Q; m++) {
            const VF number = weight[m * PAGE] - VF{};
            add_product(acc[m][w], number, first), add_product(acc[m][w + 1], number, second);
        }
    }
}

// values = keep values + weights times v for elements [at, end) of the head, P pairs of registers at a time.
template <int Q, int P>
__attribute__((noinline)) static void value_tile(Page& p, int query, Seen seen, const float* keep, int at, int end, Fold* f) {
    constexpr int W = 2 * P;
    float* to[Q];
    for (int m = 0; m < Q; m++) to[m] = f[query + m].values;
    Soon soon = p.soon;
    for (; at < end; at += W * RLANES) {
        const uint16_t* v = p.v + seen.first * p.ld + at;
        const float* weight = p.scores + query * PAGE + seen.first;
        Sums<Q, W> acc;
#pragma GCC unroll 16
        for (int i = 0; i < Q * W; i++) acc[i / W][i % W] = VF{};
        int keys = seen.last - seen.first;
        for (; keys > 1; keys -= 2, v += 2 * p.ld, weight += 2) { // two in turn: what counts and fetches is a third of one key's instructions
            if (!(keys / 2 & soon.rest)) soon.nearer();
            add_key<Q, P>(v, weight, acc), add_key<Q, P>(v + p.ld, weight + 1, acc);
        }
        if (keys) add_key<Q, P>(v, weight, acc);
#pragma GCC unroll 16
        for (int i = 0; i < Q * W; i++) {
            float* value = to[i / W] + at + i % W * RLANES;
            store_reg(value, fma_reg(load_reg(value), keep[query + i / W] - VF{}, acc[i / W][i % W]));
        }
    }
    p.soon = soon;
}

static void page_values(Page& p, const float* keep, Fold* f) {
    p.soon = {p.next, p.next + PAGE * p.ld, p.queries > 4};
    for (int from = 0, to; from < p.queries; from = to) {
        const Seen seen = p.seen[from];
        for (to = from + 1; to < p.queries && p.seen[to] == seen;) to++;
        if (seen.first < seen.last)
            tiles(from, to, [&](auto tile, int i) {
                constexpr int Q = decltype(tile)::value, P = Q == 1 ? 4 : Q <= 3 ? 2 : 1; // eight sums or more
                const int most = p.width / (P * 2 * RLANES) * (P * 2 * RLANES);
                value_tile<Q, P>(p, i, seen, keep, 0, most, f);
                if (most < p.width) value_tile<Q, 1>(p, i, seen, keep, most, p.width, f);
            });
    }
}

// Of sixteen values those with even numbers lie first.
static inline void in_order(float* values, int width) {
    for (float* v = values; v < values + width; v += 2 * RLANES) {
        const __m256 even = _mm256_loadu_ps(v), odd = _mm256_loadu_ps(v + RLANES);
        const __m256 low = _mm256_unpacklo_ps(even, odd), high = _mm256_unpackhi_ps(even, odd);
        _mm256_storeu_ps(v, _mm256_permute2f128_ps(low, high, 0x20)), _mm256_storeu_ps(v + RLANES, _mm256_permute2f128_ps(low, high, 0x31));
    }
}
