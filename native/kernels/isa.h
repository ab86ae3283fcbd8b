// Declares what each file of an ISA contributes to its table. Every kernel file is compiled once per ISA with MOORAGE_ISA set.
#pragma once
struct Kernels;
#if !defined(MOORAGE_REST) // the set whose other kernels this one takes
#define MOORAGE_REST MOORAGE_ISA
#endif
namespace MOORAGE_ISA {
void fill_linear(Kernels&);
}
namespace MOORAGE_REST {
void fill_attention(Kernels&);
void fill_delta(Kernels&);
void fill_rows(Kernels&);
} // namespace MOORAGE_REST
