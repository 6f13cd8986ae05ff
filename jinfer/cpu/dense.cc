// The handler of `jinfer_dense`: checks what XLA passes and shares the work among threads.
#include "dense.h"

#include <algorithm>
#include <string>
#include <vector>

#include "isa.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace jinfer {
namespace {

namespace ffi = xla::ffi;

constexpr int64_t MOST_ROWS = 256;  // of a piece, so that what it writes stays in a cache
constexpr int64_t LEAST_ROWS = 32;  // below, making a panel takes too large a share
constexpr int64_t PIECE = 64 << 10;  // bytes of weights that are worth claiming a piece for
constexpr int64_t INLINE = 96 << 10;  // bytes of weights that are not worth waking a thread for

const DenseKernels& kernels() {
#if defined(__x86_64__)
  if (isa() == Isa::avx512) return dense_avx512();
  if (isa() == Isa::avx2) return dense_avx2();
#endif
  return dense_portable();
}

ffi::Error invalid(const std::string& what) {
  return ffi::Error::InvalidArgument("jinfer_dense: " + what);
}

// A result: of one weight, or of gate and up. Tiles of outputs are numbered through all results.
struct Product {
  Dense weight, up;
  float* y;
  int64_t begin, tiles;
};

ffi::Error dense(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::RemainingArgs args,
                 ffi::RemainingRets rets, int64_t activation, bool indexed) {
  const DenseKernels& k = kernels();
  const int64_t rows = x.dimensions()[0], inputs = x.dimensions()[1];
  const bool gated = activation != 0;
  size_t next = 0;
  int64_t index = 0;
  if (indexed) {
    auto chosen = args.get<ffi::Buffer<ffi::S32>>(next++);
    if (chosen.has_error()) return chosen.error();
    index = chosen->typed_data()[0];
  }
  std::vector<Dense> weights;
  for (; next < args.size(); ++next) {
    auto buffer = args.get<ffi::AnyBuffer>(next);
    if (buffer.has_error()) return buffer.error();
    auto shape = buffer->dimensions();
    if (shape.size() != (indexed ? 3 : 2) || shape[indexed + 1] != inputs)
      return invalid("a weight's shape does not fit");
    if (indexed && (index < 0 || index >= shape[0])) return invalid("no such matrix in the stack");
    Dense weight{buffer->untyped_data(), Kind::f32, shape[indexed], inputs};
    switch (buffer->element_type()) {
      case ffi::DataType::F32: weight.kind = Kind::f32; break;
      case ffi::DataType::BF16: weight.kind = Kind::bf16; break;
      case ffi::DataType::F16: weight.kind = Kind::f16; break;
      default: return invalid("a weight's type is not known");
    }
    const int64_t matrix = weight.outputs * inputs * bytes_of(weight.kind);
    weight.data = static_cast<const char*>(weight.data) + index * matrix;
    weights.push_back(weight);
  }
  if (rets.size() != (gated ? 1 : weights.size())) return invalid("wrong number of results");
  if (gated && (weights.size() != 2 || weights[0].outputs != weights[1].outputs))
    return invalid("gate and up are not two weights of one shape");

  const bool few = rows <= FEW_ROWS;
  const int64_t tile = few ? k.few : k.many;
  std::vector<Product> products;
  int64_t tiles = 0, bytes = 0;
  for (size_t i = 0; i < rets.size(); ++i) {
    auto y = rets.get<ffi::Buffer<ffi::F32>>(i);
    if (y.has_error()) return y.error();
    const Dense& weight = weights[i];
    float* to = (*y)->typed_data();
    if (inputs == 0) std::fill(to, to + (*y)->element_count(), 0.0f);
    const int64_t count = (weight.outputs + tile - 1) / tile;
    products.push_back({weight, gated ? weights[1] : weight, to, tiles, count});
    tiles += count;
    bytes += weight.outputs * inputs * bytes_of(weight.kind) * (gated ? 2 : 1);
  }
  if (rows == 0 || inputs == 0 || tiles == 0) return ffi::Error::Success();

  // About 8 rows take as long as reading the weights does.
  const int64_t work = bytes * ((rows + 7) / 8);
  const int64_t threads = work < INLINE ? 1 : pool.num_threads();
  // Few rows: pieces of some tiles with all rows; many: of one tile with some rows.
  int64_t blocks = few ? 1 : (rows + MOST_ROWS - 1) / MOST_ROWS;
  while (threads > 1 && !few && blocks * tiles < 4 * threads && rows / (2 * blocks) >= LEAST_ROWS)
    blocks *= 2;
  int64_t pieces = tiles * blocks;
  if (few) {
    const int64_t most = threads < 2 ? 1 : std::max(threads, work / PIECE);
    pieces = std::min({pieces, threads * 8, most});
  }

  auto run = [&](const Product& p, int64_t from, int64_t to, int64_t first, int64_t count) {
    const int64_t begin = from * tile, end = std::min(to * tile, p.weight.outputs);
    const float* some = x.typed_data() + first * inputs;
    float* y = p.y + first * p.weight.outputs;
    k.multiply(p.weight, some, count, begin, end, y, p.weight.outputs);
    if (!gated) return;
    const int64_t width = end - begin;
    static thread_local std::vector<float> up;
    if (static_cast<int64_t>(up.size()) < count * width) up.resize(count * width);
    k.multiply(p.up, some, count, begin, end, up.data() - begin, width);
    for (int64_t row = 0; row < count; ++row)
      k.gate(static_cast<Activation>(activation), width, up.data() + row * width,
             y + row * p.weight.outputs + begin);
  };
  parallel(pool, pieces, threads, [&](int64_t piece) {
    const int64_t block = piece % blocks, parts = pieces / blocks;
    const int64_t begin = tiles * (piece / blocks) / parts;
    const int64_t end = tiles * (piece / blocks + 1) / parts;
    const int64_t first = rows * block / blocks, last = rows * (block + 1) / blocks;
    for (const Product& p : products) {
      const int64_t from = std::max(begin, p.begin) - p.begin;
      const int64_t to = std::min(end, p.begin + p.tiles) - p.begin;
      if (from < to) run(p, from, to, first, last - first);
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
                                  .Attr<bool>("indexed"));
