// Quantized matmul driver: reads operands and partitions the work for threads.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "common/buffer_checks.h"
#include "common/matmul_work.h"
#include "common/operands.h"
#include "linear/linear.h"
#include "xla/ffi/api/ffi.h"

namespace jinfer {
namespace {

namespace ffi = xla::ffi;

// Numbers that describe a tensor; see fields_of in matmul_call.py.
enum Field { kBits, kPerCode, kBlock, kNumbers, kZero, kSteps, kCodebook, kOutputs, kFields };

// A matrix or a stack of them, and its output [rows, outputs].
struct Tensor {
  Matrix matrix;  // the first of the stack
  int64_t count, words_step, scales_step, steps_step;
  float* y;

  Matrix at(int64_t index) const {
    Matrix m = matrix;
    m.words += index * words_step;
    m.scales = static_cast<const char*>(m.scales) + index * scales_step;
    if (m.steps) m.steps += index * steps_step;
    return m;
  }
};

// Whether there are kernels for a tensor's format.
inline bool is_supported_format(const int64_t* field, size_t codebook) {
  const int64_t bits = field[kBits], block = field[kBlock], numbers = field[kNumbers];
  if (bits == 16)
    return field[kPerCode] == 1 && block == 64 && numbers == 1 && !field[kSteps] &&
           !field[kCodebook];
  return bits >= 2 && bits <= (field[kSteps] ? 6 : 8) && field[kPerCode] == (per_code_of(bits)) &&
         (block == 32 || (field[kSteps] ? block == 16 : block == 64 || block == 128)) &&
         (numbers == 1 || numbers == 2) &&
         (!field[kCodebook] || (bits <= 4 && numbers == 1 && codebook > 0)) && field[kZero] >= 0 &&
         field[kZero] <= 128;
}

// Reads one tensor's arrays and validates them against its fields.
inline ffi::Error read_tensor(Operands& operands, const int64_t* field, size_t codebook,
                              const uint8_t* table, int64_t inputs, Tensor* out) {
  const auto words = operands.next(), scales = operands.next();
  if (words.has_error()) return words.error();
  if (scales.has_error()) return scales.error();
  const auto shape = words->dimensions();
  const size_t lead = shape.size() == 6 ? 1 : 0;
  if (shape.size() != lead + 5) return refuse("words have neither 5 nor 6 axes");
  Matrix& m = out->matrix;
  m = {};
  m.tiles = shape[lead], m.superblocks = shape[lead + 1];
  m.R = shape[lead + 3], m.G = shape[lead + 4];
  if (!is_supported_format(field, codebook)) return refuse("a format is not known");
  if (m.G != columns_of(field[kSteps]) || m.R * m.G != 16)
    return refuse("words are in a layout without kernels");
  m.words = static_cast<const uint32_t*>(words->untyped_data());
  m.scales = scales->untyped_data();
  m.bits = field[kBits];
  m.per_code = field[kPerCode];
  m.block = field[kBlock];
  m.numbers = field[kNumbers];
  m.zero = field[kCodebook] ? 128 : field[kZero];
  m.codebook = field[kCodebook] ? table : nullptr;
  m.outputs = field[kOutputs];
  m.inputs = inputs;
  out->count = lead ? shape[0] : 1;
  const auto has = [&](const Operand& array, ffi::DataType type, int64_t block) {
    const int64_t each = std::max<int64_t>(1, m.width() / block);
    const int64_t along = m.superblocks / std::max<int64_t>(1, block / m.width());
    return lead ? fits(array, type, {out->count, m.tiles, along, m.R, each, m.numbers})
                : fits(array, type, {m.tiles, along, m.R, each, m.numbers});
  };
  if (words->element_type() != ffi::DataType::U32 || shape[lead + 2] != m.bits || m.outputs < 0 ||
      m.tiles * m.R < m.outputs || m.columns() * 32 < inputs || m.superblocks % m.shared() ||
      !has(*scales, field[kSteps] ? ffi::DataType::S8 : ffi::DataType::F16, m.block)) {
    return refuse("words or scales do not fit the format");
  }
  const int64_t count = std::max<int64_t>(out->count, 1);
  out->words_step = words->element_count() / count;
  out->scales_step = scales->size_bytes() / count;
  if (field[kSteps]) {
    const auto steps = operands.next();
    if (steps.has_error()) return steps.error();
    if (!has(*steps, ffi::DataType::F16, 256)) return refuse("steps do not fit the format");
    m.steps = static_cast<const uint16_t*>(steps->untyped_data());
    out->steps_step = steps->element_count() / count;
  }
  return ffi::Error::Success();
}

inline bool same_shape(const Matrix& a, const Matrix& b) {
  return a.tiles == b.tiles && a.superblocks == b.superblocks && a.G == b.G &&
         a.outputs == b.outputs;
}

// Digits of activations; three are as exact as float32.
constexpr int kMostDigits = 3;

// `rows`: per matrix, on average. `bf16`: whether many rows may be in bfloat16.
inline ActivationLayout layout_of(const Matrix& m, int digits, bool bf16, int64_t rows) {
  using Form = ActivationForm;
  if (m.bits == 16) return {m.columns(), m.G, 0, 1, 1, Form::int16};
  const LinearKernels& k = linear_kernels();
  if (bf16 && k.bf16_min_rows && rows >= k.bf16_min_rows)
    return {m.columns(), m.G, 0, 1, 1, Form::bf16_tiles};
  const bool tiles = k.amx_min_rows && rows * digits >= k.amx_min_rows && fits_amx(m);
  return {m.columns(), m.G, m.affine() ? -1 : m.zero, m.block == 16 ? 2 : 1, digits,
          tiles ? Form::tiles : Form::records};
}

// The tiles of one tensor for one segment.
struct Part {
  size_t tensor;
  Segment segment;
  int64_t begin, tiles;  // begin: among all tiles
};

// Rows times quantized matrices; with an activation, gate and up give one result (GLU).
class LinearWork : public MatmulWork {
 public:
  std::vector<Tensor> tensors;
  std::vector<ActivationLayout> layouts;  // of rows that the tensors need

