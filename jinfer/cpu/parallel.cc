// Helpers that stay awake between calls: a decoding step makes hundreds of calls a few microseconds
// apart, and waking a sleeping thread takes longer than many of them do.
#include "parallel.h"

#include <chrono>
#include <cstdint>
#include <mutex>

namespace jinfer {
namespace {

// How long a helper looks for more work before its thread is the pool's again: longer than what one
// thread does alone between two products. Woken, a thread comes tens of microseconds late.
constexpr auto kPatience = std::chrono::microseconds(50);

struct Team {
  std::mutex mutex;
  std::shared_ptr<Job> job;         // the one posted last
  std::atomic<uint64_t> posted{0};  // changes with every job
  std::atomic<int64_t> looking{0};  // helpers without work
};

Team& team() {
  static Team* team = new Team;  // never destroyed: threads may outlive static objects
  return *team;
}

void help(std::shared_ptr<Job> job) {
  Team& t = team();
  while (job) {
    job->help();
    job.reset();
    uint64_t seen;
    {
      std::lock_guard<std::mutex> lock(t.mutex);
      seen = t.posted.load(std::memory_order_relaxed);
      t.looking.fetch_add(1, std::memory_order_relaxed);
    }
    const auto end = std::chrono::steady_clock::now() + kPatience;
    Wait wait;
    for (int i = 1; t.posted.load(std::memory_order_acquire) == seen; ++i) {
      if (i % 16 == 0 && std::chrono::steady_clock::now() > end) break;
      wait.once();
    }
    std::lock_guard<std::mutex> lock(t.mutex);
    t.looking.fetch_sub(1, std::memory_order_relaxed);
    if (t.posted.load(std::memory_order_relaxed) != seen) job = t.job;
  }
}

std::atomic<int64_t> limit{INT64_MAX};

}  // namespace

int64_t most_threads(const ffi::ThreadPool& pool) {
  return std::min<int64_t>(pool.num_threads(), limit.load(std::memory_order_relaxed));
}

void share(ffi::ThreadPool& pool, const std::shared_ptr<Job>& job, int64_t helpers) {
  Team& t = team();
  if (t.looking.load(std::memory_order_relaxed) > 0) {
    std::lock_guard<std::mutex> lock(t.mutex);
    if (const int64_t looking = t.looking.load(std::memory_order_relaxed); looking > 0) {
      t.job = job;
      t.posted.fetch_add(1, std::memory_order_release);
      helpers -= std::min(helpers, looking);
    }
  }
  for (; helpers > 0; --helpers) pool.Schedule([job] { help(job); });
}

}  // namespace jinfer

extern "C" __attribute__((visibility("default"))) int64_t jinfer_limit_threads(int64_t limit) {
  return jinfer::limit.exchange(std::max<int64_t>(limit, 1));
}
