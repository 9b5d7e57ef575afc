#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "collective/group.h"
#include "collective/messages.h"
#include "ops/operator.h"

namespace vnpu::ops {

// Placement of experts. The first ranks have one shared expert each, the others the routed ones.
struct ExpertPlaces {
  int64_t ranks;
  int64_t routed;        // experts that tokens choose
  int64_t shared;        // experts that take every token
  int64_t shared_ranks;  // a multiple of `shared`: each of them is on as many

  bool is_shared(int64_t rank) const { return rank < shared_ranks; }
  int64_t experts_per_rank() const { return routed / (ranks - shared_ranks); }
  int64_t experts_of(int64_t rank) const { return is_shared(rank) ? 1 : experts_per_rank(); }
  int64_t rank_of(int64_t expert) const { return shared_ranks + expert / experts_per_rank(); }
  // The rank to which tokens of rank `from` go for a shared expert.
  int64_t rank_of_shared(int64_t expert, int64_t from) const {
    const int64_t copies = shared_ranks / shared;
    return expert * copies + from % copies;
  }
  // Choices of a token beyond its routed ones.
  int64_t shared_choices() const { return shared_ranks == 0 ? 0 : shared; }
};

// Arguments that dispatch and combine have in common.
struct ExpertExchange {
  GroupPtr group;
  ExpertPlaces places;
  TensorView expert_ids;             // [tokens, k], int32
  std::optional<TensorView> active;  // [tokens] or [tokens, k], bool
  int64_t most_tokens;               // maximum over ranks
};

// One row on its way: a token for an expert.
struct ExpertAssignment {
  int32_t token;
  int32_t choice;  // 0 to k - 1 routed, then the shared ones
  int32_t expert;  // among all: the shared ones first
};

// By rank, then by that rank's experts.
using ExpertRoutes = std::vector<std::vector<std::vector<ExpertAssignment>>>;

// Settings that ranks announce for an exchange. alike: further settings that must be equal on all
// ranks.
Announcement announce_experts(Operation operation, const ExpertExchange& exchange,
                              at::ScalarType type, int64_t hidden,
                              std::initializer_list<int64_t> alike);

// An exchange of tokens' rows between ranks, in either direction.
class ExpertMessages : public MessageExchange {
 protected:
  ExpertMessages(const ExpertExchange& exchange, const Announcement& announcement,
                 const Touched& touched);

  const ExpertPlaces& places() const { return exchange_.places; }
  int64_t own_experts() const { return places().experts_of(group().rank()); }
  int64_t tokens() const { return exchange_.expert_ids.sizes[0]; }
  int64_t top_k() const { return exchange_.expert_ids.sizes[1]; }

  // The rows that this rank sends, by its tokens' choices.
  ExpertRoutes routes() const;

  // Ends the exchange for all ranks.
  [[noreturn]] void give_up(const std::string& why) const;

 private:
  // [tokens, k], bool, or undefined where all take part.
  Tensor active_choices(Tensors& tensors) const;

  const ExpertExchange exchange_;
};

}  // namespace vnpu::ops
