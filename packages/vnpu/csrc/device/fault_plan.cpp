#include "device/fault_plan.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <numeric>
#include <span>
#include <string_view>
#include <utility>

#include "device/failure.h"

namespace vnpu::faults {
namespace {

constexpr const char* kKindNames[kKinds] = {
    "point",  "alloc",       "physical",   "map",     "pinned", "stream", "event",
    "launch", "synchronize", "collective", "segment", "host",   "clock"};
constexpr const char* kPhaseNames[] = {"any", "join", "put", "meet", "get", "end"};
constexpr const char* kActionNames[] = {"CODE", "oom",   "throw", "die",       "stop",
                                        "hang", "delay", "gone",  "truncated", "jump"};
constexpr const char* kHostNames[] = {"malloc", "open", "write", "fsync"};
constexpr const char* kClockNames[] = {"monotonic", "realtime"};
constexpr const char* kSegmentNames[] = {"create", "open", "map"};
constexpr std::pair<const char*, int> kErrnos[] = {{"EIO", EIO},       {"ENOMEM", ENOMEM},
                                                   {"ENOSPC", ENOSPC}, {"EMFILE", EMFILE},
                                                   {"ENFILE", ENFILE}, {"EDQUOT", EDQUOT}};

// Letters to change, add or leave out.
size_t distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t corner = row[0]++;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t change = corner + (a[i] != b[j] ? 1 : 0);
      corner = row[j + 1];
      row[j + 1] = std::min({change, row[j] + 1, corner + 1});
    }
  }
  return row.back();
}

std::string nearest(std::string_view word, std::span<const char* const> known) {
  const auto* const best = &*std::min_element(
      known.begin(), known.end(),
      [&](const char* a, const char* b) { return distance(word, a) < distance(word, b); });
  std::string all;
  for (const char* const each : known) all += (all.empty() ? "" : ", ") + std::string(each);
  const bool is_near = distance(word, *best) <= 2;
  return (is_near ? "Did you mean '" + std::string(*best) + "'? " : "") + "There are " + all + ".";
}

// Reads a plan from left to right, and knows where it is.
class Parser {
 public:
  Parser(std::string origin, std::string text)
      : origin_(std::move(origin)), text_(std::move(text)) {}

  Plan parse() {
    while (at_ <= text_.size()) {
      skip_blanks();
      const size_t end = std::min(text_.find_first_of(";\n", at_), text_.size());
      end_ = end;
      while (end_ > at_ && std::isspace(static_cast<unsigned char>(text_[end_ - 1]))) --end_;
      if (at_ < end_ && text_[at_] != '#') entry();
      at_ = end + 1;
    }
    return std::move(plan_);
  }

 private:
  void entry() {
    if (take("rank=")) {
      rank_ = static_cast<int>(number("a rank", 0, 1'000'000));
      return expect_end();
    }
    if (take("count:")) {
      plan_.count_directory = text_.substr(at_, end_ - at_);
      if (plan_.count_directory.empty()) fail("count: needs a directory");
      at_ = end_;
      return;
    }
    const size_t begin = at_;
    Rule rule;
    rule.rank = rank_;
    rule.kind = kind();
    if (take(":")) rule.name = word("@=");
    if (!take("@")) fail("expected @ and the number of the point, as in alloc@17=oom");
    rule.first = number("the number of a point", 1, uint64_t{1} << 62);
    rule.is_sticky = take("+");
    if (take(".")) rule.phase = phase(rule);
    if (!take("=")) fail("expected = and what happens, as in alloc@17=oom");
    const size_t action_at = at_;
    rule.action = action();
    expect_end();
    rule.text = text_.substr(begin, end_ - begin);
    at_ = action_at;
    check_fits(rule);
    plan_.rules.push_back(std::move(rule));
  }

  Kind kind() {
    const size_t begin = at_;
    const std::string text = word(":@=. ");
    const auto* const found = std::find(std::begin(kKindNames), std::end(kKindNames), text);
    if (found != std::end(kKindNames)) return static_cast<Kind>(found - std::begin(kKindNames));
    at_ = begin;
    fail("'" + text + "' is no kind of point. " + nearest(text, kKindNames));
  }

  Phase phase(const Rule& rule) {
    const size_t begin = at_;
    const std::string text = word("=");
    const std::span<const char* const> known = std::span(kPhaseNames).subspan(1);
    const auto found = std::find(known.begin(), known.end(), text);
    at_ = begin;
    if (rule.kind != Kind::kCollective) fail("only a collective has phases");
    if (found == known.end()) fail("'" + text + "' is no phase. " + nearest(text, known));
    at_ += text.size();
    return static_cast<Phase>(found - known.begin() + 1);
  }

  Action action() {
    Action action;
    action.is_async = take("async:");
    const size_t begin = at_;
    if (at_ < end_ && std::isdigit(static_cast<unsigned char>(text_[at_]))) {
      action.what = Action::What::kCode;
      action.code = static_cast<int>(number("a status of CANN", 100'000, 999'999));
      return action;
    }
    const std::string text = word(":");
    for (const auto& [name, code] : kErrnos) {
      if (text != name) continue;
      action.what = Action::What::kErrno;
      action.code = code;
      return action;
    }
    const auto* const found = std::find(std::begin(kActionNames), std::end(kActionNames), text);
    if (found == std::end(kActionNames) || found == std::begin(kActionNames)) {
      at_ = begin;
      fail("'" + text + "' is nothing that can happen. " + nearest(text, kActionNames));
    }
    action.what = static_cast<Action::What>(found - std::begin(kActionNames));
    const bool is_jump = action.what == Action::What::kJump;
    if (action.what != Action::What::kDelay && !is_jump) return action;
    const std::string example = is_jump ? "jump:600s or jump:-1s" : "delay:5s or delay:200ms";
    if (!take(":")) fail("expected how long, as in " + example);
    const int sign = is_jump && take("-") ? -1 : 1;
    const auto count = static_cast<int64_t>(number("a time", 1, 86'400'000)) * sign;
    if (take("ms")) {
      action.delay = std::chrono::milliseconds(count);
    } else if (take("s")) {
      action.delay = std::chrono::seconds(count);
    } else {
      fail("expected ms or s behind the number, as in " + example);
    }
    return action;
  }

