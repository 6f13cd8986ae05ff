// Rounding of activations: rows of float32 to the layouts of linear.h, over the including file's
// `Vector`.
#pragma once

#include <cmath>
#include <cstring>

#include "linear/linear_int16.h"
#include "linear/linear_unpack.h"

namespace {

// Base of digits, which are -127 .. 127. Less than 255, so that quotients need no exact rounding.
constexpr float kBase = 253;

// Integer of a block's largest magnitude: three digits have 23 bits.
constexpr float max_quantized(int digits) {
  return digits == 1 ? 127 : kBase * max_quantized(digits - 1);
}

// 32 integers.
struct QuantizedColumn {
  Vector::I v[32 / L];

  // Splits off the lowest digit.
  QuantizedColumn take_digit() {
    QuantizedColumn digit;
    for (int i = 0; i < 32 / L; ++i) {
      const Vector::F all = Vector::to_float(v[i]);
      v[i] = Vector::rounded(Vector::mul(all, Vector::set_f(1 / kBase)));
      digit.v[i] = Vector::rounded(Vector::fma(Vector::to_float(v[i]), Vector::set_f(-kBase), all));
    }
    return digit;
  }
};

// A row's activations from `first` on: where they are, or `buffer`, with 0 after the last one.
template <int count>
inline const float* padded_inputs(const float* x, int64_t inputs, int64_t first,
                                  float (&buffer)[count]) {
  const int64_t left = inputs - first;
  if (left >= count) return x + first;
  std::memset(buffer, 0, sizeof buffer);
  if (left > 0) std::memcpy(buffer, x + first, left * sizeof(float));
  return buffer;
}

// Quantizes a column's activations to integers up to `limit`, with their scale. A block that is not
// finite becomes NaN; one below 1e-30 becomes 0.
QuantizedColumn quantize_column(const float* x, int64_t inputs, int64_t column, float limit,
                                float& scale) {
  alignas(64) float padded[32];
  const float* from = padded_inputs(x, inputs, column * 32, padded);
  const uint32_t bits = Vector::magnitude(from);
  float max_value;
  std::memcpy(&max_value, &bits, 4);
  const bool finite = bits < 0x7f800000u, some = finite && max_value >= 1e-30f;
  scale = finite ? (some ? max_value / limit : 0.0f) : NAN;
  QuantizedColumn whole = {};
  for (int i = 0; some && i < 32 / L; ++i)
    whole.v[i] = Vector::rounded(
        Vector::mul(Vector::load_f(from + i * L), Vector::set_f(limit / max_value)));
  return whole;
}

void prepare_int16(const float* x, int64_t inputs, const ActivationLayout& layout, char* row) {
  constexpr int g = kInt16Columns;
  for (int64_t column = 0; column < layout.columns; ++column) {
    char* to = row + column / g * g * layout.column_bytes();
    const int64_t lane = column % g;
    float scale;
    const QuantizedColumn whole = quantize_column(x, inputs, column, kInt16Limit, scale);
    alignas(64) int16_t codes[32];
    Vector::to_int16(whole.v, codes);
    for (int s = 0; s < 16; ++s) std::memcpy(to + 4 * (s * g + lane), codes + 2 * s, 4);
    std::memcpy(to + 64 * g + 4 * lane, &scale, 4);
  }
}

// Quantizes two columns at a time.
template <class V = Vector>
void prepare_pairs(const float* x, int64_t inputs, const ActivationLayout& layout, char* row) {
  if constexpr (V::kPairs) {
    const int64_t g = layout.group, record = g * layout.column_bytes();
    const int64_t digit_bytes = layout.digit_bytes();
    for (int64_t column = 0; column < layout.columns; column += 2) {
      const int64_t lane = column % g;
      alignas(64) float padded[64];
      const float* from = padded_inputs(x, inputs, column * 32, padded);
      Vector::F factors[2];
      typename V::Pair scale = V::scales_of_pair(from, max_quantized(layout.digits), factors);
      QuantizedColumn whole[2];
      for (int i = 0; i < 64 / L; ++i)
        whole[i / (32 / L)].v[i % (32 / L)] =
            Vector::rounded(Vector::mul(Vector::load_f(from + i * L), factors[i / (32 / L)]));
      for (int digit = layout.digits - 1; digit >= 0; --digit, scale = V::mul_pair(scale, kBase)) {
        const QuantizedColumn a = digit ? whole[0].take_digit() : whole[0],
                              b = digit ? whole[1].take_digit() : whole[1];
        const auto store = [&](bool in_turns, char* codes, char* scales, int64_t apart) {
          V::store_pair(a.v, b.v, scale, layout.zero, layout.parts, in_turns, codes,
                        reinterpret_cast<float*>(scales), apart);
        };
        char* of_digit = row + digit * digit_bytes;
        char* to = of_digit + column / g * record;
        if (layout.form == jinfer::ActivationForm::tiles) {
          store(false, of_digit + 32 * column, of_digit + 32 * layout.columns + 4 * column,
                layout.columns);
        } else if (g == 2) {
          store(true, to, to + 64, 2);
        } else {
          alignas(64) char codes[64];
          store(true, codes, to + 32 * g + 4 * lane, g);
          for (int s = 0; s < 8; ++s) std::memcpy(to + (s * g + lane) * 4, codes + 8 * s, 8);
        }
      }
    }
  }
}

void prepare(const float* x, int64_t inputs, const ActivationLayout& layout, char* row) {
  if (layout.form == jinfer::ActivationForm::int16) return prepare_int16(x, inputs, layout, row);
  if constexpr (Vector::kPairs) return prepare_pairs(x, inputs, layout, row);
  const int g = layout.group;
  const int64_t record = g * layout.column_bytes(), digit_bytes = layout.digit_bytes();
  for (int64_t column = 0; column < layout.columns; ++column) {
    const int64_t lane = column % g;
    float scale;
    QuantizedColumn whole = quantize_column(x, inputs, column, max_quantized(layout.digits), scale);
    for (int digit = layout.digits - 1; digit >= 0; --digit, scale *= kBase) {
      alignas(64) int8_t codes[32];
      int32_t total[2];
      Vector::to_int8(digit ? whole.take_digit().v : whole.v, codes, total);
      char* of_digit = row + digit * digit_bytes;
      char* to = of_digit + column / g * record;
      float* sums = reinterpret_cast<float*>(to + 36 * g) + lane;
      int64_t apart = g;  // from one part's sum to the next
      if (layout.form == jinfer::ActivationForm::tiles) {
        apart = layout.columns;
        std::memcpy(of_digit + 32 * column, codes, 32);
        float* scales = reinterpret_cast<float*>(of_digit + 32 * layout.columns) + column;
        *scales = scale, sums = scales + layout.columns;
      } else {
        for (int s = 0; s < 8; ++s) std::memcpy(to + (s * g + lane) * 4, codes + 4 * s, 4);
        reinterpret_cast<float*>(to + 32 * g)[lane] = scale;
      }
      if (layout.parts == 1) total[0] += total[1];
      for (int part = 0; part < layout.parts; ++part) {
        if (layout.zero >= 0) {
          const int32_t sum = -layout.zero * total[part];
          std::memcpy(sums + part * apart, &sum, 4);
        } else {
          sums[part * apart] = scale * static_cast<float>(total[part]);
        }
      }
    }
  }
}

}  // namespace
