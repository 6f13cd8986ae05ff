// Schedule of a fused program: its operations in stages.
//
// Row-wise operations of a stage run row by row, one after the other. A matmul begins a new stage,
// since it needs whole rows and is shared among threads by outputs; so does an operation on a
// matmul's result. Attention has stages of its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/handler.h"
#include "common/operands.h"
#include "dense/dense_driver.h"
#include "fused/fused_attention.h"
#include "fused/fused_lora.h"
#include "fused/fused_program.h"
#include "fused/fused_stages.h"
#include "linear/linear_driver.h"

namespace jinfer {
namespace {

// A matmul, its stage and the number of its first result.
struct ScheduledMatmul {
  MatmulWork* product;
  int64_t stage;
  size_t first;
};

// Objects of one type, reused by later calls.
template <class T>
struct Reused {
  std::vector<std::unique_ptr<T>> all;  // pointers stay valid
  size_t used = 0;

  T& next() {
    if (used == all.size()) all.push_back(std::make_unique<T>());
    return *all[used++];
  }
};

class FusedSchedule {
 public:
  // `results`: how many results are values; the pools of attentions that write follow, in order.
  ffi::Error read(const ffi::RemainingArgs& args, size_t inputs, ffi::Span<const int64_t> program,
                  ffi::Span<const int64_t> layout, const ffi::RemainingRets& rets, size_t results,
                  const ffi::ThreadPool& pool) {
    clear();
    if (results > rets.size()) return refuse("wrong number of results");
    rets_ = &rets, next_pool_ = results, pool_ = &pool;
    for (size_t i = 0; i < inputs; ++i) {
      auto x = args.get<ffi::Buffer<ffi::F32>>(i);
      if (x.has_error()) return x.error();
      if (x->dimensions().size() != 2 || (i > 0 && x->dimensions()[0] != rows))
        return refuse("inputs are not matrices of equally many rows");
      rows = x->dimensions()[0];
      values.push_back({x->dimensions()[1], -1, true, -1, x->typed_data(), nullptr});
    }
    Operands operands(args, inputs, layout);
    for (ProgramReader reader(program); !reader.done();) {
      ffi::Error error = read_operation(operands, reader);
      if (error.failure()) return error;
      if (reader.failed()) return refuse("a program that ends too early");
    }
    if (next_pool_ != rets.size()) return refuse("wrong number of results");
    return operands.done() ? ffi::Error::Success() : refuse("wrong number of buffers");
  }

  // The scheduled work; memory of values and of products is assigned later.
  int64_t rows = 0, stage_count = 0;
  std::vector<Value> values;
  std::vector<ScheduledMatmul> products;
  std::vector<Stage> stages;  // of which stage_count are in use
  Reused<FusedAttention> attentions;
  Reused<FusedLora> loras;

 private:
  void clear() {
    for (int64_t s = 0; s < stage_count; ++s) {
      Stage& stage = stages[s];
      stage.rows.clear(), stage.products.clear(), stage.attentions.clear();
    }
    rows = stage_count = 0, linear_.used = dense_.used = 0;
    attentions.used = loras.used = 0;
    values.clear(), products.clear(), plans_.clear();
  }

