// Matmul driver for plain matrices: reads operands and partitions the work for threads.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "common/buffer_checks.h"
#include "common/matmul_work.h"
#include "common/operands.h"
#include "dense/dense.h"

namespace jinfer {
namespace {

namespace ffi = xla::ffi;

// Options shared by a product's matrices; see matmul_call.py.
struct DenseOptions {
  int64_t activation;
  bool stacked;          // weights are stacks
  bool transposed;       // [inputs, outputs]
  int64_t first, taken;  // rows of each matrix to use; taken = 0: all
  bool rounded;          // activations may be rounded to the weights' type where that is faster
};

// Rows times plain matrices; with an activation, gate and up give one result (GLU).
class DenseWork : public MatmulWork {
 public:
  // Forms of a row: plain, packed for GEMM, packed for tiles of bfloat16.
  enum RowForm { kPlain, kPacked, kTiles, kForms };

  // Reads `count` matrices; one of E4M3 is followed by its scales.
  ffi::Error read(Operands& operands, size_t count, int64_t inputs, const DenseOptions& options) {
    weights_.clear(), parts_.clear(), units_ = 0, inputs_ = inputs;
    transposed_ = options.transposed, gated_ = options.activation != 0;
    activation_ = static_cast<Activation>(options.activation);
    if (options.activation < 0 || options.activation > static_cast<int64_t>(Activation::relu))
      return refuse("no such activation");
    for (size_t i = 0; i < count; ++i) {
      const auto array = operands.next();
      if (array.has_error()) return array.error();
      auto error = add(*array, options);
      if (error.success() && weights_.back().dtype == DType::e4m3)
        error = read_scales(operands, options);
      if (error.failure()) return error;
    }
    if (gated_ && (count != 2 || weights_[0].outputs != weights_[1].outputs))
      return refuse("gate and up are not two weights of one shape");
    y_.resize(results());
    rows.assign(kForms, nullptr);
    return ffi::Error::Success();
  }

  size_t results() const override { return gated_ ? 1 : weights_.size(); }
  int64_t outputs(size_t result) const override { return weights_[result].outputs; }
  void set_output(size_t result, float* y) override { y_[result] = y; }

  void partition(const Segment* segments, size_t count, const ffi::ThreadPool& pool) override {
    const DenseKernels& k = dense_kernels();
    int64_t work = 0;  // in bytes: some 8 rows take as long as reading the weights
    for (const Segment* s = segments; s < segments + count; ++s)
      for (size_t t = 0; t < results(); ++t)
        work += weights_[t].outputs * inputs_ * bytes_of(weights_[t].dtype) * (gated_ ? 2 : 1) *
                ((s->end - s->begin + 7) / 8);
    threads = threads_for(work, pool);
    rows_ = 0;
    for (const Segment* s = segments; s < segments + count; ++s) rows_ = std::max(rows_, s->end);
    std::fill(needed_, needed_ + kForms, false);
    for (const Segment* s = segments; s < segments + count; ++s)
      for (size_t t = 0; t < results(); ++t) add_part(k, t, *s);
    chunks = std::min<int64_t>(units_, 1);
    if (threads > 1) {
      // Equally many per thread, for load balance.
      const int64_t each = std::max<int64_t>(1, (work / kPiece + threads - 1) / threads);
      chunks = std::min(units_, threads * (needed_[kPacked] ? each : std::min<int64_t>(each, 16)));
    }
  }

  size_t row_bytes(size_t form) const override { return needed_[form] ? 4 * row_size(form) : 0; }

  void prepare(const float* x, int64_t row) const override {
    float* plain = rows_of(kPlain, row);
    if (needed_[kPlain] && plain != x) std::memcpy(plain, x, 4 * inputs_);
    if (needed_[kPacked]) dense_kernels().pack(x, inputs_, rows_of(kPacked, row));
    if (needed_[kTiles] && row < rows_)
      dense_bf16_tiles()->pack(x, inputs_, row, rows_, rows_of(kTiles, 0));
  }

