#pragma once

// CANN's operators that several of ours launch.

#include "launch/stage.h"

namespace davinci {

inline Operator kCast("aclnnCast");
inline Operator kMm("aclnnMm");
inline Operator kRmsNorm("aclnnRmsNorm");
inline Operator kInplaceAdd("aclnnInplaceAdd");
inline Operator kDynamicQuant("aclnnDynamicQuant");
inline Operator kQuantize("aclnnQuantize");
inline Operator kAddcmul("aclnnAddcmul");
inline Operator kBatchMatMul("aclnnBatchMatMul");
inline Operator kIndexSelect("aclnnIndexSelect");
inline Operator kInplaceCopy("aclnnInplaceCopy");
inline Operator kInplaceMaskedFill("aclnnInplaceMaskedFillScalar");
inline Operator kSoftmax("aclnnSoftmax");

// A paged cache [blocks, block_size, heads, size] with its heads in one dimension.
inline View flat(const Tensor& cache) {
  return View::of(cache).reshaped({cache.size(0), cache.size(1), cache.size(2) * cache.size(3)});
}

}  // namespace davinci
