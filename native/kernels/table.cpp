// The table of one ISA.
#include "isa.h"
#include "kernels.h"

#define NAME_(isa) isa##_kernels
#define NAME(isa) NAME_(isa)

const Kernels& NAME(MOORAGE_ISA)() {
    static const Kernels table = [] {
        Kernels k{};
        MOORAGE_ISA::fill_linear(k);
        MOORAGE_REST::fill_attention(k);
        MOORAGE_REST::fill_delta(k);
        MOORAGE_REST::fill_rows(k);
        return k;
    }();
    return table;
}
