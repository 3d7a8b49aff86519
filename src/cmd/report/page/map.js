// A map of the heads: one cell per layer and KV head.

const [LAYERS, HEADS] = [sizes.n_layers, sizes.n_kv_heads];
const chosenHead = { layer: 0, head: 0 };

// The rows of `inspect` by section, layer and head: their numbers in the document.
const headRows = {};
data.inspect.rows.forEach((row, i) => {
  const layers = (headRows[row.section] ??= []);
  (layers[row.layer] ??= [])[row.head] = i;
});
const headRow = (section, layer, head) => data.inspect.rows[headRows[section][layer][head]];
const headPointer = (section, layer, head) => `inspect#/rows/${headRows[section][layer][head]}`;

const sectionNames = { a2ats: 'codebook (a2ats)', wpq: 'product quantiser (wpq)' };

/** Returns the inertia on held-out keys, on calibration keys if none were held out, over the variance. */
function unexplained(row) {
  return row.variance > 0 ? (row.held_out_inertia ?? row.inertia) / row.variance : null;
}

// What the methods' maps show; `strong` says which end has the strong colour.
const LOSSES = [
  { id: 'mass', title: 'Attention covered', strong: 'low', format: percent, about: 'the share of the true attention on what the method read; what is missing to 100% is lost' },
  { id: 'recall', title: 'Recall', strong: 'low', format: percent, about: 'the share of the positions with the most attention that the method chose too' },
  { id: 'output_error', title: 'Output error', strong: 'high', format: percent, about: 'how far the output of attention is from that of full attention, relative' },
];

/** Lists where heads were measured per method: the verdict, and files with --per-head. */
function measured() {
  const verdict = (METHODS?.rows ?? []).map((row, i) => [row, i]).filter(([row]) => row.heads);
  const found = verdict.map(([row, i]) => ({
    label: `${row.method} at ${percent(row.bytes_read_fraction)} of the bytes`, oracle: isOracle(row.method),
    usual: i === data.recommended, pointer: (key, layer, head) => `inspect#/methods/rows/${i}/heads/${key}/${layer}/${head}`,
  }));
  data.evals.forEach(({ file, document }, e) => rowsOf(document).filter(([row]) => row.per_head).forEach(([row, i]) => {
    const places = new Map(row.per_head.map((of, place) => [of.layer * HEADS + of.kv_head, place]));
    found.push({ label: `${row.method}, ${setting(row)}, ${file}`, pointer: (key, layer, head) => `eval${e}#/rows/${i}/per_head/${places.get(layer * HEADS + head)}/${key}` });
  }));
  return found;
}

/** Lists the quantities of sections. */
function ofSections() {
  const found = [];
  for (const [section, name] of Object.entries(sectionNames)) {
    if (!headRows[section]) continue;
    const pointer = (key) => (layer, head) => ({ pointer: `${headPointer(section, layer, head)}/${key}` });
    found.push(
      { id: `${section}-share`, title: `Error left by the ${name}`, strong: 'high', format: percent, about: 'the mean squared distance of held-out keys to their codewords, as a share of the variance of the keys: less is better',
        value: (layer, head) => ({ value: unexplained(headRow(section, layer, head)), formula: 'held_out_inertia / variance' }) },
      { id: `${section}-inertia`, title: `Held-out inertia of the ${name}`, strong: 'high', format: plain, about: 'the mean squared distance of held-out keys to their codewords, in the metric of the queries',
        value: pointer('held_out_inertia') },
      { id: `${section}-unused`, title: `Unused codewords of the ${name}`, strong: 'high', format: count, about: 'codewords that no calibration key was assigned to', value: pointer('unused_codewords') });
  }
  if (headRows.lfps) {
    found.push({ id: 'sinks', title: 'Attention on the sinks', strong: 'high', format: percent, about: 'the share of the attention that goes to the first positions, mean over the query heads: such heads have little to gain from an index',
      value: (layer, head) => ({ value: mean(headRow('lfps', layer, head).sink_mean), formula: 'mean of sink_mean' }) });
  }
  return found;
}

/** Shows the number of a cell. */
function cellNumber(cell, format) {
  return cell.pointer ? shown(cell.pointer, format) : computed(cell.value, format, cell.formula);
}
const cellValue = (cell) => (cell.pointer ? at(cell.pointer) : cell.value);