  ffi::Error read_operation(Operands& operands, ProgramReader& reader) {
    const int64_t kind = reader.next(), a = reader.next();
    if (a < 0 || size_t(a) >= values.size()) return refuse("no such value");
    const int64_t size = values[a].size;
    RowOperation operation{
        static_cast<Operation>(kind), size_t(a), size_t(a), size_t(a), values.size(), {}};
    switch (kind) {
      case kNorm: {
        const bool centered = reader.next(), weighted = reader.next(), biased = reader.next();
        const float eps = reader.real(), offset = reader.real();
        const int64_t each = operation.each = reader.next();
        if (reader.failed()) return refuse("a program that ends too early");
        if (each < 1 || size % each) return refuse("norms of such a size do not fit");
        operation.norm = {centered, eps, offset, nullptr, nullptr};
        if (weighted)
          if (ffi::Error e = vector(operands, each, &operation.norm.weight); e.failure()) return e;
        if (biased)
          if (ffi::Error e = vector(operands, each, &operation.norm.bias); e.failure()) return e;
        break;
      }
      case kLinear: return read_linear(operands, reader, a);
      case kDense: return read_dense(operands, reader, a);
      case kAttention: return read_attention(operands, reader, a);
      case kLora: return read_lora(operands, reader, a);
      case kActivate: {
        const int64_t activation = reader.next();
        if (!is_activation(activation)) return refuse("no such activation");
        operation.activation = static_cast<Activation>(activation);
        break;
      }
      case kAdd:
      case kMultiply: {
        const int64_t b = reader.next();
        if (b < 0 || size_t(b) >= values.size() || values[b].size != size)
          return refuse("no such value to add or to multiply by");
        operation.b = b;
        break;
      }
      case kRotate: {
        const int64_t b = reader.next(), c = reader.next(), head = reader.next();
        const bool adjacent = reader.next();
        const int64_t known = values.size();
        if (b < 0 || b >= known || c < 0 || c >= known || values[b].size != values[c].size)
          return refuse("no such angles");
        if (head < 1 || size % head || 2 * values[b].size > head)
          return refuse("heads of such a size do not fit");
        operation.b = b, operation.c = c;
        operation.rotation = {head, values[b].size, adjacent};
        break;
      }
      case kHadamard: {
        const int64_t head = reader.next();
        const bool query = reader.next();
        if (head < 1 || size % head) return refuse("heads of such a size do not fit");
        operation.hadamard = {head, query};
        break;
      }
      case kAddVector:
        if (ffi::Error e = vector(operands, size, &operation.vector); e.failure()) return e;
        break;
      case kScale: operation.factor = reader.real(); break;
      default: return refuse("no such operation");
    }
    const int64_t stage = std::max(
        {first_row_stage(operation.a), first_row_stage(operation.b), first_row_stage(operation.c)});
    stage_at(stage).rows.push_back(operation);
    for (const size_t value : {operation.a, operation.b, operation.c}) is_read(value, stage);
    values.push_back({size, stage, false, stage});
    return ffi::Error::Success();
  }

  ffi::Error read_linear(Operands& operands, ProgramReader& reader, size_t a) {
    const int64_t count = reader.next(), digits = reader.next(), activation = reader.next();
    const int64_t codes = reader.next();
    if (!reader.has(codes)) return refuse("a program that ends too early");
    const int64_t* codebook = reader.take(codes);
    if (count < 1 || count > 64 || !reader.has(count * kFields))
      return refuse("a program that ends too early");
    LinearWork& product = linear_.next();
    ffi::Error error = product.read(operands, reader.take(count * kFields), count, codebook, codes,
                                    values[a].size, digits, activation, rows);
    if (error.failure()) return error;
    for (const Tensor& tensor : product.tensors)
      if (tensor.count != 1) return refuse("stacks of matrices");
    add_matmul(product, a);
    return ffi::Error::Success();
  }

  ffi::Error read_dense(Operands& operands, ProgramReader& reader, size_t a) {
    const int64_t count = reader.next(), activation = reader.next(), transposed = reader.next();
    const int64_t first = reader.next(), taken = reader.next(), rounded = reader.next();
    if (reader.failed() || count < 1 || count > 64) return refuse("a program that ends too early");
    if (values[a].size == 0) return refuse("rows of nothing");
    DenseWork& product = dense_.next();
    ffi::Error error =
        product.read(operands, count, values[a].size,
                     {activation, false, transposed != 0, first, taken, rounded != 0});
    if (error.success()) add_matmul(product, a);
    return error;
  }

