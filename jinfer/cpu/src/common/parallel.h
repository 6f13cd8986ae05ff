// Work shared with XLA's thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jinfer {

namespace ffi = xla::ffi;

// Waiting for another thread: awake at first, then leaving the processor to whoever wants it. On a
// busy machine, or with fewer cores than threads, what is waited for may be what wants it: 4 threads on
// one core took 4 times as long without.
class SpinWait {
 public:
  void spin() {
    if (++times_ > 200) {
      std::this_thread::yield();
      return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

 private:
  int times_ = 0;
};

// Threads that work may be shared among: those of the pool, no more than jinfer_limit_threads() says.
int64_t most_threads(const ffi::ThreadPool& pool);

// Some work in stages, each of which begins when the one before has ended. A stage is chunks that
// are each to be done once. They are cut into runs of neighbours: who takes part begins with a run
// of its own and then helps with the others', so that what stands in memory one after the other is
// read by one thread as far as it goes. Chunks of 64 KiB from all over took a third longer.
class Job {
 public:
  using Call = void (*)(const void* work, int64_t stage, int64_t chunk);

  // `work` is alive until finish() has returned.
  Job(const int64_t* chunks, int64_t stages, int64_t runs, Call call, const void* work)
      : stages_(stages),
        runs_(runs),
        chunks_(chunks, chunks + stages),
        counters_(new Counter[stages * (runs + 1)]),
        call_(call),
        work_(work) {
    for (int64_t stage = 0; stage < stages; ++stage)
      for (int64_t i = 0; i < runs; ++i) run(stage, i).next = first(stage, i);
  }

  // Takes part, to the end of what is left to claim.
  void help() {
    const int64_t own = taken_.fetch_add(1, std::memory_order_relaxed);
    for (int64_t stage = 0; stage < stages_; ++stage) {
      if (stage > 0) wait(stage - 1);
      for (int64_t i = 0; i < runs_; ++i) {
        const int64_t which = (own + i) % runs_, end = first(stage, which + 1);
        std::atomic<int64_t>& next = run(stage, which).next;
        while (next.load(std::memory_order_relaxed) < end) {
          const int64_t chunk = next.fetch_add(1, std::memory_order_relaxed);
          if (chunk >= end) break;
          call_(work_, stage, chunk);
          done(stage).fetch_add(1, std::memory_order_release);
        }
      }
    }
  }

  // Takes part, and waits for the chunks that others have begun.
  void finish() {
    help();
    wait(stages_ - 1);
  }

 private:
  struct alignas(128) Counter {  // processors fetch lines in pairs
    std::atomic<int64_t> next{0};
  };

  int64_t first(int64_t stage, int64_t run) const { return chunks_[stage] * run / runs_; }
  Counter& run(int64_t stage, int64_t i) { return counters_[stage * (runs_ + 1) + i]; }
  std::atomic<int64_t>& done(int64_t stage) { return counters_[stage * (runs_ + 1) + runs_].next; }

  void wait(int64_t stage) {
    for (SpinWait wait; done(stage).load(std::memory_order_acquire) < chunks_[stage];) wait.spin();
  }

  const int64_t stages_, runs_;
  const std::vector<int64_t> chunks_;
  const std::unique_ptr<Counter[]> counters_;  // of each stage: the runs' next chunks, chunks done
  std::atomic<int64_t> taken_{0};
  const Call call_;
  const void* const work_;
};

// Lets up to `helpers` threads of the pool run a job: those that have just helped with another one
// and still look for more, else new ones.
void share(ffi::ThreadPool& pool, const std::shared_ptr<Job>& job, int64_t helpers);

// Calls work(stage, chunk) for all chunks of all stages, each once, a stage after the one before, on
// the caller and on up to `threads` - 1 threads of the pool. The caller claims chunks too and waits
// only for those that a thread has already begun. So calls that run at the same time never wait for
// each other's unstarted work, though all threads of the pool may be callers themselves.
template <class Work>
void run_stages(ffi::ThreadPool& pool, const std::vector<int64_t>& chunks, int64_t threads,
               const Work& work) {
  const int64_t stages = static_cast<int64_t>(chunks.size());
  if (stages == 0) return;
  const int64_t most = *std::max_element(chunks.begin(), chunks.end());
  threads = std::min({threads, most, most_threads(pool)});
  if (threads < 2) {
    for (int64_t stage = 0; stage < stages; ++stage)
      for (int64_t chunk = 0; chunk < chunks[stage]; ++chunk) work(stage, chunk);
    return;
  }
  const Job::Call call = [](const void* w, int64_t stage, int64_t chunk) {
    (*static_cast<const Work*>(w))(stage, chunk);
  };
  auto job = std::make_shared<Job>(chunks.data(), stages, threads, call, &work);
  share(pool, job, threads - 1);
  job->finish();
}

// The same with one stage: work(chunk) for chunk = 0 .. chunks - 1.
template <class Work>
void parallel_for(ffi::ThreadPool& pool, int64_t chunks, int64_t threads, const Work& work) {
  run_stages(pool, {chunks}, threads, [&](int64_t, int64_t chunk) { work(chunk); });
}

}  // namespace jinfer
