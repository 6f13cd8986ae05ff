// Attention fused with layers: queries, new keys and values are values of the program; other
// arguments of `jinfer_attention` are operands.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "attention/attention_checks.h"
#include "attention/attention_schedule.h"
#include "common/operands.h"
#include "fused/fused_program.h"

namespace jinfer {
namespace {

struct FusedAttention {
  Call call;
  AttentionWork work;
  size_t q, k, v, y;  // values; k and v equal q if unused
  int64_t stage;      // first of its stages

  // Reads the attributes; false if sizes of values (`size_of`) do not fit the heads.
  template <class SizeOf>
  bool read(ProgramReader& reader, size_t query, const SizeOf& size_of) {
    const int64_t key = reader.next(), value = reader.next();
    call = {};
    call.rules = {reader.real(), reader.real()};
    call.rules.window = reader.next(), call.rules.ahead = reader.next();
    call.rules.lowest = reader.next();
    call.written = reader.next(), call.shared = reader.next();
    KvFormat codes{int(reader.next()), int(reader.next()), int(reader.next())};
    codes.symmetric = reader.next();
    call.keys.format = call.values.format = codes;
    const int64_t dim = reader.next(), value_dim = reader.next();
    int8_keys_ = reader.next();
    const auto cut = [&](int64_t matrix, int64_t into) {
      return size_of(matrix) > 0 && size_of(matrix) % into == 0;
    };
    const bool has_k = call.written, has_v = call.written && !call.shared;
    if (reader.failed() || dim < 1 || value_dim < 1 || !cut(query, dim)) return false;
    if ((has_k && !cut(key, dim)) || (has_v && !cut(value, value_dim))) return false;
    call.keys.dim = dim, call.values.dim = value_dim;
    q = query, k = has_k ? key : query, v = has_v ? value : query;
    return true;
  }

  int64_t result_size() const { return call.heads * call.values.dim; }

  // Reads the operands, and pools from the results from number `next` on.
  template <class SizeOf>
  ffi::Error take(Operands& operands, int64_t rows, const SizeOf& size_of,
                  const ffi::RemainingRets& rets, size_t& next) {
    static constexpr int64_t kNothing[2] = {0, 0};
    const int64_t dim = call.keys.dim, value_dim = call.values.dim, heads = size_of(q) / dim;
    const std::array<int64_t, 3> q_shape{rows, heads, dim}, y_shape{rows, heads, value_dim},
        k_shape{rows, size_of(k) / dim, dim}, v_shape{rows, size_of(v) / value_dim, value_dim};
    // Pointers are set later.
    const auto computed = [](const std::array<int64_t, 3>& shape) {
      return Operand(ffi::DataType::F32, {shape.data(), shape.size()}, nullptr);
    };
    std::vector<Operand>& in = buffers_.in;
    const auto given = [&](size_t count) {
      for (; count > 0; --count) {
        const auto operand = operands.next();
        if (operand.has_error()) return operand.error();
        in.push_back(*operand);
      }
      return ffi::Error::Success();
    };
    buffers_.clear();
    in.push_back(computed(q_shape));
    if (ffi::Error error = given(6); error.failure()) return error;  // indices, sinks and slopes
    in.emplace_back(ffi::DataType::F32, Operand::Dimensions{kNothing, 2}, nullptr);
    if (call.written) in.push_back(computed(k_shape));
    if (call.written && !call.shared) in.push_back(computed(v_shape));
    const size_t each = call.keys.format.bits > 0 ? 2 : 1;
    const size_t pools = each * (call.shared ? 1 : 2) + int8_keys_;
    if (ffi::Error error = given(pools); error.failure()) return error;
    buffers_.out.push_back(computed(y_shape));
    for (size_t i = 0; call.written && i < pools; ++i) {
      const auto pool = rets.get<ffi::AnyBuffer>(next++);
      if (pool.has_error()) return pool.error();
      buffers_.out.emplace_back(**pool);
    }
    return buffers_.fill(call, false, int8_keys_);
  }

 private:
  Buffers buffers_;
  bool int8_keys_ = false;
};

}  // namespace
}  // namespace jinfer
