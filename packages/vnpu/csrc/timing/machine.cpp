#include "timing/machine.h"

#include <charconv>
#include <map>

#include "device/failure.h"
#include "timing/rates.h"

namespace vnpu::timing {
namespace {

// The tile of a matrix product that a cube core works on, and the step in which operands are
// padded: 16 rows, and 32 bytes.
constexpr int64_t kTileRows = 128;
constexpr int64_t kTileColumns = 256;
constexpr int64_t kStep = 16;

int64_t round_up(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

[[noreturn]] void refuse(const std::string& message) {
  throw Failure(FailureKind::kInvalidArgument,
                "vnpu: VNPU_TIMING " + message +
                    " Let `vnpu run --chip NAME --topology NAME` write the variable.");
}

}  // namespace

const std::vector<Machine::Figure>& Machine::figures() {
  static const std::vector<Figure> all = {
      {"cube_cores", &Machine::cube_cores_},
      {"vector_cores", &Machine::vector_cores_},
      {"cube_int8", &Machine::cube_int8_},
      {"cube_float16", &Machine::cube_float16_},
      {"cube_bfloat16", &Machine::cube_bfloat16_},
      {"cube_float32", &Machine::cube_float32_},
      {"vector_16bit", &Machine::vector_16bit_},
      {"vector_32bit", &Machine::vector_32bit_},
      {"matmul_share", &Machine::matmul_share_},
      {"attention_share", &Machine::attention_share_},
      {"vector_share", &Machine::vector_share_},
      {"hbm_bandwidth", &Machine::hbm_bandwidth_},
      {"hbm_share", &Machine::hbm_share_},
      {"l2_bytes", &Machine::l2_bytes_},
      {"l2_bandwidth", &Machine::l2_bandwidth_},
      {"copy_in_bandwidth", &Machine::copy_in_bandwidth_},
      {"copy_out_bandwidth", &Machine::copy_out_bandwidth_},
      {"vector_static", &Machine::vector_static_},
      {"matmul_static", &Machine::matmul_static_},
      {"attention_static", &Machine::attention_static_},
      {"collective_static", &Machine::collective_static_},
      {"task_jitter", &Machine::task_jitter_},
      {"copy_static", &Machine::copy_static_},
      {"ai_cpu_static", &Machine::ai_cpu_static_},
      {"event_record", &Machine::event_record_},
      {"event_wait", &Machine::event_wait_},
      {"graph_node", &Machine::graph_node_},
      {"queue_depth", &Machine::queue_depth_},
      {"hardware_queues", &Machine::hardware_queues_},
      {"queue_change", &Machine::queue_change_},
  };
  return all;
}

namespace {

using HostFigure = std::pair<const char*, Time Machine::HostCosts::*>;
constexpr HostFigure kHostFigures[] = {
    {"host_operator_launch", &Machine::HostCosts::operator_launch},
    {"host_collective_launch", &Machine::HostCosts::collective_launch},
    {"host_copy_launch", &Machine::HostCosts::copy_launch},
    {"host_graph_launch", &Machine::HostCosts::graph_launch},
    {"host_event_call", &Machine::HostCosts::event_call},
    {"host_synchronize", &Machine::HostCosts::synchronize},
    {"host_step", &Machine::HostCosts::step},
    {"host_step_request", &Machine::HostCosts::step_request},
};

}  // namespace

std::vector<std::string> Machine::figure_names() {
  std::vector<std::string> names;
  for (const Figure& figure : figures()) names.emplace_back(figure.name);
  for (const auto& [name, member] : kHostFigures) names.emplace_back(name);
  return names;
}

Machine::Machine(std::string_view text) {
  std::map<std::string, int64_t, std::less<>> values;
  for (std::string_view rest = text; !rest.empty();) {
    const size_t end = std::min(rest.find(';'), rest.size());
    const std::string_view part = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    const size_t equals = part.find('=');
    if (equals == std::string_view::npos) {
      refuse("has '" + std::string(part) + "' where NAME=INTEGER is expected.");
    }
    const std::string_view number = part.substr(equals + 1);
    int64_t value = 0;
    const auto [stop, error] = std::from_chars(number.begin(), number.end(), value);
    if (error != std::errc() || stop != number.end() || value < 0) {
      refuse("has '" + std::string(part) + "': no integer of at least 0.");
    }
    if (!values.emplace(part.substr(0, equals), value).second) {
      refuse("states " + std::string(part.substr(0, equals)) + " twice.");
    }
  }
  const auto take = [&](const std::string& name, bool may_be_zero) {
    const auto found = values.find(name);
    if (found == values.end()) refuse("lacks the figure " + name + ".");
    const int64_t value = found->second;
    if (value == 0 && !may_be_zero) refuse("states 0 for " + name + ".");
    values.erase(found);
    return value;
  };
  for (const Figure& figure : figures()) {
    const std::string_view name = figure.name;
    const bool is_time = name.ends_with("_static") || name.ends_with("_jitter") ||
                         name.starts_with("event_") || name == "graph_node" ||
                         name == "queue_change";
    this->*figure.member = take(figure.name, is_time);
  }
  for (const auto& [name, member] : kHostFigures) host_.*member = take(name, true);
  for (size_t i = 0; values.count("tier" + std::to_string(i) + "_ranks") != 0; ++i) {
    if (i == kTiers) refuse("has more than " + std::to_string(kTiers) + " tiers of links.");
    const std::string tier = "tier" + std::to_string(i);
    tiers_.push_back({take(tier + "_ranks", false), take(tier + "_bandwidth", false),
                      take(tier + "_share", false), take(tier + "_all_to_all_share", false),
                      take(tier + "_latency", true)});
  }
  if (tiers_.empty()) refuse("has no tier of links (tier0_ranks).");
  if (!values.empty()) refuse("has an unknown figure: " + values.begin()->first + ".");
}

// Time on all cores, if each takes tiles as if it were one of `cores`.
Time Machine::matrix_time(const MatrixProduct& product, int64_t share, int64_t cores) const {
  if (product.batch <= 0 || product.m <= 0 || product.n <= 0 || product.k <= 0) return 0;
  const bool is_byte = product.arithmetic == Arithmetic::kInt8;
  const bool is_wide = product.arithmetic == Arithmetic::kFloat32;
  const int64_t rate = is_byte                                      ? cube_int8_
                       : is_wide                                    ? cube_float32_
                       : product.arithmetic == Arithmetic::kFloat16 ? cube_float16_
                                                                    : cube_bfloat16_;
  const int64_t m = round_up(product.m, kStep);
  const int64_t n = round_up(product.n, kStep);
  const int64_t k = round_up(product.k, is_byte ? 2 * kStep : kStep);
  Wide operations = static_cast<Wide>(2) * static_cast<Wide>(product.batch) * static_cast<Wide>(m) *
                    static_cast<Wide>(n) * static_cast<Wide>(k);
  // Cores without a tile in the last wave wait for the others. With fewer tiles than cores, the
  // library cuts them smaller.
  const int64_t tiles = product.batch * divide_up(m, kTileRows) * divide_up(n, kTileColumns);
  if (tiles > cores) {
    operations = operations * static_cast<Wide>(round_up(tiles, cores)) / static_cast<Wide>(tiles);
  }
  return time_for(operations, rate, share);
}

Time Machine::memory_time(int64_t bytes) const {
  return time_for(static_cast<Wide>(bytes), hbm_bandwidth_, hbm_share_);
}

// Bytes of a product's operands that are read again because they did not stay in L2. A product
// keeps a panel of one operand in half of L2, and reads the other operand once per panel; the
// library chooses the order that reads less.
int64_t Machine::read_again(const MatrixProduct& product) const {
  const int64_t item = product.arithmetic == Arithmetic::kInt8      ? 1
                       : product.arithmetic == Arithmetic::kFloat32 ? 4
                                                                    : 2;
  const int64_t left = product.m * product.k * item;
  const int64_t right = product.k * product.n * item;
  const int64_t room = std::max<int64_t>(l2_bytes_ / 2, 1);
  const auto further_panels = [&](int64_t bytes) { return (bytes - 1) / room; };
  if (left <= 0 || right <= 0) return 0;
  return product.batch * std::min(left * further_panels(right), right * further_panels(left));
}

std::vector<Phase> Machine::phases_of(const Work& work, int64_t cached_bytes,
                                      const std::optional<Cores>& allowed) const {
  if (work.kind == Work::Class::kNothing) return {};
  Phase phase;
  int64_t cube_cores = allowed ? allowed->cube : cube_cores_;
  int64_t vector_cores = allowed ? allowed->vector : vector_cores_;
  if (!work.products.empty() && work.vector_operations > 0) {
    // A kernel for both kinds is launched on cube cores with their vector cores.
    cube_cores =
        std::max<int64_t>(1, std::min(cube_cores, vector_cores * cube_cores_ / vector_cores_));
    vector_cores = divide_up(cube_cores * vector_cores_, cube_cores_);
  }
  const bool is_attention = work.kind == Work::Class::kAttention;
  switch (work.kind) {
    case Work::Class::kMatmul: phase.fixed = matmul_static_; break;
    case Work::Class::kAttention: phase.fixed = attention_static_; break;
    case Work::Class::kAiCpu: phase.fixed = ai_cpu_static_; break;
    case Work::Class::kVector:
    case Work::Class::kNothing: phase.fixed = vector_static_; break;
  }
  Time& cube = phase.busy[index_of(Resource::kCube)];
  for (const MatrixProduct& product : work.products) {
    cube += matrix_time(product, is_attention ? attention_share_ : matmul_share_, cube_cores);
  }
  const Time vector = time_for(static_cast<Wide>(work.vector_operations),
                               work.wide ? vector_32bit_ : vector_16bit_, vector_share_);
  const Resource engine = work.kind == Work::Class::kAiCpu ? Resource::kAiCpu : Resource::kVector;
  phase.busy[index_of(engine)] = vector;
  int64_t bytes = work.read_bytes + work.written_bytes;
  if (!is_attention) {
    for (const MatrixProduct& product : work.products) bytes += read_again(product);
  }
  phase.busy[index_of(Resource::kL2)] = time_for(static_cast<Wide>(bytes), l2_bandwidth_, kMillion);
  phase.busy[index_of(Resource::kHbm)] = memory_time(bytes - cached_bytes);
  const auto on_part = [](Time time, int64_t cores, int64_t all) {
    return divide_up(time * all, cores);
  };
  if (cube_cores < cube_cores_ && !work.products.empty()) {
    phase.least =
        on_part(std::max(cube, phase.busy[index_of(Resource::kL2)]), cube_cores, cube_cores_);
  }
  if (vector_cores < vector_cores_ && work.kind == Work::Class::kVector) {
    phase.least =
        on_part(std::max(vector, phase.busy[index_of(Resource::kL2)]), vector_cores, vector_cores_);
  }
  return {phase};
}

std::vector<Phase> Machine::phases_of_prefetch(int64_t bytes) const {
  Phase phase;
  phase.busy[index_of(Resource::kHbm)] = memory_time(bytes);
  phase.busy[index_of(Resource::kL2)] = time_for(static_cast<Wide>(bytes), l2_bandwidth_, kMillion);
  return {phase};
}

std::vector<Phase> Machine::phases_of_copy(Direction direction, int64_t bytes) const {
  Phase phase;
  phase.fixed = copy_static_;
  phase.busy[index_of(Resource::kHbm)] =
      memory_time(direction == Direction::kWithin ? 2 * bytes : bytes);
  if (direction == Direction::kIn) {
    phase.busy[index_of(Resource::kCopyIn)] =
        time_for(static_cast<Wide>(bytes), copy_in_bandwidth_, kMillion);
  } else if (direction == Direction::kOut) {
    phase.busy[index_of(Resource::kCopyOut)] =
        time_for(static_cast<Wide>(bytes), copy_out_bandwidth_, kMillion);
  }
  return {phase};
}

}  // namespace vnpu::timing
