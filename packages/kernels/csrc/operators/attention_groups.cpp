// Attention inside captured graphs: each launch is a task group, whose lengths an update replaces.

#include <torch/custom_class.h>

#include <utility>
#include <vector>

#include "launch/stage.h"
#include "operators/fused_attention.h"

namespace davinci {
namespace {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The launches of one graph that share lengths. Holds only masks and tables: the graph holds all
// other tensors, whose addresses are stored here.
class AttentionGroups final : public torch::CustomClassHolder {
 public:
  // Captures a launch on the current stream. Arguments are those of
  // npu_fused_infer_attention_score; the caches are [blocks, block_size, heads * size].
  void attend(const Tensor& query, const Tensor& key, const Tensor& value,
              const OptionalTensor& query_rope, const OptionalTensor& key_rope,
              const OptionalTensor& mask, const Tensor& block_table, at::IntArrayRef lengths_q,
              at::IntArrayRef lengths_kv, int64_t heads, int64_t key_value_heads, double scale,
              const std::string& layout, int64_t sparse_mode, int64_t pre_tokens,
              int64_t next_tokens, int64_t block_size, const Tensor& out, const Tensor& lse,
              const Tensor& workspace) {
    const auto view = [](const OptionalTensor& tensor) {
      return tensor.has_value() ? std::optional<View>(View::of(*tensor)) : std::nullopt;
    };
    TORCH_CHECK_VALUE(layout == kTND || layout == kTND_NTD, "a layout of ", layout, ": give ", kTND,
                      " or ", kTND_NTD);
    const FusedAttention call{.query = View::of(query),
                              .key = View::of(key),
                              .value = View::of(value),
                              .query_rope = view(query_rope),
                              .key_rope = view(key_rope),
                              .mask = mask,
                              .block_table = block_table,
                              .actual_seq_lengths_q = lengths_q,
                              .actual_seq_lengths_kv = lengths_kv,
                              .heads = heads,
                              .key_value_heads = key_value_heads,
                              .scale = scale,
                              .layout = layout == kTND ? kTND : kTND_NTD,
                              .sparse_mode = sparse_mode,
                              .pre_tokens = pre_tokens,
                              .next_tokens = next_tokens,
                              .block_size = block_size,
                              .out = View::of(out),
                              .lse = View::of(lse)};
    auto group = std::make_shared<Group>(call, View::of(workspace));
    Stage stage("attention_groups", query);
    stage.begin_group();
    launch(stage, *group, stage.handles().ints(lengths_q), stage.handles().ints(lengths_kv));
    stage.end_group(handle_of(group));
    stage.submit();
    groups_.push_back(std::move(group));
    like_ = block_table;
  }

  // Sets the lengths of all launches, in the current stream's order. One entry of the task queue.
  void update(at::IntArrayRef lengths_q, at::IntArrayRef lengths_kv) {
    if (groups_.empty()) return;
    Stage stage("attention_groups", like_);
    aclIntArray* const actual_q = stage.handles().ints(lengths_q);
    aclIntArray* const actual_kv = stage.handles().ints(lengths_kv);
    for (const std::shared_ptr<Group>& group : groups_) {
      stage.begin_update(handle_of(group));
      launch(stage, *group, actual_q, actual_kv);
      stage.end_update();
    }
    stage.submit();
  }

  int64_t size() const { return static_cast<int64_t>(groups_.size()); }

 private:
  static constexpr const char* kTND = "TND";
  static constexpr const char* kTND_NTD = "TND_NTD";
  // Lives as long as launches of it are queued.
  struct Group {
    Group(const FusedAttention& launched, const View& workspace)
        : call(made, launched),
          workspace(workspace),
          mask(launched.mask),
          block_table(launched.block_table) {}
    Handles made;  // arguments that stay the same in all updates
    PreparedAttention call;
    View workspace;
    OptionalTensor mask, block_table;
    void* handle = nullptr;  // of the task group
  };

  static std::shared_ptr<void*> handle_of(const std::shared_ptr<Group>& group) {
    return {group, &group->handle};
  }
  static void launch(Stage& stage, const Group& group, aclIntArray* lengths_q,
                     aclIntArray* lengths_kv) {
    run_attention(stage, group.call, lengths_q, lengths_kv);
    stage.use_workspace(group.workspace);
  }

  std::vector<std::shared_ptr<Group>> groups_;
  Tensor like_;
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(vllm_davinci, library) {
  library.class_<AttentionGroups>("AttentionGroups")
      .def(torch::init<>())
      .def("attend", &AttentionGroups::attend)
      .def("update", &AttentionGroups::update)
      .def("size", &AttentionGroups::size);
}

}  // namespace davinci
