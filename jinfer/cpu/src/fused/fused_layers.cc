// Handler of `jinfer_fused_layers`: norms, matmuls, RoPE, sums, attention of consecutive layers in
// one call, without gathering threads anew for each.
//
// Operations are scheduled into stages. Row-wise operations of a stage run row by row, one after
// the other. A matmul begins a new stage, since it needs whole rows and is shared among threads by
// outputs; so does an operation on a matmul's result. Attention has stages of its own.
#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/handler.h"
#include "common/operands.h"
#include "dense/dense_driver.h"
#include "fused/fused_attention.h"
#include "fused/fused_lora.h"
#include "fused/fused_program.h"
#include "linear/linear_driver.h"
#include "rowwise/rowwise.h"

namespace jinfer {
namespace {

// Operations, numbered as `Operation` in fused_layers.py.
enum Operation : int64_t {
  kNorm,
  kLinear,
  kAdd,
  kAddVector,
  kScale,
  kDense,
  kRotate,
  kAttention,
  kActivate,
  kMultiply,
  kHadamard,
  kLora
};

// A matrix [rows, size]: an input, or an operation's result.
struct Value {
  int64_t size;
  int64_t stage = -1;        // that computes it; -1: an input
  bool whole = true;         // readable only after the stage, not row by row
  int64_t until = -1;        // the last stage that reads it
  const float* x = nullptr;  // to read
  float* y = nullptr;        // to write
  int64_t early = 0;         // earlier stages that already write to it
  int64_t readers = 0;       // operations that read it, an operand more than once maybe
  int64_t in = -1;           // a value whose memory it takes over
};

// A row-wise operation. `a`, `b`, `c`: operand values; `y`: the result's number.
struct RowOperation {
  Operation kind;
  size_t a, b, c, y;
  Norm norm;
  const float* vector;
  float factor;
  Rotation rotation;
  const MatmulWork* product;  // set: only prepares the row for this matmul
  int64_t each;               // size of a norm: the row's, or a head's
  Activation activation;
  Hadamard hadamard;
};

// One of an attention's stages.
struct AttentionStage {
  const AttentionWork* work;
  int64_t number;
};

struct Stage {
  std::vector<RowOperation> rows;
  std::vector<const MatmulWork*> products;
  std::vector<AttentionStage> attentions;
};

class FusedLayers {
 public:
  int64_t rows() const { return rows_; }

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
      if (x->dimensions().size() != 2 || (i > 0 && x->dimensions()[0] != rows_))
        return refuse("inputs are not matrices of equally many rows");
      rows_ = x->dimensions()[0];
      values_.push_back({x->dimensions()[1], -1, true, -1, x->typed_data(), nullptr});
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

  ffi::Error bind_results(ffi::RemainingRets& rets, ffi::Span<const int64_t> results) {
    for (size_t i = 0; i < results.size(); ++i) {
      auto y = rets.get<ffi::Buffer<ffi::F32>>(i);
      if (y.has_error()) return y.error();
      if (results[i] < 0 || size_t(results[i]) >= values_.size()) return refuse("no such value");
      Value& value = values_[results[i]];
      if (value.stage < 0 || value.y || !has_shape(**y, {rows_, value.size}))
        return refuse("a result does not fit");
      value.y = (*y)->typed_data();
    }
    return ffi::Error::Success();
  }

