#include "triton/machine.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

#include "triton/elements.h"

namespace vnpu::triton {
namespace {

constexpr size_t kMostOperands = 8;
constexpr uint64_t kTicksPerLook = 1024;  // ticks between looks at the clock
constexpr uint64_t kMostEqualTurns = 1000;

// The frame of this thread, and the program whose constants are in it.
struct Frame {
  std::vector<std::byte> bytes;
  ProgramPtr program;
};
thread_local Frame thread_frame;

int64_t product(const std::vector<int64_t>& shape, size_t from, size_t to) {
  return std::accumulate(shape.begin() + static_cast<std::ptrdiff_t>(from),
                         shape.begin() + static_cast<std::ptrdiff_t>(to), int64_t{1},
                         std::multiplies<>());
}

// [outer, axis, inner] of a tensor.
struct Axis {
  size_t outer;
  size_t size;
  size_t inner;
  Axis(const std::vector<int64_t>& shape, int64_t axis)
      : outer(static_cast<size_t>(product(shape, 0, static_cast<size_t>(axis)))),
        size(static_cast<size_t>(shape[static_cast<size_t>(axis)])),
        inner(static_cast<size_t>(product(shape, static_cast<size_t>(axis) + 1, shape.size()))) {}
};

// Distance of neighbours along each dimension, in elements.
std::vector<int64_t> strides_of(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  return strides;
}

// Writes a tensor whose elements lie at strides (0: repeated) in its source.
void gather_strided(std::byte*& to, const std::byte* from, size_t bytes,
                    const std::vector<int64_t>& shape, const std::vector<int64_t>& strides,
                    size_t dimension) {
  if (dimension == shape.size()) {
    std::memcpy(to, from, bytes);
    to += bytes;
    return;
  }
  const auto size = static_cast<size_t>(shape[dimension]);
  if (dimension + 1 == shape.size() && strides[dimension] <= 1) {
    if (strides[dimension] == 1) {
      std::memcpy(to, from, size * bytes);
    } else {
      fill(to, bytes, from, size);
    }
    to += size * bytes;
    return;
  }
  const auto step =
      static_cast<std::ptrdiff_t>(strides[dimension]) * static_cast<std::ptrdiff_t>(bytes);
  for (size_t i = 0; i < size; ++i) {
    gather_strided(to, from + static_cast<std::ptrdiff_t>(i) * step, bytes, shape, strides,
                   dimension + 1);
  }
}

}  // namespace

Machine::Machine(const Launch& launch, const Settings& settings, AccessLog* log)
    : launch_(launch),
      program_(*launch.program),
      settings_(settings),
      log_(log),
      deadline_(std::chrono::steady_clock::now() + settings.limit) {}

void Machine::run() {
  const size_t alignment = 64;
  Frame& frame = thread_frame;
  if (frame.bytes.size() < program_.frame_bytes + alignment) {
    frame.bytes.resize(program_.frame_bytes + alignment);
    frame.program = nullptr;
  }
  const auto begin = reinterpret_cast<uintptr_t>(frame.bytes.data());
  frame_ = reinterpret_cast<std::byte*>((begin + alignment - 1) / alignment * alignment);
  if (frame.program != launch_.program) {
    for (const Constant& each : program_.constants) {
      const Value& of = value(each.value);
      fill(data(each.value), bytes_of(of.type), reinterpret_cast<const std::byte*>(&each.bits),
           of.count);
    }
    frame.program = launch_.program;
  }
  for (size_t i = 0; i < program_.parameters.size(); ++i) {
    const Value& of = value(program_.parameters[i].value);
    std::memcpy(frame_ + of.offset, &launch_.arguments[i], bytes_of(of.type));
  }
  const uint64_t count = uint64_t{launch_.grid[0]} * launch_.grid[1] * launch_.grid[2];
  if (!settings_.shuffles) {
    for (uint64_t i = 0; i < count; ++i)
      run_program(coordinates(static_cast<uint32_t>(i), launch_.grid));
    return;
  }
  std::vector<uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0u);
  std::mt19937_64 random(settings_.seed);
  for (uint64_t i = count; i > 1; --i) std::swap(order[i - 1], order[random() % i]);
  for (const uint32_t each : order) run_program(coordinates(each, launch_.grid));
}

