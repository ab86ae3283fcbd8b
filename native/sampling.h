// Choosing the next token from a row of logits: `engine/sampling.py` says what each step means, and is what tests compare with.
//
// The same numbers on every machine: additions in one order, no fused ones, an exponential of our own. Beside numpy's a sum may
// differ in its last bit, so a draw or a nucleus that falls on a border to the last bit may go the other way.
#pragma once
#include <cstdint>
#include <utility>
#include <vector>

struct Edits {
    float repetition = 1, presence = 0, frequency = 0;
    const int64_t* prompt = nullptr; // distinct tokens of the prompt, ascending
    int64_t prompts = 0;
    std::vector<std::pair<int64_t, int64_t>> counts; // sampled token, times
    std::vector<std::pair<int64_t, float>> bias;
    std::vector<int64_t> banned, stops;
    const uint8_t* mask = nullptr; // bit i: token i is allowed; tokens behind the end are not
    int64_t mask_bytes = 0;
    bool may_stop = false; // `stops` are allowed, with a mask
};

struct Choice {
    double temperature = 0, top_p = 1, min_p = 0, u = 0; // temperature 0: the best; u in [0, 1)
    int64_t top_k = 0;
};

enum : int64_t { ALL_BANNED = -1, NO_NUMBERS = -2 };

void edit(float* row, int64_t n, const Edits& e);

// A token, or why there is none.
int64_t choose(const float* row, int64_t n, const Choice& c);

// log(sum(exp(row)))
double log_sum(const float* row, int64_t n);

// Ids of the k largest, best first; ties to the lower id.
std::vector<int32_t> best(const float* row, int64_t n, int64_t k);
