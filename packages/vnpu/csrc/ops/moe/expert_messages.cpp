#include "ops/moe/expert_messages.h"

namespace vnpu::ops {
namespace {

ElementType element_type(at::ScalarType type) {
  if (type == at::kHalf) return ElementType::kFloat16;
  return type == at::kChar ? ElementType::kInt8 : ElementType::kBfloat16;
}

}  // namespace

Announcement announce_experts(Operation operation, const ExpertExchange& exchange,
                              at::ScalarType type, int64_t hidden,
                              std::initializer_list<int64_t> alike) {
  // FNV-1a: enough to tell different settings apart.
  uint64_t hash = 0xcbf29ce484222325;
  const auto add = [&](int64_t value) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 0x100000001b3;
  };
  const ExpertPlaces& places = exchange.places;
  for (const int64_t value : {places.routed, places.shared, places.shared_ranks,
                              exchange.most_tokens, exchange.expert_ids.sizes[1]}) {
    add(value);
  }
  for (const int64_t value : alike) add(value);
  return Announcement{0,
                      static_cast<uint32_t>(operation),
                      static_cast<uint32_t>(element_type(type)),
                      Announcement::kNone,
                      Announcement::kNone,
                      static_cast<uint64_t>(hidden),
                      hash,
                      0};
}

ExpertMessages::ExpertMessages(const ExpertExchange& exchange, const Announcement& announcement,
                               const Touched& touched)
    : MessageExchange(exchange.group, announcement), exchange_(exchange) {
  this->touched = touched;
}

ExpertRoutes ExpertMessages::routes() const {
  ExpertRoutes routes(group().ranks());
  for (int64_t r = 0; r < places().ranks; ++r) routes[r].resize(places().experts_of(r));
  Tensors tensors;
  const Tensor ids = tensors.make(exchange_.expert_ids).contiguous();
  const int32_t* chosen = ids.const_data_ptr<int32_t>();
  const Tensor active = active_choices(tensors);
  const bool* takes_part = active.defined() ? active.const_data_ptr<bool>() : nullptr;
  for (int64_t t = 0; t < tokens(); ++t) {
    bool any = false;
    for (int64_t i = 0; i < top_k(); ++i) {
      const int64_t a = t * top_k() + i;
      if (takes_part != nullptr && !takes_part[a]) continue;
      any = true;
      const int64_t expert = chosen[a];
      if (expert < 0 || expert >= places().routed) {
        give_up("token " + std::to_string(t) + " chose expert " + std::to_string(expert) + " of " +
                std::to_string(places().routed) + ". Look at expertIds.");
      }
      routes[places().rank_of(expert)][expert % places().experts_per_rank()].push_back(
          {static_cast<int32_t>(t), static_cast<int32_t>(i),
           static_cast<int32_t>(places().shared_choices() + expert)});
    }
    if (!any) continue;
    for (int64_t s = 0; s < places().shared_choices(); ++s) {
      routes[places().rank_of_shared(s, group().rank())][0].push_back(
          {static_cast<int32_t>(t), static_cast<int32_t>(top_k() + s), static_cast<int32_t>(s)});
    }
  }
  return routes;
}

void ExpertMessages::give_up(const std::string& why) const {
  group().fail(FailureKind::kOperatorFailed, "vnpu: " + title() + " of group " + group().name() +
                                                 ": " + group().describe(group().rank()) + ": " +
                                                 why);
}

Tensor ExpertMessages::active_choices(Tensors& tensors) const {
  if (!exchange_.active.has_value()) return {};
  const Tensor active = tensors.make(*exchange_.active).to(at::kBool);
  if (active.dim() == 2) return active.contiguous();
  const int64_t count = active.sum().item<int64_t>();
  if (!active.narrow(0, 0, count).all().item<bool>()) {
    give_up("xActiveMask of one dimension has a false before a true. Put the active tokens first.");
  }
  return active.unsqueeze(1).expand({tokens(), top_k()}).contiguous();
}

}  // namespace vnpu::ops