  void run(ffi::ThreadPool& pool) {
    const Segment whole{0, 0, rows_};
    int64_t threads = 1;
    for (size_t i = loras_.used; i > 0; --i) share_memory(*loras_.all[i - 1]);  // later first
    for (const ScheduledMatmul& scheduled : products_) {
      scheduled.product->partition(&whole, 1, pool);
      threads = std::max(threads, scheduled.product->threads);
    }
    for (size_t i = 0; i < attentions_.used; ++i)
      threads = std::max(threads, attentions_.all[i]->work.threads());
    assign_memory();
    for (Value& value : values_)
      if (value.stage >= 0) value.x = value.y;
    for (const ScheduledMatmul& scheduled : products_)
      for (size_t t = 0; t < scheduled.product->results(); ++t)
        scheduled.product->set_output(t, values_[scheduled.first + t].y);
    for (size_t i = 0; i < attentions_.used; ++i) {
      FusedAttention& a = *attentions_.all[i];
      a.work.bind(values_[a.q].x, values_[a.k].x, values_[a.v].x, values_[a.y].y, partials_[i]);
    }
    for (size_t i = 0; i < loras_.used; ++i)
      loras_.all[i]->bind([this](size_t value) { return values_[value].x; });
    const int64_t row_chunks = std::min(rows_, 4 * threads);
    chunks_.clear();  // per stage: of attentions, matmuls, then rows
    for (int64_t s = 0; s < stage_count_; ++s) {
      int64_t count = stages_[s].rows.empty() ? 0 : row_chunks;
      for (const AttentionStage& of : stages_[s].attentions) count += of.work->chunks(of.number);
      for (const MatmulWork* product : stages_[s].products) count += product->chunks;
      chunks_.push_back(count);
    }
    run_stages(pool, chunks_, threads, [&](int64_t s, int64_t chunk) {
      const Stage& stage = stages_[s];
      for (const AttentionStage& of : stage.attentions) {
        if (chunk < of.work->chunks(of.number)) return of.work->run(of.number, chunk);
        chunk -= of.work->chunks(of.number);
      }
      for (const MatmulWork* product : stage.products) {
        if (chunk < product->chunks) return product->run(chunk);
        chunk -= product->chunks;
      }
      const int64_t begin = rows_ * chunk / row_chunks, end = rows_ * (chunk + 1) / row_chunks;
      for (int64_t row = begin; row < end; ++row)
        for (const RowOperation& operation : stage.rows) run_row(operation, row);
    });
  }

 private:
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

  // Memory that is in use until a stage.
  struct MemorySlot {
    size_t at, bytes;
    int64_t until;
  };

  void clear() {
    for (int64_t s = 0; s < stage_count_; ++s) {
      Stage& stage = stages_[s];
      stage.rows.clear(), stage.products.clear(), stage.attentions.clear();
    }
    rows_ = stage_count_ = 0, end_ = 0, linear_.used = dense_.used = 0;
    attentions_.used = loras_.used = 0;
    values_.clear(), products_.clear(), slots_.clear(), plans_.clear();
  }

  // Assigns memory to values that are not results, and to rows prepared for matmuls; memory that is
  // not read any more is reused.
  void assign_memory() {
    offsets_.clear();
    for (const Value& value : values_)
      if (value.stage >= 0 && !value.y && value.in < 0)
        offsets_.push_back(
            allocate(rows_ * value.size * 4, value.stage - value.early, value.until));
    for (const auto& [product, stage, first] : products_)
      for (size_t form = 0; form < product->rows.size(); ++form)
        offsets_.push_back(allocate(rows_ * product->row_bytes(form), stage - 1, stage));
    for (size_t i = 0; i < attentions_.used; ++i) {
      const FusedAttention& a = *attentions_.all[i];
      offsets_.push_back(allocate(a.work.room() * 4, a.stage + 1, a.stage + 2));
    }
    if (memory_.size() < end_ + 64) memory_ = std::vector<char>(end_ + 64);
    char* room = memory_.data() + (-reinterpret_cast<uintptr_t>(memory_.data()) & 63);
    const size_t* at = offsets_.data();
    for (Value& value : values_)
      if (value.stage >= 0 && !value.y)
        value.y = value.in < 0 ? reinterpret_cast<float*>(room + *at++) : values_[value.in].y;
    for (const ScheduledMatmul& scheduled : products_)
      for (char*& rows : scheduled.product->rows) rows = room + *at++;
    partials_.clear();
    for (size_t i = 0; i < attentions_.used; ++i)
      partials_.push_back(reinterpret_cast<float*>(room + *at++));
  }

  // Sums take over the memory of products that nothing else reads.
  void share_memory(FusedLora& lora) {
    for (size_t t = 0; t < lora.ys.size(); ++t) {
      Value &y = values_[lora.ys[t]], &sum = values_[lora.first_sum + t];
      const bool own = y.stage >= 0 && y.readers == 1 && !y.y;
      lora.sums.sums[t].in_place = own;
      if (!own) continue;
      y.y = sum.y, y.until = std::max(y.until, sum.until);
      if (!sum.y) sum.in = lora.ys[t];
    }
  }

