#include "ops/attention/latent_cache.h"

#include <string_view>

#include "ops/attention/kv_cache.h"
#include "ops/quantization/int8_quantization.h"

namespace vnpu::ops {
namespace {

bool ends_with(const Text& text, const char* end) {
  const std::string_view suffix(end);
  return text.size() >= suffix.size() &&
         std::string_view(text).substr(text.size() - suffix.size()) == suffix;
}

// The slot of each row, if sequences begin at blocks and the index has blocks.
Tensor slots_of_blocks(const LatentCacheTarget& target, int64_t block_size) {
  const int64_t blocks = (target.tokens + block_size - 1) / block_size;
  const Tensor token = at::arange(target.tokens, at::kLong);
  const Tensor first = target.index.to(at::kLong).view({target.batches, blocks});
  return (first.index_select(1, at::floor_divide(token, block_size)) + token.remainder(block_size))
      .reshape({-1});
}

}  // namespace

void write_latent_cache(const Tensor& rows, const Tensor& cache, const LatentCacheTarget& target) {
  const Text& mode = target.mode;
  if (rows.size(0) == 0) return;
  if (mode.empty() ||
      mode == "Norm") {  // [batch, 1, length, size]; indices count within a sequence
    const Tensor flat = cache.squeeze(1);
    const Tensor first = at::arange(target.batches, at::kLong).unsqueeze(-1) * flat.size(1);
    const Tensor index = target.index.to(at::kLong).view({target.batches, target.tokens});
    const Tensor slots = at::where(index.lt(0), index, index + first).reshape({-1});
    write_slots(rows, flat, slots, CacheMode::kNorm, false);
    return;
  }
  const bool per_block = mode.rfind("PA_BLK", 0) == 0;
  const bool pieces = ends_with(mode, "NZ");
  if (mode != "PA" && !ends_with(mode, "BNSD") && !ends_with(mode, "BSND") && !pieces) {
    refuse("cacheMode '" + mode +
           "' is not supported; use Norm, PA, PA_BNSD, PA_NZ, PA_BLK_BNSD or PA_BLK_NZ.");
  }
  const int64_t block_size = cache.size(1);
  const Tensor slots =
      per_block ? slots_of_blocks(target, block_size) : target.index.to(at::kLong).reshape({-1});
  if (!pieces) {
    write_slots(rows, cache, slots, CacheMode::kNorm, false);
    return;
  }
  // The sizes are those of dense blocks; the memory of a block is [size / piece, block_size,
  // piece].
  const int64_t piece = 32 / static_cast<int64_t>(cache.element_size());
  const int64_t size = cache.size(-1) * cache.size(-2);
  write_slots(rows, cache.view({cache.size(0), size / piece, block_size, piece}), slots,
              CacheMode::kPieces, false);
}

Tensor for_cache(const Tensor& rows, const Tensor& cache, const OptionalTensor& scale,
                 const OptionalTensor& offset) {
  if (cache.scalar_type() != at::kChar) return rows.to(cache.scalar_type());
  require(scale.has_value(), "an int8 cache needs the scale of what is written to it.");
  Tensor wide = rows.to(at::kFloat) * scale->to(at::kFloat).reshape({-1});
  if (offset) wide = wide + offset->to(at::kFloat).reshape({-1});
  return to_int8(wide);
}

}  // namespace vnpu::ops
