// What the probe says with a sign, and the entropy: against sums written out here.
#include <gtest/gtest.h>

#include <cmath>

#include "analysis/analysis.h"
#include "analysis/statistics.h"
#include "cpu/reference.h"
#include "heads.h"

namespace dmattn::test {
namespace {

TEST(Signed, ResidualsKeepTheirSign) {
  const SignedResidual found = signed_residual({0.5, -0.25, 0.0, 0.25});
  EXPECT_DOUBLE_EQ(found.mean, 0.125);
  EXPECT_DOUBLE_EQ(found.rms, std::sqrt((0.25 + 2 * 0.0625) / 4));
  EXPECT_DOUBLE_EQ(found.sharpens, 0.25);
  EXPECT_DOUBLE_EQ(found.flattens, 0.5);  // a row that sums to zero does neither
  EXPECT_TRUE(std::isnan(signed_residual({}).rms));
}

TEST(Signed, EntropyIsThatOfTheSoftmax) {
  Head head(130, 200, 64);  // four tiles of keys, in which the largest score comes early, late and in between
  head.gaussian(51);
  for (float& value : head.q) value *= 3;
  const cpu::Reference truth =
      cpu::reference_attention(head.shape, head.q.data(), head.k.data(), head.v.data(), nullptr, 1);
  for (int64_t i = 0; i < head.shape.queries; ++i) {
    double entropy = 0;
    for (int64_t j = 0; j < head.shape.visible(i); ++j) {
      double s = 0;
      for (int64_t c = 0; c < 64; ++c)
        s += static_cast<double>(head.q[static_cast<size_t>(i * 64 + c)]) *
             static_cast<double>(head.k[static_cast<size_t>(j * 64 + c)]);
      const double log_p = s * head.shape.softmax_scale - truth.lse[static_cast<size_t>(i)];
      entropy -= std::exp(log_p) * log_p;
    }
    // FP64: logits up to 40, 200 terms.
    ASSERT_NEAR(truth.entropy[static_cast<size_t>(i)], entropy, 1e-12) << i;
  }
}

TEST(Signed, RowsWithoutKeysHaveNoEntropy) {
  Head head(10, 4, 64);  // causal: the first six rows see nothing
  head.gaussian(52);
  const cpu::Reference truth =
      cpu::reference_attention(head.shape, head.q.data(), head.k.data(), head.v.data(), nullptr, 1);
  for (size_t i = 0; i < 7; ++i) EXPECT_EQ(truth.entropy[i], 0.0) << i;  // nor has the row with one key
  EXPECT_GT(truth.entropy[9], 0.0);
}

}  // namespace
}  // namespace dmattn::test