  size_t allocate(size_t bytes, int64_t stage, int64_t until) {
    bytes = (bytes + 63) / 64 * 64;
    for (MemorySlot& slot : slots_)
      if (slot.until < stage && slot.bytes == bytes) return slot.until = until, slot.at;
    slots_.push_back({end_, bytes, until});
    return (end_ += bytes) - bytes;
  }

  ffi::Error read_operation(Operands& operands, ProgramReader& reader) {
    const int64_t kind = reader.next(), a = reader.next();
    if (a < 0 || size_t(a) >= values_.size()) return refuse("no such value");
    const int64_t size = values_[a].size;
    RowOperation operation{
        static_cast<Operation>(kind), size_t(a), size_t(a), size_t(a), values_.size(), {}};
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
        if (b < 0 || size_t(b) >= values_.size() || values_[b].size != size)
          return refuse("no such value to add or to multiply by");
        operation.b = b;
        break;
      }
      case kRotate: {
        const int64_t b = reader.next(), c = reader.next(), head = reader.next();
        const bool adjacent = reader.next();
        const int64_t known = values_.size();
        if (b < 0 || b >= known || c < 0 || c >= known || values_[b].size != values_[c].size)
          return refuse("no such angles");
        if (head < 1 || size % head || 2 * values_[b].size > head)
          return refuse("heads of such a size do not fit");
        operation.b = b, operation.c = c;
        operation.rotation = {head, values_[b].size, adjacent};
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
    values_.push_back({size, stage, false, stage});
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
                                    values_[a].size, digits, activation, rows_);
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
    if (values_[a].size == 0) return refuse("rows of nothing");
    DenseWork& product = dense_.next();
    ffi::Error error =
        product.read(operands, count, values_[a].size,
                     {activation, false, transposed != 0, first, taken, rounded != 0});
    if (error.success()) add_matmul(product, a);
    return error;
  }

  ffi::Error read_attention(Operands& operands, ProgramReader& reader, size_t q) {
    FusedAttention& it = attentions_.next();
    const auto size_of = [this](int64_t value) {
      return value < 0 || size_t(value) >= values_.size() ? 0 : values_[value].size;
    };
    if (!it.read(reader, q, size_of)) return refuse("attention to heads that do not fit");
    ffi::Error error = it.take(operands, rows_, size_of, *rets_, next_pool_);
    if (error.failure()) return error;
    const auto cached = plans_.of(it.call, *pool_);
    if (cached.has_error()) return cached.error();
    it.work = AttentionWork(it.call, **cached);

    it.y = values_.size();
    it.stage = 1 + std::max({first_row_stage(it.q), first_row_stage(it.k), first_row_stage(it.v)});
    for (int64_t s = 0; s < AttentionWork::kStages; ++s)
      stage_at(it.stage + s).attentions.push_back({&it.work, s});
    for (const size_t value : {it.q, it.k, it.v}) is_read(value, it.stage + 1);
    const int64_t last = it.stage + AttentionWork::kStages - 1;
    values_.push_back({it.result_size(), last, true, last, nullptr, nullptr, 1});
    return ffi::Error::Success();
  }

  ffi::Error read_lora(Operands& operands, ProgramReader& reader, size_t a) {
    FusedLora& it = loras_.next();
    const auto size_of = [this](int64_t value) {
      return value < 0 || size_t(value) >= values_.size() ? 0 : values_[value].size;
    };
    ffi::Error error = it.read(reader, operands, rows_, a, size_of);
    if (error.failure()) return error;
    it.first_inner = values_.size();
    add_matmul(it.inner, a);
    int64_t stage = 1 + values_.back().stage;
    for (const size_t y : it.ys) stage = std::max(stage, values_[y].stage + 1);
    for (const size_t y : it.ys) is_read(y, stage);
    for (size_t value = it.first_inner; value < values_.size(); ++value) is_read(value, stage);
    it.first_sum = values_.size();
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
    products_.push_back({&product, stage, values_.size()});
    for (size_t t = 0; t < product.results(); ++t)
      values_.push_back({product.outputs(t), stage, true, stage});
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
    values_[value].until = std::max(values_[value].until, stage);
    ++values_[value].readers;
  }

