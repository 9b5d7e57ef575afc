#include "ops/constraints.h"

#include <algorithm>
#include <memory>
#include <sstream>

#include "device/configuration.h"
#include "device/failure.h"
#include "ops/operator.h"
#include "ops/parameters.h"
#include "ops/passed_calls.h"
#include "ops/refusal_log.h"

namespace vnpu::ops {
namespace {

const char* text_of(CannRelease release) {
  switch (release) {
    case CannRelease::k8_3: return "8.3";
    case CannRelease::k8_5: return "8.5";
    case CannRelease::k9_0: return "9.0";
  }
  return "";
}

std::string chips_text(unsigned chips) {
  std::string text;
  for (const auto& [chip, name] :
       {std::pair{kA2, "A2"}, std::pair{kA3, "A3"}, std::pair{k310P, "310P"}}) {
    if ((chips & chip) != 0) text += (text.empty() ? "" : ", ") + std::string(name);
  }
  return text;
}

// The properties of a call that rules see and PassedCalls compares: everything but the tensors'
// addresses.
class SeenArguments {
 public:
  SeenArguments(const ArgumentValue* arguments, size_t count)
      : values_(arguments, arguments + count) {
    size_t num_views = 0;
    for (const ArgumentValue& value : values_) {
      if (value.kind == ArgumentValue::Kind::kTensor) ++num_views;
      if (value.kind == ArgumentValue::Kind::kTensors) num_views += value.tensors.count;
    }
    views_.reserve(num_views);  // values point into it
    for (ArgumentValue& value : values_) {
      if (value.kind == ArgumentValue::Kind::kTensor) {
        value.tensor = &add(*value.tensor);
      } else if (value.kind == ArgumentValue::Kind::kTensors) {
        const TensorView* const first = views_.data() + views_.size();
        for (size_t i = 0; i < value.tensors.count; ++i) add(value.tensors[i]);
        value.tensors.first = reinterpret_cast<const char*>(first);
        value.tensors.distance = sizeof(TensorView);
      }
    }
  }
  const ArgumentValue* values() const { return values_.data(); }

 private:
  const TensorView& add(const TensorView& view) {
    TensorView seen;
    seen.dims = view.dims;
    seen.dtype = view.dtype;
    seen.format = view.format;
    std::copy_n(view.sizes, view.dims, seen.sizes);
    std::copy_n(view.strides, view.dims, seen.strides);
    return views_.emplace_back(seen);
  }

  std::vector<ArgumentValue> values_;
  std::vector<TensorView> views_;
};

}  // namespace

// --- one operator's rows, ready to be checked ---------------------------------------------------

class Constraints {
 public:
  struct Bound {
    const Row* row;
    std::vector<int> positions;  // of the argument and the names
  };

  explicit Constraints(const Operator& op)
      : name_(op.name), allowed_(op.declared().rules), rows_(rows_of(allowed_)) {
    const Configuration& configuration = Configuration::instance();
    // The documents do not cover other generations.
    const unsigned chip =
        static_cast<unsigned>(configuration.chip->generation) & (kA2 | kA3 | k310P);
    if (!configuration.is_reference && chip != 0 && (allowed_.chips & chip) == 0) {
      missing_on_ = configuration.soc_name;
    }
    const std::vector<std::string>& names = op.names();
    for (const Row& row : rows_) {
      const bool applies = (row.scope.chips == 0 || (row.scope.chips & chip) != 0) &&
                           configuration.cann >= row.scope.since &&
                           configuration.cann <= row.scope.until &&
                           !(row.check.is_limit && configuration.is_reference);
      if (!applies) continue;
      Bound bound{&row, {}};
      bound.positions.push_back(position_of(names, row.argument.c_str()));
      for (const char* const name : row.check.names) {
        bound.positions.push_back(position_of(names, name));
      }
      bound_.push_back(std::move(bound));
    }
    count_ = names.size();
    passed_.emplace(counting_positions());
  }

  uint64_t check(const ArgumentValue* arguments) const {
    if (const auto bytes = passed_->find(arguments)) return *bytes;
    const SeenArguments seen(arguments, count_);
    hold(seen.values());
    const uint64_t bytes = workspace_bytes(seen.values());
    passed_->remember(arguments, bytes);
    return bytes;
  }

 private:
  // Of the arguments that rules, or the size of the workspace, depend on.
  std::vector<int> counting_positions() const {
    std::vector<bool> counts(count_, allowed_.workspace.copies);
    for (const Bound& bound : bound_) {
      for (const int position : bound.positions) counts[static_cast<size_t>(position)] = true;
    }
    std::vector<int> positions;
    for (size_t i = 0; i < count_; ++i) {
      if (counts[i]) positions.push_back(static_cast<int>(i));
    }
    return positions;
  }

