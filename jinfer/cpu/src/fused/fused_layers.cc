// Handler of `jinfer_fused_layers`: norms, matmuls, RoPE, sums, attention of consecutive layers in
// one call, without gathering threads anew for each.
#include <algorithm>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "common/handler.h"
#include "fused/fused_memory.h"
#include "fused/fused_schedule.h"
#include "fused/fused_stages.h"

namespace jinfer {
namespace {

class FusedLayers {
 public:
  FusedSchedule schedule;

  ffi::Error bind_results(ffi::RemainingRets& rets, ffi::Span<const int64_t> results) {
    for (size_t i = 0; i < results.size(); ++i) {
      auto y = rets.get<ffi::Buffer<ffi::F32>>(i);
      if (y.has_error()) return y.error();
      if (results[i] < 0 || size_t(results[i]) >= schedule.values.size())
        return refuse("no such value");
      Value& value = schedule.values[results[i]];
      if (value.stage < 0 || value.y || !has_shape(**y, {schedule.rows, value.size}))
        return refuse("a result does not fit");
      value.y = (*y)->typed_data();
    }
    return ffi::Error::Success();
  }

  void run(ffi::ThreadPool& pool) {
    const Segment whole{0, 0, schedule.rows};
    int64_t threads = 1;
    for (size_t i = schedule.loras.used; i > 0; --i)
      share_memory(*schedule.loras.all[i - 1]);  // later first
    for (const ScheduledMatmul& scheduled : schedule.products) {
      scheduled.product->partition(&whole, 1, pool);
      threads = std::max(threads, scheduled.product->threads);
    }
    for (size_t i = 0; i < schedule.attentions.used; ++i)
      threads = std::max(threads, schedule.attentions.all[i]->work.threads());
    assign_memory();
    for (Value& value : schedule.values)
      if (value.stage >= 0) value.x = value.y;
    for (const ScheduledMatmul& scheduled : schedule.products)
      for (size_t t = 0; t < scheduled.product->results(); ++t)
        scheduled.product->set_output(t, schedule.values[scheduled.first + t].y);
    for (size_t i = 0; i < schedule.attentions.used; ++i) {
      FusedAttention& a = *schedule.attentions.all[i];
      a.work.bind(schedule.values[a.q].x, schedule.values[a.k].x, schedule.values[a.v].x,
                  schedule.values[a.y].y, partials_[i]);
    }
    for (size_t i = 0; i < schedule.loras.used; ++i)
      schedule.loras.all[i]->bind([this](size_t value) { return schedule.values[value].x; });
    const int64_t row_chunks = std::min(schedule.rows, 4 * threads);
    chunks_.clear();  // per stage: of attentions, matmuls, then rows
    for (int64_t s = 0; s < schedule.stage_count; ++s) {
      int64_t count = schedule.stages[s].rows.empty() ? 0 : row_chunks;
      for (const AttentionStage& of : schedule.stages[s].attentions)
        count += of.work->chunks(of.number);
      for (const MatmulWork* product : schedule.stages[s].products) count += product->chunks;
      chunks_.push_back(count);
    }
    run_stages(pool, chunks_, threads, [&](int64_t s, int64_t chunk) {
      const Stage& stage = schedule.stages[s];
      for (const AttentionStage& of : stage.attentions) {
        if (chunk < of.work->chunks(of.number)) return of.work->run(of.number, chunk);
        chunk -= of.work->chunks(of.number);
      }
      for (const MatmulWork* product : stage.products) {
        if (chunk < product->chunks) return product->run(chunk);
        chunk -= product->chunks;
      }
      const int64_t begin = schedule.rows * chunk / row_chunks,
                    end = schedule.rows * (chunk + 1) / row_chunks;
      for (int64_t row = begin; row < end; ++row)
        for (const RowOperation& operation : stage.rows) run_row(operation, schedule.values, row);
    });
  }

 private:
  // Assigns memory to values that are not results, and to rows prepared for matmuls; memory that is
  // not read any more is reused.
  void assign_memory() {
    memory_.clear(), offsets_.clear();
    for (const Value& value : schedule.values)
      if (value.stage >= 0 && !value.y && value.in < 0)
        offsets_.push_back(memory_.allocate(schedule.rows * value.size * 4,
                                            value.stage - value.early, value.until));
    for (const auto& [product, stage, first] : schedule.products)
      for (size_t form = 0; form < product->rows.size(); ++form)
        offsets_.push_back(
            memory_.allocate(schedule.rows * product->row_bytes(form), stage - 1, stage));
    for (size_t i = 0; i < schedule.attentions.used; ++i) {
      const FusedAttention& a = *schedule.attentions.all[i];
      offsets_.push_back(memory_.allocate(a.work.buffer() * 4, a.stage + 1, a.stage + 2));
    }
    char* buffer = memory_.buffer();
    const size_t* at = offsets_.data();
    for (Value& value : schedule.values)
      if (value.stage >= 0 && !value.y)
        value.y =
            value.in < 0 ? reinterpret_cast<float*>(buffer + *at++) : schedule.values[value.in].y;
    for (const ScheduledMatmul& scheduled : schedule.products)
      for (char*& rows : scheduled.product->rows) rows = buffer + *at++;
    partials_.clear();
    for (size_t i = 0; i < schedule.attentions.used; ++i)
      partials_.push_back(reinterpret_cast<float*>(buffer + *at++));
  }

  // Sums take over the memory of products that nothing else reads.
  void share_memory(FusedLora& lora) {
    for (size_t t = 0; t < lora.ys.size(); ++t) {
      Value &y = schedule.values[lora.ys[t]], &sum = schedule.values[lora.first_sum + t];
      const bool own = y.stage >= 0 && y.readers == 1 && !y.y;
      lora.sums.sums[t].in_place = own;
      if (!own) continue;
      y.y = sum.y, y.until = std::max(y.until, sum.until);
      if (!sum.y) sum.in = lora.ys[t];
    }
  }

  StageMemory memory_;
  std::vector<size_t> offsets_;   // in it, in the order of assignment
  std::vector<float*> partials_;  // of attentions
  std::vector<int64_t> chunks_;
};

// Idle objects with their memory: threads of XLA's pool take turns as the caller, and each would
// otherwise have its own.
class FusedLayersPool {
 public:
  std::unique_ptr<FusedLayers> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return std::make_unique<FusedLayers>();
    auto layers = std::move(free_.back());
    free_.pop_back();
    return layers;
  }
  void give(std::unique_ptr<FusedLayers> layers) {
    std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(layers));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<FusedLayers>> free_;
};

FusedLayersPool& layers_pool() {
  static FusedLayersPool* layers_pool =
      new FusedLayersPool;  // never destroyed: threads may outlive static objects
  return *layers_pool;
}

ffi::Error fused_layers(ffi::ThreadPool pool, ffi::RemainingArgs args, ffi::RemainingRets rets,
                        ffi::Span<const int64_t> program, ffi::Span<const int64_t> results,
                        int64_t inputs, ffi::Span<const int64_t> layout) {
  if (inputs < 1 || size_t(inputs) > args.size()) return refuse("there are no inputs");
  auto layers = layers_pool().take();
  ffi::Error error =
      layers->schedule.read(args, inputs, program, layout, rets, results.size(), pool);
  if (error.success()) error = layers->bind_results(rets, results);
  if (error.success() && layers->schedule.rows > 0) layers->run(pool);
  layers_pool().give(std::move(layers));
  return error;
}

}  // namespace
}  // namespace jinfer

JINFER_HANDLER(jinfer_fused_layers, jinfer::fused_layers, "program", "results", "inputs",
               "operands");