  // Reads the matrices, kFields numbers of `fields` each. `rows_each`: average rows of a segment.
  ffi::Error read(Operands& operands, const int64_t* fields, size_t count, const int64_t* codebook,
                  size_t codes, int64_t inputs, int64_t digits, int64_t activation,
                  int64_t rows_each) {
    for (size_t i = 0; i < codes && i < 16; ++i) table_[i] = codebook[i] + 128;
    const bool bf16 = digits == kBf16Prompts;
    digits_ = bf16 ? 1 : digits, gated_ = activation != 0;
    activation_ = static_cast<Activation>(activation);
    if (digits_ < 1 || digits_ > kMostDigits) return refuse("no such number of digits");
    if (activation < 0 || activation > static_cast<int64_t>(Activation::relu))
      return refuse("no such activation");
    tensors.resize(count), layout_of_.resize(count), layouts.clear(), parts_.clear(), total_ = 0;
    for (size_t t = 0; t < count; ++t) {
      auto error = read_tensor(operands, fields + t * kFields, codes, table_, inputs, &tensors[t]);
      if (error.failure()) return error;
      const ActivationLayout layout = layout_of(tensors[t].matrix, digits_, bf16, rows_each);
      const auto at = std::find(layouts.begin(), layouts.end(), layout);
      layout_of_[t] = at - layouts.begin();
      if (at == layouts.end()) layouts.push_back(layout);
    }
    rows.resize(layouts.size());
    if (gated_ && (count != 2 || !same_shape(tensors[0].matrix, tensors[1].matrix)))
      return refuse("gate and up are not two matrices of one shape");
    return ffi::Error::Success();
  }

  size_t results() const override { return gated_ ? 1 : tensors.size(); }
  int64_t outputs(size_t result) const override { return tensors[result].matrix.outputs; }
  void set_output(size_t result, float* y) override { tensors[result].y = y; }

