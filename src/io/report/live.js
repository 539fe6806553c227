// Report page: what a live probe measured, one line for each layer over the steps of a training.
const LIVE_MODE_PANELS = [
  ["residual", "Residual before the cast, root mean square", (m) => m.residual],
  ["after", "Residual after the cast, root mean square", (m) => m.residual_after_cast],
  ["mean", "Residual after the cast, size of the signed mean", (m) => m.mean_after_cast.map(size)],
  ["column", "Column sums of dK after the cast, Σ|Σ dK| / Σ|dK|", (m) => m.column_sum_after_cast],
  ["o", "Error of O, worst head", (m) => m.error.o], ["dq", "Error of dQ, worst head", (m) => m.error.dq],
  ["dk", "Error of dK, worst head", (m) => m.error.dk], ["dv", "Error of dV, worst head", (m) => m.error.dv]
];
const LIVE_MOST_POINTS = 800;

const size = (value) => measured(value) ? Math.abs(value) : null;
const lastMeasured = (values) => values.findLast(measured);

// From the first layer's colour to the last one's.
function depthColour(i, count) {
  const share = count < 2 ? 0 : Math.round(100 * i / (count - 1));
  return `--mode: color-mix(in oklch, var(--stale) ${share}%, var(--matched))`;
}

// As many points as can be told apart, the last one among them.
function thinned(count) {
  const step = Math.max(1, Math.ceil(count / LIVE_MOST_POINTS));
  return Array.from({length: count}, (_, i) => i).filter((i) => (count - 1 - i) % step === 0);
}

// The least value above zero and the largest, 0 where there is none.
function extent(series) {
  let least = Infinity, top = 0;
  for (const [, list] of series) {
    for (const value of list) {
      if (!measured(value) || value <= 0) continue;
      least = Math.min(least, value);
      top = Math.max(top, value);
    }
  }
  return [top > 0 ? least : 0, top];
}

function livePanel(title, id, steps, series, logarithmic) {
  const figure = html(
      "figure", {class: "plot", id}, html("figcaption", {}, title), html("div", {class: "canvas"}));
  byId("live-panels").append(figure);
  const [least, top] = extent(series);
  const [low, high] = logarithmic ? decades([least, top]) : [0, top > 0 ? top : 1];
  const label = series.slice(0, 64).map(([name, list]) => `${name}: ${liveNumber(lastMeasured(list), logarithmic)}`);
  plot(id, (width) => {
    const drawing = picture(width, 300, `${title}. Last values: ${label.join("; ")}.`);
    drawing.append(liveAxes(width, steps, low, high, logarithmic));
    const [x, y] = liveScales(width, steps, low, high, logarithmic);
    series.forEach(([name, list], i) => drawing.append(liveLine(name, list, steps, x, y, depthColour(i, series.length),
                                                               logarithmic)));
    return drawing;
  });
}

const liveNumber = (value, logarithmic) => logarithmic ? scientific(value) : measured(value) ? value.toFixed(3) : "–";

function liveScales(width, steps, low, high, logarithmic) {
  const left = 56, right = 16, top = 14, bottom = 256;
  const first = steps[0] ?? 0, reach = (steps[steps.length - 1] ?? 0) - first;
  const x = (step) => left + (width - left - right) * (reach > 0 ? (step - first) / reach : .5);
  const height = (v) => logarithmic ? (v > 0 ? Math.max(Math.log10(v), low) : low) : v;
  const y = (v) => bottom - (bottom - top) * (height(v) - low) / (high - low);
  return [x, y];
}

function liveAxes(width, steps, low, high, logarithmic) {
  const [x, y] = liveScales(width, steps, low, high, logarithmic);
  const group = svg("g", {});
  const marks = logarithmic ? Array.from({length: high - low + 1}, (_, i) => low + i)
                            : [0, .25, .5, .75, 1].map((share) => share * high);
  const every = logarithmic ? Math.ceil(marks.length / 9) : 1;
  marks.forEach((mark, i) => {
    const value = logarithmic ? 10 ** mark : mark;
    const text = !logarithmic ? mark.toPrecision(2) : mark === 0 ? "1" : "10" + digits(String(mark));
    group.append(svg("line", {class: "grid", x1: 56, x2: width - 16, y1: y(value), y2: y(value)}));
    if (i % every === 0) group.append(svg("text", {class: "soft", x: 48, y: y(value) + 4, "text-anchor": "end"}, text));
  });
  const ends = steps.length > 1 ? [steps[0], steps[steps.length - 1]] : steps;
  ends.forEach((step, i) => group.append(svg(
      "text", {class: "soft", x: x(step), y: 276, "text-anchor": ends.length < 2 ? "middle" : i ? "end" : "start"},
      `step ${step}`)));
  return group;
}

