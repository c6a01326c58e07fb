// Small pictures of numbers, as SVG made by calls. Each has its numbers in words beside it, or as its name.

import { h, svg } from "./dom.js";
import { brief, plain } from "./format.js";

const WIDTH = 560;
const HEIGHT = 150;
const EDGE = { left: 44, right: 10, top: 10, bottom: 22 };

// points: [{x, y, label}] in order; y null: a gap.
export function lineChart(name, points, { unit = "", from = null } = {}) {
  const known = points.filter((point) => point.y !== null && point.y !== undefined);
  if (!known.length) return null;
  const [lowest, highest] = bounds(known.map((point) => point.y));
  let low = from ?? lowest;
  let high = highest;
  if (high - low < 1e-9) { high += 0.5; low -= from === null ? 0.5 : 0; }
  const [first, end] = bounds(points.map((point) => point.x));
  const wide = Math.max(1e-9, end - first);
  const x = (value) => EDGE.left + ((value - first) / wide) * (WIDTH - EDGE.left - EDGE.right);
  const y = (value) => HEIGHT - EDGE.bottom - ((value - low) / (high - low)) * (HEIGHT - EDGE.top - EDGE.bottom);
  const path = known.map((point, n) => `${n ? "L" : "M"}${x(point.x).toFixed(1)} ${y(point.y).toFixed(1)}`).join("");
  const grid = [low, (low + high) / 2, high].map((value) => [
    svg("line.grid", { x1: EDGE.left, x2: WIDTH - EDGE.right, y1: y(value), y2: y(value) }),
    svg("text.tick", { x: EDGE.left - 6, y: y(value) + 4, "text-anchor": "end" }, short(value))]);
  const last = known.at(-1);
  const words = `${name}: ${short(last.y)}${unit} at ${plain(last.label)}, between ${short(lowest)} and ${short(highest)}`;
  return h("figure.chart", h("figcaption", h("b", name), h("span.mono", `${short(last.y)}${unit}`)),
    svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": words }, grid,
      svg("path.line", { d: path }),
      known.length < 60 ? known.map((point) => svg("circle.dot", { cx: x(point.x), cy: y(point.y), r: 2.6 }, svg("title", `${plain(point.label)}: ${short(point.y)}${unit}`))) : null,
      svg("text.tick", { x: EDGE.left, y: HEIGHT - 6 }, plain(points[0].label)),
      svg("text.tick", { x: WIDTH - EDGE.right, y: HEIGHT - 6, "text-anchor": "end" }, plain(points.at(-1).label))));
}

// The smallest and the largest. A call with each value as an argument of its own fails where there are very many.
const bounds = (values) => values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

const short = (value) => (Math.abs(value) >= 1000 ? brief(Math.round(value)) : String(Number(value.toPrecision(3))));

// parts: [{name, value, kind}]: shares of a whole, with their numbers below.
export function shareBar(name, parts, say = brief) {
  const whole = parts.reduce((sum, part) => sum + part.value, 0);
  if (!whole) return null;
  return h("div.share", { role: "group", "aria-label": name },
    h("div.share-bar", { "aria-hidden": "true" }, parts.filter((part) => part.value > 0).map((part) =>
      h(`span.${part.kind}`, { style: { width: `${(100 * part.value) / whole}%` }, title: `${part.name}: ${say(part.value)}` }))),
    h("div.legend", parts.filter((part) => part.value > 0).map((part) =>
      h("span.key", h(`i.${part.kind}`, { "aria-hidden": "true" }), plain(part.name), " ", h("b.mono", say(part.value)),
        h("span.dim", ` ${((100 * part.value) / whole).toFixed(part.value / whole < 0.1 ? 1 : 0)} %`)))));
}