void Machine::run_program(std::array<uint32_t, 3> program) {
  id_ = program;
  run(program_.functions.front().body);
}

const Instruction* Machine::run(const Region& region) {
  const Block* block = &region.front();
  for (;;) {
    const Block* next = nullptr;
    for (const Instruction& each : block->body) {
      switch (each.operation) {
        case Operation::kEnd: return &each;
        case Operation::kBranch:
        case Operation::kConditionalBranch: {
          // Attributes: for each target its block and number of operands.
          const bool is_conditional = each.operation == Operation::kConditionalBranch;
          const bool takes_second = is_conditional && *as<uint8_t>(each.operands[0]) == 0;
          const size_t target = takes_second ? 2 : 0;
          size_t first = is_conditional ? 1 : 0;
          if (takes_second) first += static_cast<size_t>(each.attributes[1]);
          next = &region[static_cast<size_t>(each.attributes[target])];
          copy_all(next->arguments, each.operands.data() + first,
                   static_cast<size_t>(each.attributes[target + 1]));
          tick(each);
          break;
        }
        default: execute(each);
      }
    }
    block = next;
  }
}

void Machine::execute(const Instruction& instruction) {
  if (instruction.operation < Operation::kLastElement) {
    Operand operands[kMostOperands];
    for (size_t i = 0; i < instruction.operands.size(); ++i) {
      operands[i] = {data(instruction.operands[i]), value(instruction.operands[i]).type};
    }
    const Value& result = value(instruction.results[0]);
    compute(instruction.operation, instruction.attributes.empty() ? 0 : instruction.attributes[0],
            frame_ + result.offset, result.type, operands, count_of(result));
    return;
  }
  switch (instruction.operation) {
    case Operation::kLoad: return load(instruction);
    case Operation::kStore: return store(instruction);
    case Operation::kAtomic: return atomic(instruction);
    case Operation::kCompareAndSwap: return compare_and_swap(instruction);
    case Operation::kReduce: return reduce(instruction);
    case Operation::kScan: return scan(instruction);
    case Operation::kDot: return dot(instruction);
    case Operation::kCall: return call(instruction);
    case Operation::kIf: return run_if(instruction);
    case Operation::kFor: return run_for(instruction);
    case Operation::kWhile: return run_while(instruction);
    case Operation::kPrint: return print(instruction);
    case Operation::kProgramId:
      *as<int32_t>(instruction.results[0]) =
          static_cast<int32_t>(id_[static_cast<size_t>(instruction.attributes[0])]);
      return;
    case Operation::kNumPrograms:
      *as<int32_t>(instruction.results[0]) =
          static_cast<int32_t>(launch_.grid[static_cast<size_t>(instruction.attributes[0])]);
      return;
    case Operation::kAssert: {
      const auto* const holds = as<uint8_t>(instruction.operands[0]);
      const size_t count = value(instruction.operands[0]).count;
      if (std::all_of(holds, holds + count, [](uint8_t each) { return each != 0; })) return;
      fail(instruction, FailureKind::kOperatorFailed,
           std::string("the assertion failed: ") + instruction.text);
    }
    default: break;
  }
  if (execute_shape(instruction)) return;
  fail(instruction, FailureKind::kInternal, "an instruction at a place where it has no meaning.");
}

bool Machine::execute_shape(const Instruction& instruction) {
  const auto bytes = [&](uint32_t number) { return bytes_of(value(number).type); };
  switch (instruction.operation) {
    case Operation::kSplat: {
      const uint32_t to = instruction.results[0];
      fill(data(to), bytes(to), data(instruction.operands[0]), count_of(value(to)));
      return true;
    }
    case Operation::kMakeRange: {
      auto* const to = as<int32_t>(instruction.results[0]);
      std::iota(to, to + value(instruction.results[0]).count,
                static_cast<int32_t>(instruction.attributes[0]));
      return true;
    }
    case Operation::kBroadcast: broadcast(instruction); return true;
    case Operation::kTranspose: transpose(instruction); return true;
    case Operation::kGather: gather(instruction); return true;
    case Operation::kHistogram: histogram(instruction); return true;
    case Operation::kJoin: {
      const size_t size = bytes(instruction.results[0]);
      const size_t count = value(instruction.operands[0]).count;
      std::byte* to = data(instruction.results[0]);
      for (size_t i = 0; i < count; ++i) {
        for (const uint32_t each : instruction.operands) {
          std::memcpy(to, data(each) + i * size, size);
          to += size;
        }
      }
      return true;
    }
    case Operation::kSplit: {
      const size_t size = bytes(instruction.operands[0]);
      const size_t count = value(instruction.results[0]).count;
      const std::byte* from = data(instruction.operands[0]);
      for (size_t i = 0; i < count; ++i) {
        for (const uint32_t each : instruction.results) {
          std::memcpy(data(each) + i * size, from, size);
          from += size;
        }
      }
      return true;
    }
    case Operation::kCat: {
      std::byte* to = data(instruction.results[0]);
      for (const uint32_t each : instruction.operands) {
        const size_t all = value(each).count * bytes(each);
        std::memcpy(to, data(each), all);
        to += all;
      }
      return true;
    }
    default: return false;
  }
}

