// LoRA driver: y + scale * (x A^T) B for rows that each have an adapter of a stack, or none.
//
// Rows with an adapter are sorted by slot, so that each slot's matrices are read once. There are
// two parts of work: the inner products x A^T, and the sums, which need both these and y.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/buffer_checks.h"
#include "common/matmul_work.h"
#include "common/operands.h"
#include "dense/dense_driver.h"
#include "lora/lora.h"

namespace jinfer {
namespace {

// The rows with an adapter, sorted by slot. A place is an index in that order.
struct LoraRows {
  std::vector<Segment> segments;  // of places; index: of the slot's matrices
  std::vector<int64_t> place;     // of each row; -1: it has no adapter
  std::vector<int64_t> row;       // at each place
  const float* scales;            // of each row

  ffi::Error read(Operands& operands, int64_t rows) {
    segments.clear(), row.clear(), place.assign(rows, kUnseen);
    const auto slots = operands.next(), factors = operands.next(), order = operands.next();
    for (const auto* each : {&slots, &factors, &order})
      if (each->has_error()) return each->error();
    if (!fits(*slots, ffi::DataType::S32, {rows}) || !fits(*order, ffi::DataType::S32, {rows}) ||
        !fits(*factors, ffi::DataType::F32, {rows}))
      return refuse("adapters do not fit the rows");
    scales = static_cast<const float*>(factors->untyped_data());
    const auto* slot = static_cast<const int32_t*>(slots->untyped_data());
    const auto* sorted = static_cast<const int32_t*>(order->untyped_data());
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t at = sorted[i];
      if (at < 0 || at >= rows || place[at] != kUnseen) return refuse("no order of the rows");
      place[at] = -1;
      if (slot[at] < 1) continue;
      const int64_t here = place[at] = row.size();
      if (segments.empty() || segments.back().index != slot[at] - 1)
        segments.push_back({slot[at] - 1, here, here});
      ++segments.back().end;
      row.push_back(at);
    }
    return ffi::Error::Success();
  }

 private:
  static constexpr int64_t kUnseen = -2;
};

// The inner products x A^T of several projections, by place: result t is [rows, rank].
class LoraInner : public DenseWork {
 public:
  LoraRows adapted;

  ffi::Error read(Operands& operands, size_t count, int64_t inputs, int64_t rows) {
    ffi::Error error = adapted.read(operands, rows);
    if (error.success()) error = DenseWork::read(operands, count, inputs, {0, true});
    if (error.failure()) return error;
    for (const Segment& segment : adapted.segments)
      if (segment.index >= this->count()) return refuse("no such slot");
    return ffi::Error::Success();
  }

  void partition(const Segment*, size_t, const ffi::ThreadPool& pool) override {
    DenseWork::partition(adapted.segments.data(), adapted.segments.size(), pool);
  }

  void prepare(const float* x, int64_t row) const override {
    if (adapted.place[row] >= 0) DenseWork::prepare(x, adapted.place[row]);
  }
};

// The sums y + scale * inner B; rows without an adapter are copied, unless they are in place.
class LoraSums : public MatmulWork {
 public:
  // One sum. `in_place`: y is also the result.
  struct Sum {
    DenseMatrix b;        // the first of a stack
    const float* factors;  // of matrices in int8: [slots, 2, rank], of A's rows and of B's
    const float *inner, *y;
    float* result;
    bool in_place;
    int64_t tiles;
  };
  std::vector<Sum> sums;

  ffi::Error read(Operands& operands, const LoraInner& inner, const int64_t* outputs) {
    adapted_ = &inner.adapted, sums.clear();
    for (size_t t = 0; t < inner.results(); ++t) {
      const auto b = operands.next();
      if (b.has_error()) return b.error();
      const auto shape = b->dimensions();
      const int64_t rank = inner.outputs(t), size = outputs[t];
      if (shape.size() != 3 || shape[0] < inner.count() || shape[1] != rank || shape[2] != size)
        return refuse("a stack of adapters does not fit");
      DenseMatrix matrix{b->untyped_data(), DType::f32, size, rank, true, size * rank};
      const float* factors = nullptr;
      if (b->element_type() == ffi::DataType::S8) {
        matrix.dtype = DType::i8;
        const auto given = operands.next();
        if (given.has_error()) return given.error();
        if (!fits(*given, ffi::DataType::F32, {shape[0], 2, rank}))
          return refuse("an adapter's scales do not fit");
        factors = static_cast<const float*>(given->untyped_data());
      } else if (!dtype_of(b->element_type(), &matrix.dtype) || matrix.dtype == DType::quantized) {
        return refuse("a weight's type is not known");
      }
      if ((inner.dtype(t) == DType::i8) != (factors != nullptr))
        return refuse("only one of an adapter's stacks is int8");
      sums.push_back({matrix, factors, nullptr, nullptr, nullptr, false, 0});
    }
    return ffi::Error::Success();
  }

