#include "collective/element.h"

namespace vnpu {
namespace {

struct ElementRow {
  const char* name;
  size_t bytes;
  bool reducible;
};

// In the order of ElementType.
constexpr ElementRow kElements[] = {
    {"int8", 1, true},         {"int16", 2, true},        {"int32", 4, true},
    {"int64", 8, true},        {"int128", 16, false},     {"uint8", 1, true},
    {"uint16", 2, true},       {"uint32", 4, true},       {"uint64", 8, true},
    {"float16", 2, true},      {"bfloat16", 2, true},     {"float32", 4, true},
    {"float64", 8, true},      {"hifloat8", 1, false},    {"float8_e4m3", 1, false},
    {"float8_e5m2", 1, false}, {"float8_e8m0", 1, false},
};

const ElementRow& row(ElementType type) { return kElements[static_cast<size_t>(type)]; }

}  // namespace

size_t size_of(ElementType type) { return row(type).bytes; }
const char* name_of(ElementType type) { return row(type).name; }
bool can_reduce(ElementType type) { return row(type).reducible; }

const char* name_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum: return "sum";
    case Reduction::kProduct: return "product";
    case Reduction::kMaximum: return "max";
    case Reduction::kMinimum: return "min";
  }
  return "unknown reduction";
}

}  // namespace vnpu
