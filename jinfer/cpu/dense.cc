// The handler of `jinfer_dense`: checks what XLA passes and shares the work among threads.
#include "dense.h"

#include <algorithm>
#include <string>
#include <vector>

#include "buffers.h"
#include "isa.h"
#include "select.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jinfer {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t MOST_ROWS = 256;  // of a piece, so that what it writes stays in a cache
constexpr int64_t LEAST_ROWS = 32;  // below, making a panel takes too large a share
constexpr int64_t PIECE = 64 << 10;  // bytes of weights that are worth claiming a piece for
constexpr int64_t INLINE = 96 << 10;  // bytes of weights that are not worth waking a thread for
constexpr int64_t WORTH_THREAD = 32 << 10;  // of each of more threads

const DenseKernels& kernels() { return JINFER_PICK(dense); }

ffi::Error invalid(const std::string& what) {
  return ffi::Error::InvalidArgument("jinfer_dense: " + what);
}

// The weight, or gate and up, of a result.
struct Product {
  Dense weight, up;
  float* y;
};

// What is computed of one product for one segment: tiles of outputs, each with some blocks of rows.
struct Part {
  const Product* product;
  Segment segment;
  bool few;
  int64_t tile, blocks;
  int64_t begin, units;  // begin: among those of all parts; block by block, tile by tile
};

Dense matrix_of(const Dense& stack, int64_t index) {
  Dense out = stack;
  out.data = static_cast<const char*>(stack.data) + index * stack.apart * bytes_of(stack.kind);
  return out;
}

