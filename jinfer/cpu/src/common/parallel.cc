// Thread pool helpers that stay awake between calls: a decoding step makes hundreds of calls a few
// microseconds apart, and waking a thread takes longer than many of them do.
#include "common/parallel.h"

#include <chrono>
#include <cstdint>
#include <mutex>

namespace jinfer {
namespace {

// How long a helper looks for more work before it returns its thread to the pool: longer than the
// serial part between two steps of several sequences. A woken thread starts late and may share the
// waker's core for milliseconds.
constexpr auto kSpinTime = std::chrono::microseconds(400);

struct HelperPool {
  std::mutex mutex;
  std::shared_ptr<Job> job;         // posted last
  std::atomic<uint64_t> posted{0};  // jobs so far
  int64_t awake = 0;                // helpers that work, look for work or are being scheduled
};

HelperPool& helper_pool() {
  static HelperPool* helper_pool =
      new HelperPool;  // never destroyed: threads may outlive static objects
  return *helper_pool;
}

// Helps with job number `seen`, then with later ones.
void help(std::shared_ptr<Job> job, uint64_t seen) {
  HelperPool& t = helper_pool();
  for (;;) {
    job->help();
    job.reset();
    const auto end = std::chrono::steady_clock::now() + kSpinTime;
    SpinWait wait;
    for (int i = 1; t.posted.load(std::memory_order_acquire) == seen; ++i) {
      if (i % 16 == 0 && std::chrono::steady_clock::now() > end) break;
      wait.spin();
    }
    std::lock_guard<std::mutex> lock(t.mutex);
    if (t.posted.load(std::memory_order_relaxed) == seen) {
      --t.awake;
      return;
    }
    seen = t.posted.load(std::memory_order_relaxed);
    job = t.job;
  }
}

std::atomic<int64_t> thread_limit{INT64_MAX};

}  // namespace

int64_t max_threads(const ffi::ThreadPool& pool) {
  return std::min<int64_t>(pool.num_threads(), thread_limit.load(std::memory_order_relaxed));
}

// At most as many helpers are awake as there are cores other than the caller's; the caller may not
// be a thread of the pool. One more helper would share a core with another spinning thread, which
// takes the system milliseconds to resolve.
void share(ffi::ThreadPool& pool, const std::shared_ptr<Job>& job, int64_t helpers) {
  HelperPool& t = helper_pool();
  uint64_t number;
  {
    std::lock_guard<std::mutex> lock(t.mutex);
    t.job = job;
    number = t.posted.fetch_add(1, std::memory_order_release) + 1;
    helpers = std::min(helpers, max_threads(pool) - 1 - t.awake);
    t.awake += std::max<int64_t>(helpers, 0);
  }
  for (; helpers > 0; --helpers) pool.Schedule([job, number] { help(job, number); });
}

}  // namespace jinfer

extern "C" __attribute__((visibility("default"))) int64_t jinfer_limit_threads(int64_t limit) {
  return jinfer::thread_limit.exchange(std::max<int64_t>(limit, 1));
}