  ffi::Error read_attention(Operands& operands, ProgramReader& reader, size_t q) {
    FusedAttention& it = attentions.next();
    const auto size_of = [this](int64_t value) {
      return value < 0 || size_t(value) >= values.size() ? 0 : values[value].size;
    };
    if (!it.read(reader, q, size_of)) return refuse("attention to heads that do not fit");
    ffi::Error error = it.take(operands, rows, size_of, *rets_, next_pool_);
    if (error.failure()) return error;
    const auto cached = plans_.of(it.call, *pool_);
    if (cached.has_error()) return cached.error();
    it.work = AttentionWork(it.call, **cached);

    it.y = values.size();
    it.stage = 1 + std::max({first_row_stage(it.q), first_row_stage(it.k), first_row_stage(it.v)});
    for (int64_t s = 0; s < AttentionWork::kStages; ++s)
      stage_at(it.stage + s).attentions.push_back({&it.work, s});
    for (const size_t value : {it.q, it.k, it.v}) is_read(value, it.stage + 1);
    const int64_t last = it.stage + AttentionWork::kStages - 1;
    values.push_back({it.result_size(), last, true, last, nullptr, nullptr, 1});
    return ffi::Error::Success();
  }

  ffi::Error read_lora(Operands& operands, ProgramReader& reader, size_t a) {
    FusedLora& it = loras.next();
    const auto size_of = [this](int64_t value) {
      return value < 0 || size_t(value) >= values.size() ? 0 : values[value].size;
    };
    ffi::Error error = it.read(reader, operands, rows, a, size_of);
    if (error.failure()) return error;
    it.first_inner = values.size();
    add_matmul(it.inner, a);
    int64_t stage = 1 + values.back().stage;
    for (const size_t y : it.ys) stage = std::max(stage, values[y].stage + 1);
    for (const size_t y : it.ys) is_read(y, stage);
    for (size_t value = it.first_inner; value < values.size(); ++value) is_read(value, stage);
    it.first_sum = values.size();
    add_product(it.sums, stage);
    return ffi::Error::Success();
  }

  // Prepares the matmul's rows in the stage of value `a`; the matmul is the next stage.
  void add_matmul(MatmulWork& product, size_t a) {
    const int64_t before = first_row_stage(a);
    stage_at(before).rows.push_back({kLinear, a, a, a, 0, {}, nullptr, 0, {}, &product});
    is_read(a, before);
    add_product(product, before + 1);
  }

  void add_product(MatmulWork& product, int64_t stage) {
    stage_at(stage).products.push_back(&product);
    products.push_back({&product, stage, values.size()});
    for (size_t t = 0; t < product.results(); ++t)
      values.push_back({product.outputs(t), stage, true, stage});
  }

  ffi::Error vector(Operands& operands, int64_t size, const float** out) {
    const auto array = operands.next();
    if (array.has_error()) return array.error();
    if (array->element_type() != ffi::DataType::F32 || int64_t(array->element_count()) != size)
      return refuse("a vector does not fit its rows");
    *out = static_cast<const float*>(array->untyped_data());
    return ffi::Error::Success();
  }

  void is_read(size_t value, int64_t stage) {
    values[value].until = std::max(values[value].until, stage);
    ++values[value].readers;
  }

  // The first stage in which a value's rows can be read.
  int64_t first_row_stage(size_t value) const {
    const Value& v = values[value];
    return v.stage < 0 ? 0 : v.whole ? v.stage + 1 : v.stage;
  }

  Stage& stage_at(int64_t stage) {
    stage_count = std::max(stage_count, stage + 1);
    if (int64_t(stages.size()) < stage_count) stages.resize(stage_count);
    return stages[stage];
  }

  Reused<LinearWork> linear_;
  Reused<DenseWork> dense_;
  PlanCache plans_;
  const ffi::RemainingRets* rets_ = nullptr;
  const ffi::ThreadPool* pool_ = nullptr;
  size_t next_pool_ = 0;  // index of the result that is the next attention's pool
};

}  // namespace
}  // namespace jinfer
