// The CUDA backend's host-side plans: where dS tiles lie and their rows, how the backward is cut, what the workspace
// holds.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "core/error.h"
#include "cuda/schedule/chunks.h"
#include "cuda/schedule/divide.h"
#include "cuda/schedule/ds_tiles.h"
#include "cuda/schedule/workspace.h"
#include "cuda/tile/image.h"

namespace dmattn::cuda {
namespace {

constexpr int64_t kLengths[] = {1, 2, 63, 64, 65, 127, 128, 129, 192, 300, 513, 700};

int64_t tiles_of(int64_t rows) { return (rows + kImageRows - 1) / kImageRows; }
int64_t even(int64_t tiles) { return (tiles + 1) / 2 * 2; }

// Key tiles up to the last that some query of the tile sees, by looking at every row.
int64_t seen_by_hand(int64_t query_tile, int64_t q_rows, int64_t k_rows, bool causal) {
  int64_t seen = 0;
  for (int64_t i = query_tile * kImageRows; i < std::min(q_rows, (query_tile + 1) * kImageRows); ++i) {
    const int64_t keys = causal ? std::clamp<int64_t>(i + k_rows - q_rows + 1, 0, k_rows) : k_rows;
    seen = std::max(seen, tiles_of(keys));
  }
  return seen;
}

// Lane 4 g + t of warp w stores rows (w, 0, t, g) and (w, 1, t, g); a matrix is the rows of one t.
TEST(DsTile, HasEachRowOnceAndNoConflicts) {
  std::set<int> rows;
  for (int w = 0; w < 4; ++w)
    for (int h = 0; h < 2; ++h) {
      for (int lane = 0; lane < 32; ++lane) {
        const int row = ds_tile_row(w, h, lane % 4, lane / 4);
        EXPECT_EQ(row / 8, ds_tile_row(w, h, 0, lane / 8 * 2) / 8) << "eight lanes, one line of 128 bytes: " << lane;
        rows.insert(row);
      }
      for (int t = 0; t < 4; ++t) {
        std::set<int> columns;
        for (int g = 0; g < 8; ++g) columns.insert(ds_tile_row(w, h, t, g) % 8);
        EXPECT_EQ(columns.size(), 8u) << "rows of a matrix share banks: " << t;
      }
    }
  EXPECT_EQ(rows.size(), 256u);
  EXPECT_EQ(*rows.rbegin(), kDsTileBytes / 16 - 1);
}

// Element c of a row is of query 16 (c / 2) + 8 h + 2 t + c % 2, and transposed it is row c of the matrix.
TEST(DsTile, QueriesAreThoseOfTheTransposedElements) {
  std::set<int> queries;
  for (int h = 0; h < 2; ++h)
    for (int t = 0; t < 4; ++t)
      for (int k = 0; k < 4; ++k)
        for (int next = 0; next < 2; ++next) {
          EXPECT_EQ(ds_tile_query(h, t, 2 * k + next), 16 * k + 8 * h + 2 * t + next);
          queries.insert(ds_tile_query(h, t, 2 * k + next));
        }
  EXPECT_EQ(queries.size(), static_cast<size_t>(kImageRows));
}

TEST(CudaSchedule, VisibleTilesAgreeWithEveryRow) {
  for (const int64_t q : kLengths)
    for (const int64_t k : kLengths)
      for (const bool causal : {false, true})
        for (int64_t tile = 0; tile < tiles_of(q); ++tile)
          ASSERT_EQ(visible_tiles(tile, q, k, causal), seen_by_hand(tile, q, k, causal))
              << q << ' ' << k << ' ' << causal << ' ' << tile;
}

TEST(CudaSchedule, CausalTileBaseIsASum) {
  for (int64_t shift = -9; shift <= 9; ++shift)
    for (int64_t width = 0; width <= 9; ++width) {
      int64_t sum = 0;
      for (int64_t tile = 0; tile < 25; ++tile) {
        ASSERT_EQ(causal_tile_base(tile, shift, width), sum) << shift << ' ' << width << ' ' << tile;
        sum += std::clamp<int64_t>(tile + 1 + shift, 0, width);
      }
    }
}

TEST(CudaSchedule, CeilTilesOfAnySign) {
  for (int64_t x = -300; x <= 300; ++x) {
    const int64_t tiles = ceil_tiles(x);
    EXPECT_TRUE(tiles * 64 >= x && (tiles - 1) * 64 < x) << x;
  }
}

DsShape shape_of(bool causal, int64_t batch, int64_t q, int64_t k, int64_t kv_heads = 1, int64_t group = 1) {
  return {false, causal, batch, q, k, batch * ((q + 127) / 128), even(tiles_of(k)), kv_heads, group, 128, 132};
}

// Every visible tile of the range has a place of its own among the tiles of a head.
void expect_places(const DsShape& shape, const TileRange& range) {
  const DsIndex index = ds_index(shape.variable, shape.causal, shape.q_len, shape.k_len,
                                 static_cast<int32_t>(range.first), static_cast<int32_t>(range.end));
  std::set<int64_t> places;
  for (int64_t b = 0; b < shape.batch; ++b)
    for (int64_t tile = 0; tile < tiles_of(shape.q_len); ++tile) {
      const int64_t end = std::min(range.end, seen_by_hand(tile, shape.q_len, shape.k_len, shape.causal));
      for (int64_t j = range.first; j < end; ++j) {
        const int64_t place = index.row(b, b * ((shape.q_len + 127) / 128), tile) + j - range.first;
        ASSERT_TRUE(place >= 0 && place < range.tiles_per_head) << place << " of " << range.tiles_per_head;
        ASSERT_TRUE(places.insert(place).second) << place;
      }
    }
}

TEST(CudaSchedule, TilesHavePlacesOfTheirOwn) {
  for (const int64_t q : kLengths)
    for (const int64_t k : kLengths)
      for (const bool causal : {false, true}) {
        const DsShape shape = shape_of(causal, 3, q, k);
        for (int64_t first = 0; first < shape.key_tiles; first += 2)
          for (int64_t end = first + 2; end <= shape.key_tiles; end += 2) {
            const DsIndex index = ds_index(false, causal, q, k, static_cast<int32_t>(first), static_cast<int32_t>(end));
            const int64_t tiles = causal ? 3 * index.sequence_tiles : 2 * shape.q_blocks * index.width;
            expect_places(shape, {first, end, tiles});
          }
      }
}

void expect_ranges(const std::vector<HeadRange>& ranges, int64_t heads) {
  int64_t head = 0;
  for (const HeadRange& range : ranges) {
    ASSERT_EQ(range.first, head);
    ASSERT_GT(range.count, 0);
    head += range.count;
  }
  ASSERT_EQ(head, heads);
}

int64_t most_of_group(const ChunkPlan& plan) {
  int64_t most = 0;
  for (const HeadRange& range : plan.group) most = std::max(most, range.count);
  return most;
}

// KV heads, heads of a group and key tiles are covered once, in order, by whole 128-key blocks.
void expect_cover(const DsShape& shape, const ChunkPlan& plan) {
  expect_ranges(plan.kv_heads, shape.kv_heads);
  expect_ranges(plan.group, shape.group);
  int64_t tile = 0, tiles_of_head = 0;
  for (const TileRange& range : plan.tiles) {
    ASSERT_EQ(range.first, tile);
    ASSERT_EQ(range.end % 2, 0);
    ASSERT_GE(range.end - range.first, std::min<int64_t>(shape.key_tiles, 2));
    ASSERT_LE((range.end - range.first) / 2, plan.most_blocks());
    tile = range.end;
    tiles_of_head += range.tiles_per_head;
    ASSERT_LE(plan.most_kv_heads() * most_of_group(plan) * range.tiles_per_head, plan.most_tiles);
    expect_places(shape, range);
  }
  ASSERT_EQ(tile, shape.key_tiles);
  ASSERT_EQ(tiles_of_head, single_chunk(shape).tiles[0].tiles_per_head);  // cutting stores nothing twice
}

TEST(CudaSchedule, ChunksCoverEverythingOnceWithinTheCap) {
  for (const int64_t q : {1, 64, 200, 513})
    for (const int64_t k : {1, 65, 300, 700})
      for (const bool causal : {false, true})
        for (const int64_t kv_heads : {1, 3, 8})
          for (const int64_t group : {1, 4, 7})
            for (const size_t cap : {size_t{1}, size_t{20000}, size_t{100000}, size_t{400000}, size_t{1} << 30}) {
              const DsShape shape = shape_of(causal, 2, q, k, kv_heads, group);
              const ChunkPlan plan = plan_chunks(shape, cap);
              SCOPED_TRACE(std::to_string(q) + " x " + std::to_string(k) + ", cap " + std::to_string(cap));
              expect_cover(shape, plan);
              int64_t smallest = 0;  // a query head against two key tiles is always held
              for (int64_t first = 0; first < shape.key_tiles; first += 2)
                smallest = std::max(smallest, causal ? 2 * ds_index(false, true, q, k, static_cast<int32_t>(first),
                                                                    static_cast<int32_t>(first + 2))
                                                               .sequence_tiles
                                                     : 4 * shape.q_blocks);
              EXPECT_LE(plan.code_bytes() + plan.scale_bytes(), std::max(cap, static_cast<size_t>(smallest) * 4100));
            }
}

TEST(CudaSchedule, WhatFitsIsNotCut) {
  const DsShape shape = shape_of(true, 1, 1024, 1024, 32, 4);
  const auto tiles = static_cast<size_t>(single_chunk(shape).tiles[0].tiles_per_head);
  const ChunkPlan whole = plan_chunks(shape, 128 * tiles * 4100);
  EXPECT_EQ(whole.kv_heads.size() * whole.group.size() * whole.tiles.size(), 1u);
  const ChunkPlan cut = plan_chunks(shape, 128 * tiles * 4100 - 1);
  EXPECT_GT(cut.kv_heads.size() * cut.group.size() * cut.tiles.size(), 1u);
}

// Query tiles that the busiest CTA goes through, over all chunks, items dealt as the kernel deals them.
int64_t busiest(const DsShape& shape, const ChunkPlan& plan) {
  int64_t sum = 0;
  for (const HeadRange& kv_heads : plan.kv_heads)
    for (const HeadRange& group : plan.group)
      for (const TileRange& range : plan.tiles) {
        std::vector<int64_t> load(static_cast<size_t>(shape.ctas));
        const int64_t each = kv_heads.count * shape.batch, items = (range.end - range.first) / 2 * each;
        const int64_t grid = std::min(items, shape.ctas);
        for (int64_t item = 0; item < items; ++item) {
          const int64_t round = item / grid, place = item % grid;
          const int64_t key = (range.first + item / each * 2) * kImageRows;
          load[static_cast<size_t>(round % 2 == 0 ? place : grid - 1 - place)] +=
              group.count * (tiles_of(shape.q_len) - (shape.causal ? key / kImageRows : 0));
        }
        sum += *std::max_element(load.begin(), load.end());
      }
  return sum;
}

TEST(CudaSchedule, ChunksKeepTheCtasBusy) {
  struct Case {
    int64_t batch, length, kv_heads, group;
    bool causal;
    double least;
  };
  // In the last but one a gigabyte holds dS of half as many items as there are CTAs.
  for (const Case& at :
       {Case{1, 32768, 4, 2, true, 0.95}, Case{1, 32768, 8, 4, true, 0.95}, Case{1, 32768, 8, 1, true, 0.95},
        Case{1, 16384, 16, 1, true, 0.95}, Case{1, 32768, 2, 8, true, 0.95}, Case{1, 65536, 4, 2, true, 0.95},
        Case{2, 8192, 16, 1, true, 0.95}, Case{2, 8192, 8, 4, true, 0.95}, Case{1, 32768, 8, 4, false, 0.95},
        Case{1, 131072, 8, 1, true, 0.6}, Case{1, 65536, 1, 8, true, 0.85}}) {
    const DsShape shape = shape_of(at.causal, at.batch, at.length, at.length, at.kv_heads, at.group);
    const ChunkPlan plan = plan_chunks(shape, size_t{1} << 30);
    int64_t all = 0;
    for (int64_t block = 0; block < at.length / 128; ++block)
      all += at.batch * at.kv_heads * at.group * (at.length / 64 - (at.causal ? 2 * block : 0));
    const double busy = static_cast<double>(all) / static_cast<double>(shape.ctas * busiest(shape, plan));
    EXPECT_GT(busy, at.least) << at.length << ' ' << at.kv_heads << 'x' << at.group << ": " << plan.kv_heads.size()
                              << ' ' << plan.group.size() << ' ' << plan.tiles.size();
  }
}

TEST(CudaSchedule, ManyRangesArePlannedQuickly) {
  const DsShape shape = shape_of(true, 1, int64_t{1} << 20, int64_t{1} << 20, 1, 1);
  const ChunkPlan plan = plan_chunks(shape, size_t{1} << 30);
  EXPECT_GT(plan.tiles.size(), 500u);
  EXPECT_LE(plan.code_bytes() + plan.scale_bytes(), size_t{1} << 30);
}

Problem problem_of(int64_t batch, int64_t q, int64_t k, int64_t q_heads, int64_t kv_heads, bool variable) {
  dmattn_problem raw{};
  raw.struct_size = sizeof raw;
  raw.batch = variable ? 0 : batch;
  raw.q_heads = q_heads, raw.kv_heads = kv_heads, raw.q_len = q, raw.k_len = k, raw.head_dim = 64;
  raw.softmax_scale = 0.125f;
  raw.causal = 1;
  Problem problem = check_problem(&raw);
  problem.cuda = true;
  problem.batch = batch;
  problem.variable_length = variable;
  return problem;
}

// Pieces by their place, each ending where the next begins or before.
void expect_apart(const std::map<uintptr_t, size_t>& pieces, uintptr_t base, size_t bytes) {
  uintptr_t end = base;
  for (const auto& [place, size] : pieces) {
    EXPECT_GE(place, end);
    EXPECT_EQ(place % 256, 0u);
    end = place + size;
  }
  EXPECT_LE(end, base + bytes);
}

uintptr_t place(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

TEST(CudaSchedule, WorkspacePiecesLieApart) {
  constexpr uintptr_t kBase = uintptr_t{1} << 40;
  for (const bool variable : {false, true}) {
    const Problem problem = problem_of(3, 300, 200, 4, 2, variable);
    const ForwardPlan plan = plan_forward(problem, reinterpret_cast<void*>(kBase));
    EXPECT_EQ(plan.bytes, plan_forward(problem, nullptr).bytes);
    EXPECT_EQ(plan_forward(problem, nullptr).keys.k, nullptr);
    const auto q_blocks = static_cast<size_t>(plan.shape.sequences.q_blocks);
    const auto k_blocks = static_cast<size_t>(plan.shape.sequences.k_blocks);
    EXPECT_EQ(q_blocks, variable ? 5u : 9u);  // 300 rows in at most three pieces
    EXPECT_EQ(k_blocks, variable ? 4u : 6u);
    const auto means = static_cast<size_t>(plan.shape.mean_blocks_max);
    EXPECT_EQ(means, 3u);
    std::map<uintptr_t, size_t> pieces{{place(plan.keys.k), 2 * k_blocks * 128 * 64},
                                       {place(plan.keys.v_t), 2 * k_blocks * 128 * 64},
                                       {place(plan.keys.k_mean), 2 * 3 * 64 * 4},
                                       {place(plan.keys.k_partial), 2 * k_blocks * 2 * 64 * 4},
                                       {place(plan.queries.q), 4 * q_blocks * 128 * 64},
                                       {place(plan.queries.mean), 4 * 3 * means * 64 * 4},
                                       {place(plan.queries.bias), 4 * means * k_blocks * 128 * 4},
                                       {place(plan.queries.bias_amax), 4 * means * k_blocks * 2 * 4},
                                       {place(plan.queries.mean_dot), 4 * q_blocks * 128 * 4}};
    if (variable) pieces[place(plan.tables.k_block_sequence)] = k_blocks * 4;
    expect_apart(pieces, kBase, plan.bytes);
  }
}

// Forward and backward find the same pieces at the same places of the codes, and no piece of theirs in a workspace.
TEST(CudaSchedule, SavedCodesHaveOnePlan) {
  constexpr uintptr_t kBase = uintptr_t{1} << 40, kCodes = uintptr_t{1} << 41;
  for (const bool variable : {false, true})
    for (const Centre centre : {Centre::none, Centre::k, Centre::qk}) {
      Problem problem = problem_of(3, 300, 200, 4, 2, variable);
      problem.centre = centre;
      void *const workspace = reinterpret_cast<void*>(kBase), *const codes = reinterpret_cast<void*>(kCodes);
      const ForwardPlan forward = plan_forward(problem, workspace, codes);
      const BackwardPlan backward = plan_backward(problem, 132, workspace, codes);
      const size_t bytes = saved_codes_bytes(problem);
      EXPECT_EQ(forward.codes_bytes, bytes);
      EXPECT_EQ(backward.codes_bytes, bytes);
      const auto q_blocks = static_cast<size_t>(forward.shape.sequences.q_blocks);
      const auto k_blocks = static_cast<size_t>(forward.shape.sequences.k_blocks);
      const auto means = static_cast<size_t>(forward.shape.mean_blocks_max);
      const std::vector<std::tuple<const void*, const void*, size_t>> shared{
          {forward.keys.k, backward.keys.k, 2 * k_blocks * 128 * 64},
          {forward.keys.k_t, backward.keys.k_t, 2 * k_blocks * 128 * 64},
          {forward.keys.v, backward.keys.v, 2 * k_blocks * 128 * 64},
          {forward.keys.k_scale, backward.keys.k_scale, 2 * k_blocks * 2 * 4},
          {forward.keys.v_scale, backward.keys.v_scale, 2 * k_blocks * 2 * 4},
          {forward.keys.k_mean, backward.keys.k_mean, 2 * 3 * 64 * 4},
          {forward.queries.q, backward.queries.q, 4 * q_blocks * 128 * 64},
          {forward.queries.q_scale, backward.queries.q_scale, 4 * q_blocks * 4},
          {forward.queries.bias, backward.queries.bias, 4 * means * k_blocks * 128 * 4}};
      std::map<uintptr_t, size_t> pieces;
      for (const auto& [ours, theirs, size] : shared) {
        EXPECT_EQ(ours, theirs);
        pieces[place(ours)] += size;  // without centring the bias is empty
      }
      expect_apart(pieces, kCodes, bytes);
      const std::map<uintptr_t, size_t> own{{place(forward.keys.v_t), 2 * k_blocks * 128 * 64},
                                            {place(forward.keys.k_partial), 2 * k_blocks * 2 * 64 * 4},
                                            {place(forward.queries.mean_dot), 4 * q_blocks * 128 * 4}};
      expect_apart(own, kBase, forward.bytes);
      EXPECT_LE(forward.bytes, plan_forward(problem, nullptr).bytes);
      EXPECT_LE(backward.bytes + bytes, plan_backward(problem, 132, nullptr).bytes);
      EXPECT_EQ(backward.keys.v_t, nullptr);
      EXPECT_EQ(backward.queries.mean_dot, nullptr);
      EXPECT_EQ(plan_forward(problem, workspace).codes_bytes, 0u);
      problem.mode = Mode::onepass;
      EXPECT_EQ(saved_codes_bytes(problem), bytes);
    }
}

TEST(CudaSchedule, ASmallCapMakesASmallWorkspace) {
  Problem problem = problem_of(1, 4096, 4096, 8, 8, false);
  const BackwardPlan whole = plan_backward(problem, 132, nullptr);
  EXPECT_FALSE(whole.chunks.splits_keys());
  problem.workspace_cap = 1 << 20;
  const BackwardPlan cut = plan_backward(problem, 132, reinterpret_cast<void*>(256));
  EXPECT_TRUE(cut.chunks.splits_keys());
  EXPECT_NE(cut.query_partial, nullptr);
  EXPECT_LT(cut.bytes, whole.bytes);
}

// A backward without dQ goes through one chunk whatever the plan, with sums for every CTA.
TEST(CudaSchedule, SumsHaveRoomForEveryCta) {
  int split = 0;
  for (const int64_t length : {4096, 16384})
    for (const int64_t kv_heads : {4, 8})
      for (const int64_t cap : {int64_t{1} << 20, int64_t{1} << 26, int64_t{1} << 30}) {
        Problem problem = problem_of(1, length, length, 8 * kv_heads, kv_heads, false);
        problem.causal = false;
        problem.workspace_cap = static_cast<size_t>(cap);
        const BackwardPlan plan = plan_backward(problem, 132, reinterpret_cast<void*>(256));
        const auto sums = reinterpret_cast<uintptr_t>(plan.key_partial);
        const auto next = plan.query_partial ? reinterpret_cast<uintptr_t>(plan.query_partial) : plan.bytes + 256;
        split += plan.chunks.splits_groups() ? 1 : 0;
        EXPECT_GE(next - sums, size_t{132} * 2 * 128 * problem.head_dim * 4) << length << ' ' << kv_heads << ' ' << cap;
      }
  EXPECT_GT(split, 6);  // whose sums are of items
}

// The fastest cut of these shapes would keep 2 GiB of dQ's sums between ranges of keys.
TEST(CudaSchedule, SumsStayBelowTheCapWhereSomeCutsDo) {
  for (const auto& [batch, length, kv_heads] : {std::tuple{2, 32768, 8}, std::tuple{1, 65536, 4}}) {
    DsShape shape = shape_of(true, batch, length, length, kv_heads, 8);
    shape.head_dim = 256;
    const ChunkPlan plan = plan_chunks(shape, size_t{1} << 30);
    const int64_t block_bytes = 128 * shape.head_dim * 4;
    int64_t sums = 0;
    if (plan.splits_keys()) sums += plan.most_kv_heads() * shape.group * shape.q_blocks * block_bytes;
    if (plan.splits_groups()) sums += 2 * plan.most_kv_heads() * shape.batch * plan.most_blocks() * block_bytes;
    EXPECT_LE(sums, int64_t{1} << 30) << length;
  }
}

TEST(CudaSchedule, DivisorsDivideExactly) {
  const auto expect = [](int64_t value, int64_t x) {
    if (x < 0 || x > INT32_MAX) return;
    EXPECT_EQ(divisor(value).divide(static_cast<int32_t>(x)), x / value) << x << " / " << value;
  };
  std::vector<int64_t> values;
  for (int64_t value = 1; value <= 300; ++value) values.push_back(value);
  for (int power = 8; power <= 31; ++power)
    for (const int64_t off : {-1, 0, 1}) values.push_back((int64_t{1} << power) + off);
  for (const int64_t value : values) {
    if (value > INT32_MAX) continue;
    for (int64_t x = 0; x <= 1000; ++x) expect(value, x);
    for (int64_t multiple = value; multiple <= INT32_MAX; multiple += value * (1 + multiple / (64 * value)))
      for (const int64_t off : {-1, 0, 1}) expect(value, multiple + off);
    for (const int64_t off : {0, 1, 2}) expect(value, INT32_MAX - off), expect(value, INT32_MAX / value * value - off);
  }
  EXPECT_EQ(divisor(0).divide(7), 7);
  for (const int64_t beyond : {int64_t{INT32_MAX} + 1, int64_t{1} << 33, (int64_t{1} << 42) + 1, INT64_MAX})
    EXPECT_EQ(divisor(beyond).value, INT32_MAX) << beyond;
}

TEST(CudaSchedule, WorkspacesThatOverflowAreRefused) {
  Layout layout(nullptr);
  EXPECT_THROW(layout.take<float>({int64_t{1} << 40, int64_t{1} << 40}), InvalidValue);
  EXPECT_NO_THROW(layout.take<float>({int64_t{1} << 60}));
  EXPECT_THROW(layout.take<float>({int64_t{1} << 60}), InvalidValue);
  Layout empty(nullptr);
  EXPECT_NO_THROW(empty.take<float>({0, int64_t{1} << 60, int64_t{1} << 60}));
  EXPECT_EQ(empty.bytes(), 0u);
}

TEST(CudaSchedule, ProblemsWithoutRowsHavePlans) {
  for (const bool variable : {false, true})
    for (const auto& [q, k] : std::vector<std::pair<int64_t, int64_t>>{{0, 5}, {5, 0}, {0, 0}}) {
      const BackwardPlan plan = plan_backward(problem_of(2, q, k, 2, 1, variable), 132, nullptr);
      ASSERT_EQ(plan.chunks.tiles.size(), 1u);
      EXPECT_EQ(plan.chunks.most_tiles > 0, q > 0 && k > 0);
    }
}

}  // namespace
}  // namespace dmattn::cuda
