// The worked row: dS per key under the chosen mode, and what each mode's row sums to.
function rowSection(row) {
  const modes = Object.entries(row.modes).filter(([, m]) => m.d_s.length > 0);
  let chosen = modes.length > 0 ? modes[0][0] : "";
  const cut = row.keys.length < row.row.tokens ? ` The ${row.keys.length} largest entries are drawn.` : "";
  byId("row-intro").textContent =
      `The last query of a random head: ${row.row.tokens} keys, head dimension ${row.row.head_dim}, ` +
      `seed ${row.seed}, ${row.numerics} numerics, real E4M3 codes. Switch between the modes and watch the row sum: ` +
      `the bars themselves hardly move.${cut}`;
  const redraw = plot("plot-row", (width) => rowPicture(row, modes, chosen, width));
  modes.forEach(([name]) => {
    const input = html("input", {type: "radio", name: "mode", value: name});
    input.checked = name === chosen;
    input.addEventListener("change", () => {
      chosen = name;
      redraw();
      readout(row.modes[chosen]);
    });
    byId("mode-switch")
        .append(html("label", {class: `mode-${name}`}, input, html("span", {}, html("i", {class: "key"}), name)));
  });
  if (chosen !== "") readout(row.modes[chosen]);
  splitTable(row.split);
  byId("row-table")
      .append(table(
          "dS for each key, before its cast", ["mode", ...row.keys.map((key) => String(key + 1))],
          modes.map(([name, m]) => ({mode: name, name, cells: m.d_s.map(signed)}))));
}

function readout(mode) {
  const entry = (name, value) => html("div", {}, html("dt", {}, name), html("dd", {}, value));
  byId("row-readout")
      .replaceChildren(
          entry("δ", signed(mode.delta)), entry("sum of positive dS", signed(mode.sum_positive)),
          entry("sum of negative dS", signed(mode.sum_negative)), entry("row sum", scientific(mode.row_sum, 2)),
          entry("share of Σ|dS|", percent(mode.share)));
}

function splitTable(split) {
  if (!measured(split.probability)) return;
  const cell = (value) => ({cells: [scientific(value, 2)]});
  byId("row-split").append(table("Where the stale row sum comes from", ["rounding", "part of the row sum"], [
    {name: "P was rounded in the forward pass", ...cell(split.probability)},
    {name: "dO was rounded for dP but not for δ", ...cell(split.gradient)},
    {name: "O was stored in BF16, and the rest", ...cell(split.remainder)}
  ]));
}

function rowPicture(row, modes, chosen, width) {
  const stacked = width < 680, leftWidth = stacked ? width : Math.round(width * .56), height = 260;
  const sumsTop = stacked ? height + 56 : 0, sumsLeft = stacked ? 0 : leftWidth + 48;
  const total = stacked ? sumsTop + 60 + 44 * modes.length : Math.max(height + 30, 60 + 44 * modes.length);
  const label = modes.map(
      ([name, m]) => `${name}: row sum ${scientific(m.row_sum)}, ${percent(m.share)} of the sum of magnitudes`);
  const drawing = picture(width, total, `dS of one row under ${chosen}. ` + label.join("; ") + ".");
  if (modes.length === 0) return drawing;
  drawing.append(
      rowBars(row, modes, chosen, leftWidth, height), rowSums(modes, chosen, sumsLeft, sumsTop, width - sumsLeft));
  return drawing;
}

function rowBars(row, modes, chosen, width, height) {
  const values = row.modes[chosen].d_s, top = 26;
  const most = Math.max(...modes.flatMap(([, m]) => m.d_s.map(Math.abs)), 1e-30);
  const middle = top + (height - top) / 2, scale = (height - top) / 2 / most, slot = width / values.length;
  const group = svg("g", {class: `mode-${chosen}`}, svg("text", {class: "soft", x: 0, y: 12}, "dS by key"));
  values.forEach((value, i) => {
    const size = Math.max(Math.abs(value) * scale, .75), x = i * slot + slot * .14;
    group.append(
        svg("rect", {class: "bar", x, y: value >= 0 ? middle - size : middle, width: slot * .72, height: size},
            svg("title", {}, `key ${row.keys[i] + 1}: dS ${signed(value)}`)));
    if (slot >= 22) {
      group.append(
          svg("text", {class: "soft", x: (i + .5) * slot, y: height + 18, "text-anchor": "middle"},
              String(row.keys[i] + 1)));
    }
  });
  group.append(svg("line", {class: "axis", x1: 0, x2: width, y1: middle, y2: middle}));
  return group;
}

function rowSums(modes, chosen, left, top, width) {
  const most = Math.max(...modes.map(([, m]) => Math.abs(m.row_sum)), 1e-30);
  const group = svg("g", {}, svg("text", {class: "soft", x: left, y: top + 12}, "what the row sums to"));
  const start = left + 92, room = Math.max(width - 92 - 84, 40);
  const negative = modes.some(([, m]) => m.row_sum < 0), positive = modes.some(([, m]) => m.row_sum > 0);
  const half = negative && positive, zero = half ? start + room / 2 : negative ? start + room : start;
  const scale = (half ? room / 2 : room) / most;
  modes.forEach(([name, m], i) => {
    const y = top + 34 + i * 44, size = Math.max(Math.abs(m.row_sum) * scale, 1.5);
    group.append(
        svg("g", {class: `mode-${name}${name === chosen ? "" : " faded"}`},
            svg("title", {}, `${name}: row sum ${scientific(m.row_sum, 2)}`),
            svg("rect", {class: "bar", x: m.row_sum < 0 ? zero - size : zero, y, width: size, height: 22})),
        svg("text", {x: left, y: y + 16, style: name === chosen ? "font-weight:600" : ""}, name),
        svg("text", {class: "soft", x: start + room + 10, y: y + 16}, scientific(m.row_sum)));
  });
  group.append(svg("line", {class: "axis", x1: zero, x2: zero, y1: top + 26, y2: top + 30 + 44 * modes.length}));
  return group;
}
