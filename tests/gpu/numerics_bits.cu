// The numerics headers on a GPU against the same headers on the host and against the hardware:
//   cast       e4m3_encode against cvt.rn.satfinite.e4m3x2.f32, all 2^32 floats
//   exp2       the polynomial's bits on device and host; ex2.approx.ftz beside it: error and E4M3 codes that differ
//   rules      scales, weights, references, bias split, dot tree: device bits against host bits
//   wgmma      the tensor-core model against wgmma.m64n8k32, bit for bit
// Prints one line a check, "name compared mismatches", and ends with 1 if any counts against us.
#include <cuda_fp8.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "cpu/tile_kernels.h"
#include "numerics/bf16.h"
#include "numerics/bias.h"
#include "numerics/exp2.h"
#include "numerics/fp8.h"
#include "numerics/reduce.h"
#include "numerics/scale.h"
#include "numerics/softmax.h"

namespace dn = dmattn::numerics;

#define CHECK(call)                                                                        \
  do {                                                                                     \
    const cudaError_t status = (call);                                                     \
    if (status != cudaSuccess) {                                                           \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, cudaGetErrorString(status)); \
      std::exit(2);                                                                        \
    }                                                                                      \
  } while (0)

int failures = 0;
void report(const char* name, unsigned long long compared, unsigned long long mismatches, bool counts = true) {
  std::printf("%-44s %14llu %12llu\n", name, compared, mismatches);
  if (counts && mismatches) ++failures;
}

template <class T>
struct Buffer {  // device memory with a host copy
  std::vector<T> host;
  T* device = nullptr;
  explicit Buffer(size_t n) : host(n) { CHECK(cudaMalloc(&device, n * sizeof(T))); }
  ~Buffer() { cudaFree(device); }
  void up() { CHECK(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice)); }
  void down() { CHECK(cudaMemcpy(host.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost)); }
};

// ---- cast --------------------------------------------------------------------------------------------------------

__global__ void cast_all(unsigned long long* wrong) {
  const unsigned long long stride = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
  unsigned long long bad = 0, bad_nan = 0;
  for (unsigned long long i = blockIdx.x * static_cast<unsigned long long>(blockDim.x) + threadIdx.x; i < (1ull << 32);
       i += stride) {
    const float x = dn::bits_float(static_cast<uint32_t>(i));
    const bool same = dn::e4m3_encode(x) == static_cast<uint8_t>(__nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3));
    if (!same) (x == x ? bad : bad_nan) += 1;
  }
  atomicAdd(wrong, bad);
  atomicAdd(wrong + 1, bad_nan);
}

void check_cast() {
  Buffer<unsigned long long> wrong(2);
  wrong.up();
  cast_all<<<132 * 8, 256>>>(wrong.device);
  CHECK(cudaGetLastError());
  wrong.down();
  report("E4M3 cast against cvt, all floats", (1ull << 32) - 2 * 0x7fffffull, wrong.host[0]);
  report("E4M3 cast against cvt, NaNs", 2 * 0x7fffffull, wrong.host[1]);
}

// ---- exp2 --------------------------------------------------------------------------------------------------------

__global__ void exp2_of(const float* y, float* polynomial, float* approx, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  polynomial[i] = dn::exp2_polynomial(y[i]);
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(approx[i]) : "f"(y[i]));
}

void check_exp2() {
  constexpr int kCount = 1 << 24;
  Buffer<float> y(kCount), polynomial(kCount), approx(kCount);
  std::mt19937 random(1);
  std::uniform_real_distribution<float> argument(-126.0f, 8.0f), typical(-10.0f, 8.0f);
  unsigned long long wrong = 0, flipped = 0;
  double worst = 0;
  for (int round = 0; round < 4; ++round) {
    for (int i = 0; i < kCount; ++i) y.host[i] = round == 0 ? argument(random) : typical(random);
    y.host[0] = -126.0f, y.host[1] = -126.00001f, y.host[2] = 200.0f, y.host[3] = dn::negative_infinity();
    y.up();
    exp2_of<<<kCount / 256, 256>>>(y.device, polynomial.device, approx.device, kCount);
    CHECK(cudaGetLastError());
    polynomial.down();
    approx.down();
    for (int i = 0; i < kCount; ++i) {
      const float host = dn::exp2_polynomial(y.host[i]);
      wrong += dn::float_bits(host) != dn::float_bits(polynomial.host[i]);
      if (i < 4) continue;
      worst = std::max(worst, std::abs(static_cast<double>(approx.host[i]) / host - 1));
      flipped += round > 0 && dn::e4m3_encode(host) != dn::e4m3_encode(approx.host[i]);
    }
  }
  report("exp2 polynomial, device against host", 4ull * kCount, wrong);
  report("codes that ex2.approx flips (not a fault)", 3ull * kCount, flipped, false);
  std::printf("ex2.approx against the polynomial: largest relative difference %.2e\n", worst);
}

