#pragma once

// The product of every head's rows with a matrix of its own: one launch.

#include <array>

#include "launch/stage.h"

namespace davinci {

inline constexpr std::array<int64_t, 3> kAsGiven = {0, 1, 2};
inline constexpr std::array<int64_t, 3> kSwapLeading = {1, 0, 2};

// out [tokens, heads, out] = permute(x) [heads, tokens, in] times weight [heads, in, out].
void multiply_heads(Stage& stage, const View& x, const std::array<int64_t, 3>& permute,
                    const at::Tensor& weight, const View& out);

}  // namespace davinci
