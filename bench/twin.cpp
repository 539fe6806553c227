// Speed of the twin: products, one mode of one head, all four modes, FP64. docs/performance.md keeps the figures.
// `dmattn_bench --benchmark_filter=...`; every result names its threads.
#include <benchmark/benchmark.h>

#include "analysis/analysis.h"
#include "cpu/tile_kernels.h"
#include "heads.h"
#include "numerics/fp8.h"

namespace dmattn::test {
namespace {

// Multiply-accumulates a second of one core, in products of 64 x 64 x k as the twin makes them.
void product(benchmark::State& state, cpu::ProductFn<float> kernel) {
  const auto k = static_cast<int>(state.range(0));
  Random random(1);
  std::vector<float> a(static_cast<size_t>(64 * k)), b(a.size()), c(64 * 64);
  for (auto* x : {&a, &b})
    for (float& value : *x) value = numerics::e4m3_round(static_cast<float>(100 * random.normal()));
  for (auto _ : state) {
    kernel(64, 64, k, a.data(), k, b.data(), 64, c.data(), 64, false);
    benchmark::DoNotOptimize(c.data());
  }
  state.counters["MAC/s"] =
      benchmark::Counter(64.0 * 64 * k * static_cast<double>(state.iterations()), benchmark::Counter::kIsRate);
  state.SetLabel(cpu::tile_kernels().name);
}
void tensor_core(benchmark::State& state) { product(state, cpu::tile_kernels().product_tensor_core); }
void fp32(benchmark::State& state) { product(state, cpu::tile_kernels().product_f32); }
BENCHMARK(tensor_core)->Arg(64)->Arg(128)->Arg(256);
BENCHMARK(fp32)->Arg(64)->Arg(128)->Arg(256);

// Forward and backward of one causal head, D = 128, without diagnostics.
void head(benchmark::State& state, cpu::TwinConfig config, Mode mode) {
  config.threads = static_cast<int>(state.range(1));
  const Head input = Head(state.range(0), state.range(0), 128).gaussian(1);
  for (auto _ : state) benchmark::DoNotOptimize(run(input, config, mode, false));
  state.SetLabel(std::to_string(config.threads) + " threads");
}
void head_sizes(benchmark::internal::Benchmark* b) {
  b->Args({2048, 1})->Args({2048, 2})->Unit(benchmark::kMillisecond)->UseRealTime();
}
void hopper_stale(benchmark::State& state) { head(state, hopper(), Mode::stale); }
void hopper_matched(benchmark::State& state) { head(state, hopper(), Mode::matched); }
void hopper_onepass(benchmark::State& state) { head(state, hopper(), Mode::onepass); }
void paper_stale(benchmark::State& state) { head(state, paper(), Mode::stale); }
void paper_matched(benchmark::State& state) { head(state, paper(), Mode::matched); }
BENCHMARK(hopper_stale)->Apply(head_sizes);
BENCHMARK(hopper_matched)->Apply(head_sizes);
BENCHMARK(hopper_onepass)->Apply(head_sizes);
BENCHMARK(paper_stale)->Apply(head_sizes);
BENCHMARK(paper_matched)->Apply(head_sizes);

// What `dmattn probe` does for a head: four modes, diagnostics, FP64.
void probe_head(benchmark::State& state) {
  SweepOptions sizes;
  sizes.heads = 1;
  sizes.tokens = 2048;
  sizes.head_dim = 128;
  const Layer layer = random_layer("gaussian", 1, sizes, 1);
  RunOptions options;
  options.threads = static_cast<int>(state.range(0));
  for (auto _ : state) benchmark::DoNotOptimize(probe(layer, options));
}
BENCHMARK(probe_head)->Arg(1)->Arg(2)->Unit(benchmark::kMillisecond)->UseRealTime();

void fp64(benchmark::State& state) {
  const Head input = Head(2048, 2048, 128).gaussian(1);
  for (auto _ : state)
    benchmark::DoNotOptimize(cpu::reference_attention(input.shape, input.q.data(), input.k.data(), input.v.data(),
                                                      input.d_o.data(), static_cast<int>(state.range(0))));
}
BENCHMARK(fp64)->Arg(1)->Arg(2)->Unit(benchmark::kMillisecond)->UseRealTime();

}  // namespace
}  // namespace dmattn::test