  void hold(const ArgumentValue* arguments) const {
    if (!missing_on_.empty()) {
      throw Failure(FailureKind::kTilingRefused, name_ + ": " + missing_on_ +
                                                     " has no such operator; " +
                                                     chips_text(allowed_.chips) + " have it.");
    }
    for (const Bound& bound : bound_) {
      const RuleArguments own(arguments, bound.positions.data());
      if (!bound.row->check.sees_absence) {
        bool complete = true;
        for (size_t i = 0; complete && i < bound.positions.size(); ++i) complete = own.has(i);
        if (!complete) continue;
      }
      if (const Found found = bound.row->check.find(own)) refuse(bound, *found);
    }
  }

  uint64_t workspace_bytes(const ArgumentValue* arguments) const {
    uint64_t bytes = allowed_.workspace.bytes;
    if (allowed_.workspace.copies) {
      for (size_t i = 0; i < count_; ++i) {
        if (arguments[i].kind != ArgumentValue::Kind::kTensor) continue;
        const TensorView& view = *arguments[i].tensor;
        if (!is_contiguous(view)) {
          bytes += static_cast<uint64_t>(view.numel()) * at::elementSize(view.dtype);
        }
      }
    }
    return bytes;
  }

  int position_of(const std::vector<std::string>& names, const char* name) const {
    const auto found = std::find(names.begin(), names.end(), plain_name(name));
    if (found == names.end()) {
      throw Failure(FailureKind::kInternal, "vnpu: a constraint of " + name_ +
                                                " names an argument '" + name +
                                                "' that its row in ops/ does not have.");
    }
    return static_cast<int>(found - names.begin());
  }

  [[noreturn]] void refuse(const Bound& bound, const std::string& found) const {
    const Configuration& configuration = Configuration::instance();
    const Row& row = *bound.row;
    throw Failure(row.scope.tiling ? FailureKind::kTilingRefused : FailureKind::kOperatorInvalid,
                  name_ + ": " + row.argument + " (argument " +
                      std::to_string(bound.positions[0] + 1) + ") has " + found + ", but must " +
                      row.check.text + " on " + (configuration.is_reference ? "reference:" : "") +
                      configuration.soc_name + " with CANN " + text_of(configuration.cann) +
                      ". Source: " + row.source + ".");
  }

  const std::string name_;
  const Rules allowed_;
  const std::vector<Row> rows_;
  std::vector<Bound> bound_;
  std::string missing_on_;
  size_t count_ = 0;
  mutable std::optional<PassedCalls> passed_;
};

const Constraints* Operator::constraints() const {
  if (is_bound_.load(std::memory_order_acquire)) return constraints_;
  std::call_once(bound_, [this] {
    if (Configuration::instance().strict && !declared().rules.list.empty()) {
      constraints_ = new Constraints(*this);  // as long as the process
    }
    is_bound_.store(true, std::memory_order_release);
  });
  return constraints_;
}

uint64_t check(const Operator& op, const Constraints* constraints, const ArgumentValue* arguments) {
  RefusalLog* const log = RefusalLog::instance();
  if (constraints == nullptr) {
    if (log != nullptr && op.declared().rules.list.empty()) log->add_call_without_rules(op.name);
    return 0;
  }
  if (log != nullptr) log->add_call();
  return constraints->check(arguments);
}

std::string listed_constraints() {
  std::ostringstream out;
  const auto quoted = [](const std::string& text) {
    std::string result = "\"";
    for (const char c : text) {
      if (c == '"' || c == '\\') result += '\\';
      result += c;
    }
    return result + "\"";
  };
  for (const Operator* op = Operator::newest(); op != nullptr; op = op->before) {
    const Rules& allowed = op->declared().rules;
    for (const Row& row : rows_of(allowed)) {
      out << "{\"operator\": " << quoted(op->name) << ", \"argument\": " << quoted(row.argument)
          << ", \"rule\": " << quoted(row.check.text)
          << ", \"form\": " << (row.check.form.empty() ? "null" : row.check.form)
          << ", \"source\": " << quoted(row.source) << ", \"chips\": "
          << quoted(chips_text(row.scope.chips == 0 ? allowed.chips : row.scope.chips))
          << ", \"since\": " << quoted(text_of(row.scope.since))
          << ", \"until\": " << quoted(text_of(row.scope.until))
          << ", \"status\": " << (row.scope.tiling ? 561002 : 161002)
          << ", \"limit\": " << (row.check.is_limit ? "true" : "false") << "}\n";
    }
  }
  return out.str();
}

}  // namespace vnpu::ops
