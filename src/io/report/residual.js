// Probe page: the residual of every mode on one logarithmic axis, before and after the cast of dS.
function residualPlot(modes) {
  const all = modes.flatMap(([, m]) => [...Object.values(m.residual), ...Object.values(m.residual_after_cast)]);
  const [low, high] = decades(all);
  const describe = modes.map(
      ([name, m]) =>
          `${name}: ${scientific(m.residual.median)}, after the cast ${scientific(m.residual_after_cast.median)}`);
  plot("plot-residual", (width) => {
    const left = width < 560 ? 86 : 112, right = width < 560 ? 16 : 96, lane = 62, top = 34;
    const bottom = top + lane * modes.length;
    const step = (width - left - right) / (high - low) < 46 ? 2 : 1;
    const x = (v) => left + (width - left - right) * (Math.max(Math.log10(v), low) - low) / (high - low);
    const drawing =
        picture(width, bottom + 44, "Residual of the row sums, median over rows. " + describe.join("; ") + ".");
    for (let d = low; d <= high; ++d) {
      const at = left + (width - left - right) * (d - low) / (high - low);
      drawing.append(svg("line", {class: "grid", x1: at, x2: at, y1: top, y2: bottom}));
      if ((d - low) % step === 0) {
        drawing.append(
            svg("text", {class: "soft", x: at, y: bottom + 18, "text-anchor": "middle"},
                d === 0 ? "1" : "10" + digits(String(d))));
      }
    }
    drawing.append(
        residualLegend(left),
        ...(right > 60 ? [svg("text", {class: "soft", x: width - right + 18, y: 14}, "median")] : []));
    drawing.append(svg("text", {class: "soft", x: left, y: bottom + 38}, "|Σ dS| / Σ|dS|, a share of the row’s size"));
    modes.forEach(([name, m], i) => {
      const y = top + lane * (i + .5);
      const group = svg("g", {class: `mode-${name}`}, svg("text", {class: "named", x: 0, y: y + 5}, name));
      residualMarks(group, name, m.residual, x, y - 11, "");
      residualMarks(group, name, m.residual_after_cast, x, y + 12, "hollow");
      if (right > 60) {
        group.append(
            svg("text", {class: "soft", x: width - right + 18, y: y - 7}, scientific(m.residual.median)),
            svg("text", {class: "soft", x: width - right + 18, y: y + 16}, scientific(m.residual_after_cast.median)));
      }
      drawing.append(group);
    });
    return drawing;
  });
}

function residualLegend(left) {
  const entry =
      (x, kind, text) => [mark("stale", x + 5, 10, 4.5, kind), svg("text", {class: "soft", x: x + 17, y: 14}, text)];
  return svg(
      "g", {style: "--mode: var(--soft)"}, ...entry(left, "", "as computed"),
      ...entry(left + 112, "hollow", "after the cast"));
}

function residualMarks(group, name, statistic, x, y, kind) {
  const {median, p95, max} = statistic;
  if (!measured(median)) return;
  const what = kind === "" ? "before the cast" : "after the cast";
  const marks =
      svg("g", {},
          svg("title", {},
              `${name}, ${what}: median ${scientific(median)}, 95 % of rows below ${scientific(p95)}, worst ${
                  scientific(max)}`));
  marks.append(
      svg("line", {class: "reach", x1: x(median), x2: x(max), y1: y, y2: y}),
      svg("line", {class: "range", x1: x(median), x2: x(p95), y1: y, y2: y}),
      svg("line", {class: "reach", x1: x(max), x2: x(max), y1: y - 5, y2: y + 5}), mark(name, x(median), y, 5, kind));
  group.append(marks);
}
