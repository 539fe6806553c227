// Threads of the twin. Work items own their outputs and never share a sum, so the number of threads cannot change a
// bit. Nested calls run on the calling thread: the outermost loop with enough items takes all threads.
#pragma once

#include <omp.h>

#include <algorithm>

#include <cstdint>
#include <exception>
#include <mutex>

namespace dmattn::cpu {

inline int thread_count(int wanted) { return wanted > 0 ? wanted : omp_get_max_threads(); }

template <class Work>
void parallel_for(int64_t items, int threads, Work work) {
  const int team = omp_in_parallel() ? 1 : static_cast<int>(std::min<int64_t>(thread_count(threads), items));
  if (team <= 1) {
    for (int64_t i = 0; i < items; ++i) work(i);
    return;
  }
  std::exception_ptr failure;
  std::mutex guard;
#pragma omp parallel for schedule(dynamic, 1) num_threads(team)
  for (int64_t i = 0; i < items; ++i) {
    try {
      work(i);
    } catch (...) {  // an exception may not leave an OpenMP region
      const std::lock_guard lock(guard);
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace dmattn::cpu
