#pragma once

// The stage before MLA, for projections of all precisions.

#include "launch/stage.h"
#include "operators/operators.h"

namespace davinci {

// Inputs of the stage besides its projections.
struct MlaInputs {
  const Tensor &kv_a_norm, &W_UK, &cos, &sin, &slot_mapping, &kv_c_cache, &k_pe_cache;
  double kv_epsilon;
  int64_t num_decode_tokens;
  const std::optional<c10::Stream>& side_stream;

  // a: arguments of one of the stage's operators.
  template <class A>
  static MlaInputs of(const A& a) {
    return {a.kv_a_norm,         a.W_UK,       a.cos,        a.sin,
            a.slot_mapping,      a.kv_c_cache, a.k_pe_cache, a.kv_epsilon,
            a.num_decode_tokens, a.side_stream};
  }
};

// Sizes of the stage, read from its weights.
struct MlaSizes {
  int64_t tokens, decode_tokens, heads, kv_lora_rank, rope, nope, q_lora_rank;

  // Raises ValueError when they contradict each other.
  MlaSizes(const Tensor& hidden_states, const Tensor& a_weight, const OptionalTensor& q_a_norm,
           const Tensor& q_b_weight, const MlaInputs& inputs);
  bool has_q_lora() const { return q_lora_rank > 0; }
  bool has_prefill() const { return decode_tokens < tokens; }
  int64_t kv_row() const { return kv_lora_rank + rope; }
  int64_t query_row() const { return heads * (nope + rope); }
};

// Memory for compressed queries between the down and the up projection; [0] where not needed.
struct CompressedQueries {
  View normed, deviation, integers, scales;
};

// The products before attention and the norm between them.
class Projections {
 public:
  virtual ~Projections() = default;
  virtual bool is_int8() const = 0;
  // True if `down` can compute a subset of its columns.
  virtual bool divides_down() const = 0;
  // Columns `first` and up of both down projections, as many as `out` has.
  virtual void down(Stage& stage, int64_t first, const View& out) const = 0;
  // Only with q_lora_rank.
  virtual void normalize(Stage& stage, const View& compressed,
                         const CompressedQueries& rows) const = 0;
  // The queries, from normalized rows, or without q_lora_rank from the hidden states.
  virtual void up(Stage& stage, const CompressedQueries& rows, const View& out) const = 0;
};

// Makes the stage's results (operators.mla_preprocess) and, unless they are meta tensors, launches
// it. hidden_states: a tensor on its device.
Tensors<5> preprocess(const char* name, const Tensor& hidden_states, const MlaSizes& sizes,
                      const MlaInputs& inputs, const Projections& projections);

}  // namespace davinci