  void run(int64_t chunk) const override {
    const int64_t begin = units_ * chunk / chunks, end = units_ * (chunk + 1) / chunks;
    for (const Part& part : parts_) {
      const int64_t from = std::max(begin, part.begin) - part.begin;
      const int64_t to = std::min(end, part.begin + part.units) - part.begin;
      if (part.gemv && from < to) run_tiles(part, 0, from, to);
      for (int64_t unit = from; !part.gemv && unit < to; ++unit) {
        const int64_t tile = unit / part.blocks;
        run_tiles(part, unit % part.blocks, tile, tile + 1);
      }
    }
  }

  DType dtype(size_t weight) const { return weights_[weight].dtype; }

  // Number of matrices of the shortest stack.
  int64_t count() const { return count_; }

 private:
  static constexpr int64_t kMostRows = 256;  // of a block, so that its results stay in a cache
  static constexpr int64_t kLeastRows = 32;  // with fewer, packing a panel takes too large a share
  static constexpr int64_t kPiece = 64 << 10;  // bytes of weights that make a chunk worthwhile

  // Work on one result for one segment: tiles of outputs, each with some blocks of rows.
  struct Part {
    size_t result;
    Segment segment;
    bool gemv;
    int64_t tile, blocks;
    int64_t begin, units;  // begin: among the units of all parts, block by block, tile by tile
  };

  ffi::Error add(const Operand& array, const DenseOptions& options) {
    const auto shape = array.dimensions();
    const size_t lead = options.stacked ? 1 : 0;
    if (shape.size() != lead + 2) return refuse("a weight's shape does not fit");
    const int64_t columns = shape[lead + 1], taken = options.taken ? options.taken : shape[lead];
    if (options.first < 0 || taken < 0 || options.first > shape[lead] - taken)
      return refuse("a weight has not so many rows");
    if ((options.transposed ? taken : columns) != inputs_)
      return refuse("a weight's shape does not fit");
    DenseMatrix weight{nullptr,
                       DType::f32,
                       options.transposed ? columns : taken,
                       inputs_,
                       options.transposed,
                       shape[lead] * columns,
                       false};
    if (array.element_type() == ffi::F8E4M3FN && !options.transposed)
      weight.dtype = DType::e4m3;
    else if (array.element_type() == ffi::S8 && !options.transposed)
      weight.dtype = DType::i8;
    else if (!dtype_of(array.element_type(), &weight.dtype) || weight.dtype == DType::quantized)
      return refuse("a weight's type is not known");
    weight.data = static_cast<const char*>(array.untyped_data()) +
                  options.first * columns * bytes_of(weight.dtype);
    weight.tiles = options.rounded && weight.dtype == DType::bf16 && !options.transposed &&
                   dense_bf16_tiles();
    const int64_t matrices = lead ? shape[0] : 1;
    count_ = weights_.empty() ? matrices : std::min(count_, matrices);
    weights_.push_back(weight);
    return ffi::Error::Success();
  }

  // The scales of the last matrix: float32 [*stack, outputs, blocks]. A block is the power of 2 of
  // at least 32 inputs of which a row has as many, or the row.
  ffi::Error read_scales(Operands& operands, const DenseOptions& options) {
    const auto array = operands.next();
    if (array.has_error()) return array.error();
    const auto shape = array->dimensions();
    const size_t lead = options.stacked ? 1 : 0;
    DenseMatrix& weight = weights_.back();
    if (array->element_type() != ffi::F32 || shape.size() != lead + 2 ||
        shape[lead] < options.first + weight.outputs || (lead && shape[0] < count_))
      return refuse("a weight's scales do not fit it");
    const int64_t blocks = shape[lead + 1];
    int log2 = 5;
    while (log2 < 62 && (inputs_ + (int64_t{1} << log2) - 1) >> log2 > blocks) ++log2;
    if ((inputs_ + (int64_t{1} << log2) - 1) >> log2 != blocks && !(blocks == 1 && inputs_ == 0))
      return refuse("a weight's scales are not those of blocks of 32, 64, 128, ... inputs");
    weight.scales = static_cast<const float*>(array->untyped_data()) + options.first * blocks;
    weight.row_blocks = blocks, weight.block_log2 = log2;
    return ffi::Error::Success();
  }

