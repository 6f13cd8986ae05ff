// The handler of `jinfer_linear`: checks what XLA passes, prepares the activations and shares the
// work among threads.
#include "linear.h"

#include <algorithm>
#include <string>
#include <vector>

#include "buffers.h"
#include "isa.h"
#include "parallel.h"
#include "select.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jinfer {
namespace {

const Kernels& kernels() { return JINFER_PICK(linear); }

// Per tensor in the attribute `tensors`; see _describe in linear.py.
enum Field { kBits, kHalves, kBlock, kNumbers, kZero, kSteps, kCodebook, kOutputs, kFields };

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

// Bytes of weights that one thread goes through about as fast as another one is woken.
constexpr int64_t kWorthThreads = 96 << 10;
constexpr int64_t kWorthThread = 32 << 10;  // of each of more threads

ffi::Error invalid(const std::string& what) {
  return ffi::Error::InvalidArgument("jinfer_linear: " + what);
}

// Whether the fields of a tensor are those of a format there are kernels for.
bool is_format(const int64_t* field, int64_t columns, size_t codebook) {
  const int64_t bits = field[kBits], block = field[kBlock], numbers = field[kNumbers];
  const int64_t width = 32 * columns * field[kHalves];
  return bits >= 2 && bits <= 8 && field[kHalves] == (bits == 7 ? 2 : 1) &&
         (block == 16 || block == 32 || block == 64 || block == 128) && width % block == 0 &&
         (numbers == 1 || numbers == 2) && (!field[kSteps] || width % 256 == 0) &&
         (!field[kCodebook] || (bits <= 4 && numbers == 1 && codebook > 0)) &&
         field[kZero] >= 0 && field[kZero] <= 128;
}

// Reads one tensor's buffers, from number `next` on, and compares them with its fields.
ffi::Error read(const ffi::RemainingArgs& args, size_t& next, const int64_t* field,
                ffi::Span<const int64_t> codebook, const uint8_t* table, int64_t inputs,
                Tensor* out) {
  auto words = args.get<ffi::AnyBuffer>(next++);
  auto scales = args.get<ffi::AnyBuffer>(next++);
  if (words.has_error() || scales.has_error()) return invalid("words or scales are missing");
  const auto shape = words->dimensions();
  const size_t lead = shape.size() == 6 ? 1 : 0;
  if (shape.size() != lead + 5) return invalid("words have neither 5 nor 6 axes");
  Matrix& m = out->matrix;
  m = {};
  m.tiles = shape[lead], m.superblocks = shape[lead + 1];
  m.R = shape[lead + 3], m.G = shape[lead + 4];
  if (!has_kernels(m.G) || m.R * m.G != 16) return invalid("words are in a layout without kernels");
  if (!is_format(field, m.G, codebook.size())) return invalid("a format is not known");
  m.words = static_cast<const uint32_t*>(words->untyped_data());
  m.scales = scales->untyped_data();
  m.bits = field[kBits];
  m.halves = field[kHalves];
  m.block = field[kBlock];
  m.numbers = field[kNumbers];
  m.zero = field[kCodebook] ? 128 : field[kZero];
  m.codebook = field[kCodebook] ? table : nullptr;
  m.outputs = field[kOutputs];
  m.inputs = inputs;
  out->count = lead ? shape[0] : 1;
  const auto has = [&](const ffi::AnyBuffer& buffer, ffi::DataType type, int64_t block) {
    const int64_t each = 32 * m.G * m.halves / block;
    return lead ? fits(buffer, type, {out->count, m.tiles, m.superblocks, m.R, each, m.numbers})
                : fits(buffer, type, {m.tiles, m.superblocks, m.R, each, m.numbers});
  };
  if (words->element_type() != ffi::DataType::U32 || shape[lead + 2] != m.bits ||
      m.outputs < 0 || m.tiles * m.R < m.outputs || m.columns() * 32 < inputs ||
      !has(*scales, field[kSteps] ? ffi::DataType::S8 : ffi::DataType::F16, m.block)) {
    return invalid("words or scales do not fit the format");
  }
  const int64_t count = std::max<int64_t>(out->count, 1);
  out->words_step = words->element_count() / count;
  out->scales_step = scales->size_bytes() / count;
  if (field[kSteps]) {
    auto steps = args.get<ffi::AnyBuffer>(next++);
    if (steps.has_error() || !has(*steps, ffi::DataType::F16, 256))
      return invalid("steps are missing or do not fit the format");
    m.steps = static_cast<const uint16_t*>(steps->untyped_data());
    out->steps_step = steps->element_count() / count;
  }
  return ffi::Error::Success();
}

bool are_alike(const Matrix& a, const Matrix& b) {
  return a.tiles == b.tiles && a.superblocks == b.superblocks && a.G == b.G &&
         a.outputs == b.outputs;
}

// Rows of activations as some tensors want them.
struct Prepared {
  Form form;
  std::vector<char> memory;
  char* data;  // aligned
};

Form form_of(const Matrix& m, bool exact) {
  return {m.columns(), m.G, m.affine() || exact ? -1 : m.zero, m.block == 16 ? 2 : 1, exact};
}

void prepare(ffi::ThreadPool& pool, const Kernels& k, const float* x, int64_t rows, int64_t inputs,
             Prepared& p) {
  const size_t bytes = rows * p.form.row_bytes() + 64;
  if (p.memory.size() < bytes) p.memory.resize(bytes);
  p.data = p.memory.data() + (-reinterpret_cast<uintptr_t>(p.memory.data()) & 63);
  const int64_t chunks = rows >= 16 ? std::min<int64_t>(rows / 8, 16) : 1;
  parallel(pool, chunks, chunks, [&](int64_t chunk) {
    for (int64_t m = rows * chunk / chunks; m < rows * (chunk + 1) / chunks; ++m)
      k.prepare(x + m * inputs, inputs, p.form, p.data + m * p.form.row_bytes());
  });
}

// The row groups of one tensor for one segment.
struct Part {
  size_t tensor;
  Segment segment;
  int64_t begin, groups;  // begin: among all
};

ffi::Error linear(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs args,
                  ffi::RemainingRets rets, ffi::Span<const int64_t> fields,
                  ffi::Span<const int64_t> codebook, int64_t exact, int64_t activation,
                  int64_t select) {
  const Kernels& k = kernels();
  if (x.dimensions().size() != 2) return invalid("x is no matrix");
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1];
  const size_t tensor_count = fields.size() / kFields;
  const bool gated = activation != 0;
  if (rets.size() != (gated ? 1 : tensor_count)) return invalid("wrong number of results");
  size_t next = 0;
  std::vector<Segment> segments{{0, 0, rows}};
  if (select != kOnly) {
    auto chosen = args.get<ffi::Buffer<ffi::S32>>(next++);
    if (chosen.has_error()) return chosen.error();
    segments = segments_of(select, chosen->typed_data(), chosen->element_count(), rows);
  }
  uint8_t table[16] = {};
  for (size_t i = 0; i < codebook.size() && i < 16; ++i) table[i] = codebook[i] + 128;
  std::vector<Tensor> tensors(tensor_count);
  for (size_t t = 0; t < tensor_count; ++t) {
    Tensor& tensor = tensors[t];
    const int64_t* field = fields.begin() + t * kFields;
    if (auto error = read(args, next, field, codebook, table, inputs, &tensor); error.failure())
      return error;
    for (const Segment& segment : segments)
      if (segment.index < 0 || segment.index >= tensor.count)
        return invalid("no such matrix in the stack");
    if (gated && t > 0) continue;
    auto y = rets.get<ffi::Buffer<ffi::F32>>(t);
    if (y.has_error()) return y.error();
    if (!has_shape(**y, {rows, tensor.matrix.outputs})) return invalid("a result does not fit");
    tensor.y = (*y)->typed_data();
  }
  if (next != args.size()) return invalid("wrong number of buffers");
  if (gated && (tensor_count != 2 || !are_alike(tensors[0].matrix, tensors[1].matrix)))
    return invalid("gate and up are not two matrices of one shape");
  if (rows == 0) return ffi::Error::Success();

