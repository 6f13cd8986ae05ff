// Attention: validates types and shapes of the buffers against each other and the attributes.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "attention/attention_int8_cache.h"
#include "attention/attention_slots.h"
#include "common/buffer_checks.h"
#include "common/operands.h"
#include "xla/ffi/api/ffi.h"

namespace jinfer {
namespace {

namespace ffi = xla::ffi;

// Whether jinfer/quant_format.py has this format.
inline bool is_supported(const KvFormat& c) {
  for (const CodeWidth& w : kWidths)
    if (c.bits == w.bits && c.levels == w.levels && c.per_code == w.per_code) return c.bits <= 8;
  return false;
}

struct Buffers {
  std::vector<Operand> in, out;
  std::string error;

  void clear() { in.clear(), out.clear(), error.clear(); }

  ffi::Error take(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets) {
    for (size_t i = 0; i < args.size(); ++i) {
      auto buffer = args.get<ffi::AnyBuffer>(i);
      if (!buffer) return buffer.error();
      in.emplace_back(*buffer);
    }
    for (size_t i = 0; i < rets.size(); ++i) {
      auto buffer = rets.get<ffi::AnyBuffer>(i);
      if (!buffer) return buffer.error();
      out.emplace_back(**buffer);
    }
    return ffi::Error::Success();
  }

  // A buffer's data if it has this type and shape; otherwise records the error.
  template <class T = void>
  T* data(const char* name, const Operand& buffer, ffi::DataType type,
          std::initializer_list<int64_t> shape) {
    auto dims = buffer.dimensions();
    bool equal = buffer.element_type() == type && dims.size() == shape.size() &&
                 std::equal(shape.begin(), shape.end(), dims.begin());
    if (!equal && error.empty()) {
      error = std::string(name) + " must have another type, or the shape [";
      for (int64_t size : shape) error += (error.back() == '[' ? "" : ", ") + std::to_string(size);
      error += "]";
    }
    return static_cast<T*>(const_cast<void*>(buffer.untyped_data()));
  }

  // Fills in a call whose attributes are set.
  ffi::Error fill(Call& call, bool partial, bool int8_keys) {
    using Type = ffi::DataType;
    const bool written = call.written;
    const KvFormat& codes = call.keys.format;
    const bool coded = codes.bits > 0;
    const size_t each = coded ? 2 : 1, vectors = (call.shared ? 1 : 2) * each;
    const size_t arrays = vectors + int8_keys;
    const size_t given = 8 + (written ? (call.shared ? 1 : 2) : 0);
    const size_t results = partial ? 2 : 1;
    if (in.size() != given + arrays || out.size() != results + (written ? arrays : 0))
      return refuse("another number of arguments or results");
    if (coded && !is_supported(codes)) return refuse("no such codes");
    if (call.keys.dim < 1 || call.values.dim < 1) return refuse("vectors without numbers");
    if (call.rules.window < -1 || call.rules.ahead < -1) return refuse("a window below 0");
    auto q = in[0].dimensions(), tables = in[4].dimensions(), pool = in[given].dimensions();
    if (q.size() != 3 || tables.size() != 2 || pool.size() != 4 || in[7].dimensions().size() != 2)
      return refuse("queries, tables, pools and biases must have 3, 2, 4 and 2 axes");
    call.tokens = q[0], call.heads = q[1];
    call.width = tables[1];
    call.blocks = pool[0], call.kv_heads = pool[1], call.size = pool[2];
    if (call.heads < 1 || call.kv_heads < 1 || call.heads % call.kv_heads ||
        call.heads / call.kv_heads > MAX_TILE_ROWS)
      return refuse("query heads that key heads do not divide, or too many, or none");
    call.group = int(call.heads / call.kv_heads);
    if (call.size < 1 || (call.size % BLOCK_KEYS && call.width > 1))
      return refuse("blocks must be of " + std::to_string(BLOCK_KEYS) +
                    " tokens, or one a sequence");
    if (!dtype_of(in[0].element_type(), &call.dtype) || call.dtype == DType::quantized ||
        !dtype_of(in[given].element_type(), &call.keys.dtype) ||
        (call.keys.dtype == DType::quantized) != coded)
      return refuse("queries or a cache of this type");
    call.values.dtype = call.keys.dtype;

    const Type type = in[0].element_type();
    call.q = data("queries", in[0], type, {call.tokens, call.heads, call.keys.dim});
    call.rows = data<int32_t>("rows", in[1], Type::S32, {call.tokens});
    call.positions = data<int32_t>("positions", in[2], Type::S32, {call.tokens});
    call.last = data<int32_t>("last", in[3], Type::S32, {call.tokens});
    call.tables = data<int32_t>("tables", in[4], Type::S32, {tables[0], tables[1]});
    if (in[5].element_count())
      call.rules.sinks = data<float>("sinks", in[5], Type::F32, {call.heads});
    if (in[6].element_count())
      call.rules.slopes = data<float>("slopes", in[6], Type::F32, {call.heads});
    if (in[7].element_count()) {
      call.rules.distances = in[7].dimensions()[1];
      call.rules.by_distance =
          data<float>("biases", in[7], Type::F32, {call.heads, call.rules.distances});
    }
    if (written) {
      call.k = data("new keys", in[8], type, {call.tokens, call.kv_heads, call.keys.dim});
      if (!call.shared)
        call.v = data("new values", in[9], type, {call.tokens, call.kv_heads, call.values.dim});
    }
    auto bind_cache = [&](CachedVectors& cache, const char* name, size_t at) {
      const int64_t b = call.blocks, h = call.kv_heads, s = call.size;
      if (!coded) {
        cache.data = data(name, in[at], in[given].element_type(), {b, h, s, cache.dim});
      } else {
        cache.data = data(name, in[at], Type::U32, {b, h, s, codes.words(cache.dim)});
        cache.numbers =
            data<uint16_t>(name, in[at + 1], Type::F16, {b, h, s, codes.numbers(cache.dim)});
      }
    };
    bind_cache(call.keys, "keys", given);
    if (call.shared)
      call.values = call.keys;
    else
      bind_cache(call.values, "values", given + each);
    if (int8_keys && (coded || call.size != BLOCK_KEYS || call.keys.dim % 16))
      return refuse("int8 keys with such a cache");
    if (int8_keys)
      call.int8_keys = data<char>("int8 keys", in[given + vectors], Type::U8,
                                  {call.blocks, call.kv_heads, Int8Block::bytes(call.keys.dim)});
    call.out = data("result", out[0], partial ? Type::F32 : type,
                    {call.tokens, call.heads, call.values.dim});
    if (partial) call.sums = data<float>("sums", out[1], Type::F32, {call.tokens, call.heads, 2});
    for (size_t i = results; i < out.size(); ++i) {
      const Operand& before = in[given + i - results];
      if (out[i].untyped_data() != before.untyped_data() ||
          out[i].size_bytes() != before.size_bytes())
        return refuse("a cache that is not in place");
    }
    if (!error.empty()) return refuse(error);
    return check_rows(call, tables[0]);
  }

  static ffi::Error check_rows(const Call& call, int64_t sequences) {
    for (int64_t t = 0; t < call.tokens; ++t)
      if (call.rows[t] < -1 || call.rows[t] >= sequences)
        return refuse("token " + std::to_string(t) + " is in row " + std::to_string(call.rows[t]) +
                      " of " + std::to_string(sequences) + " tables");
    return ffi::Error::Success();
  }
};

}  // namespace
}  // namespace jinfer