  void partition(const Segment* segments, size_t count, const ffi::ThreadPool& pool) override {
    int64_t work = 0;  // in bytes
    bool many_rows = false;
    for (const Segment* one = segments; one < segments + count; ++one) {
      const Segment& segment = *one;
      for (size_t t = 0; t < results(); ++t) {
        const Matrix& m = tensors[t].matrix;
        const int64_t tiles = (m.outputs + m.R - 1) / m.R;
        parts_.push_back({t, segment, total_, tiles});
        total_ += tiles;
        // Some 8 rows take as long as reading the weights.
        const int64_t many = (segment.end - segment.begin) * digits_, times = (many + 7) / 8;
        many_rows |= many > 2;
        work += (gated_ ? 2 : 1) * tiles * m.R * m.columns() * 4 * m.bits * times;
      }
    }
    threads = threads_for(work, pool);
    // Chunks of 64 KiB of weights, so that a single row streams; several rows are compute-bound and
    // take half.
    const int64_t worth = many_rows ? work >> 15 : work >> 16;
    chunks = threads < 2 ? std::min<int64_t>(total_, 1)
                         : std::min({total_, threads * 8, std::max(threads, worth)});
  }

  size_t row_bytes(size_t layout) const override { return layouts[layout].row_bytes(); }

  void prepare(const float* x, int64_t row) const override {
    const int64_t inputs = tensors[0].matrix.inputs;
    for (size_t f = 0; f < layouts.size(); ++f)
      linear_kernels().prepare(x, inputs, layouts[f], rows[f] + row * layouts[f].row_bytes());
  }

  void run(int64_t chunk) const override {
    const LinearKernels& k = linear_kernels();
    const int64_t begin = total_ * chunk / chunks, end = total_ * (chunk + 1) / chunks;
    for (const Part& part : parts_) {
      const Matrix& m = tensors[part.tensor].matrix;
      const int64_t together = tiles_together(part.tensor);
      const auto whole = [&](int64_t tile) {
        const int64_t in_part = std::max<int64_t>(0, tile - part.begin);
        return std::min(part.tiles, (in_part + together - 1) / together * together);
      };
      const int64_t from = whole(begin), to = whole(end);
      if (from >= to) continue;
      float* y = tensors[part.tensor].y + part.segment.begin * m.outputs;
      multiply(k, part, part.tensor, from, to, y, m.outputs);
      if (!gated_) continue;
      const int64_t first = from * m.R, width = std::min(to * m.R, m.outputs) - first;
      const int64_t many = part.segment.end - part.segment.begin;
      static thread_local std::vector<float> up;
      if (static_cast<int64_t>(up.size()) < many * width) up.resize(many * width);
      multiply(k, part, 1, from, to, up.data() - first, width);
      for (int64_t row = 0; row < many; ++row)
        k.glu(activation_, width, up.data() + row * width, y + row * m.outputs + first);
    }
  }

 private:
  // Tiles that kernels take at a time: two, or 16 outputs.
  int64_t tiles_together(size_t t) const {
    const ActivationForm form = layouts[layout_of_[t]].form;
    const bool amx = form == ActivationForm::tiles || form == ActivationForm::bf16_tiles;
    return amx ? 16 / tensors[t].matrix.R : 2;
  }

  void multiply(const LinearKernels& k, const Part& part, size_t t, int64_t begin, int64_t end,
                float* y, int64_t stride) const {
    const ActivationLayout& layout = layouts[layout_of_[t]];
    const Activations x{layout, rows[layout_of_[t]] + part.segment.begin * layout.row_bytes()};
    const int64_t many = part.segment.end - part.segment.begin;
    k.multiply(tensors[t].at(part.segment.index), x, many, begin, end, y, stride);
  }

  uint8_t table_[16] = {};
  int digits_ = 1;
  bool gated_ = false;
  Activation activation_{};
  std::vector<size_t> layout_of_;
  std::vector<Part> parts_;
  int64_t total_ = 0;  // tiles of all parts
};

}  // namespace
}  // namespace jinfer
