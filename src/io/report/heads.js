// Probe page: dQ's error by head and mode as a heat map, on one logarithmic scale.
function heat(t) {
  const mix = (a, b, part) => `color-mix(in srgb, var(--heat-${b}) ${(100 * part).toFixed(1)}%, var(--heat-${a}))`;
  return t < .5 ? mix("low", "mid", 2 * t) : mix("mid", "high", 2 * t - 1);
}

// Short enough for a cell.
function cellText(value) {
  const v = 100 * value;
  return v >= 9999.5 ? scientific(value, 0) :
      v >= 99.5      ? String(Math.round(v)) :
      v >= 9.95      ? v.toFixed(0) :
                       v.toFixed(1);
}

function headsPlot(modes, heads) {
  const dq = (head, mode) => head.modes[mode]?.error.dq;
  const values = heads.flatMap((head) => modes.map(([name]) => dq(head, name))).filter((v) => measured(v) && v > 0);
  // From what E4M3 alone costs to an error as large as the gradient, so that a harmless layer looks harmless.
  const low = Math.log10(values.reduce((a, b) => Math.min(a, b), .03));
  const high = Math.log10(values.reduce((a, b) => Math.max(a, b), 1));
  const shade = (v) => v > 0 ? (Math.log10(v) - low) / (high - low) : 0;
  const label = "Error of dQ by head. " +
      modes
          .map(
              ([name, m]) => measured(m.worst_head.dq) ?
                  `${name}: worst is head ${m.worst_head.head} with ${percent(m.worst_head.dq)}` :
                  `${name}: not measured`)
          .join("; ") +
      ".";
  plot("plot-heads", (width) => {
    const left = width < 560 ? 82 : 112, room = width - left;
    const cell = Math.max(18, Math.min(74, Math.floor(room / Math.max(heads.length, 1))));
    const perBand = Math.max(1, Math.floor(room / cell)), bands = Math.ceil(heads.length / perBand);
    const row = 38, bandHeight = row * modes.length + 40;
    const drawing = picture(width, bands * bandHeight + 34, label);
    for (let band = 0; band < bands; ++band) {
      const top = band * bandHeight + 22;
      const shown = heads.slice(band * perBand, (band + 1) * perBand);
      shown.forEach((head, i) => {
        if (cell >= 26 || i % 2 === 0) {
          drawing.append(
              svg("text", {class: "soft", x: left + (i + .5) * cell, y: top - 8, "text-anchor": "middle"},
                  String(head.head)));
        }
      });
      if (band === 0) drawing.append(svg("text", {class: "soft", x: 0, y: top - 8}, "query head"));
      modes.forEach(([name, m], k) => {
        const y = top + k * row;
        drawing.append(
            svg("g", {class: `mode-${name}`}, svg("text", {class: "named", x: 0, y: y + row / 2 + 4}, name)));
        shown.forEach(
            (head, i) =>
                drawing.append(headCell(name, m, head, dq(head, name), shade, left + i * cell, y, cell, row)));
      });
    }
    if (values.length > 0) drawing.append(heatLegend(left, bands * bandHeight + 8, Math.min(room, 260), low, high));
    return drawing;
  });
}

function headCell(name, mode, head, value, shade, x, y, cell, row) {
  const known = measured(value), t = known ? shade(value) : 0;
  const group =
      svg("g", {}, svg("title", {}, `head ${head.head}, ${name}: dQ error ${known ? percent(value) : "not measured"}`),
          svg("rect", {class: "cell", x, y, width: cell, height: row, style: `fill:${known ? heat(t) : "none"}`}));
  if (cell >= 34) {
    group.append(
        svg("text", {class: t > .72 ? "value hot" : "value", x: x + cell / 2, y: y + row / 2 + 4},
            known ? cellText(value) : "–"));
  }
  if (head.head === mode.worst_head.head) {
    group.append(svg("rect", {class: "frame", x: x + 2, y: y + 2, width: cell - 4, height: row - 4}));
  }
  return group;
}

function heatLegend(x, y, width, low, high) {
  const steps = 24, group = svg("g", {"aria-hidden": "true"});
  for (let i = 0; i < steps; ++i) {
    group.append(svg(
        "rect",
        {x: x + width * i / steps, y, width: width / steps + .5, height: 8, style: `fill:${heat(i / (steps - 1))}`}));
  }
  const at = (t, anchor) =>
      svg("text", {class: "soft", x: x + t * width, y: y + 24, "text-anchor": anchor},
          percent(10 ** (low + t * (high - low))));
  group.append(at(0, "start"), at(.5, "middle"), at(1, "end"));
  return group;
}
