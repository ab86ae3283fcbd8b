// Declares what each file of an ISA contributes to its table. Every kernel file is compiled once per ISA with MOORAGE_ISA set.
#pragma once
struct Kernels;
namespace MOORAGE_ISA {
void fill_linear(Kernels&);
void fill_attention(Kernels&);
void fill_delta(Kernels&);
void fill_rows(Kernels&);
} // namespace MOORAGE_ISA