// --- control flow --------------------------------------------------------------------------------

int64_t Machine::integer(uint32_t number) const {
  switch (bytes_of(value(number).type)) {
    case 1: return *as<int8_t>(number);
    case 2: return *as<int16_t>(number);
    case 4: return *as<int32_t>(number);
    default: return *as<int64_t>(number);
  }
}

void Machine::copy(uint32_t to, uint32_t from) {
  if (to == from) return;
  const Value& of = value(to);
  std::memcpy(data(to), data(from), of.count * bytes_of(of.type));
}

// As if all values were copied at the same time.
void Machine::copy_all(const std::vector<uint32_t>& to, const uint32_t* from, size_t count) {
  bool crosses = false;
  for (size_t i = 0; i < count && !crosses; ++i) {
    for (size_t j = i + 1; j < count; ++j) crosses |= from[j] == to[i];
  }
  if (!crosses) {
    for (size_t i = 0; i < count; ++i) copy(to[i], from[i]);
    return;
  }
  size_t bytes = 0;
  for (size_t i = 0; i < count; ++i) bytes += value(to[i]).count * bytes_of(value(to[i]).type);
  scratch_.resize(std::max(scratch_.size(), bytes));
  std::byte* place = scratch_.data();
  for (size_t i = 0; i < count; ++i) {
    const size_t size = value(to[i]).count * bytes_of(value(to[i]).type);
    std::memcpy(place, data(from[i]), size);
    place += size;
  }
  place = scratch_.data();
  for (size_t i = 0; i < count; ++i) {
    const size_t size = value(to[i]).count * bytes_of(value(to[i]).type);
    std::memcpy(data(to[i]), place, size);
    place += size;
  }
}

void Machine::run_if(const Instruction& instruction) {
  const Region& taken = instruction.regions[*as<uint8_t>(instruction.operands[0]) != 0 ? 0 : 1];
  if (taken.empty()) return;
  const Instruction* const end = run(taken);
  copy_all(instruction.results, end->operands.data(), instruction.results.size());
}

// Operands: first, bound and step, then the first iteration's carried values.
void Machine::run_for(const Instruction& instruction) {
  const Block& body = instruction.regions[0].front();
  const uint32_t counter = body.arguments[0];
  const std::vector<uint32_t> carried(body.arguments.begin() + 1, body.arguments.end());
  copy_all(carried, instruction.operands.data() + 3, carried.size());
  const int64_t bound = integer(instruction.operands[1]);
  const int64_t step = integer(instruction.operands[2]);
  if (step <= 0) {
    fail(instruction, FailureKind::kOperatorFailed,
         "a loop with the step " + std::to_string(step) + " does not end.");
  }
  const bool is_narrow = bytes_of(value(counter).type) == 4;
  for (int64_t i = integer(instruction.operands[0]); i < bound; i += step) {
    tick(instruction);
    if (is_narrow) {
      *as<int32_t>(counter) = static_cast<int32_t>(i);
    } else {
      *as<int64_t>(counter) = i;
    }
    const Instruction* const end = run(instruction.regions[0]);
    copy_all(carried, end->operands.data(), carried.size());
  }
  copy_all(instruction.results, carried.data(), carried.size());
}

