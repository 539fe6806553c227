// Sweep page: residual over spread, one panel for each family of inputs.
function sweepPlot(rows) {
  const families = [...new Set(rows.map((row) => row.inputs))];
  const spreads = [...new Set(rows.map((row) => row.spread))].sort((a, b) => a - b);
  const [low, high] = decades(rows.flatMap((row) => [row.residual, row.residual_after_cast]));
  const label =
      rows.map((row) => `${row.inputs}, spread ${row.spread}, ${row.mode}: ${scientific(row.residual)}`).join("; ");
  plot("plot-residual", (width) => {
    const columns = width < 640 ? 1 : Math.min(families.length, 3), gap = 40;
    const panelWidth = (width - gap * (columns - 1)) / columns, panelHeight = 340;
    const drawing =
        picture(width, Math.ceil(families.length / columns) * panelHeight, "Residual of the row sums. " + label + ".");
    families.forEach((family, i) => {
      const panel = sweepPanel(
          rows.filter((row) => row.inputs === family), family, spreads, low, high, panelWidth, panelHeight - 40);
      panel.setAttribute(
          "transform", `translate(${(i % columns) * (panelWidth + gap)} ${Math.floor(i / columns) * panelHeight})`);
      drawing.append(panel);
    });
    return drawing;
  });
}

function sweepPanel(rows, family, spreads, low, high, width, height) {
  const left = 44, right = 88, top = 34, inner = width - left - right;
  const x = (spread) => left + inner * (spreads.length < 2 ? .5 : spreads.indexOf(spread) / (spreads.length - 1));
  const y = (v) => height - 20 - (height - 20 - top) * (Math.log10(Math.max(v, 10 ** low)) - low) / (high - low);
  const group = svg("g", {}, svg("text", {x: 0, y: 14, style: "font-weight:600"}, family + " inputs"));
  for (let d = low; d <= high; ++d) {
    group.append(
        svg("line", {class: "grid", x1: left, x2: left + inner, y1: y(10 ** d), y2: y(10 ** d)}),
        svg("text", {class: "soft", x: left - 8, y: y(10 ** d) + 4, "text-anchor": "end"},
            d === 0 ? "1" : "10" + digits(String(d))));
  }
  for (const spread of spreads) {
    group.append(svg("text", {class: "soft", x: x(spread), y: height, "text-anchor": "middle"}, String(spread)));
  }
  group.append(
      svg("text", {class: "soft", x: left + inner / 2, y: height + 18, "text-anchor": "middle"}, "spread of q"));
  const ends = [];
  for (const mode of new Set(rows.map((row) => row.mode))) {
    const own = rows.filter((row) => row.mode === mode).sort((a, b) => a.spread - b.spread);
    const series = svg("g", {class: `mode-${mode}`});
    for (const [field, kind] of [["residual_after_cast", "hollow"], ["residual", ""]]) {
      const points = own.filter((row) => measured(row[field]));
      series.append(svg("polyline", {
        class: kind ? "line dashed" : "line",
        points: points.map((row) => `${x(row.spread)},${y(row[field])}`).join(" ")
      }));
      for (const row of points) {
        const dot = mark(mode, x(row.spread), y(row[field]), 4, kind);
        dot.append(
            svg("title", {},
                `${mode}, spread ${row.spread}, ${kind ? "after" : "before"} the cast: ${scientific(row[field])}`));
        series.append(dot);
      }
      if (!kind && points.length > 0) ends.push({mode, y: y(points[points.length - 1][field])});
    }
    group.append(series);
  }
  // Labels at the right end, pushed apart where lines meet.
  ends.sort((a, b) => a.y - b.y);
  ends.forEach((end, i) => {
    if (i > 0) end.y = Math.max(end.y, ends[i - 1].y + 15);
    group.append(svg(
        "g", {class: `mode-${end.mode}`}, svg("text", {class: "named", x: left + inner + 12, y: end.y + 4}, end.mode)));
  });
  return group;
}
