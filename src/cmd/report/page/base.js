'use strict';
// The data, elements, and numbers that carry their full value.

const data = JSON.parse(document.getElementById('data').textContent);

// The documents that numbers come from, by the first part of a pointer such as `inspect#/methods/rows/3/kl`.
const documents = { inspect: data.inspect };
data.evals.forEach((of, i) => { documents[`eval${i}`] = of.document; });
if (data.against) documents.against = data.against.inspect;

/** Returns the value at a pointer; undefined if there is none. */
function at(pointer) {
  const [name, path] = pointer.split('#');
  let value = documents[name];
  for (const key of path.split('/').slice(1)) value = value?.[key];
  return value;
}

const isNumber = (x) => typeof x === 'number' && Number.isFinite(x);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, '');
    else if (value !== undefined && value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

/** Makes an HTML element. */
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

/** Makes an SVG element. */
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS('http://www.w3.org/2000/svg', tag), attributes, children);

const byId = (id) => document.getElementById(id);

/** Takes a section off the page and out of the contents. */
function leaveOut(id) {
  byId(id).remove();
}

// How numbers are shown.
const plain = (x) => (Math.abs(x) >= 1e4 ? x.toLocaleString('en', { maximumFractionDigits: 0 }) : String(+x.toPrecision(4)));
const nats = (x) => (x === 0 ? '0' : Math.abs(x) < 1e-4 ? x.toExponential(1) : String(+x.toPrecision(3)));
const percent = (x) => `${+(100 * x).toFixed(Math.abs(x) < 0.0995 ? 2 : 1)}%`;
const axisPercent = (x) => `${+(100 * x).toPrecision(2)}%`;
const count = (x) => x.toLocaleString('en');
const ratio = (x) => x.toFixed(3);
const bits = (x) => `${+x.toFixed(1)} bits`;

/** Formats bytes as `inspect` does. */
function bytes(x) {
  if (x >= 1e9) return `${(x / 1e9).toFixed(2)} GB`;
  if (x >= 1e6) return `${(x / 1e6).toFixed(2)} MB`;
  return x >= 1000 ? `${(x / 1e3).toFixed(1)} KB` : `${Math.round(x)} bytes`;
}

/** Formats a budget: a share of the context up to 1, else a number of positions. */
const budgetText = (x) => (x <= 1 ? `${+(100 * x).toFixed(2)}%` : `${count(x)} positions`);

/** Formats a length of context: 4096 as 4K. */
const tokens = (x) => (x >= 1024 && x % 1024 === 0 ? `${x / 1024}K` : count(x));

/** Shows the number at a pointer, with its full value; a dash if there is none. */
function shown(pointer, format = plain) {
  const value = at(pointer);
  if (!isNumber(value)) return el('span', { class: 'none' }, '–');
  return el('span', { class: 'number', 'data-value': value, 'data-from': pointer }, format(value));
}

/** Shows how many things there are, such as `20 blocks`. */
const things = (pointer, thing) => [shown(pointer, count), ` ${thing}${at(pointer) === 1 ? '' : 's'}`];

/** Shows a number that was computed from others; `formula` says how. */
function computed(value, format, formula, id) {
  if (!isNumber(value)) return el('span', { class: 'none' }, '–');
  return el('span', { class: 'number', id, 'data-value': value, 'data-formula': formula, title: formula }, format(value));
}

/** Makes a table in a box that scrolls sideways by itself. The first column is a heading of its row. */
function table(caption, columns, rows) {
  const head = columns.map((title, i) => el('th', { scope: 'col', class: i ? null : 'first' }, title));
  const cell = (value, i) => (i ? el('td', {}, value) : el('th', { scope: 'row' }, value));
  return el('div', { class: 'scroll', tabindex: 0, role: 'region', 'aria-label': caption },
    el('table', {}, el('caption', {}, el('span', {}, caption)), el('thead', {}, el('tr', {}, head)),
      el('tbody', {}, rows.map((row) => el('tr', {}, row.map(cell))))));
}

/** Folds something away under a line. */
const folded = (summary, ...children) => el('details', {}, el('summary', {}, summary), ...children);

/** Makes a labelled choice; `options` are [value, text]. */
function choice(id, label, options, chosen, onchange) {
  const option = ([value, text]) => el('option', { value, selected: String(value) === String(chosen) }, text);
  const select = el('select', { id, onchange: () => onchange(select.value) }, options.map(option));
  return el('label', { class: 'choice', for: id }, el('span', {}, label), select);
}

/** Says which command would give what is missing. */
const missing = (what, command) => el('p', { class: 'missing' }, `${what} `, el('code', {}, command));

const unique = (values) => [...new Set(values)];
const mean = (values) => values.reduce((sum, x) => sum + x, 0) / values.length;
const sizes = data.inspect.model;

// The style of each method: a colour, a mark and a kind of line, so that colour is never the only difference.
const styles = new Map();

/** Returns the number of a name's style; each name keeps its own. */
function styleOf(name) {
  if (!styles.has(name)) styles.set(name, styles.size);
  return styles.get(name);
}
