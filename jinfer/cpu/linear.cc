// The handler of `jinfer_linear`: checks what XLA passes, prepares the activations and shares the
// work among threads.
#include <cstdlib>
#include <string>
#include <vector>

#include "isa.h"
#include "linear.h"
#include "parallel.h"
#include "select.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace jinfer {
namespace {

const Kernels& kernels() {
  switch (isa()) {
#if defined(__x86_64__)
    case Isa::avx512:
      return avx512_kernels();
    case Isa::avx2:
      return avx2_kernels();
#endif
    default:
      return portable_kernels();
  }
}

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

struct Prepared {
  Form form;
  std::vector<char> memory;
  char* data;  // aligned
};

Form form_of(const Matrix& m, bool exact) {
  return {m.columns(), m.G, m.affine() || exact ? -1 : m.zero, m.block == 16 ? 2 : 1, exact};
}

ffi::Error invalid(const std::string& what) {
  return ffi::Error::InvalidArgument("jinfer_linear: " + what);
}

ffi::Error linear(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs args,
                  ffi::RemainingRets rets, ffi::Span<const int64_t> fields,
                  ffi::Span<const int64_t> codebook, int64_t exact, int64_t activation,
                  int64_t select) {
  const Kernels& k = kernels();
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1];
  const size_t tensor_count = fields.size() / kFields;
  const bool gated = activation != 0;
  if (rets.size() != (gated ? 1 : tensor_count)) return invalid("wrong number of results");
  if (rows == 0) return ffi::Error::Success();
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
    const int64_t* field = fields.begin() + t * kFields;
    auto words = args.get<ffi::AnyBuffer>(next++);
    auto scales = args.get<ffi::AnyBuffer>(next++);
    if (words.has_error() || scales.has_error()) return invalid("words or scales are missing");
    auto shape = words->dimensions();
    const int64_t lead = static_cast<int64_t>(shape.size()) - 5;
    if (lead < 0 || lead > 1) return invalid("words have neither 5 nor 6 axes");
    Tensor& out = tensors[t];
    out.count = lead ? shape[0] : 1;
    Matrix& m = out.matrix;
    m.words = static_cast<const uint32_t*>(words->untyped_data());
    m.scales = scales->untyped_data();
    m.steps = nullptr;
    m.bits = field[kBits];
    m.halves = field[kHalves];
    m.block = field[kBlock];
    m.numbers = field[kNumbers];
    m.zero = field[kCodebook] ? 128 : field[kZero];
    m.codebook = field[kCodebook] ? table : nullptr;
    m.tiles = shape[lead];
    m.superblocks = shape[lead + 1];
    m.R = shape[lead + 3];
    m.G = shape[lead + 4];
    m.outputs = field[kOutputs];
    m.inputs = inputs;
    if (shape[lead + 2] != m.bits || m.R * m.G != 16 || !has_kernels(m.G) ||
        m.tiles * m.R < m.outputs || m.columns() * 32 < inputs) {
      return invalid("the words' shape does not fit the format");
    }
    const int64_t size = out.count;
    out.words_step = words->element_count() / size;
    out.scales_step = scales->size_bytes() / size;
    if (field[kSteps]) {
      auto steps = args.get<ffi::AnyBuffer>(next++);
      if (steps.has_error()) return invalid("steps are missing");
      m.steps = static_cast<const uint16_t*>(steps->untyped_data());
      out.steps_step = steps->element_count() / size;
    }
    for (const Segment& segment : segments) {
      if (segment.index < 0 || segment.index >= size) return invalid("no such matrix in the stack");
    }
    if (!gated || t == 0) {
      auto y = rets.get<ffi::Buffer<ffi::F32>>(t);
      if (y.has_error()) return y.error();
      out.y = (*y)->typed_data();
    }
  }

  // Activations, once for all tensors that take them in the same form.
  static thread_local std::vector<Prepared> kept;
  std::vector<int> form_index(tensor_count);
  size_t forms = 0;
  for (size_t t = 0; t < tensor_count; ++t) {
    const Form form = form_of(tensors[t].matrix, exact != 0);
    size_t f = 0;
    while (f < forms && !(kept[f].form == form)) ++f;
    if (f == forms) {
      if (kept.size() == forms) kept.emplace_back();
      Prepared& p = kept[forms++];
      p.form = form;
      const size_t bytes = rows * form.row_bytes() + 64;
      if (p.memory.size() < bytes) p.memory.resize(bytes);
      p.data = p.memory.data() + (-reinterpret_cast<uintptr_t>(p.memory.data()) & 63);
      const int64_t chunks = rows >= 16 ? std::min<int64_t>(rows / 8, 16) : 1;
      const float* data = x.typed_data();
      parallel(pool, chunks, chunks, [&](int64_t chunk) {
        for (int64_t m = rows * chunk / chunks; m < rows * (chunk + 1) / chunks; ++m) {
          k.prepare(data + m * inputs, inputs, form, p.data + m * form.row_bytes());
        }
      });
    }
    form_index[t] = f;
  }

  // Row groups of all matrices, one after the other, in chunks.
  struct Part {
    int tensor;
    Segment segment;
    int64_t begin, groups;  // begin: among all
  };
  std::vector<Part> parts;
  int64_t total = 0, work = 0;  // in bytes
  for (const Segment& segment : segments) {
    for (size_t t = 0; t < (gated ? 1 : tensor_count); ++t) {
      const Matrix& m = tensors[t].matrix;
      const int per = group_rows(m, k.lanes);
      const int64_t groups = (m.outputs + per - 1) / per;
      parts.push_back({static_cast<int>(t), segment, total, groups});
      total += groups;
      const int64_t weight = gated ? 2 : 1;
      // About 8 rows take as long as reading the weights does.
      const int64_t times =
          exact ? segment.end - segment.begin : (segment.end - segment.begin + 7) / 8;
      work += weight * groups * per * m.columns() * 4 * m.bits * times;
    }
  }
  const int64_t threads = work < kWorthThreads ? 1 : pool.num_threads();
  const int64_t chunks =
      threads < 2 ? 1
                  : std::min<int64_t>({total, threads * 8, std::max<int64_t>(threads, work >> 16)});

  const Prepared* prepared = kept.data();  // the name is another vector on another thread
  auto multiply = [&](const Part& part, int t, int64_t begin, int64_t end, float* y,
                      int64_t stride) {
    const Prepared& p = prepared[form_index[t]];
    const Activations x{p.form, p.data + part.segment.begin * p.form.row_bytes()};
    const int64_t many = part.segment.end - part.segment.begin;
    k.multiply(tensors[t].at(part.segment.index), x, many, begin, end, y, stride);
  };
  parallel(pool, chunks, threads, [&](int64_t chunk) {
    int64_t begin = total * chunk / chunks, end = total * (chunk + 1) / chunks;
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
