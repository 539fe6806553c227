// The JSON documents: keys and their order as published, null where nothing was measured, any bytes as a file name;
// and the page: complete, and closed to foreign text.
#include "io/json_report.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>

#include "io/html_report.h"
#include "io/report_assets.h"

namespace dmattn {
namespace {

using nlohmann::ordered_json;

std::vector<std::string> keys(const ordered_json& object) {
  std::vector<std::string> names;
  for (const auto& [name, value] : object.items()) names.push_back(name);
  return names;
}

using Names = std::vector<std::string>;

ModeResult mode_result(double dq) {
  ModeResult result;
  result.residual = {1e-2, 2e-2, 3e-2};
  result.residual_after_cast = {1.5e-2, kNaN, std::numeric_limits<double>::infinity()};
  result.column_sum = 4e-3;
  result.columns_after_cast = {1.23456e-3, kNaN};
  result.error = {0.05, dq, 0.07, 0.04};
  return result;
}

ProbeResult probe_result() {
  ProbeResult result;
  for (const Mode mode : {Mode::matched, Mode::stale})
    result.modes[mode] = mode_result(mode == Mode::stale ? 0.5 : 0.1);
  result.modes[Mode::stale].worst_head = 1;
  result.modes[Mode::stale].worst_head_dq = 0.5;
  result.heads.resize(2);
  for (int64_t head = 0; head < 2; ++head) {
    result.heads[static_cast<std::size_t>(head)].head = head;
    result.heads[static_cast<std::size_t>(head)].modes = result.modes;
  }
  return result;
}

Layer layer_of(int64_t tokens) {
  Layer layer;
  layer.q_tokens = layer.k_tokens = tokens;
  layer.q_heads = 2;
  layer.head_dim = 128;
  layer.softmax_scale = 0.08838834764831845f;
  return layer;
}

WorkedRow worked_row_of(std::size_t tokens) {
  WorkedRow row;
  row.options.numerics = Numerics::paper;
  row.options.centre = Centre::k;
  row.result.row.tokens = static_cast<int64_t>(tokens);
  for (const Mode mode : kModes) {
    RowMode one{0.5, 1.0, -1.25, -0.25, -0.111, std::vector<double>(tokens, -0.01)};
    one.d_s.back() = 1.0;
    row.result.modes[mode] = one;
  }
  return row;
}

TEST(JsonReport, ProbeHasThePublishedKeys) {
  const auto document = ordered_json::parse(probe_json(probe_result(), layer_of(512), {}, "a.safetensors", "cpu"));
  EXPECT_EQ(keys(document),
            (Names{"schema", "version", "numerics", "centre", "device", "input", "modes", "heads", "nonfinite_heads"}));
  EXPECT_EQ(document["schema"], "dmattn.probe/1");
  EXPECT_EQ(document["numerics"], "hopper");
  EXPECT_EQ(document["centre"], "qk");
  EXPECT_EQ(keys(document["input"]),
            (Names{"file", "tokens", "q_heads", "kv_heads", "head_dim", "softmax_scale", "causal"}));
  EXPECT_EQ(document["input"]["softmax_scale"].dump(), "0.088388346");  // the float, not its double
  EXPECT_EQ(keys(document["modes"]), (Names{"stale", "matched"}));
  const auto& stale = document["modes"]["stale"];
  EXPECT_EQ(keys(stale), (Names{"residual", "residual_after_cast", "column_sum", "error", "worst_head",
                                "signed_residual", "signed_residual_after_cast", "column_sum_after_cast"}));
  EXPECT_EQ(keys(stale["signed_residual"]), (Names{"rms", "mean", "sharpens", "flattens"}));
  EXPECT_EQ(keys(stale["signed_residual_after_cast"]), (Names{"rms", "mean"}));
  EXPECT_EQ(keys(stale["residual"]), (Names{"median", "p95", "max"}));
  EXPECT_EQ(keys(stale["error"]), (Names{"o", "dq", "dk", "dv"}));
  EXPECT_EQ(keys(stale["worst_head"]), (Names{"head", "dq"}));
  EXPECT_EQ(document["heads"][1]["head"], 1);
  EXPECT_EQ(document["heads"][1]["modes"]["stale"]["error"]["dq"], 0.5);
  EXPECT_EQ(keys(document["heads"][1]), (Names{"head", "modes", "entropy"}));
  EXPECT_EQ(document["heads"][1]["modes"]["stale"]["columns_after_cast"].dump(), "[0.001235,null]");
}

TEST(JsonReport, WhatWasNotMeasuredIsNull) {
  const auto document = ordered_json::parse(probe_json(probe_result(), layer_of(0), {}, "", "cpu"));
  EXPECT_TRUE(document["input"]["file"].is_null());
  const auto& after = document["modes"]["stale"]["residual_after_cast"];
  EXPECT_TRUE(after["p95"].is_null());
  EXPECT_TRUE(after["max"].is_null());
  EXPECT_TRUE(document["modes"]["matched"]["worst_head"]["head"].is_null());
  EXPECT_TRUE(document["nonfinite_heads"].is_array());
}

TEST(JsonReport, FileNamesMayHoldAnyBytes) {
  const auto document =
      ordered_json::parse(probe_json(probe_result(), layer_of(1), {}, "bad\xff\"\n</script>.st", "cpu"));
  EXPECT_EQ(document["input"]["file"], "bad\xef\xbf\xbd\"\n</script>.st");
}

TEST(JsonReport, KeyCountAppearsWhereItDiffers) {
  Layer layer = layer_of(4);
  layer.k_tokens = 9;
  EXPECT_EQ(ordered_json::parse(probe_json({}, layer, {}, "f", "cpu"))["input"]["k_tokens"], 9);
}

TEST(JsonReport, SweepAndRowHaveThePublishedKeys) {
  SweepRow row;
  row.inputs = "outlier";
  row.residual = 1e-3;
  const auto sweep = ordered_json::parse(sweep_json({row}, {}, "cpu"));
  EXPECT_EQ(keys(sweep), (Names{"schema", "version", "numerics", "centre", "device", "rows"}));
  EXPECT_EQ(keys(sweep["rows"][0]), (Names{"inputs", "spread", "mode", "residual", "residual_after_cast", "column_sum",
                                           "error_o", "error_dq", "error_dk", "error_dv"}));
  EXPECT_TRUE(sweep["rows"][0]["error_o"].is_null());

  const WorkedRow worked = worked_row_of(8);
  const auto document = ordered_json::parse(row_json(worked.result, worked.options, "cpu"));
  EXPECT_EQ(keys(document), (Names{"schema", "version", "numerics", "centre", "device", "row", "modes", "split"}));
  EXPECT_EQ(keys(document["row"]), (Names{"tokens", "head_dim", "query"}));
  EXPECT_EQ(document["row"]["query"], 7);
  EXPECT_EQ(keys(document["modes"]), (Names{"stale", "consistent", "matched", "onepass"}));
  EXPECT_EQ(keys(document["modes"]["stale"]), (Names{"delta", "sum_positive", "sum_negative", "row_sum", "share"}));
  EXPECT_EQ(keys(document["split"]), (Names{"probability", "gradient", "remainder"}));
}

// The data that the page's script reads.
ordered_json data_of(const std::string& page) {
  const std::string open = "<script type=\"application/json\" id=\"report-data\">";
  const std::size_t begin = page.find(open) + open.size();
  return ordered_json::parse(page.substr(begin, page.find("</script>", begin) - begin));
}

TEST(HtmlReport, IsCompleteAndLoadsNothing) {
  const ReportContext context{{}, "cpu"};
  const WorkedRow row = worked_row_of(8);
  const std::string probe = probe_html(probe_result(), layer_of(512), "f", row, context);
  for (const char* id : {"plot-residual", "plot-heads", "plot-row", "mode-switch"}) {
    EXPECT_NE(probe.find(std::string("id=\"") + id + "\""), std::string::npos) << id;
  }
  SweepRow sweep_row;
  sweep_row.inputs = "gaussian";
  for (const std::string& page :
       {probe, sweep_html({sweep_row}, row, context), row_html(row.result, {row.options, "cpu"})}) {
    EXPECT_EQ(page.find("{{"), std::string::npos);
    for (const char* outside : {"src=", "href=", "url(\"", "url('", "url(h", "@import", "fetch("}) {
      EXPECT_EQ(page.find(outside), std::string::npos) << outside;
    }
    EXPECT_NE(page.find("id=\"plot-row\""), std::string::npos);
    EXPECT_EQ(data_of(page)["row"]["modes"]["stale"]["d_s"].size(), 8u);
  }
}

TEST(HtmlReport, ForeignTextStaysData) {
  const std::string name = "</title></script><script>alert(1)</script><!--{{data}}&'\"";
  const std::string page = probe_html(probe_result(), layer_of(2), name, worked_row_of(2), {{}, "cpu"});
  EXPECT_EQ(page.find("alert(1)<"), std::string::npos);
  EXPECT_EQ(page.find("<script>alert"), std::string::npos);
  EXPECT_EQ(page.find("<!--{"), std::string::npos);
  EXPECT_EQ(data_of(page)["document"]["input"]["file"], name);
  EXPECT_NE(page.find("<title>dmattn probe: &lt;/title&gt;"), std::string::npos);
}

TEST(HtmlReport, LongRowsKeepTheirLargestKeys) {
  const auto row = data_of(row_html(worked_row_of(5000).result, {{}, "cpu"}))["row"];
  ASSERT_EQ(row["keys"].size(), 96u);
  EXPECT_EQ(row["keys"].back(), 4999);
  EXPECT_EQ(row["modes"]["matched"]["d_s"].back(), 1.0);
}

TEST(HtmlReport, EveryPieceIsEmbedded) {
  for (const char* piece : {"page.html", "style.css", "util.js", "residual.js", "heads.js", "row.js", "sweep.js",
                            "live.js", "main.js", "delta.html", "passes.html", "live.html", "head_report.html"}) {
    EXPECT_FALSE(report_asset(piece).empty()) << piece;
  }
  EXPECT_TRUE(report_asset("no such piece").empty());
}

}  // namespace
}  // namespace dmattn
