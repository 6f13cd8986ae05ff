// Quantized matmul kernels, over the including file's `Vector` and try_gemv(): rows of activations
// times panels that linear_unpack.h decodes.
#pragma once

#include <algorithm>
#include <type_traits>

#include "linear/linear_activations.h"
#include "linear/linear_int16.h"
#include "linear/linear_unpack.h"
#include "rowwise/glu.h"

namespace {

// Bytes of a panel: a share of L1 for few rows, beyond which stores cost more than they save, and
// of L2 for many.
constexpr int kFewRowsPanel = 16 << 10;
constexpr int kPanel = 96 << 10;
// Bytes of activations that stay in L1 while a panel's row groups pass.
constexpr int kRowsShare = 24 << 10;

// ---- products ---------------------------------------------------------------------------------

// Operands of a panel kernel: some row groups of a panel, and as many rows of activations as the
// kernel takes.
struct PanelOperands {
  Panel panel;
  int64_t groups, units;  // units: of a group, to multiply with
  int64_t all_units;      // of a group in the panel
  const char* x;          // the first row's record for the first unit
  int64_t x_stride;       // bytes to the next row's
  bool add;               // add to existing sums
  const char* ahead;      // memory to prefetch, some with each group
  int64_t fetch;          // bytes; 0: none
  float* sums;            // [groups][rows][L]
  int64_t sums_stride;    // floats to the next group's
};

// `max_value`: largest code. Vector::kGroups row groups are processed together, to reuse loaded
// activations; the last one is repeated if there are too few.
template <int g, int count, bool affine, int parts, int max_value>
void multiply_int8(const PanelOperands& o) {
  constexpr int adjacent = Vector::kGroups, steps = 8 / parts, record = (36 + 4 * parts) * g;
  constexpr bool minus = Vector::kNarrowCodes && max_value > 127 && !affine;  // their zero is 128
  const int64_t stride = o.x_stride, group_numbers = o.all_units * parts * L,
                group_codes = o.all_units * 32 * L;
  for (int64_t group = 0; group < o.groups; group += adjacent) {
    // From a group of these to the next one's.
    const bool all = group + adjacent <= o.groups;
    const int64_t codes = all ? group_codes : 0, numbers = all ? group_numbers : 0,
                  sums_stride = all ? o.sums_stride : 0;
    const uint8_t* panel_codes = o.panel.codes + group * group_codes;
    const float* scales = o.panel.scales + group * group_numbers;
    const float* bases = o.panel.bases + group * group_numbers;
    float* sums = o.sums + group * o.sums_stride;
    const char* x = o.x;
    for (int64_t at = 0; at < adjacent * o.fetch; at += 64)
      __builtin_prefetch(o.ahead + group * o.fetch + at, 0, 2);
    Vector::F total[adjacent][count];
    UNROLL
    for (int v = 0; v < adjacent; ++v) {
      UNROLL
      for (int m = 0; m < count; ++m)
        total[v][m] = o.add ? Vector::load_f(sums + v * sums_stride + m * L) : Vector::zero_f();
    }
    for (int64_t u = 0; u < o.units; ++u) {
      UNROLL
      for (int part = 0; part < parts; ++part) {
        const int sum = (36 + 4 * part) * g, first = part * steps;
        Vector::I within[adjacent][count], pairs[adjacent][count];
        UNROLL
        for (int m = 0; m < count; ++m) {
          const Vector::I from =
              affine || minus ? Vector::zero() : Vector::repeat<g>(x + m * stride + sum);
          UNROLL
          for (int v = 0; v < adjacent; ++v) within[v][m] = from;
        }
        Vector::I second[adjacent];  // breaks a single row's dependency chain
        UNROLL
        for (int v = 0; v < adjacent; ++v) second[v] = Vector::zero();
        // All rows of a step before the next step: independent sums.
        UNROLL
        for (int s = first; s < first + steps; ++s) {
          Vector::I of[adjacent];
          UNROLL
          for (int v = 0; v < adjacent; ++v)
            of[v] = Vector::load(panel_codes + v * codes + s * 4 * L);
          UNROLL
          for (int m = 0; m < count; ++m) {
            const Vector::I by = once(Vector::repeat<g>(x + m * stride + s * 4 * g));
            UNROLL
            for (int v = 0; v < adjacent; ++v) {
              Vector::I& a = count == 1 && s % 2 ? second[v] : within[v][m];
              Vector::dot<max_value, minus, steps>(a, pairs[v][m], of[v], by, s - first);
            }
          }
        }
        UNROLL
        for (int v = 0; v < adjacent; ++v) {
          if (count == 1) within[v][0] = Vector::add(within[v][0], second[v]);
          const Vector::F scale = Vector::load_f(scales + v * numbers + part * L);
          UNROLL
          for (int m = 0; m < count; ++m) {
            const Vector::F both = Vector::mul(scale, Vector::repeat_f<g>(x + m * stride + 32 * g));
            total[v][m] = Vector::fma(Vector::to_float(within[v][m]), both, total[v][m]);
            if constexpr (affine) {
              const Vector::F x_sum = Vector::repeat_f<g>(x + m * stride + sum);
              const Vector::F base = Vector::load_f(bases + v * numbers + part * L);
              total[v][m] = Vector::fma(base, x_sum, total[v][m]);
            }
          }
        }
      }
      x += record;
      panel_codes += 32 * L;
      scales += parts * L;
      bases += parts * L;
    }
    UNROLL
    for (int v = 0; v < adjacent; ++v) {
      UNROLL
      for (int m = 0; m < count; ++m) Vector::store_f(sums + v * sums_stride + m * L, total[v][m]);
    }
  }
}

using PanelKernel = void (*)(const PanelOperands&);

template <int g, int count, int max_value>
PanelKernel panel_kernel_int8(const MatmulPlan& plan) {
  constexpr int parts = kMostParts<g>;
  // Two-level codes have 6 bits at most, or a codebook and no bases.
  constexpr bool can_be_affine = g != 8 || !Vector::kNarrowCodes || max_value <= 127;
  if constexpr (can_be_affine) {
    if (plan.matrix->affine())
      return plan.parts == 2 ? multiply_int8<g, count, true, parts, max_value>
                             : multiply_int8<g, count, true, 1, max_value>;
  }
  return plan.parts == 2 ? multiply_int8<g, count, false, parts, max_value>
                         : multiply_int8<g, count, false, 1, max_value>;
}

template <int g, int count>
PanelKernel panel_kernel(const MatmulPlan& plan) {
  // A single row is rare here: one kernel for all codes up to 7 bits.
  constexpr int few = Vector::dot_class(count == 1 ? 127 : 15);
  constexpr int some = Vector::dot_class(count == 1 ? 127 : 63), all = Vector::dot_class(255);
  const int max_value = max_code(plan.matrix->bits, plan.matrix->codebook);
  return max_value <= few    ? panel_kernel_int8<g, count, few>(plan)
         : max_value <= some ? panel_kernel_int8<g, count, some>(plan)
                             : panel_kernel_int8<g, count, all>(plan);
}

// Reduces and stores the sums of each row. `o`: the kernel's operands.
template <int g, int count>
void store_outputs(const MatmulPlan& plan, const PanelOperands& o, int64_t group,
                   const Results& results) {
  const int64_t outputs = plan.matrix->outputs;
  for (int64_t i = 0; i < o.groups; i += 2) {
    const int64_t output = (group + i) * (L / g);
    for (int m = 0; m < count; ++m) {
      const float* sums = o.sums + i * o.sums_stride + m * L;
      const Vector::F a = Vector::load_f(sums);
      if (i + 1 < o.groups) {
        const Vector::F b = Vector::load_f(sums + o.sums_stride);
        store_sums<g>(a, b, results.of[m], output, outputs);
      } else {
        store_sums<g>(a, results.of[m], output, outputs);
      }
    }
  }
}

template <int g>
void multiply_groups(const MatmulPlan& plan, const Activations& x, int64_t rows, int64_t begin,
                     int64_t end, float* y, int64_t stride, Scratch& scratch) {
  const Matrix& m = *plan.matrix;
  const int64_t code_bytes = plan.units * 32 * L, number_bytes = plan.units * plan.parts * 4 * L;
  const int64_t panel_bytes = code_bytes + 2 * number_bytes;
  const int64_t buffer = rows <= 16 ? kFewRowsPanel : kPanel;
  constexpr int64_t adjacent = Vector::kGroups;
  const int64_t fit = std::max<int64_t>(buffer / panel_bytes / adjacent * adjacent, adjacent);
  const int64_t groups = std::min(fit, end - begin);
  // Some units at a time, so that their share of the rows stays in L1.
  constexpr int max_value = Vector::kPanelRows;
  const int64_t share = g * x.layout.column_bytes() * (rows < max_value ? rows : max_value);
  const int64_t pieces = rows == 1 ? 1 : (plan.units * share + kRowsShare - 1) / kRowsShare;
  const int64_t piece = (plan.units + pieces - 1) / pieces;

  char* memory = scratch.get(groups * (panel_bytes + max_value * 4 * L));
  const Panel panel{reinterpret_cast<uint8_t*>(memory),
                    reinterpret_cast<float*>(memory + groups * code_bytes),
                    reinterpret_cast<float*>(memory + groups * (code_bytes + number_bytes))};
  float* sums = reinterpret_cast<float*>(memory + groups * panel_bytes);
  const int64_t digit_bytes = x.layout.digit_bytes();
  const PanelKernel many_rows = panel_kernel<g, max_value>(plan),
                    some_rows = panel_kernel<g, max_value / 2>(plan),
                    one_row = panel_kernel<g, 1>(plan);

  // Bytes of words. Groups are contiguous if each is a tile, else nearly.
  const int64_t group_bytes = m.superblocks * m.bits * L * 4, all_groups = m.tiles * m.R * g / L;
  for (int64_t first = begin; first < end; first += groups) {
    const int64_t here = end - first < groups ? end - first : groups;
    fill(plan, first, here, panel);
    // The words of the next panel are prefetched meanwhile, some with each group.
    const int64_t products = (rows + max_value - 1) / max_value * pieces * here;
    const int64_t fetch = (here * group_bytes / products + 63) / 64 * 64;
    const char* ahead = reinterpret_cast<const char*>(m.words) + (first + here) * group_bytes;
    const char* fetched = first + here + groups <= all_groups ? ahead + here * group_bytes : ahead;
    int64_t done = 0;  // rows
    auto some = [&](auto times, PanelKernel multiply, int64_t row) {
      constexpr int count = decltype(times)::value;
      PanelOperands o;
      o.groups = here;
      o.all_units = plan.units;
      o.x_stride = digit_bytes;
      o.sums = sums;
      o.sums_stride = count * L;
      for (int64_t from = 0; from < plan.units; from += piece) {
        o.units = plan.units - from < piece ? plan.units - from : piece;
        const int64_t number = from * plan.parts * L;
        o.panel = {panel.codes + from * 32 * L, panel.scales + number, panel.bases + number};
        o.x = x.data + row * digit_bytes + from * g * x.layout.column_bytes();
        o.add = from > 0;
        o.ahead = ahead, o.fetch = ahead < fetched ? fetch : 0;
        ahead += here * fetch;
        multiply(o);
      }
      store_outputs<g, count>(plan, o, first,
                              Results(y, stride, x.layout.digits, row, count, done));
      done = row + count;
    };
    // Repeats some rows at the end: cheaper than one by one.
    for (int64_t row = 0; row < rows;) {
      const int64_t left = rows - row;
      if (left > max_value / 2 && rows >= max_value) {
        row = std::min(row, rows - max_value);
        some(std::integral_constant<int, max_value>{}, many_rows, row);
        row += max_value;
      } else if (left > 1 && rows >= max_value / 2) {
        row = std::min(row, rows - max_value / 2);
        some(std::integral_constant<int, max_value / 2>{}, some_rows, row);
        row += max_value / 2;
      } else {
        some(std::integral_constant<int, 1>{}, one_row, row);
        ++row;
      }
    }
  }
}

// Calls f(std::integral_constant<int, g>) for superblocks of g columns; see columns_of().
template <class F>
void with_columns(int columns, F f) {
  switch (columns) {
    case 2: return f(std::integral_constant<int, 2>{});
    case 8: return f(std::integral_constant<int, 8>{});
  }
}

void multiply(const Matrix& matrix, const Activations& x, int64_t rows, int64_t begin, int64_t end,
              float* y, int64_t stride) {
  static thread_local Scratch scratch;
  rows *= x.layout.digits;
  const MatmulPlan& plan = plan_of(matrix);
  const int64_t groups_of_tile = matrix.R / plan.rows;
  begin *= groups_of_tile;
  end *= groups_of_tile;
  if (x.layout.form == jinfer::ActivationForm::int16)
    return multiply_int16(plan, x, rows, begin, end, y, stride, scratch);
  if (try_gemv(plan, x, rows, begin, end, y, stride, scratch)) return;
  with_columns(matrix.G, [&](auto g) {
    multiply_groups<decltype(g)::value>(plan, x, rows, begin, end, y, stride, scratch);
  });
}

const jinfer::LinearKernels kernels{prepare, multiply, jinfer::glu, 0, 0};

}  // namespace
