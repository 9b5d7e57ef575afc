#pragma once

// Everything before latent attention, whatever the projections compute with.

#include "launch/stage.h"
#include "operators/operators.h"

namespace davinci {

// What the stage takes beside its projections.
struct LatentInputs {
  const Tensor &kv_a_norm, &up_key, &cos, &sin, &slot_mapping, &latent_cache, &rotary_cache;
  double kv_epsilon;
  int64_t decode_tokens;
  const std::optional<c10::Stream>& side_stream;
};

// Sizes of the stage, read from its weights.
struct LatentSizes {
  int64_t tokens, decode_tokens, heads, latent, rope, nope, query_rank;

  // Raises ValueError when they contradict each other.
  LatentSizes(const Tensor& hidden_states, const Tensor& a_weight, const OptionalTensor& q_a_norm,
              const Tensor& q_b_weight, const LatentInputs& inputs);
  bool has_query_rank() const { return query_rank > 0; }
  bool has_prefill() const { return decode_tokens < tokens; }
  int64_t kv_row() const { return latent + rope; }
  int64_t query_row() const { return heads * (nope + rope); }
};

// Memory for compressed queries on their way to the up projection; [0] where not needed.
struct CompressedQueries {
  View normed, deviation, integers, scales;
};

// The products before latent attention and the norm between them.
class Projections {
 public:
  virtual ~Projections() = default;
  virtual bool is_int8() const = 0;
  // Whether `down` can give some columns only.
  virtual bool divides_down() const = 0;
  // Columns `first` and up of both down projections, as many as `out` has.
  virtual void down(Stage& stage, int64_t first, const View& out) const = 0;
  // Only with a query rank.
  virtual void normalize(Stage& stage, const View& compressed,
                         const CompressedQueries& rows) const = 0;
  // The queries, of normalized rows or without a query rank of the hidden states.
  virtual void up(Stage& stage, const CompressedQueries& rows, const View& out) const = 0;
};

// Launches the stage. hidden_states: a tensor on its device.
LatentQueries preprocess(const char* name, const Tensor& hidden_states, const LatentSizes& sizes,
                         const LatentInputs& inputs, const Projections& projections);

// Empty results of those sizes.
LatentQueries meta_queries(const Tensor& hidden_states, const LatentSizes& sizes,
                           const LatentInputs& inputs);

}  // namespace davinci
