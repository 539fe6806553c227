// Does ThreadSanitizer see what it should? Built twice: with PLANT_RACE it must report a data race, without it must
// stay silent on the OpenMP idioms that the library uses, which it does only with libarcher loaded.
#include <cstdio>
#include <vector>

int main() {
  std::vector<double> partial(64, 0.0);
  double total = 0;
  double extra = 0;
#pragma omp parallel num_threads(4)
  {
#pragma omp for schedule(dynamic)
    for (int i = 0; i < 64; ++i) partial[static_cast<size_t>(i)] = i;
      // The loop's barrier orders these reads after the writes above.
#pragma omp for schedule(static) reduction(+ : total)
    for (int i = 0; i < 64; ++i) total += partial[static_cast<size_t>(63 - i)];
#ifdef PLANT_RACE
    for (int i = 0; i < 1000; ++i) extra += 1;
#endif
  }
  std::printf("%g %g\n", total, extra);
  return total == 63 * 64 / 2 ? 0 : 1;
}