  void check_fits(const Rule& rule) {
    using What = Action::What;
    const What what = rule.action.what;
    if (rule.action.is_async && rule.kind != Kind::kLaunch && rule.kind != Kind::kPoint) {
      fail("only a launch fails asynchronously");
    }
    if (what == What::kHang && !rule.action.is_async) fail("a hang is the device's: async:hang");
    if (what == What::kGone && !(rule.kind == Kind::kSegment && rule.name == "open")) {
      fail("gone is for segment:open");
    }
    if (what == What::kTruncated && !(rule.kind == Kind::kSegment && rule.name == "map")) {
      fail("truncated is for segment:map");
    }
    if (rule.kind == Kind::kSegment) check_name(rule, "a segment", kSegmentNames);
    check_fits_host(rule);
  }

  // The device library applies faults to its own points, and host_faults to calls of the C library.
  void check_fits_host(const Rule& rule) const {
    using What = Action::What;
    const What what = rule.action.what;
    if (rule.kind == Kind::kClock) {
      if (what != What::kJump) fail("a clock jumps, as in clock@100=jump:600s");
      return check_name(rule, "a clock", kClockNames);
    }
    if (what == What::kJump) fail("jump is for a clock: clock@100=jump:600s");
    const bool is_errno = what == What::kErrno || what == What::kOom;
    if (rule.kind != Kind::kHost) {
      if (what == What::kErrno) fail("an errno is for calls of the host: host:write@1=ENOSPC");
      return;
    }
    check_name(rule, "the host", kHostNames);
    if (!is_errno && what != What::kDie && what != What::kStop && what != What::kDelay) {
      fail("a call of the host takes ENOSPC, EMFILE, EIO, ..., oom, die, stop or delay");
    }
  }

  void check_name(const Rule& rule, const std::string& of,
                  std::span<const char* const> known) const {
    if (rule.name.empty() || std::find(known.begin(), known.end(), rule.name) != known.end())
      return;
    fail("'" + rule.name + "' is no point of " + of + ". " + nearest(rule.name, known));
  }

  bool take(std::string_view text) {
    if (std::string_view(text_).substr(at_, end_ - at_).substr(0, text.size()) != text) {
      return false;
    }
    at_ += text.size();
    return true;
  }

  std::string word(const char* until) {
    const size_t begin = at_;
    at_ = std::min(text_.find_first_of(until, at_), end_);
    return text_.substr(begin, at_ - begin);
  }

  uint64_t number(const char* what, uint64_t least, uint64_t most) {
    const size_t begin = at_;
    while (at_ < end_ && std::isdigit(static_cast<unsigned char>(text_[at_]))) ++at_;
    const std::string digits = text_.substr(begin, at_ - begin);
    errno = 0;
    const uint64_t value = std::strtoull(digits.c_str(), nullptr, 10);
    if (digits.empty() || errno != 0 || value < least || value > most) {
      at_ = begin;
      fail(std::string("expected ") + what + ", " + std::to_string(least) + " to " +
           std::to_string(most));
    }
    return value;
  }

  void expect_end() {
    if (at_ < end_) fail("expected ; or the end of the line");
  }

  void skip_blanks() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t')) ++at_;
  }

  [[noreturn]] void fail(const std::string& what) const {
    const std::string_view before = std::string_view(text_).substr(0, at_);
    const auto line = std::count(before.begin(), before.end(), '\n') + 1;
    const size_t begin = before.rfind('\n') == before.npos ? 0 : before.rfind('\n') + 1;
    const std::string shown =
        text_.substr(begin, std::min(text_.find('\n', at_), text_.size()) - begin);
    const size_t column = at_ - begin + 1;
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: " + origin_ + ":" + std::to_string(line) + ":" + std::to_string(column) +
                      ": " + what + "\n  " + shown + "\n  " + std::string(column - 1, ' ') + "^");
  }

  const std::string origin_;
  const std::string text_;
  size_t at_ = 0;
  size_t end_ = 0;  // of the entry
  std::optional<int> rank_;
  Plan plan_;
};

}  // namespace

const char* name_of(Kind kind) { return kKindNames[static_cast<size_t>(kind)]; }
const char* name_of(Phase phase) { return kPhaseNames[static_cast<size_t>(phase)]; }

Plan Plan::parse(const std::string& text) {
  if (text.empty() || text[0] != '@') return Parser("VNPU_FAULTS", text).parse();
  const std::string path = text.substr(1);
  std::ifstream file(path);
  if (!file) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: VNPU_FAULTS='" + text + "': " + path + ": " + std::strerror(errno) +
                      ". Name a file that holds a plan, or write the plan itself.");
  }
  return Parser(path, std::string(std::istreambuf_iterator<char>(file), {})).parse();
}

bool Plan::is_of_host() const {
  return std::any_of(rules.begin(), rules.end(), [](const Rule& rule) {
    return rule.kind == Kind::kHost || rule.kind == Kind::kClock;
  });
}

}  // namespace vnpu::faults
