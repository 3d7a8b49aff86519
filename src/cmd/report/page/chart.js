// Charts with lines: drawn for the width that is there, and again when it changes.

const MARKS = [
  'M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0',
  'M-3.6,-3.6h7.2v7.2h-7.2z',
  'M0,-4.8l4.8,8.4h-9.6z',
  'M0,-5.2l5.2,5.2l-5.2,5.2l-5.2,-5.2z',
  'M0,4.8l4.8,-8.4h-9.6z',
  'M-1.6,-4.8h3.2v3.2h3.2v3.2h-3.2v3.2h-3.2v-3.2h-3.2v-3.2h3.2z',
];
const COLOURS = 10;
const DASHES = ['', '7 3', '2 3'];

/** Returns how a series is drawn. */
function drawn(series) {
  const i = styleOf(series.style ?? series.name);
  return {
    class: series.oracle ? 'oracle' : `colour${i % COLOURS}`,
    mark: MARKS[i % MARKS.length],
    dash: series.oracle ? '3 3' : DASHES[Math.floor(i / COLOURS) % DASHES.length],
  };
}

/** Returns the entry of a series in a legend. */
function legendEntry(series) {
  const { class: name, mark, dash } = drawn(series);
  return el('li', {}, svg('svg', { width: 28, height: 14, 'aria-hidden': 'true', class: name },
    svg('path', { d: 'M0,7h28', class: 'line', 'stroke-dasharray': dash }),
    series.bare ? null : svg('path', { d: mark, transform: 'translate(14 7)', class: 'mark' })), series.name);
}

/** Returns nice ticks of a scale. */
function ticksOf(axis, low, high) {
  if (axis.ticks) return axis.ticks.filter((x) => x >= low * (1 - 1e-9) && x <= high * (1 + 1e-9));
  if (axis.kind === 'log') {
    const ticks = [];
    const decades = Math.log10(high / low);
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e++) {
      const every = decades > 7 ? (e % 2 ? [] : [1]) : decades > 3 ? [1] : decades > 1.2 ? [1, 3] : [1, 2, 3, 5, 7];
      for (const x of every) ticks.push(x * 10 ** e);
    }
    return ticks.filter((x) => x >= low * (1 - 1e-9) && x <= high * (1 + 1e-9)).map((x) => +x.toPrecision(3));
  }
  const span = high - low || 1;
  const unit = 10 ** Math.floor(Math.log10(span / 4));
  const step = [1, 2, 5, 10].map((x) => x * unit).find((x) => span / x <= 6);
  const ticks = [];
  for (let x = Math.ceil(low / step) * step; x <= high + step * 1e-9; x += step) ticks.push(+x.toPrecision(6));
  return ticks;
}

/** Returns the range of an axis, widened a little. A logarithmic one leaves zeros out. */
function rangeOf(axis, values) {
  const usable = values.filter((x) => isNumber(x) && (axis.kind !== 'log' || x > 0));
  let [low, high] = [axis.low ?? Math.min(...usable), axis.high ?? Math.max(...usable)];
  if (!usable.length) [low, high] = axis.kind === 'log' ? [1e-6, 1e-3] : [0, 1];
  if (axis.kind === 'log') {
    const widen = Math.max((high / low) ** 0.06, low === high ? 2 : 1);
    return [axis.low ?? low / widen, axis.high ?? high * widen];
  }
  const widen = 0.06 * (high - low || Math.abs(high) || 1);
  return [axis.low ?? low - widen, axis.high ?? high + widen];
}

/** Returns the function from values to pixels. What a logarithmic axis cannot show lies on its lower end. */
function scaleOf(axis, [low, high], [from, to]) {
  const place = axis.kind === 'log' ? (x) => Math.log(Math.max(x, low)) : (x) => x;
  return (x) => from + ((place(x) - place(low)) / (place(high) - place(low) || 1)) * (to - from);
}

/** Keeps ticks whose labels do not touch. */
function spaced(ticks, position, gap) {
  let last = -Infinity;
  return ticks.filter((tick) => {
    const here = position(tick);
    const fits = Math.abs(here - last) >= gap;
    if (fits) last = here;
    return fits;
  });
}

function axes(chart, place, frame) {
  const { x, y } = chart;
  const { left, right, top, bottom } = frame;
  const xFormat = x.format ?? plain;
  const yFormat = y.format ?? plain;
  const longest = (ticks, format) => Math.max(1, ...ticks.map((tick) => format(tick).length));
  const xTicks = spaced(ticksOf(x, ...frame.xRange), place.x, 7 * longest(ticksOf(x, ...frame.xRange), xFormat) + 8);
  const yTicks = spaced(ticksOf(y, ...frame.yRange), place.y, 18);
  return svg('g', { class: 'axes', 'aria-hidden': 'true' },
    yTicks.map((tick) => [
      svg('path', { d: `M${left},${place.y(tick)}H${right}`, class: 'grid' }),
      svg('text', { x: left - 6, y: place.y(tick) + 4, 'text-anchor': 'end' }, yFormat(tick)),
    ]),
    xTicks.map((tick) => [
      svg('path', { d: `M${place.x(tick)},${bottom}v5`, class: 'tick' }),
      svg('text', { x: place.x(tick), y: bottom + 18, 'text-anchor': 'middle' }, xFormat(tick)),
    ]),
    svg('path', { d: `M${left},${top}V${bottom}H${right}`, class: 'tick' }),
    svg('text', { x: (left + right) / 2, y: bottom + 36, 'text-anchor': 'middle', class: 'title' }, x.title),
    svg('text', { x: 0, y: 12, class: 'title' }, y.title));
}

