// Copies of whole blocks inside paged caches.

#include "launch/stage.h"
#include "operators/operators.h"

namespace davinci {
namespace {

void check(at::TensorList kv_caches, const Tensor& block_pairs) {
  TORCH_CHECK_VALUE(
      block_pairs.device().is_cpu() && block_pairs.scalar_type() == at::kLong &&
          block_pairs.dim() == 2 && block_pairs.size(1) == 2 && block_pairs.is_contiguous(),
      "block pairs of sizes ", block_pairs.sizes(), ", ", block_pairs.scalar_type(), " on ",
      block_pairs.device(), ": give [num_pairs, 2] (from, to), int64, contiguous, on the host");
  const int64_t num_blocks = kv_caches[0].size(0);
  for (const Tensor& cache : kv_caches) {
    TORCH_CHECK_VALUE(
        cache.dim() >= 2 && cache.is_contiguous() && cache.size(0) == num_blocks,
        "a cache of sizes ", cache.sizes(), " beside one of ", num_blocks,
        " blocks: caches are contiguous, [num_blocks, ...], with equally many blocks");
  }
  const int64_t* const pairs = block_pairs.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < 2 * block_pairs.size(0); ++i) {
    TORCH_CHECK_INDEX(pairs[i] >= 0 && pairs[i] < num_blocks, "block ", pairs[i], " of a cache of ",
                      num_blocks, " blocks");
  }
}

}  // namespace

void copy_kv_blocks(const arguments::copy_kv_blocks& a) {
  TORCH_CHECK_VALUE(!a.kv_caches.empty(), "copy_kv_blocks got no cache: give at least one");
  if (a.kv_caches[0].is_meta()) {  // meta tensors have no pairs to check
    TORCH_CHECK_VALUE(a.block_pairs.dim() == 2 && a.block_pairs.size(1) == 2,
                      "block pairs of sizes ", a.block_pairs.sizes(), ": give [num_pairs, 2]");
    return;
  }
  check(a.kv_caches, a.block_pairs);
  const int64_t num_pairs = a.block_pairs.size(0);
  if (num_pairs == 0 || a.kv_caches[0].numel() == 0) return;
  Stage stage("copy_kv_blocks", a.kv_caches[0]);
  const int64_t* const pairs = a.block_pairs.const_data_ptr<int64_t>();
  for (const Tensor& cache : a.kv_caches) {
    const size_t block_bytes = cache.nbytes() / static_cast<size_t>(cache.size(0));
    char* const base = static_cast<char*>(cache.mutable_data_ptr());
    for (int64_t first = 0; first < num_pairs;) {
      const int64_t from = pairs[2 * first];
      const int64_t to = pairs[2 * first + 1];
      // Adjacent blocks that go to adjacent blocks are one copy, unless they overlap.
      int64_t run = 1;
      while (first + run < num_pairs && pairs[2 * (first + run)] == from + run &&
             pairs[2 * (first + run) + 1] == to + run && run < std::abs(from - to)) {
        ++run;
      }
      if (from != to) {
        stage.copy(base + static_cast<size_t>(to) * block_bytes,
                   base + static_cast<size_t>(from) * block_bytes,
                   static_cast<size_t>(run) * block_bytes);
      }
      first += run;
    }
  }
  stage.submit();
}

}  // namespace davinci