// An iteration that stores nothing and passes on unchanged values would repeat forever.
void Machine::run_while(const Instruction& instruction) {
  const Region& before = instruction.regions[0];
  const std::vector<uint32_t>& carried = before.front().arguments;
  copy_all(carried, instruction.operands.data(), carried.size());
  std::vector<std::byte> last;
  std::vector<std::byte> now;
  uint64_t equal_turns = 0;
  for (;;) {
    tick(instruction);
    const uint64_t stores = stores_;
    const Instruction* const condition = run(before);
    if (*as<uint8_t>(condition->operands[0]) == 0) {
      copy_all(instruction.results, condition->operands.data() + 1, instruction.results.size());
      return;
    }
    const Region& after = instruction.regions[1];
    copy_all(after.front().arguments, condition->operands.data() + 1,
             after.front().arguments.size());
    const Instruction* const end = run(after);
    copy_all(carried, end->operands.data(), carried.size());
    now.clear();
    for (const uint32_t each : carried) {
      now.insert(now.end(), data(each),
                 data(each) + value(each).count * bytes_of(value(each).type));
    }
    equal_turns = now == last && stores == stores_ ? equal_turns + 1 : 0;
    std::swap(now, last);
    if (equal_turns < kMostEqualTurns) continue;
    if (!settings_.others_may_write) {
      fail(instruction, FailureKind::kOperatorFailed,
           "an endless loop: its turns change nothing. If it waits for another program or another "
           "stream: programs run one after another here, in any order on a chip.");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    ticks_ = 0;
  }
}

void Machine::tick(const Instruction& instruction) {
  if (ticks_++ % kTicksPerLook != 0 || std::chrono::steady_clock::now() < deadline_) return;
  fail(instruction, FailureKind::kWaitTimeout,
       "the kernel has run for " + std::to_string(settings_.limit.count()) +
           " ms and is still in this loop. A longer limit: VNPU_WAIT_LIMIT=SECONDS.");
}

void Machine::call(const Instruction& instruction) {
  const Function& function = program_.functions[static_cast<size_t>(instruction.attributes[0])];
  copy_all(function.arguments, instruction.operands.data(), function.arguments.size());
  const Instruction* const end = run(function.body);
  copy_all(instruction.results, end->operands.data(), instruction.results.size());
}

// --- combinations --------------------------------------------------------------------------------

void Machine::combine(const Instruction& instruction, size_t lanes) {
  lanes_ = lanes;
  run(instruction.regions[0]);
  lanes_ = 0;
}

// The second half of the axis is combined with the first, until one element is left.
void Machine::reduce(const Instruction& instruction) {
  const size_t count = instruction.operands.size();
  const Axis axis(value(instruction.operands[0]).shape, instruction.attributes[0]);
  const Block& block = instruction.regions[0].front();
  const std::vector<uint32_t>& ends = block.body.back().operands;
  const auto size_of = [&](size_t i) { return bytes_of(value(instruction.operands[i]).type); };
  for (size_t size = axis.size; size > 1; size /= 2) {
    const size_t half = size / 2 * axis.inner;
    for (size_t i = 0; i < count; ++i) {
      const size_t bytes = half * size_of(i);
      const std::byte* from = data(size == axis.size ? instruction.operands[i] : ends[i]);
      std::byte* first = data(block.arguments[i]);
      std::byte* second = data(block.arguments[count + i]);
      for (size_t outer = 0; outer < axis.outer; ++outer) {
        std::memcpy(first, from, bytes);
        std::memcpy(second, from + bytes, bytes);
        from += 2 * bytes;
        first += bytes;
        second += bytes;
      }
    }
    combine(instruction, half * axis.outer);
  }
  for (size_t i = 0; i < count; ++i) {
    const uint32_t from = axis.size > 1 ? ends[i] : instruction.operands[i];
    std::memcpy(data(instruction.results[i]), data(from), axis.outer * axis.inner * size_of(i));
  }
}

// From the first element of the axis to the last, or from the last to the first.
void Machine::scan(const Instruction& instruction) {
  const size_t count = instruction.operands.size();
  const Axis axis(value(instruction.operands[0]).shape, instruction.attributes[0]);
  const bool is_reversed = instruction.attributes[1] != 0;
  const Block& block = instruction.regions[0].front();
  const std::vector<uint32_t>& ends = block.body.back().operands;
  for (size_t step = 0; step < axis.size; ++step) {
    const size_t place = is_reversed ? axis.size - 1 - step : step;
    for (size_t i = 0; i < count; ++i) {
      const size_t bytes = axis.inner * bytes_of(value(instruction.operands[i]).type);
      const auto at = [&](uint32_t number, size_t outer) {
        return data(number) + (outer * axis.size + place) * bytes;
      };
      std::byte* const earlier = data(block.arguments[i]);
      std::byte* const now = data(block.arguments[count + i]);
      if (step > 0) std::memcpy(earlier, data(ends[i]), axis.outer * bytes);
      for (size_t outer = 0; outer < axis.outer; ++outer) {
        std::memcpy(now + outer * bytes, at(instruction.operands[i], outer), bytes);
      }
      if (step == 0) std::memcpy(data(ends[i]), now, axis.outer * bytes);
    }
    if (step > 0) combine(instruction, axis.outer * axis.inner);
    for (size_t i = 0; i < count; ++i) {
      const size_t bytes = axis.inner * bytes_of(value(instruction.operands[i]).type);
      for (size_t outer = 0; outer < axis.outer; ++outer) {
        std::memcpy(data(instruction.results[i]) + (outer * axis.size + place) * bytes,
                    data(ends[i]) + outer * bytes, bytes);
      }
    }
  }
}

// Sums of products begin with the accumulator: they do not depend on how a kernel splits k.
void Machine::dot(const Instruction& instruction) {
  const Value& left = value(instruction.operands[0]);
  const Value& right = value(instruction.operands[1]);
  const Value& result = value(instruction.results[0]);
  const size_t rank = result.shape.size();
  const auto m = static_cast<size_t>(result.shape[rank - 2]);
  const auto n = static_cast<size_t>(result.shape[rank - 1]);
  const auto k = static_cast<size_t>(left.shape[rank - 1]);
  const size_t batch = result.count / (m * n);
  const auto multiply_all = [&](auto* out, const auto* a, const auto* b) {
    for (size_t i = 0; i < batch; ++i)
      multiply(out + i * m * n, a + i * m * k, b + i * k * n, m, n, k);
  };
  const Operand in[] = {{data(instruction.operands[0]), left.type},
                        {data(instruction.operands[1]), right.type},
                        {data(instruction.operands[2]), result.type}};
  std::byte* const to = frame_ + result.offset;
  if (left.type == Type::kFloat64) {
    copy(instruction.results[0], instruction.operands[2]);
    multiply_all(reinterpret_cast<double*>(to), reinterpret_cast<const double*>(in[0].data),
                 reinterpret_cast<const double*>(in[1].data));
    return;
  }
  if (left.type == Type::kInt8) {
    thread_local std::vector<int32_t> a;
    thread_local std::vector<int32_t> b;
    a.resize(left.count);
    b.resize(right.count);
    compute(Operation::kExtendInt, 0, reinterpret_cast<std::byte*>(a.data()), Type::kInt32, in,
            left.count);
    compute(Operation::kExtendInt, 0, reinterpret_cast<std::byte*>(b.data()), Type::kInt32, in + 1,
            right.count);
    copy(instruction.results[0], instruction.operands[2]);
    multiply_all(reinterpret_cast<int32_t*>(to), a.data(), b.data());
    return;
  }
  thread_local std::vector<float> a;
  thread_local std::vector<float> b;
  thread_local std::vector<float> sums;
  a.resize(left.count);
  b.resize(right.count);
  sums.resize(result.count);
  widen(a.data(), in[0], left.count);
  widen(b.data(), in[1], right.count);
  widen(sums.data(), in[2], result.count);
  multiply_all(sums.data(), a.data(), b.data());
  const Operand wide{reinterpret_cast<const std::byte*>(sums.data()), Type::kFloat32};
  compute(Operation::kConvertFloat, 0, to, result.type, &wide, result.count);
}

// --- shapes --------------------------------------------------------------------------------------

void Machine::broadcast(const Instruction& instruction) {
  const Value& from = value(instruction.operands[0]);
  const Value& to = value(instruction.results[0]);
  std::vector<int64_t> strides = strides_of(from.shape);
  for (size_t i = 0; i < strides.size(); ++i) {
    if (from.shape[i] == 1 && to.shape[i] != 1) strides[i] = 0;
  }
  std::byte* place = frame_ + to.offset;
  gather_strided(place, frame_ + from.offset, bytes_of(to.type), to.shape, strides, 0);
}

// Attributes: the source's dimension of each of the result's.
void Machine::transpose(const Instruction& instruction) {
  const Value& from = value(instruction.operands[0]);
  const Value& to = value(instruction.results[0]);
  const std::vector<int64_t> of_source = strides_of(from.shape);
  std::vector<int64_t> strides;
  for (const int64_t each : instruction.attributes)
    strides.push_back(of_source[static_cast<size_t>(each)]);
  std::byte* place = frame_ + to.offset;
  gather_strided(place, frame_ + from.offset, bytes_of(to.type), to.shape, strides, 0);
}

void Machine::gather(const Instruction& instruction) {
  const Value& from = value(instruction.operands[0]);
  const Value& places = value(instruction.operands[1]);
  const Axis source(from.shape, instruction.attributes[0]);
  const Axis result(places.shape, instruction.attributes[0]);
  const size_t bytes = bytes_of(from.type);
  for (size_t i = 0; i < places.count; ++i) {
    const size_t inner = i % result.inner;
    const size_t outer = i / result.inner / result.size;
    const int64_t place = places.type == Type::kInt64 ? as<int64_t>(instruction.operands[1])[i]
                                                      : as<int32_t>(instruction.operands[1])[i];
    if (place < 0 || place >= static_cast<int64_t>(source.size)) {
      fail(instruction, FailureKind::kOperatorFailed,
           "gathers element " + std::to_string(place) + " of " + std::to_string(source.size) + ".");
    }
    const size_t at = (outer * source.size + static_cast<size_t>(place)) * source.inner + inner;
    std::memcpy(data(instruction.results[0]) + i * bytes,
                data(instruction.operands[0]) + at * bytes, bytes);
  }
}

// Operands: the numbers, and a mask.
void Machine::histogram(const Instruction& instruction) {
  const Value& bins = value(instruction.results[0]);
  auto* const counts = as<int32_t>(instruction.results[0]);
  std::fill_n(counts, bins.count, 0);
  const Value& from = value(instruction.operands[0]);
  const auto* const mask =
      instruction.operands.size() > 1 ? as<uint8_t>(instruction.operands[1]) : nullptr;
  for (size_t i = 0; i < from.count; ++i) {
    if (mask != nullptr && mask[i] == 0) continue;
    const int64_t bin = from.type == Type::kInt64 ? as<int64_t>(instruction.operands[0])[i]
                                                  : as<int32_t>(instruction.operands[0])[i];
    if (bin >= 0 && bin < static_cast<int64_t>(bins.count)) ++counts[bin];
  }
}

void Machine::print(const Instruction& instruction) {
  std::string line = "pid (" + std::to_string(id_[0]) + ", " + std::to_string(id_[1]) + ", " +
                     std::to_string(id_[2]) + ")" + instruction.text;
  for (const uint32_t each : instruction.operands) {
    const Value& of = value(each);
    line += of.count == 1 ? " " : " [";
    for (size_t i = 0; i < of.count; ++i) {
      const Operand in{data(each) + i * bytes_of(of.type), of.type};
      char text[32];
      if (of.type >= Type::kFloat16 && of.type != Type::kPointer) {
        double wide = 0;
        if (of.type == Type::kFloat64) {
          std::memcpy(&wide, in.data, sizeof(wide));
        } else {
          float narrow = 0;
          widen(&narrow, in, 1);
          wide = narrow;
        }
        std::snprintf(text, sizeof(text), "%g", wide);
      } else {
        int64_t whole = 0;
        compute(of.type == Type::kInt1 ? Operation::kExtendUint : Operation::kExtendInt, 0,
                reinterpret_cast<std::byte*>(&whole), Type::kInt64, &in, 1);
        std::snprintf(text, sizeof(text), "%" PRId64, whole);
      }
      line += (i == 0 ? "" : " ") + std::string(text);
    }
    if (of.count != 1) line += "]";
  }
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

void Machine::fail(const Instruction& instruction, FailureKind kind,
                   const std::string& text) const {
  throw Failure(kind, "vnpu: Triton kernel " + program_.name + ", program (" +
                          std::to_string(id_[0]) + ", " + std::to_string(id_[1]) + ", " +
                          std::to_string(id_[2]) + "), " + instruction.place + ": " + text);
}

}  // namespace vnpu::triton
