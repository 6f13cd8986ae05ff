#include "attention/attention_schedule.h"

#include <algorithm>
#include <tuple>

#include "attention/attention_plan.h"
#include "attention/attention_slots.h"
#include "common/scratch.h"

namespace jinfer {
namespace {

constexpr int64_t kWrites = 8;  // tokens of a work item that writes

thread_local Scratch scratch;

// Whether two calls share a plan: equal shapes, and equal slots to read and write.
bool same_plan(const Call& a, const Call& b) {
  const auto places = [](const Call& c) {
    return std::make_tuple(c.rows, c.positions, c.last, c.tables, c.tokens, c.width, c.blocks,
                           c.size, c.rules.window, c.rules.ahead, c.written, c.sums != nullptr,
                           c.int8_keys != nullptr);
  };
  const auto shapes = [](const Call& c) {
    return std::make_tuple(c.heads, c.kv_heads, c.keys.dim, c.values.padded());
  };
  return places(a) == places(b) && shapes(a) == shapes(b);
}

}  // namespace

struct CachedPlan {
  Call call;  // that the plan was made for
  TilePlan plan;
  bool writes_in_tile;  // the thread that computes a tile also writes its tokens
};

PlanCache::PlanCache() = default;
PlanCache::~PlanCache() = default;

ffi::ErrorOr<const CachedPlan*> PlanCache::of(const Call& call, const ffi::ThreadPool& pool) {
  for (size_t i = 0; i < used_; ++i)
    if (same_plan(plans_[i]->call, call)) return const_cast<const CachedPlan*>(plans_[i].get());
  if (ffi::Error error = check_slots(call); error.failure()) return error;
  if (used_ == plans_.size()) plans_.push_back(std::make_unique<CachedPlan>());
  CachedPlan* cached = plans_[used_++].get();
  cached->call = call;
  cached->writes_in_tile = call.written && writes_are_disjoint(call);
  cached->plan.make(call, max_threads(pool));
  return const_cast<const CachedPlan*>(cached);
}

AttentionWork::AttentionWork(const Call& call, const CachedPlan& cached)
    : call_(call), planned_(&cached) {
  const TilePlan& plan = cached.plan;
  call_.writes_in_tile = cached.writes_in_tile;
  const int64_t cut = plan.split_tiles().size();
  if (call.written) chunks_[0] = call_.writes_in_tile ? cut : (call.tokens + kWrites - 1) / kWrites;
  chunks_[1] = plan.items + !plan.padding().empty();
  chunks_[2] = cut + plan.int8_splits().size() * call.kv_heads;
}

int64_t AttentionWork::threads() const { return planned_->plan.threads; }
int64_t AttentionWork::buffer() const { return planned_->plan.buffer; }

void AttentionWork::bind(const void* q, const void* k, const void* v, void* out, float* partial) {
  call_.q = q, call_.k = k, call_.v = v, call_.out = out, partial_ = partial;
}

void AttentionWork::write(int64_t token, int64_t head) const {
  if (call_.rows[token] >= 0)
    attention_kernels().write(call_, token, head, scratch.of(write_floats(call_)));
}

void AttentionWork::run(int64_t stage, int64_t chunk) const {
  const AttentionKernels& kernels = attention_kernels();
  const TilePlan& plan = planned_->plan;
  if (stage == 0 && call_.writes_in_tile) {
    const Tile& tile = plan.split_tiles()[chunk];
    for (int64_t t = 0; t < tile.rows / call_.group; ++t) write(tile.token + t, tile.head);
  } else if (stage == 0) {
    for (int64_t t = chunk * kWrites; t < std::min(call_.tokens, (chunk + 1) * kWrites); ++t)
      for (int64_t head = 0; head < call_.kv_heads; ++head) write(t, head);
  } else if (const int64_t int8 = chunk - int64_t(plan.split_tiles().size());
             stage == 2 && int8 >= 0) {
    const auto [row, split] = plan.int8_splits()[int8 / call_.kv_heads];
    const int64_t head = int8 % call_.kv_heads;
    kernels.write_int8(call_, row, split, head, scratch.of(split_floats(call_)));
  } else if (stage == 2) {
    const Tile& tile = plan.split_tiles()[chunk];
    kernels.merge(call_, tile, partial_ + tile.at, scratch.of(merge_floats(call_)));
  } else if (chunk == plan.items) {
    for (int64_t token : plan.padding()) clear(call_, token);
  } else if (const auto [tile, split] = plan.piece(call_, chunk); split < 0) {
    kernels.tile(call_, tile, scratch.of(tile_floats(call_)));
  } else {
    const int64_t before = split - tile.first_split();
    float* to = partial_ + tile.at + before * tile.rows * partial_floats(call_);
    const int64_t later = chunk + 1;  // a thread takes neighbours
    const TilePlan::Piece next = plan.piece(call_, later < plan.items ? later : chunk);
    kernels.split(call_, tile, split, {next.tile, std::max(next.split, 0)}, to,
                  scratch.of(split_floats(call_)));
  }
}

}  // namespace jinfer
