// Work shared with XLA's thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace jinfer {

// Waiting for another thread: awake at first, then leaving the processor to whoever wants it. On a
// busy machine, or with fewer cores than threads, what is waited for may be what wants it: 4 threads on
// one core took 4 times as long without.
class Wait {
 public:
  void once() {
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
int64_t most_threads(const xla::ffi::ThreadPool& pool);

// Chunks 0 .. chunks - 1 of some work, each to be done once.
struct Job {
  std::atomic<int64_t> next{0}, done{0};
  int64_t chunks;
  void (*call)(const void* work, int64_t chunk);
  const void* work;  // alive as long as a chunk is unfinished

  // Claims chunks until there are no more.
  void run() {
    for (int64_t chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < chunks;) {
      call(work, chunk);
      done.fetch_add(1, std::memory_order_release);
    }
  }
};

// Lets up to `helpers` threads of the pool run a job: those that have just helped with another one
// and still look for more, else new ones.
void share(xla::ffi::ThreadPool& pool, const std::shared_ptr<Job>& job, int64_t helpers);

// Calls work(chunk) for chunk = 0 .. chunks - 1, each once, on the caller and on up to `threads` -
// 1 threads of the pool. The caller claims chunks too and at the end waits only for those that a
// thread has already begun. So calls that run at the same time never wait for each other's
// unstarted work, though all threads of the pool may be callers themselves.
template <class Work>
void parallel(xla::ffi::ThreadPool& pool, int64_t chunks, int64_t threads, const Work& work) {
  threads = std::min<int64_t>({threads, chunks, most_threads(pool)});
  if (threads < 2) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) work(chunk);
    return;
  }
  auto job = std::make_shared<Job>();
  job->chunks = chunks;
  job->call = [](const void* w, int64_t chunk) { (*static_cast<const Work*>(w))(chunk); };
  job->work = &work;
  share(pool, job, threads - 1);
  job->run();
  for (Wait wait; job->done.load(std::memory_order_acquire) < chunks;) wait.once();
}

}  // namespace jinfer