  // Activations, once for all tensors that take them in the same form.
  static thread_local std::vector<Prepared> kept;
  std::vector<size_t> form_index(tensor_count);
  size_t forms = 0;
  for (size_t t = 0; t < tensor_count; ++t) {
    const Form form = form_of(tensors[t].matrix, exact != 0);
    size_t f = 0;
    while (f < forms && !(kept[f].form == form)) ++f;
    form_index[t] = f;
    if (f < forms) continue;
    if (kept.size() == forms) kept.emplace_back();
    kept[forms].form = form;
    prepare(pool, k, x.typed_data(), rows, inputs, kept[forms++]);
  }

  // Row groups of all matrices, one after the other, in chunks.
  std::vector<Part> parts;
  int64_t total = 0, work = 0;  // in bytes
  for (const Segment& segment : segments) {
    for (size_t t = 0; t < (gated ? 1 : tensor_count); ++t) {
      const Matrix& m = tensors[t].matrix;
      const int per = group_rows(m, k.lanes);
      const int64_t groups = (m.outputs + per - 1) / per;
      parts.push_back({t, segment, total, groups});
      total += groups;
      const int64_t weight = gated ? 2 : 1;
      // About 8 rows take as long as reading the weights does.
      const int64_t times =
          exact ? segment.end - segment.begin : (segment.end - segment.begin + 7) / 8;
      work += weight * groups * per * m.columns() * 4 * m.bits * times;
    }
  }
  const int64_t threads =
      work < kWorthThreads ? 1 : std::min<int64_t>(most_threads(pool), work / kWorthThread);
  const int64_t chunks =
      threads < 2 ? 1
                  : std::min<int64_t>({total, threads * 8, std::max<int64_t>(threads, work >> 16)});

