#pragma once

#include <cstddef>
#include <span>

#include "collective/element.h"

namespace vnpu {

// Combines `inputs` element by element into `output`, in the order given: the same inputs in the
// same order give the same bits everywhere. float16 and bfloat16 are rounded after each input (to
// nearest, ties to even), as on a chip that reduces during the transfer: torch_npu's test of reduce
// on eight ranks expects these bits. Integers wrap around; max and min propagate NaN. `output` may
// be one of the inputs. Throws kNotSupported for types that cannot be reduced.
void reduce(ElementType type, Reduction reduction, std::span<const std::byte* const> inputs,
            std::byte* output, size_t count);

}  // namespace vnpu