  // The form of rows that a weight is multiplied with.
  static RowForm form(bool gemv, const DenseMatrix& weight) {
    if (weight.tiles) return kTiles;
    return gemv ? kPlain : kPacked;
  }

  void add_part(const DenseKernels& k, size_t t, const Segment& s) {
    const int64_t count = s.end - s.begin, outputs = weights_[t].outputs;
    // A panel of a narrow matrix would be mostly padding.
    const bool in_tiles = weights_[t].tiles;
    const bool gemv = transposed_ || count < k.gemm_min_rows || outputs < k.gemm_outputs ||
                      (in_tiles && !dense_bf16_tiles()->splits_rows);
    const int64_t tile = in_tiles ? dense_bf16_tiles()->outputs
                         : gemv   ? k.gemv_outputs
                                  : k.gemm_outputs;
    const int64_t tiles = (outputs + tile - 1) / tile;
    int64_t blocks = gemv ? 1 : (count + kMostRows - 1) / kMostRows;
    while (threads > 1 && !gemv && blocks * tiles < 4 * threads &&
           count / (2 * blocks) >= kLeastRows)
      blocks *= 2;
    parts_.push_back({t, s, gemv, tile, blocks, units_, tiles * blocks});
    units_ += tiles * blocks;
    needed_[form(gemv, weights_[t])] = true;
    if (gated_) needed_[form(gemv, weights_[1])] = true;
  }

  float* rows_of(RowForm form, int64_t row) const {
    return reinterpret_cast<float*>(rows[form]) + row * row_size(form);
  }

  // Scales from one matrix of a stack to the next.
  int64_t scales_stride(const DenseMatrix& weight) const {
    return weight.stack_stride / inputs_ * weight.row_blocks;
  }

  // Size of a row in floats, or in pairs of bfloat16.
  int64_t row_size(size_t form) const {
    if (form == kTiles) return dense_bf16_tiles()->packed(inputs_);
    return form == kPlain ? inputs_ : dense_kernels().packed(inputs_);
  }

  // Computes tiles from .. to - 1 of one block of rows.
  void run_tiles(const Part& part, int64_t block, int64_t from, int64_t to) const {
    const int64_t all = part.segment.end - part.segment.begin;
    const int64_t first = part.segment.begin + all * block / part.blocks;
    const int64_t count = part.segment.begin + all * (block + 1) / part.blocks - first;
    const int64_t outputs = weights_[part.result].outputs;
    const int64_t begin = from * part.tile, end = std::min(to * part.tile, outputs);
    float* y = y_[part.result] + first * outputs;
    const auto multiply = [&](size_t t, float* to, int64_t stride) {
      DenseMatrix weight = weights_[t];
      weight.data = static_cast<const char*>(weight.data) +
                    part.segment.index * weight.stack_stride * bytes_of(weight.dtype);
      if (weight.scales) weight.scales += part.segment.index * scales_stride(weight);
      if (weight.tiles)
        return dense_bf16_tiles()->multiply(weight, rows_of(kTiles, 0), rows_, first, count, begin,
                                            end, to, stride);
      const DenseKernels& k = dense_kernels();
      const float* x = rows_of(form(part.gemv, weight), first);
      (part.gemv ? k.gemv : k.gemm)(weight, x, count, begin, end, to, stride);
    };
    multiply(part.result, y, outputs);
    if (!gated_) return;
    const int64_t width = end - begin;
    static thread_local std::vector<float> up;
    if (static_cast<int64_t>(up.size()) < count * width) up.resize(count * width);
    multiply(1, up.data() - begin, width);
    for (int64_t row = 0; row < count; ++row)
      dense_kernels().glu(activation_, width, up.data() + row * width, y + row * outputs + begin);
  }

  std::vector<DenseMatrix> weights_;  // the first of each stack
  std::vector<float*> y_;
  std::vector<Part> parts_;
  int64_t inputs_ = 0, count_ = 0, units_ = 0;  // units: of all parts
  int64_t rows_ = 0;                            // up to the last row in use
  bool transposed_ = false, gated_ = false, needed_[kForms] = {};
  Activation activation_{};
};

}  // namespace
}  // namespace jinfer