ffi::Error dense(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs args,
                 ffi::RemainingRets rets, int64_t activation, int64_t select, bool transposed,
                 int64_t first, int64_t taken) {
  const DenseKernels& k = kernels();
  if (x.dimensions().size() != 2) return invalid("x is no matrix");
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1];
  const bool gated = activation != 0;
  size_t next = 0;
  std::vector<Segment> segments{{0, 0, rows}};
  if (select != kOnly) {
    auto chosen = args.get<ffi::Buffer<ffi::S32>>(next++);
    if (chosen.has_error()) return chosen.error();
    segments = segments_of(select, chosen->typed_data(), chosen->element_count(), rows);
  }
  std::vector<Dense> weights;
  for (; next < args.size(); ++next) {
    auto buffer = args.get<ffi::AnyBuffer>(next);
    if (buffer.has_error()) return buffer.error();
    const auto shape = buffer->dimensions();
    const size_t lead = select == kOnly ? 0 : 1;
    if (shape.size() != lead + 2) return invalid("a weight's shape does not fit");
    // Rows first .. first + taken - 1 of each matrix are what counts; all where none are named.
    const int64_t columns = shape[lead + 1], count = taken ? taken : shape[lead];
    if (first < 0 || count < 0 || first > shape[lead] - count)
      return invalid("a weight has not so many rows");
    if ((transposed ? count : columns) != inputs) return invalid("a weight's shape does not fit");
    for (const Segment& segment : segments)
      if (lead && (segment.index < 0 || segment.index >= shape[0]))
        return invalid("no such matrix in the stack");
    Dense weight{nullptr, Kind::f32, transposed ? columns : count, inputs, transposed,
                 shape[lead] * columns};
    switch (buffer->element_type()) {
      case ffi::DataType::F32: weight.kind = Kind::f32; break;
      case ffi::DataType::BF16: weight.kind = Kind::bf16; break;
      case ffi::DataType::F16: weight.kind = Kind::f16; break;
      default: return invalid("a weight's type is not known");
    }
    weight.data = static_cast<const char*>(buffer->untyped_data()) +
                  first * columns * bytes_of(weight.kind);
    weights.push_back(weight);
  }
  if (rets.size() != (gated ? 1 : weights.size())) return invalid("wrong number of results");
  if (gated && (weights.size() != 2 || weights[0].outputs != weights[1].outputs))
    return invalid("gate and up are not two weights of one shape");

  std::vector<Product> products;
  for (size_t i = 0; i < rets.size(); ++i) {
    auto y = rets.get<ffi::Buffer<ffi::F32>>(i);
    if (y.has_error()) return y.error();
    if (!has_shape(**y, {rows, weights[i].outputs})) return invalid("a result's shape does not fit");
    float* to = (*y)->typed_data();
    if (inputs == 0) std::fill(to, to + (*y)->element_count(), 0.0f);
    products.push_back({weights[i], gated ? weights[1] : weights[i], to});
  }
  if (rows == 0 || inputs == 0) return ffi::Error::Success();

  int64_t work = 0;  // in bytes: about 8 rows take as long as reading the weights does
  for (const Product& p : products)
    for (const Segment& s : segments)
      work += p.weight.outputs * inputs * bytes_of(p.weight.kind) * (gated ? 2 : 1) *
              ((s.end - s.begin + 7) / 8);
  const int64_t threads =
      work < INLINE ? 1 : std::min<int64_t>(most_threads(pool), work / WORTH_THREAD);
  std::vector<Part> parts;
  int64_t units = 0;
  bool all_few = true;
  for (const Segment& s : segments)
    for (const Product& p : products) {
      const int64_t count = s.end - s.begin;
      // A panel of a narrow matrix would be mostly empty.
      const bool few =
          transposed || count < k.many_rows || p.weight.outputs < k.many_outputs;
      const int64_t tile = few ? k.few_outputs : k.many_outputs;
      const int64_t tiles = (p.weight.outputs + tile - 1) / tile;
      int64_t blocks = few ? 1 : (count + MOST_ROWS - 1) / MOST_ROWS;
      while (threads > 1 && !few && blocks * tiles < 4 * threads &&
             count / (2 * blocks) >= LEAST_ROWS)
        blocks *= 2;
      parts.push_back({&p, s, few, tile, blocks, units, tiles * blocks});
      units += tiles * blocks;
      all_few = all_few && few;
    }
  if (units == 0) return ffi::Error::Success();
  int64_t pieces = 1;
  if (threads > 1) {
    pieces = std::min(units, std::max(threads, work / PIECE));
    if (all_few) pieces = std::min(pieces, threads * 8);
  }

  const int64_t row_size = k.arranged(inputs);
  static thread_local std::vector<float> kept;
  if (!all_few && static_cast<int64_t>(kept.size()) < rows * row_size) kept.resize(rows * row_size);
  float* arranged = kept.data();  // the name is another vector on another thread
  if (!all_few) {
    const int64_t shares = std::min<int64_t>(rows / LEAST_ROWS + 1, 4 * threads);
    parallel(pool, shares, threads, [&](int64_t share) {
      for (int64_t m = rows * share / shares; m < rows * (share + 1) / shares; ++m)
        k.arrange(x.typed_data() + m * inputs, inputs, arranged + m * row_size);
    });
  }

  // Tiles from .. to - 1 of one block of rows.
  auto run = [&](const Part& part, int64_t block, int64_t from, int64_t to) {
    const Product& p = *part.product;
    const int64_t all = part.segment.end - part.segment.begin;
    const int64_t first = part.segment.begin + all * block / part.blocks;
    const int64_t count = part.segment.begin + all * (block + 1) / part.blocks - first;
    const int64_t begin = from * part.tile, end = std::min(to * part.tile, p.weight.outputs);
    float* y = p.y + first * p.weight.outputs;
    auto multiply = [&](const Dense& stack, float* to, int64_t stride) {
      const Dense weight = matrix_of(stack, part.segment.index);
      if (part.few) {
        k.few(weight, x.typed_data() + first * inputs, count, begin, end, to, stride);
      } else {
        k.many(weight, arranged + first * row_size, count, begin, end, to, stride);
      }
    };
    multiply(p.weight, y, p.weight.outputs);
    if (!gated) return;
    const int64_t width = end - begin;
    static thread_local std::vector<float> up;
    if (static_cast<int64_t>(up.size()) < count * width) up.resize(count * width);
    multiply(p.up, up.data() - begin, width);
    for (int64_t row = 0; row < count; ++row)
      k.gate(static_cast<Activation>(activation), width, up.data() + row * width,
             y + row * p.weight.outputs + begin);
  };
  parallel(pool, pieces, threads, [&](int64_t piece) {
    const int64_t begin = units * piece / pieces, end = units * (piece + 1) / pieces;
    for (const Part& part : parts) {
      const int64_t from = std::max(begin, part.begin) - part.begin;
      const int64_t to = std::min(end, part.begin + part.units) - part.begin;
      if (part.few && from < to) run(part, 0, from, to);
      for (int64_t unit = from; !part.few && unit < to; ++unit) {
        const int64_t tile = unit / part.blocks;
        run(part, unit % part.blocks, tile, tile + 1);
      }
    }
  });
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jinfer

XLA_FFI_DEFINE_HANDLER_SYMBOL(jinfer_dense, jinfer::dense,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attr<int64_t>("activation")
                                  .Attr<int64_t>("select")
                                  .Attr<bool>("transposed")
                                  .Attr<int64_t>("first")
                                  .Attr<int64_t>("taken"));