/** Draws one series. */
function seriesOf(series, place, say) {
  const { class: name, mark, dash } = drawn(series);
  const points = [...series.points].sort((a, b) => a.x - b.x);
  const line = points.map((of, i) => `${i ? 'L' : 'M'}${place.x(of.x).toFixed(1)},${place.y(of.y).toFixed(1)}`).join('');
  const interval = (of) => isNumber(of.low) && isNumber(of.high)
    ? svg('path', { class: 'interval', d: `M${place.x(of.x)},${place.y(of.low)}V${place.y(of.high)}` }) : null;
  const point = (of) => {
    const text = `${series.name}: ${of.text}`;
    const tell = () => say(text);
    return svg('g', { transform: `translate(${place.x(of.x).toFixed(1)} ${place.y(of.y).toFixed(1)})`, class: 'point', onpointerenter: tell, onclick: tell },
      svg('title', {}, text),
      of.chosen ? svg('circle', { r: 9, class: 'ring' }) : null,
      series.bare ? null : svg('path', { d: mark, class: 'mark' }),
      svg('circle', { r: series.bare ? 6 : 11, class: 'target' }));
  };
  return svg('g', { class: series.strong ? `${name} strong` : name },
    svg('path', { d: line, class: 'line', 'stroke-dasharray': dash }), points.map(interval), points.map(point));
}

/** Puts the mark and the name of each series beside the end of its line; names that would touch move down. */
function endNames(all, place, { right, bottom }) {
  const ends = all.map((series) => [place.y([...series.points].sort((a, b) => a.x - b.x).at(-1).y), series]).sort(([a], [b]) => a - b);
  let last = -Infinity;
  return svg('g', { class: 'ends' }, ends.map(([end, series], i) => {
    // The lowest place that leaves room for the names below.
    const lowest = bottom - LINE * (ends.length - i - 1);
    last = Math.max(last + LINE, Math.min(end, lowest));
    const { class: name, mark } = drawn(series);
    return svg('g', { class: series.strong ? `${name} strong` : name },
      svg('path', { d: mark, transform: `translate(${right + 18} ${last})`, class: 'mark' }),
      svg('text', { x: right + 28, y: last + 4 }, series.name));
  }));
}

/** Draws a line across the chart, with a word. */
function guide(of, place, { left, right, top }) {
  const y = place.y(of.y);
  return svg('g', { class: 'guide' }, svg('path', { d: `M${left},${y}H${right}` }),
    svg('text', { x: right - 28, y: y < top + 30 ? y + 14 : y - 5, 'text-anchor': 'end' }, of.text));
}

/** What draws the charts of a new page as soon as they are in it and have a width. */
const firstDraws = [];

/** The height of a line of text, and the width of a letter, in pixels. */
const [LINE, LETTER] = [15, 7.5];

/**
 * Makes a chart: `label` says what it shows, `x` and `y` are axes, `series` have points {x, y, low, high, text}. A series that is
 * `strong` has a thick line. With `ends`, the names of the series stand at the ends of their lines where there is room, else in a legend.
 */
function chart({ label, height = 300, ...of }) {
  const readout = el('p', { class: 'readout', 'aria-live': 'polite' }, 'Point at a mark, or touch it, to read its value.');
  const canvas = el('div', { class: 'canvas' });
  const legend = of.series.length > 1 || of.legend ? el('ul', { class: 'legend' }, of.series.map(legendEntry)) : null;
  const figure = el('figure', { class: 'chart' }, canvas, legend, readout);
  const named = of.series.filter((series) => series.points.length);
  const longest = Math.max(0, ...named.map((series) => series.name.length));
  const all = of.series.flatMap((series) => series.points);
  const guides = of.guides ?? [];
  const xRange = rangeOf(of.x, all.map((p) => p.x));
  const yRange = rangeOf(of.y, [...all.flatMap((p) => [p.y, p.low, p.high]), ...guides.map((g) => g.y)]);
  let before = 0;
  const draw = (width) => {
    if (!width || Math.abs(width - before) < 2) return;
    before = width;
    const yTicks = ticksOf(of.y, ...yRange).map((tick) => (of.y.format ?? plain)(tick).length);
    const atEnds = Boolean(of.ends) && LETTER * longest < width / 4 && LINE * named.length < height - 68;
    if (legend) legend.hidden = atEnds;
    const frame = { left: 14 + 7 * Math.max(2, ...yTicks), right: width - (atEnds ? 40 + LETTER * longest : 22), top: 24, bottom: height - 44, xRange, yRange };
    const place = { x: scaleOf(of.x, xRange, [frame.left + 8, frame.right]), y: scaleOf(of.y, yRange, [frame.bottom, frame.top]) };
    const say = (text) => { readout.textContent = text; };
    canvas.replaceChildren(svg('svg', { viewBox: `0 0 ${width} ${height}`, width, height, role: 'img', 'aria-label': label },
      axes(of, place, frame), of.series.map((series) => seriesOf(series, place, say)), atEnds ? endNames(named, place, frame) : null,
      guides.map((g) => guide(g, place, frame))));
  };
  if (!document.body.dataset.ready) firstDraws.push(() => draw(canvas.clientWidth));
  new ResizeObserver(([entry]) => requestAnimationFrame(() => draw(Math.floor(entry.contentRect.width)))).observe(canvas);
  return figure;
}
