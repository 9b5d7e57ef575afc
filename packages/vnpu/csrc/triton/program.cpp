#include "triton/program.h"

#include <cstring>
#include <unordered_map>

#include "device/failure.h"

namespace vnpu::triton {
namespace {

constexpr int64_t kFormat = 0x766e707531;  // "vnpu1"

// Reads integers of 64 bits and refers to texts by their number.
class Reader {
 public:
  Reader(const int64_t* next, const int64_t* end, const std::vector<const char*>& texts)
      : next_(next), end_(end), texts_(texts) {}

  int64_t number() {
    if (next_ == end_)
      throw Failure(FailureKind::kInvalidArgument, "vnpu: a Triton program ends early.");
    return *next_++;
  }
  template <class T>
  std::vector<T> numbers() {
    std::vector<T> all(static_cast<size_t>(number()));
    for (T& each : all) each = static_cast<T>(number());
    return all;
  }
  const char* text() { return texts_.at(static_cast<size_t>(number())); }

  Region region() {
    Region blocks(static_cast<size_t>(number()));
    for (Block& block : blocks) {
      block.arguments = numbers<uint32_t>();
      block.body.reserve(static_cast<size_t>(number()));
      for (size_t i = block.body.capacity(); i > 0; --i) block.body.push_back(instruction());
    }
    return blocks;
  }

 private:
  Instruction instruction() {
    static const auto* const known = [] {
      auto* by_name = new std::unordered_map<std::string, Operation>();
      for (size_t i = 0; i < operation_names().size(); ++i) {
        by_name->emplace(operation_names()[i], static_cast<Operation>(i));
      }
      return by_name;
    }();
    const char* const name = text();
    const auto found = known->find(name);
    if (found == known->end()) {
      throw Failure(FailureKind::kInvalidArgument,
                    std::string("vnpu: a Triton program has the unknown operation ") + name + ".");
    }
    Instruction result{found->second, text(), text(), {}, {}, {}, {}};
    result.results = numbers<uint32_t>();
    result.operands = numbers<uint32_t>();
    result.attributes = numbers<int64_t>();
    result.regions.resize(static_cast<size_t>(number()));
    for (Region& each : result.regions) each = region();
    return result;
  }

  const int64_t* next_;
  const int64_t* const end_;
  const std::vector<const char*>& texts_;
};

}  // namespace

size_t bytes_of(Type type) {
  switch (type) {
    case Type::kInt1:
    case Type::kInt8:
    case Type::kFloat8E4m3:
    case Type::kFloat8E5m2: return 1;
    case Type::kInt16:
    case Type::kFloat16:
    case Type::kBfloat16: return 2;
    case Type::kInt32:
    case Type::kFloat32: return 4;
    case Type::kInt64:
    case Type::kFloat64:
    case Type::kPointer: return 8;
  }
  return 0;
}

const std::vector<std::string>& operation_names() {
  static const auto* const names = new std::vector<std::string>{
#define VNPU_TRITON(ENUMERATOR, NAME) NAME,
#include "triton/operations.inc"
#undef VNPU_TRITON
  };
  return *names;
}

// Layout: format, number of words, bytes of texts, words, texts (each ends with a zero byte).
Program::Program(std::string_view written) {
  int64_t header[3] = {};
  if (written.size() >= sizeof(header)) std::memcpy(header, written.data(), sizeof(header));
  const auto num_words = static_cast<size_t>(header[1]);
  const auto text_bytes = static_cast<size_t>(header[2]);
  if (header[0] != kFormat || written.size() != sizeof(header) + num_words * 8 + text_bytes) {
    throw Failure(FailureKind::kInvalidArgument,
                  "vnpu: this is no Triton program of this release. Clear Triton's cache.");
  }
  std::vector<int64_t> words(num_words);
  std::memcpy(words.data(), written.data() + sizeof(header), num_words * 8);
  strings_ = written.substr(sizeof(header) + num_words * 8);
  std::vector<const char*> texts;
  for (size_t i = 0; i < strings_.size(); i += std::strlen(&strings_[i]) + 1) {
    texts.push_back(&strings_[i]);
  }
  Reader reader(words.data(), words.data() + words.size(), texts);
  name = reader.text();
  frame_bytes = static_cast<size_t>(reader.number());
  operations = reader.number();
  loaded_bytes = reader.number();
  stored_bytes = reader.number();
  has_loops = reader.number() != 0;
  synchronizes = reader.number() != 0;
  products.resize(static_cast<size_t>(reader.number()));
  for (timing::MatrixProduct& each : products) {
    each.m = reader.number();
    each.n = reader.number();
    each.k = reader.number();
    each.batch = reader.number();
    each.arithmetic = static_cast<timing::Arithmetic>(reader.number());
  }
  values.resize(static_cast<size_t>(reader.number()));
  for (Value& each : values) {
    each.type = static_cast<Type>(reader.number());
    each.count = static_cast<size_t>(reader.number());
    each.offset = static_cast<size_t>(reader.number());
    each.shape = reader.numbers<int64_t>();
  }
  parameters.resize(static_cast<size_t>(reader.number()));
  for (Parameter& each : parameters) {
    each.name = reader.text();
    each.value = static_cast<uint32_t>(reader.number());
    each.reads = reader.number() != 0;
    each.writes = reader.number() != 0;
  }
  constants.resize(static_cast<size_t>(reader.number()));
  for (Constant& each : constants) {
    each.value = static_cast<uint32_t>(reader.number());
    each.bits = static_cast<uint64_t>(reader.number());
  }
  functions.resize(static_cast<size_t>(reader.number()));
  for (Function& each : functions) {
    each.arguments = reader.numbers<uint32_t>();
    each.body = reader.region();
  }
}

}  // namespace vnpu::triton