  const Prepared* prepared = kept.data();  // the name is another vector on another thread
  auto multiply = [&](const Part& part, size_t t, int64_t begin, int64_t end, float* y,
                      int64_t stride) {
    const Prepared& p = prepared[form_index[t]];
    const Activations x{p.form, p.data + part.segment.begin * p.form.row_bytes()};
    const int64_t many = part.segment.end - part.segment.begin;
    k.multiply(tensors[t].at(part.segment.index), x, many, begin, end, y, stride);
  };
  parallel(pool, chunks, threads, [&](int64_t chunk) {
    const int64_t begin = total * chunk / chunks, end = total * (chunk + 1) / chunks;
    for (const Part& part : parts) {
      const int64_t from = std::max(begin, part.begin) - part.begin;
      const int64_t to = std::min(end, part.begin + part.groups) - part.begin;
      if (from >= to) continue;
      const Matrix& m = tensors[part.tensor].matrix;
      float* y = tensors[part.tensor].y + part.segment.begin * m.outputs;
      multiply(part, part.tensor, from, to, y, m.outputs);
      if (!gated) continue;
      const int per = group_rows(m, k.lanes);
      const int64_t first = from * per, width = std::min(to * per, m.outputs) - first;
      const int64_t many = part.segment.end - part.segment.begin;
      static thread_local std::vector<float> up;
      if (static_cast<int64_t>(up.size()) < many * width) up.resize(many * width);
      multiply(part, 1, from, to, up.data() - first, width);
      for (int64_t row = 0; row < many; ++row) {
        k.gate(static_cast<Activation>(activation), width, up.data() + row * width,
               y + row * m.outputs + first);
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jinfer

XLA_FFI_DEFINE_HANDLER_SYMBOL(jinfer_linear, jinfer::linear,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<ffi::Span<const int64_t>>("tensors")
                                  .Attr<ffi::Span<const int64_t>>("codebook")
                                  .Attr<int64_t>("exact")
                                  .Attr<int64_t>("activation")
                                  .Attr<int64_t>("select"));