// ---- rules -------------------------------------------------------------------------------------------------------

constexpr int kRuleOutputs = 32;

DMATTN_HD void rules(const float* x, float* out) {  // x: 256 numbers
  int at = 0;
  const auto block = dn::block_scale(dn::absolute(x[0]));
  out[at++] = block.scale, out[at++] = block.inverse;
  const auto tile = dn::tile_scale(dn::absolute(x[1]));
  out[at++] = tile.scale, out[at++] = tile.inverse;
  const auto weight = dn::row_weight(dn::absolute(x[2]));
  out[at++] = weight.weight, out[at++] = weight.exponent;
  out[at++] = dn::group_reference(x[3]);
  out[at++] = dn::raise_reference(x[4], x[5]);
  out[at++] = dn::power_of_two(dn::group_reference(x[6]));
  out[at++] = dn::bf16_round(x[7]);
  out[at++] = dn::bias_units(x[8], dn::absolute(x[9]), dn::absolute(x[10]));
  out[at++] = dn::tree_dot([&](int i) { return x[i]; }, [&](int i) { return x[255 - i]; }, 256);
  out[at++] = dn::tree_dot([&](int i) { return x[i]; }, [&](int i) { return x[127 - i]; }, 128);
  out[at++] = dn::tree_dot([&](int i) { return x[i]; }, [&](int i) { return x[63 - i]; }, 64);
  out[at++] = static_cast<float>(dn::bias_guard_exponent(dn::absolute(x[11]), dn::absolute(x[12])));
  const float units = dn::absolute(x[13]) < dn::kBiasCapacity ? x[13] : 1.0f;
  dn::bias_split(units, out + at, 1);
  at += dn::kBiasSlots;
  out[at++] = 0.0f;
}

__global__ void rules_of(const float* x, float* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) rules(x + i * 256, out + i * kRuleOutputs);
}

void check_rules() {
  constexpr int kCount = 1 << 16;
  Buffer<float> x(kCount * 256), out(kCount * kRuleOutputs);
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> exponent(-120.0f, 100.0f);
  for (int i = 0; i < kCount; ++i)
    for (int j = 0; j < 256; ++j)
      x.host[i * 256 + j] =
          i % 2 ? normal(random) : normal(random) * std::exp2(exponent(random) * (i % 4 ? 1.0f : 0.1f));
  x.host[0] = dn::quiet_nan(), x.host[256] = 0, x.host[512] = dn::negative_infinity(), x.host[2] = 0;
  x.up();
  rules_of<<<kCount / 64, 64>>>(x.device, out.device, kCount);
  CHECK(cudaGetLastError());
  out.down();
  unsigned long long wrong = 0;
  for (int i = 0; i < kCount; ++i) {
    float expected[kRuleOutputs];
    rules(x.host.data() + i * 256, expected);
    for (int j = 0; j < kRuleOutputs; ++j) {
      const float got = out.host[i * kRuleOutputs + j];
      const bool both_nan = got != got && expected[j] != expected[j];
      if (!both_nan && dn::float_bits(got) != dn::float_bits(expected[j])) {
        if (wrong < 5) std::printf("  rule %d of input %d: device %a, host %a\n", j, i, got, expected[j]);
        ++wrong;
      }
    }
  }
  report("scales, weights, bias, dots: device/host", 1ull * kCount * kRuleOutputs, wrong);
}

// ---- wgmma -------------------------------------------------------------------------------------------------------
// One warpgroup computes D[64][8] (+)= A[64][32 S] B[8][32 S]^T, S steps. No swizzle: core matrices of 8 rows x 16
// bytes; the two of a step's k lie 128 bytes apart, those of the next 8 rows 256 bytes.

constexpr int kSteps = 4, kDepth = 32 * kSteps;

__device__ uint64_t descriptor(const void* shared) {
  const auto address = static_cast<uint64_t>(__cvta_generic_to_shared(shared));
  constexpr uint64_t kLeading = 128, kStride = 256;
  return ((address & 0x3ffff) >> 4) | (kLeading >> 4) << 16 | (kStride >> 4) << 32;
}

