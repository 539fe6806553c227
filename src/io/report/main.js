// Fills the page from its data. All text goes in as text nodes.
const report = JSON.parse(byId("report-data").textContent);

const CENTRED = {
  none: "nothing centred",
  k: "K centred",
  qk: "Q and K centred"
};
const setup = (d) => `${d.numerics} numerics, ${Object.hasOwn(CENTRED, d.centre) ? CENTRED[d.centre] : d.centre}, on ${d.device}`;

function errorRows(modes) {
  return modes.map(
      ([name, m]) => ({
        mode: name,
        name,
        cells: [
          scientific(m.residual.median), scientific(m.residual_after_cast.median), scientific(m.column_sum),
          percent(m.error.o), percent(m.error.dq), percent(m.error.dk), percent(m.error.dv)
        ]
      }));
}

// The usual shortcut against the best repair that was run.
function rivals(modes) {
  const names = modes.map(([name]) => name);
  const worse = names.includes("stale") ? "stale" : names[0];
  const better = ["matched", "onepass", "consistent"].find((name) => names.includes(name) && name !== worse);
  return [worse, better];
}

function headline(modes, heads, d) {
  const [worse, better] = rivals(modes), worst = worse && d.modes[worse].worst_head;
  if (!worst || !(worst.dq > 0))
    return d.nonfinite_heads.length
      ? "Nothing to measure: NaN, infinity or logits beyond 2^24 in every head"
      : "Nothing to measure: no row has two keys and a gradient";
  const repaired = better && heads.find((head) => head.head === worst.head)?.modes[better]?.error.dq;
  const first = `In head ${worst.head} the ${worse} δ leaves an error ${compared(worst.dq)} the query gradient`;
  return measured(repaired) ? `${first}; the ${better} δ, ${percent(repaired)}` : first;
}

function keyFigures(modes, heads, d) {
  const [worse, better] = rivals(modes);
  if (!worse) return;
  const a = d.modes[worse], b = better && d.modes[better];
  const head = heads.find((one) => one.head === a.worst_head.head);
  const pair = (left, right) =>
      [html("span", {class: `worse mode-${worse}`}, left),
       ...(b ? [html("span", {class: "arrow"}, " → "), html("span", {class: `better mode-${better}`}, right)] : [])];
  const add = (what, values) =>
      byId("figures").append(html("div", {}, html("dt", {}, what), html("dd", {}, ...values)));
  const between = b ? `${worse} → ${better}` : worse;
  add(`of each row of dS does not cancel: median residual before the cast, ${between}`,
      pair(scientific(a.residual.median), b && scientific(b.residual.median)));
  if (head) {
    add(`error of dQ in head ${head.head}, the worst of ${heads.length}, ${between}`,
        pair(percent(a.worst_head.dq), b && percent(head.modes[better].error.dq)));
  }
  const hidden = a.worst_head.dq > 2 * a.error.dq ? ", which hides it" : "";
  add(`error of dQ over the whole layer${hidden}, ${between}`, pair(percent(a.error.dq), b && percent(b.error.dq)));
}

function probePage(d) {
  const modes = Object.entries(d.modes), heads = d.heads, input = d.input;
  byId("headline").textContent = headline(modes, heads, d);
  byId("facts").textContent = `${input.file ?? "from memory"} — ${input.tokens} tokens, ${input.q_heads} query and ` +
      `${input.kv_heads} key heads of dimension ${input.head_dim}, ${input.causal ? "causal" : "full attention"}, ` +
      `softmax scale ${input.softmax_scale}; ${setup(d)}`;
  keyFigures(modes, heads, d);
  if (d.nonfinite_heads.length > 0) {
    byId("nonfinite").hidden = false;
    byId("nonfinite").textContent =
        `Left out: heads ${d.nonfinite_heads.join(", ")}. Their input holds NaN or infinity.`;
  }
  residualPlot(modes);
  byId("heads-intro").textContent = headsText(modes, d);
  headsPlot(modes, heads);
  byId("heads-table")
      .append(table(
          "Error of dQ", ["head", ...modes.map(([name]) => name)],
          heads.map(
              (head) =>
                  ({name: String(head.head), cells: modes.map(([name]) => percent(head.modes[name]?.error.dq))}))));
  byId("errors-table")
      .append(table(
          "Median residuals, column sums and errors by mode",
          ["mode", "residual", "after cast", "column sum", "O", "dQ", "dK", "dV"], errorRows(modes)));
}

function headsText(modes, d) {
  const known = modes.filter(([, m]) => measured(m.worst_head.dq));
  if (known.length === 0) return "No head could be measured.";
  const parts = known.map(([name, m]) => `${name}: head ${m.worst_head.head}, ${percent(m.worst_head.dq)}`);
  return "A head whose softmax is nearly one-hot has a true dS near zero, and there a wrong δ outweighs it, while the norm " +
      `of the whole layer barely notices. The worst head of each mode, ${parts.join("; ")}.`;
}

function sweepPage(d) {
  byId("facts").textContent = setup(d) + "; medians over rows, then over seeds";
  sweepPlot(d.rows);
  const families = [...new Set(d.rows.map((row) => row.inputs))];
  for (const family of families) {
    const rows = d.rows.filter((row) => row.inputs === family)
                     .map((row) => ({
                            mode: row.mode,
                            name: row.mode,
                            cells: [
                              String(row.spread), scientific(row.residual), scientific(row.residual_after_cast),
                              scientific(row.column_sum), percent(row.error_o), percent(row.error_dq),
                              percent(row.error_dk), percent(row.error_dv)
                            ]
                          }));
    byId("errors-table")
        .append(table(
            family + " inputs", ["mode", "spread", "residual", "after cast", "column sum", "O", "dQ", "dK", "dV"],
            rows));
  }
}

function rowPage(d) {
  const modes = Object.entries(d.modes), [worse, better] = rivals(modes);
  byId("facts").textContent = setup(d);
  if (!worse || !measured(d.modes[worse].share)) return;
  const left = (mode) => percent(Math.abs(d.modes[mode].share));
  byId("headline").textContent = `Of this row of dS the ${worse} δ leaves ${left(worse)} that should cancel` +
      (better && measured(d.modes[better].share) ? `; the ${better} δ, ${left(better)}` : "");
}

const pages = {probe: probePage, sweep: sweepPage, row: rowPage, report: livePage};
pages[report.kind](report.document);
if (report.row) rowSection(report.row);
byId("provenance").textContent = `dmattn ${report.document.version}; ${setup(report.document)}. ` +
    "This page is complete in itself and loads nothing.";
