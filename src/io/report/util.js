// Small helpers: elements, numbers for people, plots that follow the width of the page.
const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);  // strings become text, never markup
  return element;
}
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const html = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const byId = (id) => document.getElementById(id);

const measured = (value) => typeof value === "number" && Number.isFinite(value);
const digits = (text) => text.replace(/[0-9-]/g, (c) => c === "-" ? "⁻" : "⁰¹²³⁴⁵⁶⁷⁸⁹"[Number(c)]);
const minus = (text) => text.replace("-", "−");

function scientific(value, places = 1) {
  if (!measured(value)) return "–";
  if (value === 0) return "0";
  const [mantissa, exponent] = value.toExponential(places).split("e");
  return minus(mantissa) + "·10" + digits(String(Number(exponent)));
}

function percent(fraction) {
  if (!measured(fraction)) return "–";
  const value = 100 * fraction, size = Math.abs(value);
  if (size !== 0 && size < 0.01) return scientific(value) + "\u202f%";
  const places = size < 10 ? 2 : size < 100 ? 1 : 0;
  return minus(size < 1000 ? value.toFixed(places) : Math.round(value).toLocaleString("en").replace(/,/g, "\u202f")) +
      "\u202f%";
}

// An error beside what it is the error of.
const compared = (error) => error > 2 ? `${error.toFixed(1)} times` : `${percent(error)} of`;

const signed = (value) => measured(value) ? (value < 0 ? "−" : "+") + Math.abs(value).toFixed(4) : "–";

// Draws into a figure's canvas now and whenever its width changes.
function plot(id, draw) {
  const canvas = document.querySelector(`#${id} .canvas`);
  let width = 0;
  const redraw = () => {
    if (canvas.clientWidth === width || canvas.clientWidth === 0) return;
    width = canvas.clientWidth;
    canvas.replaceChildren(draw(width));
  };
  redraw();
  // Not inside the observer: a drawing changes the size that is observed.
  new ResizeObserver(() => requestAnimationFrame(redraw)).observe(canvas);
  return () => canvas.replaceChildren(draw(width));
}

function picture(width, height, label, ...children) {
  return svg("svg", {viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label}, ...children);
}

// One shape per mode, so that colour is never the only sign.
function mark(mode, x, y, size, extra = "") {
  const s = size, attributes = {class: `mark ${extra}`};
  const polygon = (...points) =>
      svg("polygon", {...attributes, points: points.map(([a, b]) => `${x + a},${y + b}`).join(" ")});
  switch (mode) {
    case "stale":
      return svg("circle", {...attributes, cx: x, cy: y, r: s});
    case "consistent":
      return svg("rect", {...attributes, x: x - .9 * s, y: y - .9 * s, width: 1.8 * s, height: 1.8 * s});
    case "matched":
      return polygon([0, -1.3 * s], [1.3 * s, 0], [0, 1.3 * s], [-1.3 * s, 0]);
    case "onepass":
      return polygon([0, -1.2 * s], [1.15 * s, .9 * s], [-1.15 * s, .9 * s]);
    default:
      return polygon([0, 1.2 * s], [1.15 * s, -.9 * s], [-1.15 * s, -.9 * s]);
  }
}

// Whole decades that hold all values; zeros and gaps are left to the caller.
function decades(values) {
  const logs = values.filter((v) => measured(v) && v > 0).map(Math.log10);
  if (logs.length === 0) return [-8, 0];
  const low = Math.floor(Math.min(...logs)), high = Math.ceil(Math.max(...logs) - 1e-9);
  return [low, Math.max(high, low + 1)];
}

function table(caption, header, rows) {
  const cells = (row) => row.cells.map((text) => html("td", {}, text));
  const body = html("tbody", {});
  for (const row of rows)  // one by one: a call takes only so many arguments
    body.append(html(
        "tr", row.mode ? {class: `mode-${row.mode}`} : {},
        html("th", {scope: "row"}, ...(row.mode ? [html("i", {class: "key"})] : []), row.name), ...cells(row)));
  return html(
      "table", {class: "numbers"}, html("caption", {}, caption),
      html("thead", {}, html("tr", {}, ...header.map((text) => html("th", {scope: "col"}, text)))), body);
}