  // The first stage in which a value's rows can be read.
  int64_t first_row_stage(size_t value) const {
    const Value& v = values_[value];
    return v.stage < 0 ? 0 : v.whole ? v.stage + 1 : v.stage;
  }

  Stage& stage_at(int64_t stage) {
    stage_count_ = std::max(stage_count_, stage + 1);
    if (int64_t(stages_.size()) < stage_count_) stages_.resize(stage_count_);
    return stages_[stage];
  }

  void run_row(const RowOperation& o, int64_t row) const {
    const int64_t size = values_[o.a].size;
    const float* a = values_[o.a].x + row * size;
    if (o.product) return o.product->prepare(a, row);
    float* y = values_[o.y].y + row * size;
    if (o.kind == kNorm) {
      for (int64_t i = 0; i < size; i += o.each)
        rowwise_kernels().norm(a + i, o.each, o.norm, y + i);
      return;
    }
    if (o.kind == kRotate) {
      const int64_t angles = row * o.rotation.pairs;
      const float *cos = values_[o.b].x + angles, *sin = values_[o.c].x + angles;
      return rowwise_kernels().rotate(a, cos, sin, size, o.rotation, y);
    }
    if (o.kind == kHadamard) return rowwise_kernels().hadamard(a, size, o.hadamard, y);
    if (o.kind == kScale) return rowwise_kernels().scale(a, o.factor, size, y);
    if (o.kind == kActivate) return rowwise_kernels().activate(a, o.activation, size, y);
    if (o.kind == kMultiply)
      return rowwise_kernels().multiply(a, values_[o.b].x + row * size, size, y);
    rowwise_kernels().add(a, o.kind == kAdd ? values_[o.b].x + row * size : o.vector, size, y);
  }

  int64_t rows_ = 0, stage_count_ = 0;
  size_t end_ = 0;  // bytes
  std::vector<Value> values_;
  std::vector<ScheduledMatmul> products_;
  std::vector<Stage> stages_;
  Reused<LinearWork> linear_;
  Reused<DenseWork> dense_;
  Reused<FusedAttention> attentions_;
  Reused<FusedLora> loras_;
  PlanCache plans_;
  std::vector<float*> partials_;
  const ffi::RemainingRets* rets_ = nullptr;
  const ffi::ThreadPool* pool_ = nullptr;
  size_t next_pool_ = 0;  // index of the result that is the next attention's pool
  std::vector<int64_t> chunks_;
  std::vector<MemorySlot> slots_;
  std::vector<size_t> offsets_;
  std::vector<char> memory_;
};

// Idle objects with their memory: threads of XLA's pool take turns as the caller, and each would
// otherwise have its own.
class FusedLayersPool {
 public:
  std::unique_ptr<FusedLayers> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return std::make_unique<FusedLayers>();
    auto layers = std::move(free_.back());
    free_.pop_back();
    return layers;
  }
  void give(std::unique_ptr<FusedLayers> layers) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(layers));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<FusedLayers>> free_;
};

FusedLayersPool& layers_pool() {
  static FusedLayersPool* layers_pool =
      new FusedLayersPool;  // never destroyed: threads may outlive static objects
  return *layers_pool;
}

ffi::Error fused_layers(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        ffi::Span<const int64_t> program, ffi::Span<const int64_t> results,
                        int64_t inputs, ffi::Span<const int64_t> layout) {
  if (inputs < 1 || size_t(inputs) > args.size()) return refuse("there are no inputs");
  auto layers = layers_pool().take();
  ffi::Error error = layers->read(args, inputs, program, layout, rets, results.size(), pool);
  if (error.success()) error = layers->bind_results(rets, results);
  if (error.success() && layers->rows() > 0) layers->run(pool);
  layers_pool().give(std::move(layers));
  return error;
}

}  // namespace
}  // namespace jinfer

JINFER_HANDLER(jinfer_fused_layers, jinfer::fused_layers, "program", "results", "inputs",
               "operands");
