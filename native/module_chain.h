// What a chain asks of the halves it runs (module_halves.cpp).
#pragma once
#include "chain.h"
#include "tensors.h"

#include <climits>

// What a step must have for all halves of a chain: checked once, for all of them.
struct Needs {
    int64_t pages = INT64_MAX; // the fewest that a cache holds
    int64_t slots = INT64_MAX;
    int window = -1; // the longest of all layers, 0 = full, -1 = no layer has pages

    void attention(int64_t held, int reach) {
        pages = std::min(pages, held);
        window = window < 0 || !reach ? reach : window ? std::max(window, reach) : 0;
    }
};

// `first` and `second` are the half's cache: keys and values, or convolution and state; `rope` is half of what its table rotates.
Link link_of(nb::handle half, nb::handle first, nb::handle second, int64_t rope, Needs& needs);
int64_t width_of(nb::handle half);