function drawMap(quantity, select) {
  const SIDE = 22;
  const [left, top] = [46, 22];
  const cells = [];
  for (let layer = 0; layer < LAYERS; layer++) for (let head = 0; head < HEADS; head++) cells.push({ layer, head, ...quantity.value(layer, head) });
  const values = cells.map(cellValue).filter(isNumber);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const strength = (x) => (high > low ? (quantity.strong === 'high' ? x - low : high - x) / (high - low) : 0);
  const readout = el('p', { class: 'readout', id: 'map-readout', 'aria-live': 'polite' });
  const textOf = (cell) => {
    const value = cellValue(cell);
    return `layer ${cell.layer}, KV head ${cell.head}: ${isNumber(value) ? quantity.format(value) : 'not measured'}`;
  };
  const say = (cell) => {
    const value = cellValue(cell);
    readout.replaceChildren(`layer ${cell.layer}, KV head ${cell.head}: `, isNumber(value) ? cellNumber(cell, quantity.format) : 'not measured');
  };
  const rect = (cell) => {
    const value = cellValue(cell);
    const isChosen = cell.layer === chosenHead.layer && cell.head === chosenHead.head;
    const choose = () => select(cell.layer, cell.head);
    const move = (event) => {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (event.key === 'Enter' || event.key === ' ') choose();
      else if (step) select(Math.min(Math.max(cell.layer + step[0], 0), LAYERS - 1), Math.min(Math.max(cell.head + step[1], 0), HEADS - 1), true);
      else return;
      event.preventDefault();
    };
    return svg('rect', {
      x: left + cell.layer * SIDE, y: top + cell.head * SIDE, width: SIDE - 2, height: SIDE - 2, rx: 3,
      class: `cell${isChosen ? ' chosen' : ''}${isNumber(value) ? '' : ' none'}`,
      style: isNumber(value) ? `--strength: ${(100 * strength(value)).toFixed(1)}%` : null,
      role: 'button', tabindex: isChosen ? 0 : -1, 'aria-label': textOf(cell), 'aria-pressed': String(isChosen),
      'data-value': isNumber(value) ? value : null, 'data-from': isNumber(value) ? cell.pointer : null, 'data-formula': isNumber(value) ? cell.formula : null,
      onpointerenter: () => say(cell), onfocus: () => say(cell), onclick: choose, onkeydown: move,
    }, svg('title', {}, textOf(cell)));
  };
  // The title needs room too if there are few layers.
  const [width, height] = [Math.max(left + LAYERS * SIDE + 4, 190), top + HEADS * SIDE + 24];
  const every = LAYERS > 12 ? 5 : 1;
  const names = [...Array(LAYERS).keys()].filter((layer) => layer % every === 0);
  const map = svg('svg', { width, height, viewBox: `0 0 ${width} ${height}`, role: 'group', 'aria-label': `${quantity.title} by layer and KV head` },
    [...Array(HEADS).keys()].map((head) => svg('text', { x: left - 6, y: top + head * SIDE + 15, 'text-anchor': 'end' }, head)),
    names.map((layer) => svg('text', { x: left + layer * SIDE + 10, y: top + HEADS * SIDE + 14, 'text-anchor': 'middle' }, layer)),
    svg('text', { x: 0, y: 12, class: 'title' }, 'KV head (down), layer (across)'), cells.map(rect));
  const chosen = cells.find((cell) => cell.layer === chosenHead.layer && cell.head === chosenHead.head);
  if (chosen) say(chosen);
  const ends = quantity.strong === 'high' ? [low, high] : [high, low];
  const heads = [...Array(HEADS).keys()];
  const rows = () => [...Array(LAYERS).keys()].map((layer) => [String(layer), ...heads.map((head) => cellNumber(quantity.value(layer, head), quantity.format))]);
  return [
    el('p', { class: 'caption' }, `${quantity.title}: ${quantity.about}. Choose a cell to see its head below.`),
    el('div', { class: 'scroll map', role: 'region', 'aria-label': 'map of the heads' }, map),
    el('p', { class: 'scale' }, values.length ? ends.map((x, i) => [i ? el('span', { class: 'ramp', 'aria-hidden': 'true' }) : null, computed(x, quantity.format, 'minimum or maximum over the heads')]) : 'not available'), readout,
    folded('The same numbers as a table', table(`${quantity.title} by layer and KV head`, ['Layer', ...heads.map((head) => `Head ${head}`)], rows())),
  ];
}

function mapSection(onselect) {
  const methods = measured();
  const quantities = ofSections();
  if (!methods.length && !quantities.length) return leaveOut('map');
  if (methods.length) quantities.unshift(...LOSSES.map((of) => ({ ...of, method: true })));
  const box = el('div', { id: 'map-box' });
  const usual = methods.findIndex((of) => of.usual);
  const chosen = { quantity: quantities[0].id, method: Math.max(usual, 0) };
  const quantity = () => {
    const found = quantities.find((of) => of.id === chosen.quantity);
    if (!found.method) return found;
    const { pointer, label } = methods[chosen.method];
    return { ...found, title: `${found.title}, ${label}`, value: (layer, head) => ({ pointer: pointer(found.id, layer, head) }) };
  };
  const update = (focus) => {
    box.replaceChildren(
      el('div', { class: 'controls' },
        choice('quantity', 'Quantity', quantities.map((of) => [of.id, of.title]), chosen.quantity, (value) => { chosen.quantity = value; update(); }),
        quantities.find((of) => of.id === chosen.quantity).method
          ? choice('map-method', 'Method', methods.map((of, i) => [i, of.label]), chosen.method, (value) => { chosen.method = +value; update(); }) : null),
      ...drawMap(quantity(), select));
    if (focus) box.querySelector('.chosen')?.focus();
  };
  const select = (layer, head, focus = true) => {
    Object.assign(chosenHead, { layer, head });
    const { scrollLeft } = box.querySelector('.map');
    update(focus);
    box.querySelector('.map').scrollLeft = scrollLeft;
    onselect();
  };
  byId('map').append(box);
  if (!METHODS) byId('map').append(missing('What methods lose in each head is measured by', `kvsmith verdict ${data.argument} --model DIR --text FILE -o ART2.safetensors`));
  selectHead = select;
  update();
}

/** Chooses a head; the map replaces this by what redraws it too. */
let selectHead = (layer, head) => { Object.assign(chosenHead, { layer, head }); headSection(); };