__global__ void __launch_bounds__(128) tensor_core(const uint8_t* a, const uint8_t* b, const float* start, float* d) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __shared__ __align__(128) uint8_t left[64 * 32], right[8 * 32];
  a += blockIdx.x * 64ull * kDepth;
  b += blockIdx.x * 8ull * kDepth;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, column = lane % 4 * 2;
  const unsigned long long base = blockIdx.x * 64ull * 8;
  float sum[4];
  for (int i = 0; i < 4; ++i) sum[i] = start[base + (row + i / 2 * 8) * 8 + column + i % 2];
  for (int step = 0; step < kSteps; ++step) {
    for (int i = threadIdx.x; i < 72 * 32; i += 128) {
      const int r = i / 32 % 64, k = i % 32;
      const int place = r / 8 * 256 + k / 16 * 128 + r % 8 * 16 + k % 16;
      if (i < 64 * 32) {
        left[place] = a[r * kDepth + step * 32 + k];
      } else {
        right[place] = b[r * kDepth + step * 32 + k];
      }
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, 1, 1, 1;\n"
        "wgmma.commit_group.sync.aligned;\n"
        "wgmma.wait_group.sync.aligned 0;\n"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "l"(descriptor(left)), "l"(descriptor(right))
        : "memory");
    __syncthreads();
  }
  for (int i = 0; i < 4; ++i) d[base + (row + i / 2 * 8) * 8 + column + i % 2] = sum[i];
#endif
}

void check_tensor_core() {
  constexpr int kBlocks = 8192;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const auto& kernels = dmattn::cpu::tile_kernels();
  for (int kind = 0; kind < 5; ++kind) {
    Buffer<uint8_t> a(kBlocks * 64ull * kDepth), b(kBlocks * 8ull * kDepth);
    Buffer<float> start(kBlocks * 64ull * 8), d(kBlocks * 64ull * 8);
    const auto draw = [&]() -> uint8_t {
      switch (kind) {
        case 0: return dn::e4m3_encode(normal(random) * std::exp2(3 * normal(random)));
        case 1: return dn::e4m3_encode(normal(random) * 100);
        case 2: return dn::e4m3_encode(std::abs(normal(random)) * 200);
        case 3: return random() % 10 ? 0 : dn::e4m3_encode(normal(random) * 0.02f);
        default: {  // every code alike
          const auto code = static_cast<uint8_t>(random());
          return (code & 0x7f) == 0x7f ? 0 : code;
        }
      }
    };
    for (auto* x : {&a, &b})
      for (uint8_t& code : x->host) code = draw();
    for (float& value : start.host) value = kind % 2 ? 0.0f : std::trunc(normal(random) * 4096);
    a.up(), b.up(), start.up();
    tensor_core<<<kBlocks, 128>>>(a.device, b.device, start.device, d.device);
    CHECK(cudaGetLastError());
    d.down();
    unsigned long long wrong = 0;
    std::vector<float> left(64 * kDepth), right(kDepth * 16, 0.0f), c(64 * 16);
    for (int block = 0; block < kBlocks; ++block) {
      for (int i = 0; i < 64 * kDepth; ++i) left[i] = dn::e4m3_decode(a.host[block * 64ull * kDepth + i]);
      for (int j = 0; j < 8; ++j)
        for (int k = 0; k < kDepth; ++k) right[k * 16 + j] = dn::e4m3_decode(b.host[(block * 8ull + j) * kDepth + k]);
      for (int i = 0; i < 64; ++i)
        for (int j = 0; j < 8; ++j) c[i * 16 + j] = start.host[(block * 64ull + i) * 8 + j];
      kernels.product_tensor_core(64, 16, kDepth, left.data(), kDepth, right.data(), 16, c.data(), 16, true);
      for (int i = 0; i < 64; ++i)
        for (int j = 0; j < 8; ++j)
          wrong += dn::float_bits(c[i * 16 + j]) != dn::float_bits(d.host[(block * 64ull + i) * 8 + j]);
    }
    const char* names[] = {"wgmma against the model, wide codes", "wgmma against the model, narrow codes",
                           "wgmma against the model, one-signed", "wgmma against the model, sparse subnormals",
                           "wgmma against the model, all codes"};
    report(names[kind], kBlocks * 64ull * 8, wrong);
  }
}

int main() {
  cudaDeviceProp properties;
  CHECK(cudaGetDeviceProperties(&properties, 0));
  std::printf("%s, sm_%d%d\n%-44s %14s %12s\n", properties.name, properties.major, properties.minor, "check",
              "compared", "mismatches");
  check_cast();
  check_exp2();
  check_rules();
  check_tensor_core();
  std::printf("%s\n", failures ? "FAILED" : "all bits agree");
  return failures != 0;
}