  size_t results() const override { return sums.size(); }
  int64_t outputs(size_t result) const override { return sums[result].b.outputs; }
  void set_output(size_t result, float* y) override { sums[result].result = y; }

  void partition(const Segment*, size_t, const ffi::ThreadPool& pool) override {
    const int64_t tile = lora_kernels().tile, rows = adapted_->place.size();
    int64_t work = 0, tiles = 0;  // work in bytes, as of a product
    for (Sum& sum : sums) {
      const int64_t rank = sum.b.inputs;
      int64_t bytes = sum.in_place ? 0 : rows * 4;
      for (const Segment& s : adapted_->segments)
        bytes += rank * bytes_of(sum.b.dtype) * ((s.end - s.begin + 7) / 8);
      sum.tiles = bytes > 0 ? (sum.b.outputs + tile - 1) / tile : 0;
      work += bytes * sum.b.outputs, tiles += sum.tiles;
    }
    threads = threads_for(work, pool);
    const int64_t each = std::max<int64_t>(1, (work / kPiece + threads - 1) / threads);
    chunks = std::min(tiles, threads > 1 ? threads * std::min<int64_t>(each, 16) : 1);
  }

  size_t row_bytes(size_t) const override { return 0; }
  void prepare(const float*, int64_t) const override {}

  void run(int64_t chunk) const override {
    int64_t tiles = 0;
    for (const Sum& sum : sums) tiles += sum.tiles;
    int64_t begin = tiles * chunk / chunks, end = tiles * (chunk + 1) / chunks;
    const int64_t tile = lora_kernels().tile;
    for (const Sum& sum : sums) {
      const int64_t from = std::max<int64_t>(begin, 0), to = std::min(end, sum.tiles);
      if (from < to) add(sum, from * tile, std::min(to * tile, sum.b.outputs));
      begin -= sum.tiles, end -= sum.tiles;
    }
  }

 private:
  static constexpr int64_t kPiece = 64 << 10;  // bytes of weights that make a chunk worthwhile

  // Outputs begin .. end - 1 of all rows.
  void add(const Sum& sum, int64_t begin, int64_t end) const {
    const int64_t outputs = sum.b.outputs, rows = adapted_->place.size();
    for (int64_t row = 0; !sum.in_place && row < rows; ++row)
      if (adapted_->place[row] < 0)
        std::memcpy(sum.result + row * outputs + begin, sum.y + row * outputs + begin,
                    4 * (end - begin));
    static thread_local std::vector<float> scaled;
    for (const Segment& segment : adapted_->segments) {
      const int64_t count = segment.end - segment.begin, rank = sum.b.inputs;
      const int64_t* at = adapted_->row.data() + segment.begin;
      const float* inner = sum.inner + segment.begin * rank;
      scaled.resize(count * rank);
      for (int64_t i = 0; i < count; ++i)
        for (int64_t r = 0; r < rank; ++r)
          scaled[i * rank + r] = inner[i * rank + r] * adapted_->scales[at[i]];
      if (sum.factors) {
        const float* of_a = sum.factors + segment.index * 2 * rank;
        for (int64_t i = 0; i < count; ++i)
          for (int64_t r = 0; r < rank; ++r) scaled[i * rank + r] *= of_a[r] * of_a[rank + r];
      }
      const auto matrix = [&sum](int64_t slot) {
        return static_cast<const char*>(sum.b.data) +
               slot * sum.b.stack_stride * bytes_of(sum.b.dtype);
      };
      DenseMatrix b = sum.b;
      b.data = matrix(segment.index);
      const bool last = &segment == &adapted_->segments.back();
      const void* next = last ? nullptr : matrix((&segment + 1)->index);
      lora_kernels().add(b, next, scaled.data(), at, count, begin, end, sum.y, sum.result);
    }
  }

  const LoraRows* adapted_ = nullptr;
};

}  // namespace
}  // namespace jinfer