function liveLine(name, list, steps, x, y, colour, logarithmic) {
  const known = thinned(list.length).filter((i) => measured(list[i]));
  const group = svg("g", {style: colour});
  const line = svg("polyline", {class: "line", points: known.map((i) => `${x(steps[i])},${y(list[i])}`).join(" ")});
  const last = known[known.length - 1];
  line.append(svg("title", {}, `${name}: ${liveNumber(list[last], logarithmic)} at step ${steps[last]}`));
  group.append(line);
  if (known.length > 0) group.append(svg("circle", {class: "mark", cx: x(steps[last]), cy: y(list[last]), r: 2.5}));
  return group;
}

function livePanels(d) {
  const modes = [...new Set(d.layers.flatMap((layer) => Object.keys(layer.modes)))];
  modes.forEach((mode, m) => {
    byId("live-panels").append(html("h3", {}, `Mode ${mode}`));
    for (const [id, title, pick] of LIVE_MODE_PANELS) {
      const series = d.layers.filter((layer) => Object.hasOwn(layer.modes, mode))
                         .map((layer) => [layer.layer, pick(layer.modes[mode])]);
      livePanel(title, `live-${m}-${id}`, d.steps, series, true);
    }
  });
  byId("live-panels").append(html("h3", {}, "The model itself"));
  livePanel("Entropy of the attention, nats, mean over rows and heads", "live-entropy", d.steps,
            d.layers.map((layer) => [layer.layer, layer.entropy]), false);
  const gains = d.layers.filter((layer) => layer.gain_share.some(measured));
  if (gains.length > 0) {
    livePanel("Largest share of Σ(g_q g_k)² in one channel of the QK-norms, worst head", "live-gain", d.steps,
              gains.map((layer) => [layer.layer, layer.gain_share]), false);
  }
}

function lastTable(d) {
  const rows = d.layers.flatMap(
      (layer) => Object.entries(layer.modes)
                     .map(([mode, m]) => ({
                            name: layer.layer,
                            mode,
                            cells: [
                              mode, scientific(lastMeasured(m.residual)),
                              scientific(lastMeasured(m.residual_after_cast)),
                              scientific(lastMeasured(m.mean_after_cast)), percent(lastMeasured(m.sharpens)),
                              percent(lastMeasured(m.error.o)), percent(lastMeasured(m.error.dq)),
                              percent(lastMeasured(m.error.dk)), percent(lastMeasured(m.error.dv)),
                              liveNumber(lastMeasured(layer.entropy), false),
                              percent(lastMeasured(layer.gain_share))
                            ]
                          })));
  byId("last-table")
      .append(table(
          "Residuals: root mean square before and after the cast, signed mean after it; rows that are sharpened",
          ["layer", "mode", "rms", "after cast", "mean", "sharpens", "O", "dQ", "dK", "dV", "entropy", "gain"], rows));
}

function livePage(d) {
  const steps = d.steps, names = d.layers.map((layer) => layer.layer);
  byId("headline").textContent =
      steps.length === 1 ? `Attention at step ${steps[0]}` : `Attention from step ${steps[0]} to ${steps[steps.length - 1]}`;
  byId("facts").textContent = `${d.input.file} — ${steps.length} measured steps in ${d.input.runs} ` +
      `${d.input.runs === 1 ? "run" : "runs"}, ${names.length} layers; ${setup(d)}`;
  byId("unfinished").hidden = !d.input.unfinished;
  byId("live-legend").textContent = names.length > 1
      ? `Colours go from ${names[0]} to ${names[names.length - 1]}; the pointer on a line names its layer.`
      : names.length > 0 ? `The layer: ${names[0]}.` : "No layer was measured.";
  livePanels(d);
  byId("channels-table")
      .append(table(
          "Largest mean share first", ["layer", "head", "mode", "channel", "mean share", "consistency", "steps"],
          d.channels.map((one) => ({
                           name: one.layer,
                           cells: [
                             String(one.head), one.mode, String(one.channel), scientific(one.share),
                             liveNumber(one.consistency, false), String(one.steps)
                           ]
                         }))));
  lastTable(d);
  byId("gaps").hidden = d.not_measured.length === 0;
  byId("gaps-table")
      .append(table(
          "By layer and reason", ["layer", "steps", "reason"],
          d.not_measured.map((gap) => ({name: gap.layer, cells: [String(gap.steps), gap.reason]}))));
}
