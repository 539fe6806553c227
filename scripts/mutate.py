#!/usr/bin/env python3
"""Plants one-line faults in a copy of the sources and checks that the fast C++ tests catch each of them.

The copy, and a Release build of it, live in a temporary directory; the tree itself is only read. The unmutated copy
must pass first. A fault whose text no longer occurs exactly once is an error: update MUTATIONS with the source.
Exit status: 0 all faults caught; 1 a fault survived, did not match or did not compile; 2 the unmutated tree fails.

Examples:
  scripts/mutate.py                              all faults; minutes each where a header changes
  scripts/mutate.py --list                       names, files and why each matters
  scripts/mutate.py --only fp8 bias              faults whose name or file holds one of these words
  scripts/mutate.py --work build/mutate --resume keep copy, build and results there; skip what was caught before
  scripts/mutate.py --report docs/mutations.md   write the table
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("CMakeLists.txt", "cmake", "include", "src", "tests", "examples")
TARGETS = ("dmattn_tests", "dmattn_abi_tests")
OWN_SUITE = "Mutants"  # tests/cpp/test_mutants.cpp: written for faults that nothing else caught
FILTER = "-Slow*:*.Slow*:*/Slow*"
TEST_SECONDS = 900


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str
    old: str
    new: str
    why: str


MUTATIONS = (
    Mutation("reference_floor", "src/numerics/softmax.h", "return __builtin_ceilf(largest_score);",
             "return __builtin_floorf(largest_score);", "codes of P could exceed 2^8 and saturate"),
    Mutation("exp2_digits_swapped", "src/numerics/exp2.h", "0x1.3cea88p-7f", "0x1.3cae88p-7f",
             "a mistyped coefficient breaks the error bound of every probability"),
    Mutation("e4m3_half_up", "src/numerics/fp8.h", "(bits + 0x7ffffu + ((bits >> 20) & 1u)) & 0xfff00000u",
             "(bits + 0x80000u) & 0xfff00000u",
             "ties away from zero bias every cast and differ from the hardware's cvt.rn"),
    Mutation("e4m3_saturates_at_480", "src/numerics/fp8.h", "rounded = rounded > kE4m3Max ? kE4m3Max : rounded;",
             "rounded = rounded > 480.0f ? 480.0f : rounded;", "480 is the NaN code"),
    Mutation("e4m3_subnormal_step", "src/numerics/fp8.h", "const float shift = 0x1.8p14f;",
             "const float shift = 0x1.8p15f;", "half of the subnormal codes would never be used"),
    Mutation("amax_drops_nan", "src/numerics/scale.h", "(magnitude > amax || magnitude != magnitude) ?",
             "(magnitude > amax) ?", "a NaN in a block would vanish from its scale"),
    Mutation("tile_scale_four_times", "src/numerics/scale.h",
             "static_cast<int32_t>(float_bits(clamped) >> 23) - 127 - 7);",
             "static_cast<int32_t>(float_bits(clamped) >> 23) - 127 - 9);",
             "the largest dS of each tile would saturate"),
    Mutation("exponents_rise_early", "src/numerics/exponent.h", "e4m3_round(largest) != kE4m3Max;",
             "e4m3_round(largest) < 256.0f;", "a kernel raises them where a code reaches 448, and bits would differ"),
    Mutation("exponents_fall", "src/numerics/exponent.h",
             "!keeps && own + kExponentRoom > current ? own + kExponentRoom : current;",
             "!keeps ? own + kExponentRoom : current;",
             "an exponent that falls would scale up what the tensor core holds"),
    Mutation("accumulator_14_bits", "src/numerics/constants.h", "constexpr int kAccumulatorFractionBits = 13;",
             "constexpr int kAccumulatorFractionBits = 14;", "the model would be kinder than the tensor core"),
    Mutation("causal_one_key_more", "src/cpu/codes.h", "const int64_t last = i + keys - queries + 1;",
             "const int64_t last = i + keys - queries + 2;",
             "every query would see the next token; twin and FP64 reference share this line"),
    Mutation("step_rounds_to_nearest", "src/cpu/isa_products.cpp",
             "total += __builtin_convertvector(right * a[kk] * inverse, I);",
             "total += __builtin_convertvector((right * a[kk] * inverse + 0x1.8p23f) - 0x1.8p23f, I);",
             "the tensor core truncates; rounding hides its drift"),
    Mutation("zero_takes_part", "src/cpu/isa_products.cpp",
             "static_cast<uint8_t>(biased == 0 ? 0 : clamped + kExponentOffset)",
             "static_cast<uint8_t>(clamped + kExponentOffset)", "a zero operand would set the unit of its step"),
    Mutation("zeros_set_the_unit", "src/cpu/isa_products.cpp", ": I{} + kSmallest;", ": I{} + 64;",
             "an accumulator that was scaled far down would be lost beside products of zero"),
    Mutation("k_mean_stays_in_ragged_block", "src/cpu/codes.cpp", "for (int64_t j = 0; j < shape.keys; ++j)",
             "for (int64_t j = 0; j < shape.keys / kTile * kTile; ++j)",
             "the last keys' logits would be off by q . mean"),
    Mutation("mean_over_padded_rows", "src/cpu/codes.cpp", "value /= static_cast<float>(rows);",
             "value /= static_cast<float>(round_up(rows, numerics::kMeanRows));",
             "the removed mean must be the documented one, bit for bit"),
    Mutation("bias_lost_in_last_key_tile", "src/cpu/tiles.cpp", "if (query.bias_dots.empty()) return;",
             "if (query.bias_dots.empty() || (key_tile + 1) * kTile >= shape.keys) return;",
             "the last keys' logits would lack Q's mean"),
    Mutation("bias_block_of_128_rows", "src/cpu/tiles.cpp", "query_tile * kTile / query.bias_rows",
             "query_tile * kTile / numerics::kQueryScaleRows",
             "above 8192 queries a row would take another block's bias, or none at all"),
    Mutation("dq_without_softmax_scale", "src/cpu/backward.cpp",
             "for (auto* x : {&out.dq, &out.dk})",
             "for (auto* x : {&out.dk})", "dQ too large by sqrt(head_dim)"),
    Mutation("strip_starts_late", "src/cpu/backward.cpp",
             "for (int64_t key_tile = first_key; key_tile < std::min(end_key,",
             "for (int64_t key_tile = first_key + (first_key > 0); key_tile < std::min(end_key,",
             "dQ would lack a key tile at each strip's start"),
    Mutation("exponents_start_late", "src/cpu/tiles.cpp",
             "return std::max(interval * kIntervalTiles, first_query_tile(key_tile));",
             "return std::max((interval + 1) * kIntervalTiles, first_query_tile(key_tile));",
             "a row's tile would lack the exponents that earlier tiles left"),
    Mutation("exponents_forgotten_everywhere", "src/numerics/exponent.h",
             "return (interval & (interval - 1)) == 0;", "return true;",
             "a kernel keeps them, and bits would differ"),
    Mutation("exponents_never_forgotten", "src/numerics/exponent.h",
             "return (interval & (interval - 1)) == 0;", "return interval == 0;",
             "small P of late rows would lose their codes"),
    Mutation("exponents_without_room", "src/numerics/exponent.h", "constexpr float kExponentRoom = 1.0f;",
             "constexpr float kExponentRoom = 0.0f;", "a kernel leaves room, and bits would differ"),
    Mutation("interval_of_2048_queries", "src/cpu/tiles.h", "= numerics::kFlushRows / kTile;",
             "= 2 * numerics::kFlushRows / kTile;",
             "sums would outlive the scales of dO and q, and small P their codes"),
    Mutation("dv_not_rescaled", "src/cpu/hopper.cpp", "tile.dv.exponent[w] = exponents.p[w];",
             "tile.dv.exponent[w] = 0.0f;", "the sum of earlier tiles would take the new exponent's factor"),
    Mutation("dk_not_rescaled", "src/cpu/hopper.cpp", "tile.dk.exponent[w] = exponents.ds;",
             "tile.dk.exponent[w] = 0.0f;", "likewise for dK"),
    Mutation("nan_lost_in_interval", "src/cpu/backward.cpp", "if (numerics::is_nan(scale_.factor[w])) now.factor[w]",
             "if (false) now.factor[w]", "a tile's NaN would vanish where a later tile of the interval has none"),
    Mutation("nan_of_dp_reaches_dv", "src/cpu/hopper.cpp", "if (p_nan) tile.dv.factor[w]",
             "if (numerics::is_nan(tile.ds_scale)) tile.dv.factor[w]",
             "dV would be NaN where only V is"),
    Mutation("dk_from_centred_q", "src/cpu/backward.cpp",
             "const Codes& q = source.query.plain_codes();\n  std::vector<KeySum> work;",
             "const Codes& q = source.query.s;\n  std::vector<KeySum> work;",
             "dK needs plain q: dS does not sum to zero over queries"),
    Mutation("columns_without_softmax_scale", "src/cpu/backward.cpp", "q.scale_of_row(i) * source.shape.softmax_scale;",
             "q.scale_of_row(i);", "the reported column sum of dK would be too large by sqrt(head_dim)"),
    Mutation("cast_residual_without_scale", "src/cpu/backward.cpp",
             "after = code[i * kTile + j] * scale;", "after = code[i * kTile + j] + 0 * scale;",
             "residuals after the cast would weigh tiles by their codes"),
    Mutation("q_mean_not_bf16", "src/cpu/query.cpp",
             "for (float& value : mu) value = numerics::bf16_round(value);", "for (float& value : mu) value *= 1.0f;",
             "bits of the bias are part of the contract"),
    Mutation("guard_dropped", "src/cpu/query.cpp",
             "const int exponent = numerics::bias_guard_exponent(need, scale.scale);",
             "const int exponent = 0 * numerics::bias_guard_exponent(need, scale.scale);",
             "a large bias would saturate its slots"),
    Mutation("guard_leaves_inverse", "src/cpu/query.cpp", "std::ldexp(scale.inverse, -exponent)};", "scale.inverse};",
             "codes of q - mu would be decoded with a scale they were not made with"),
    Mutation("onepass_o_by_unrounded_sum", "src/cpu/query.cpp",
             "config.numerics == Numerics::hopper || mode == Mode::onepass;", "config.numerics == Numerics::hopper;",
             "onepass rests on O and dS being divided by the same sum"),
    Mutation("onepass_weight_of_unrounded_sum", "src/cpu/hopper.cpp", "(onepass ? input.sum_rounded : input.sum)[i];",
             "input.sum[i];", "w must be folded with the sum of the rounded codes in onepass"),
    Mutation("dv_weight_of_unrounded_sum", "src/cpu/hopper.cpp", "power_of_two(exponent) / input.sum_rounded[i];",
             "power_of_two(exponent) / sum;", "the codes that dV multiplies would not sum to one"),
    Mutation("onepass_takes_unrounded_p", "src/cpu/hopper.cpp", "mode_ == Mode::onepass ? tile.p_code : tile.p;",
             "tile.p;", "onepass's dS must come from the forward's codes"),
    Mutation("matched_not_divided", "src/cpu/hopper.cpp", "total[i] == 0.0f ? 0.0f : weighted[i] / total[i];",
             "total[i] == 0.0f ? 0.0f : weighted[i];", "P of a tile does not sum to one before the division"),
    Mutation("stale_takes_quantised_d_o", "src/cpu/hopper.cpp",
             "? contract_dot(weighted_.data() + i * dim, input.o_stored + i * dim, dim)",
             "? d_o.scale_of_row(i) * contract_dot(d_o.row(i, dim), input.o_stored + i * dim, dim)",
             "stale would silently be consistent"),
    Mutation("onepass_without_remainder", "src/cpu/hopper.cpp",
             "truncated_delta(query_tile, input.o_full);", "truncated_delta(query_tile, input.o_stored);",
             "O's BF16 rounding would enter onepass's delta"),
    Mutation("onepass_delta_not_truncated", "src/cpu/hopper.cpp",
             "product(kTile, kTile, dim, d_o.row(first, dim), dim, columns.data()",
             "tile_kernels().product_exact(kTile, kTile, dim, d_o.row(first, dim), dim, columns.data()",
             "dP is truncated: on rows of one key the difference is a bias"),
    Mutation("v_scaled_by_amax", "src/cpu/codes.cpp",
             "numerics == Numerics::hopper ? ScaleRule::power : ScaleRule::amax;",
             "ScaleRule::amax;", "codes of O would not be those of V on rows of one key"),
    Mutation("rounded_sum_not_rescaled", "src/cpu/hopper.cpp", "row.sum_rounded * rescale +", "row.sum_rounded +",
             "O would be divided by sums of different references"),
    Mutation("true_delta_keeps_weight", "src/cpu/hopper.cpp",
             "return weight == 0.0f ? 0.0f : delta_[static_cast<size_t>(row)] / weight;",
             "return weight == 0.0f ? 0.0f : delta_[static_cast<size_t>(row)];", "delta_out is the true delta"),
    Mutation("exponent_of_last_row", "src/cpu/hopper.cpp",
             "own[w] = std::max(own[w], b - reference_[static_cast<size_t>(row)]);",
             "own[w] = b - reference_[static_cast<size_t>(row)];", "codes of the tile's other rows could saturate"),
    Mutation("lse_without_k_mean", "src/cpu/hopper.cpp",
             "out.lse[row] = numerics::fused(shape.softmax_scale, mean, centred);",
             "out.lse[row] = centred + 0 * mean;", "lse is that of uncentred scores"),
    Mutation("paper_onepass_ds_by_unrounded_sum", "src/cpu/paper.cpp",
             "group / input_.sum_rounded[at] :", "group / input_.sum[at] :",
             "rows of dS would still sum to zero, but of the wrong size"),
    Mutation("paper_matched_not_divided", "src/cpu/paper.cpp",
             "static_cast<float>(weighted[i] / total[i]);", "static_cast<float>(weighted[i]);",
             "the unnormalised P of a row sums to far more than one"),
    Mutation("paper_stale_takes_quantised_d_o", "src/cpu/paper.cpp",
             "input_.mode == Mode::consistent ||", "input_.mode == Mode::consistent || input_.mode == Mode::stale ||",
             "stale would silently be consistent"),
    Mutation("keys_at_query_offset", "src/cpu/tensors.h",
             "const int64_t first = is_query ? at.q_first : at.k_first, rows", "const int64_t first = at.q_first, rows",
             "keys of a variable-length sequence start at their own row"),
    Mutation("gqa_keeps_last_head", "src/cpu/backend.cpp", "input, wanted, nullptr, &group);",
             "input, wanted, nullptr, &(group = {}));", "dK is the sum over the group's query heads"),
    Mutation("dk_of_group_without_softmax_scale", "src/cpu/backward.cpp", "for (float& value : group.dk)",
             "for (float& value : group.dv)", "dK too large by sqrt(head_dim), dV too small"),
    Mutation("remainder_subtracted", "src/cpu/backend.cpp", "in.state.o_full[i] += low[i];",
             "in.state.o_full[i] -= low[i];", "onepass's O is the stored pair's sum"),
    Mutation("lse_start_mean_sign", "src/cpu/backend.cpp", "(lse[i] - static_cast<double>(shape.softmax_scale) * mean)",
             "(lse[i] + static_cast<double>(shape.softmax_scale) * mean)",
             "a backward without saved sums starts from lse"),
    Mutation("reference_o_not_rescaled", "src/cpu/reference.cpp", "o[static_cast<size_t>(i * dim + c)] *= rescale;",
             "o[static_cast<size_t>(i * dim + c)] *= 1.0;", "the truth itself would be wrong beyond 64 keys"),
    Mutation("gqa_interleaved", "src/analysis/head_run.cpp", "q_head / (layer.q_heads / layer.kv_heads)",
             "q_head % layer.kv_heads", "query heads share a KV head in runs, not in turns"),
    Mutation("median_not_interpolated", "src/analysis/statistics.h",
             "return values[below] + (at - static_cast<double>(below)) * (values[above] - values[below]);",
             "return values[std::min(below, above)];", "medians of an even number of rows would be too small"),
)


@dataclass
class Result:
    status: str  # caught, SURVIVED, NO MATCH, NO BUILD
    tests: list[str] = field(default_factory=list)
    seconds: float = 0.0
    key: str = ""  # what was planted: an older result counts only for the same text


# ---- The copy and its build -----------------------------------------------------------------------------------------


def copy_tree(source: Path, target: Path) -> None:
    """Copies what the build needs. Files that did not change keep their times, so an old build stays valid."""
    wanted = set()
    for top in COPIED:
        path = source / top
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        for file in files:
            if "__pycache__" in file.parts:
                continue
            to = target / file.relative_to(source)
            wanted.add(to)
            content = file.read_bytes()
            if not to.is_file() or to.read_bytes() != content:
                to.parent.mkdir(parents=True, exist_ok=True)
                to.write_bytes(content)
                shutil.copymode(file, to)
    for old in sorted(target.rglob("*")):
        if old.is_file() and old not in wanted:
            old.unlink()


def configure(tree: Path, build: Path) -> None:
    run_checked(["cmake", "-S", str(tree), "-B", str(build), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
                 "-DDMATTN_BUILD_TESTS=ON", "-DDMATTN_BUILD_CLI=OFF", "-DDMATTN_CUDA=OFF"])


def run_checked(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.stderr.write(done.stdout)
        raise SystemExit(2)


def compiles(build: Path, jobs: int, log: Path) -> bool:
    with log.open("w") as out:
        return subprocess.run(["ninja", "-C", str(build), f"-j{jobs}", *TARGETS], stdout=out,
                              stderr=subprocess.STDOUT).returncode == 0


# ---- The tests ------------------------------------------------------------------------------------------------------


def plain_name(test: str) -> str:
    """Suite.Test of a parameterised name Prefix/Suite.Test/param."""
    suite, _, rest = test.partition(".")
    return f"{suite.rsplit('/', 1)[-1]}.{rest.split('/', 1)[0]}"


def failed_tests(build: Path, log: Path) -> list[str]:
    """Tests that failed; a test that crashed or hung is named with what happened to it."""
    failed: dict[str, None] = {}
    for target in TARGETS:
        command = [str(build / "tests" / target), f"--gtest_filter={FILTER}"]
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
        end = ""
        with log.open("w") as out:
            try:
                status = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment,
                                        timeout=TEST_SECONDS).returncode
            except subprocess.TimeoutExpired:
                status, end = -1, "hung"
        running = ""
        for line in log.read_text(errors="replace").splitlines():
            match = re.match(r"\[ +(RUN|OK|FAILED) +\] ([\w/]+\.[\w/]+)", line)
            if not match:
                continue
            running = match[2] if match[1] == "RUN" else ""
            if match[1] == "FAILED":
                failed[plain_name(match[2])] = None
        if status < 0 and not end:
            end = signal.Signals(-status).name
        if end:
            failed[f"{plain_name(running) if running else target} ({end})"] = None
        elif status != 0 and not failed:
            failed[f"{target} (status {status})"] = None
    return list(failed)


# ---- The run --------------------------------------------------------------------------------------------------------


def try_mutation(mutation: Mutation, work: Path, jobs: int) -> Result:
    path = work / "tree" / mutation.file
    original = path.read_text(encoding="utf-8") if path.is_file() else ""
    if original.count(mutation.old) != 1:
        return Result("NO MATCH")
    path.write_text(original.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        if not compiles(work / "build", jobs, work / f"{mutation.name}.build.log"):
            return Result("NO BUILD")
        failed = failed_tests(work / "build", work / f"{mutation.name}.test.log")
        return Result("caught" if failed else "SURVIVED", failed)
    finally:
        path.write_text(original, encoding="utf-8")  # a new time: the next build sees it as changed


def key_of(mutation: Mutation) -> str:
    return json.dumps([mutation.file, mutation.old, mutation.new])


def load_results(path: Path) -> dict[str, Result]:
    if not path.is_file():
        return {}
    return {name: Result(**fields) for name, fields in json.loads(path.read_text()).items()}


def say(text: str) -> None:
    print(text, flush=True)


def check(work: Path, source: Path, chosen: list[Mutation], jobs: int, resume: bool) -> dict[str, Result]:
    results_file = work / "results.json"
    results = load_results(results_file) if resume else {}
    copy_tree(source, work / "tree")
    configure(work / "tree", work / "build")
    began = time.monotonic()
    say("building and testing the unmutated tree")
    if not compiles(work / "build", jobs, work / "unmutated.build.log"):
        say(f"the unmutated tree does not build: {work}/unmutated.build.log")
        raise SystemExit(2)
    failed = failed_tests(work / "build", work / "unmutated.test.log")
    if failed:
        say(f"the unmutated tree fails: {', '.join(failed)} ({work}/unmutated.test.log)")
        raise SystemExit(2)
    say(f"the unmutated tree passes ({time.monotonic() - began:.0f} s)")
    for number, mutation in enumerate(chosen, 1):
        old = results.get(mutation.name)
        if old and old.status == "caught" and old.key == key_of(mutation):
            say(f"[{number}/{len(chosen)}] {mutation.name}: caught in an earlier run")
            continue
        began = time.monotonic()
        result = try_mutation(mutation, work, jobs)
        result.seconds = round(time.monotonic() - began, 1)
        result.key = key_of(mutation)
        results[mutation.name] = result
        results_file.write_text(json.dumps({name: asdict(r) for name, r in results.items()}, indent=1))
        tests = f" by {', '.join(result.tests)}" if result.tests else ""
        say(f"[{number}/{len(chosen)}] {mutation.name}: {result.status}{tests} ({result.seconds:.0f} s)")
    return {m.name: results[m.name] for m in chosen}


# ---- The table ------------------------------------------------------------------------------------------------------


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def caught_by(result: Result, most: int = 4) -> str:
    if not result.tests:
        return f"**{result.status}**"
    own_last = sorted(result.tests, key=lambda name: name.startswith(OWN_SUITE))
    names = [f"`{name}`" for name in own_last[:most]]
    more = f" and {len(result.tests) - most} more" if len(result.tests) > most else ""
    return ", ".join(names) + more


def table(results: dict[str, Result]) -> str:
    by_name = {m.name: m for m in MUTATIONS}
    alone = [name for name, r in results.items() if r.tests and all(t.startswith(OWN_SUITE) for t in r.tests)]
    caught = sum(r.status == "caught" for r in results.values())
    lines = [
        "# Planted faults", "",
        "Written by `scripts/mutate.py --report docs/mutations.md`. Each fault changes one line of the sources, alone;",
        "the fast C++ tests must fail. The script holds the exact texts.", "",
        f"{caught} of {len(results)} faults are caught, {len(alone)} of them (marked \\*) by `{OWN_SUITE}` alone",
        "(tests/cpp/test_mutants*.cpp), which was written for faults that every other fast C++ test let pass.", "",
        "| fault | file | caught by |", "|---|---|---|",
    ]
    for name, result in results.items():
        mutation = by_name[name]
        mark = " \\*" if name in alone else ""
        lines.append(f"| {name}{mark}: {cell(mutation.why)} | {mutation.file} | {caught_by(result)} |")
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the faults and stop")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="faults whose name or file holds one of these words")
    parser.add_argument("--source", type=Path, default=ROOT, help="the tree to copy (this one)")
    parser.add_argument("--work", type=Path, help="where to keep copy, build and logs (a temporary directory)")
    parser.add_argument("--resume", action="store_true", help="with --work: skip faults caught in an earlier run there")
    parser.add_argument("--jobs", type=int, default=2, help="jobs of ninja (2)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a table of all results as Markdown")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    chosen = [m for m in MUTATIONS
              if not options.only or any(word in m.name or word in m.file for word in options.only)]
    if options.list:
        for mutation in chosen:
            print(f"{mutation.name:32} {mutation.file:28} {mutation.why}")
        return 0
    if not chosen:
        print("no fault has such a name or file", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="mutate-") as temporary:
        work = (options.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        results = check(work, options.source.resolve(), chosen, options.jobs, options.resume)
    if options.report:
        options.report.write_text(table(results), encoding="utf-8")
    bad = {name: r.status for name, r in results.items() if r.status != "caught"}
    say(f"{len(results) - len(bad)} of {len(results)} faults caught")
    for name, status in bad.items():
        say(f"{name}: {status}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
