// Python's door to sampling: one call for a row, over the logits as numpy holds them.
#include "sampling.h"
#include "tensors.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <optional>
#include <string>

namespace nb = nanobind;

namespace {

using Logits = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

int64_t token(nb::handle h, int64_t vocab) {
    const int64_t id = nb::cast<int64_t>(h);
    if (id < 0 || id >= vocab) throw nb::value_error(("token " + std::to_string(id) + " is not in the vocabulary").c_str());
    return id;
}

std::vector<int64_t> tokens(nb::handle sequence, int64_t vocab) {
    std::vector<int64_t> ids;
    for (nb::handle h : sequence) ids.push_back(token(h, vocab));
    return ids;
}

// (repetition, presence, frequency, prompt ids or None, {sampled token: times}, {token: bias}, banned, mask or None, stops, may stop)
Edits edits_of(const nb::tuple& t, int64_t vocab) {
    if (t.size() != 10) throw nb::value_error("edits: ten parts");
    Edits e;
    e.repetition = nb::cast<float>(t[0]), e.presence = nb::cast<float>(t[1]), e.frequency = nb::cast<float>(t[2]);
    if (!t[3].is_none()) {
        const Ids prompt = nb::cast<Ids>(t[3]);
        e.prompt = prompt.data(), e.prompts = (int64_t)prompt.shape(0);
        if (e.prompts && (e.prompt[0] < 0 || e.prompt[e.prompts - 1] >= vocab)) throw nb::value_error("prompt: a token is not in the vocabulary");
    }
    for (auto [id, times] : nb::cast<nb::dict>(t[4])) e.counts.emplace_back(token(id, vocab), nb::cast<int64_t>(times));
    for (auto [id, value] : nb::cast<nb::dict>(t[5])) e.bias.emplace_back(token(id, vocab), (float)nb::cast<double>(value));
    e.banned = tokens(t[6], vocab);
    if (!t[7].is_none()) {
        const nb::bytes mask = nb::cast<nb::bytes>(t[7]); // `t` holds it for the time of the call
        e.mask = (const uint8_t*)mask.c_str(), e.mask_bytes = (int64_t)mask.size();
        e.stops = tokens(t[8], vocab), e.may_stop = nb::cast<bool>(t[9]);
    }
    return e;
}

// (log probability of `chosen`, [(id, log probability)] of the `top` best)
nb::tuple log_probabilities(Logits row, int64_t chosen, int64_t top) {
    const int64_t n = (int64_t)row.shape(0);
    if (chosen < 0 || chosen >= n) throw nb::value_error("chosen: not in the vocabulary");
    double norm;
    std::vector<int32_t> ids;
    {
        nb::gil_scoped_release released;
        norm = log_sum(row.data(), n);
        ids = best(row.data(), n, top);
    }
    nb::list out;
    for (int32_t id : ids) out.append(nb::make_tuple(id, (double)row.data()[id] - norm));
    return nb::make_tuple((double)row.data()[chosen] - norm, out);
}

// Changes the row; a negative token says why there is none. `forced`: the token if there could be one, -1 for a free choice.
int64_t sample_row(Logits row, const std::optional<nb::tuple>& edits, double temperature, int64_t top_k, double top_p, double min_p, double u,
                   int64_t forced) {
    const int64_t n = (int64_t)row.shape(0);
    if (!n) throw nb::value_error("row: is empty");
    if (forced >= n) throw nb::value_error("forced: not in the vocabulary");
    const Edits e = edits ? edits_of(*edits, n) : Edits{};
    const Choice choice{forced < 0 ? temperature : 0, top_p, min_p, u, top_k};
    nb::gil_scoped_release released;
    edit(row.data(), n, e);
    const int64_t chosen = choose(row.data(), n, choice);
    return chosen < 0 || forced < 0 ? chosen : forced;
}

} // namespace

void bind_sampling(nb::module_& m) {
    m.def("sample_row", &sample_row, nb::arg("row"), nb::arg("edits").none(), nb::arg("temperature"), nb::arg("top_k"), nb::arg("top_p"),
          nb::arg("min_p"), nb::arg("u"), nb::arg("forced"));
    m.def("log_probabilities", &log_probabilities);
    m.attr("ALL_BANNED") = (int64_t)ALL_BANNED;
    m.attr("NO_NUMBERS") = (int64_t)NO_NUMBERS;
}
