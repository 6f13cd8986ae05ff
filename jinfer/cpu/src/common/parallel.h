// Parallel loops and staged work on XLA's thread pool.
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

// Spins, then yields: on a busy machine, or with fewer cores than threads, the awaited thread may
// need this core.
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

// Threads to share work among: the pool's, at most as jinfer_limit_threads() says.
int64_t max_threads(const ffi::ThreadPool& pool);

// Work in stages, each of which begins when the one before has ended. A stage consists of chunks,
// split into runs of neighbours. A thread begins with a run of its own and then helps with others,
// so that one thread reads memory in sequence as far as possible.
class Job {
 public:
  using Call = void (*)(const void* work, int64_t stage, int64_t chunk);

  // `work` must outlive finish().
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

  // Runs chunks until none is left to claim.
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

  // Runs chunks, then waits for those that other threads have begun.
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
  const std::unique_ptr<Counter[]> counters_;  // per stage: each run's next chunk; chunks done
  std::atomic<int64_t> taken_{0};
  const Call call_;
  const void* const work_;
};

// Lets up to `helpers` threads of the pool run a job: helpers that are still awake, else new ones.
void share(ffi::ThreadPool& pool, const std::shared_ptr<Job>& job, int64_t helpers);

// Calls work(stage, chunk) once for each chunk of each stage, stage by stage, on the caller and up
// to `threads` - 1 threads of the pool. The caller claims chunks too, and waits only for chunks
// that a thread has begun. So concurrent calls never wait for each other's unstarted work, though
// all threads of the pool may be callers.
template <class Work>
void run_stages(ffi::ThreadPool& pool, const std::vector<int64_t>& chunks, int64_t threads,
                const Work& work) {
  const int64_t stages = static_cast<int64_t>(chunks.size());
  if (stages == 0) return;
  const int64_t max_chunks = *std::max_element(chunks.begin(), chunks.end());
  threads = std::min({threads, max_chunks, max_threads(pool)});
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

// The same with one stage.
template <class Work>
void parallel_for(ffi::ThreadPool& pool, int64_t chunks, int64_t threads, const Work& work) {
  run_stages(pool, {chunks}, threads, [&](int64_t, int64_t chunk) { work(chunk); });
}

}  // namespace jinfer
