// Matrix products. Transposed operands arrive as strided views, which ATen's products take as they
// are. cubeMathType allows the device to lower the precision of float32; here it never does.

#include <limits>

#include "ops/matmul/blocked_matmul.h"
#include "ops/matmul/fractal_layout.h"
#include "ops/operator.h"
#include "ops/shared_rules.h"

namespace vnpu::ops {
namespace {

bool is_floating(const Tensor& tensor) {
  const ScalarType type = tensor.scalar_type();
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

void require_floating(std::initializer_list<Tensor> operands) {
  for (const Tensor& operand : operands) {
    if (!is_floating(operand)) {
      refuse(std::string("the matrix unit multiplies float32, float16 and bfloat16; got ") +
             at::toString(operand.scalar_type()) + ". Convert the operand first.");
    }
  }
}

// True if ATen may compute straight into `out`: one dtype throughout, and not float16, for which
// ATen has only a scalar loop (widening to float32 is 3 times as fast and as exact).
template <class... T>
bool is_direct(const Tensor& out, const T&... operands) {
  const ScalarType type = out.scalar_type();
  return type != at::kHalf && ((operands.scalar_type() == type) && ...);
}

void multiply(const Tensor& self, const Tensor& mat2, const Tensor& out) {
  require_floating({self, mat2});
  if (blocked_matmul(self, mat2, /*bias=*/Tensor(), out)) return;
  if (blocked_batch_matmul(self, mat2, out)) return;
  if (!is_direct(out, self, mat2)) {
    store(out, multiply_rows(widen(self), widen(mat2)));
  } else if (self.dim() == 2 && mat2.dim() == 2) {
    at::mm_out(const_cast<Tensor&>(out), self, mat2);
  } else if (self.dim() == 3 && mat2.dim() == 3 && self.size(0) == mat2.size(0)) {
    at::bmm_out(const_cast<Tensor&>(out), self, mat2);
  } else {
    store(out, at::matmul(self, mat2));
  }
}

void multiply_add(const Tensor& self, const Tensor& mat1, const Tensor& mat2, const Scalar& beta,
                  const Scalar& alpha, const Tensor& out) {
  require_floating({mat1, mat2});
  const bool is_bias = self.dim() == 1 || (self.dim() == 2 && self.size(0) == 1);
  if (is_bias && beta.equal(1) && alpha.equal(1) &&
      blocked_matmul(mat1, mat2, self.reshape(-1), out)) {
    return;
  }
  if (is_direct(out, self, mat1, mat2)) {
    at::addmm_out(const_cast<Tensor&>(out), self, mat1, mat2, beta, alpha);
  } else {
    store(out,
          at::addmm(self.to(at::kFloat), mat1.to(at::kFloat), mat2.to(at::kFloat), beta, alpha));
  }
}

}  // namespace

constexpr char kMm[] = "ops-nn matmul/mat_mul_v3/docs/aclnnMm.md, parameters";
// The documents exclude bfloat16 beside float32; the library casts either to float32, and
// quantizers rely on it.
constexpr char kPromotion[] = "Dav2201MatMulRule in matmul_util.cpp of ops-nn";
static Check inner_sizes_agree(const char* other) {
  return fits(std::string("have the inner size of ") + other, {other},
              [](const RuleArguments& own) {
                return size_of(own.tensor(), -2) == size_of(own.tensor(1), -1);
              });
}
static Rules rules_of_product(const char* a, const char* b, int64_t dimensions) {
  return {kMm,
          {{a, {dtype(kFloats), dims(dimensions, dimensions)}},
           {a, dtype({at::kFloat, at::kHalf}), {.chips = k310P}},
           {b, dtype(kFloats), kPromotion},
           {b, dtype({at::kFloat, at::kHalf}), {.chips = k310P}},
           {b, {dims(dimensions, dimensions), inner_sizes_agree(a)}}},
          {.bytes = 20 * kMiB, .copies = true}};
}
static void cost_of_mm(const Call& call, Work& work) {
  multiply(work, call.tensor("self"), call.tensor("mat2"));
}
VNPU_OPERATOR(Mm, (const Tensor& self, const Tensor& mat2, Out out, int8_t),
              {.cost = cost_of_mm, .rules = rules_of_product("self", "mat2", 2)}) {
  require(self.dim() == 2 && mat2.dim() == 2, "both operands must be matrices");
  multiply(self, mat2, out.tensor);
}
VNPU_OPERATOR(Matmul, (const Tensor& self, const Tensor& mat2, Out out, int8_t),
              {.cost = cost_of_mm,
               .rules = {kMm,
                         {{"self", dtype(kFloats)}, {"mat2", dtype(kFloats), kPromotion}},
                         {.bytes = 20 * kMiB, .copies = true}}}) {
  multiply(self, mat2, out.tensor);
}
VNPU_OPERATOR(BatchMatMul, (const Tensor& self, const Tensor& mat2, Out out, int8_t),
              {.cost = cost_of_mm, .rules = rules_of_product("self", "mat2", 3)}) {
  require(self.dim() == 3 && mat2.dim() == 3, "both operands must have 3 dimensions");
  multiply(self, mat2, out.tensor);
}

static void cost_of_addmm(const Call& call, Work& work) {
  multiply(work, call.tensor("mat1"), call.tensor("mat2"));
}
VNPU_OPERATOR(Addmm,
              (const Tensor& self, const Tensor& mat1, const Tensor& mat2, const Scalar& beta,
               const Scalar& alpha, Out out, int8_t),
              {.cost = cost_of_addmm, .rules = rules_of_product("mat1", "mat2", 2)}) {
  multiply_add(self, mat1, mat2, beta, alpha, out.tensor);
}
VNPU_OPERATOR(InplaceAddmm,
              (InOut self, const Tensor& mat1, const Tensor& mat2, const Scalar& beta,
               const Scalar& alpha, int8_t),
              {.cost = cost_of_addmm}) {
  multiply_add(self.tensor, mat1, mat2, beta, alpha, self.tensor);
}
VNPU_OPERATOR(Addmv,
              (const Tensor& self, const Tensor& mat, const Tensor& vec, const Scalar& alpha,
               const Scalar& beta, Out out, int8_t),
              {.cost = elements<2>}) {
  require_floating({mat, vec});
  store(out, at::addmv(widen(self), widen(mat), widen(vec), beta, alpha));
}
VNPU_OPERATOR(Mv, (const Tensor& self, const Tensor& vec, Out out, int8_t), {.cost = elements<2>}) {
  require_floating({self, vec});
  store(out, at::mv(widen(self), widen(vec)));
}
VNPU_OPERATOR(Dot, (const Tensor& self, const Tensor& tensor, Out out), {.cost = elements<2>}) {
  store(out, at::dot(widen(self), widen(tensor)));
}

static void cost_of_baddbmm(const Call& call, Work& work) {
  multiply(work, call.tensor("batch1"), call.tensor("batch2"));
}
static Rules rules_of_baddbmm() {
  return {"CheckDtypeValid, CheckShape in aclnn_baddbmm.cpp",
          {{"self, batch1, batch2", dtype(kFloats), kOnBigChips},
           {"self, batch1, batch2", dtype({at::kFloat, at::kHalf}), {.chips = k310P}},
           {"batch1, batch2", dims(3, 3)},
           {"batch2", inner_sizes_agree("batch1")},
           {"out", same_dtype("self")}}};
}
VNPU_OPERATOR(Baddbmm,
              (const Tensor& self, const Tensor& batch1, const Tensor& batch2, const Scalar& beta,
               const Scalar& alpha, Out out, int8_t),
              {.cost = cost_of_baddbmm, .rules = rules_of_baddbmm()}) {
  require_floating({batch1, batch2});
  if (is_direct(out.tensor, self, batch1, batch2)) {
    at::baddbmm_out(out.tensor, self, batch1, batch2, beta, alpha);
  } else {
    store(out, at::baddbmm(widen(self), widen(batch1), widen(batch2), beta, alpha));
  }
}
VNPU_OPERATOR(Addbmm,
              (const Tensor& self, const Tensor& batch1, const Tensor& batch2, const Scalar& beta,
               const Scalar& alpha, Out out, int8_t),
              {.cost = cost_of_baddbmm}) {
  require_floating({batch1, batch2});
  store(out, at::addbmm(widen(self), widen(batch1), widen(batch2), beta, alpha));
}
VNPU_OPERATOR(Addr,
              (const Tensor& self, const Tensor& vec1, const Tensor& vec2,
               const OptionalScalar& beta, const OptionalScalar& alpha, Out out),
              {.cost = elements<2>}) {
  store(out, at::addr(widen(self), widen(vec1), widen(vec2), beta.value_or(1), alpha.value_or(1)));
}
VNPU_OPERATOR(InplaceAddr,
              (InOut self, const Tensor& vec1, const Tensor& vec2, const OptionalScalar& beta,
               const OptionalScalar& alpha),
              {.cost = elements<2>}) {
  store(self, at::addr(widen(self.tensor), widen(vec1), widen(vec2), beta.value_or(1),
                       alpha.value_or(1)));
}

// --- weights in FRACTAL_NZ
// -------------------------------------------------------------------------
VNPU_OPERATOR(MatmulWeightNz, (const Tensor& self, const LaidOut& mat2, Out out, int8_t),
              {.cost = cost_of_mm}) {
  multiply(self, mat2.matrix(), out.tensor);
}
VNPU_OPERATOR(BatchMatMulWeightNz, (const Tensor& self, const LaidOut& mat2, Out out, int8_t),
              {.cost = cost_of_mm}) {
  multiply(self, mat2.matrix(), out.tensor);
}
VNPU_OPERATOR(AddmmWeightNz,
              (const Tensor& self, const Tensor& mat1, const LaidOut& mat2, const Scalar& beta,
               const Scalar& alpha, Out out, int8_t),
              {.cost = cost_of_addmm}) {
  multiply_add(self, mat1, mat2.matrix(), beta, alpha, out.tensor);
}

static Rules rules_of_add_lora() {
  constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
  return {
      "op-plugin torch_npu-npu_batch_gather_matmul.md, parameters",
      {{"y", {dtype({at::kHalf}), dims(2, 2)}},
       {"x", {dtype({at::kHalf}), dims(2, 2), size_between(1, 16, kAny, 16), same_size(0, "y", 0)}},
       {"weight_b", {dtype({at::kHalf}), dims(4, 4), size_between(2, 16, kAny, 16)}},
       {"weight_b", size_between(0, 1, 32),
        "ops-transformer posembedding/add_lora/docs/aclnnAddLora.md, constraints"},
       {"indices", {dtype({at::kInt}), dims(1, 1), same_size(0, "y", 0)}},
       {"weight_a",
        {dtype({at::kHalf}), dims(4, 4), size_between(2, 16, 128, 16), same_size(0, "weight_b", 0),
         same_size(1, "weight_b", 1), same_size(2, "weight_b", 3), same_size(3, "x", 1)}},
       {"weight_b", same_size(3, "x", 1).when(is_missing("weight_a"))},
       {"out", {same_dtype("y"), same_sizes("y")}}},
      {},
      kA2 | k310P};
}
// Each row uses only its own slot's pair of matrices, so the number of slots does not matter.
static void cost_of_add_lora(const Call& call, Work& work) {
  work.kind = Work::Class::kMatmul;
  const TensorView& x = call.tensor("x");
  const TensorView& weight_b = call.tensor("weight_b");
  MatrixProduct product;
  product.m = size_of(x, 0);
  product.arithmetic = arithmetic_of(x);
  product.k = size_of(x, 1);
  product.n = size_of(weight_b, 3);
  if (product.n != product.k) work.products.push_back(product);
  product.k = size_of(weight_b, 3);
  product.n = size_of(weight_b, 2);
  work.products.push_back(product);
}
// The result is y, and is copied to `out` if that is another tensor. A row of index -1 has no slot,
// as in torch_npu's example; the documents do not say so.
VNPU_OPERATOR(AddLora,
              (InOut y, const Tensor& x, const Tensor& weight_b, const Tensor& indices,
               const OptionalTensor& weight_a, int64_t layer_idx, double scale, int64_t y_offset,
               int64_t y_slice_size, Out out),
              {.tier = kT3, .cost = cost_of_add_lora, .rules = rules_of_add_lora()}) {
  const int64_t slots = weight_b.size(0);
  const int64_t columns = weight_b.size(2);
  require(layer_idx >= 0 && layer_idx < weight_b.size(1),
          "layer_idx must name a layer of weight_b");
  require(y_slice_size == -1 || y_slice_size == columns,
          "y_slice_size must be -1 or the third size of weight_b");
  require(y_offset >= 0 && y_offset + columns <= y.tensor.size(1),
          "y_offset and the third size of weight_b must stay within y's columns");
  require(indices.numel() == 0 ||
              (indices.min().item<int>() >= -1 && indices.max().item<int>() < slots),
          "indices must name slots of weight_b, or be -1 for none");
  const Tensor sum = y.tensor.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  for (int64_t slot = 0; slot < slots; ++slot) {
    const Tensor rows = indices.eq(slot).nonzero().flatten();
    if (rows.numel() == 0) continue;
    Tensor found = x.index_select(0, rows).to(at::kFloat);
    const auto times = [&](const Tensor& weights) {
      const Tensor weight = weights.select(0, slot).select(0, layer_idx).to(at::kFloat).t();
      Tensor product = at::empty({found.size(0), weight.size(1)}, at::kFloat);
      multiply(found, weight, product);
      found = product;
    };
    if (weight_a.has_value()) times(*weight_a);
    times(weight_b);
    sum.narrow(1, y_offset, columns).index_add_(0, rows, found, scale);
  }
  store(y.tensor, sum);
  store(out, sum);
}

}  // namespace vnpu::ops
