#pragma once

namespace vnpu::ops {

// How many floats the vectors of this processor hold: 16 (AVX-512), 8 (AVX2 with FMA) or 4. As ATen
// decides, so ATEN_CPU_CAPABILITY lowers it for our own loops too.
int vector_floats();

}  // namespace vnpu::ops
