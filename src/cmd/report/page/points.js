// What each method lost at each share of the bytes, and which one is enough.

const METHODS = data.inspect.methods;
const bare = (method) => method.replace(/\+tail$/, '');
const isOracle = (method) => bare(method) === data.oracle;
const isFull = (method) => bare(method) === 'full';

/** Tells whether a row may be recommended: it was measured on all blocks, and passed the probe if there was one. */
function isUsable(row, { limits, probed }) {
  if (row.dropped_after) return false;
  return !(limits && probed) || (row.probe !== undefined && row.probe.interval[1] <= limits.points);
}

/**
 * Lists the rows of a document that have a loss as points. Of a verdict with limits, the upper ends of the intervals count
 * (`most`); of an evaluation, the means.
 */
function pointsOf(rows, pointer, about) {
  return rows.flatMap((row, i) => (row && isNumber(row.kl) && isNumber(row.budget) && isNumber(row.bytes_read_fraction) ? [{
    ...about,
    method: row.method,
    oracle: isOracle(row.method),
    read: row.bytes_read_fraction,
    target: row.reads_target,
    kl: row.kl,
    budget: row.budget,
    interval: row.intervals?.kl,
    most: about.limits ? row.intervals?.kl[1] ?? row.kl : row.kl,
    usable: isUsable(row, about),
    dropped: row.dropped_after !== undefined,
    probe: row.probe,
    indexBits: row.index_bits_per_token,
    constant: row.constant_bytes ?? data.serving.constant_bytes[row.method] ?? 0,
    pointer: `${pointer}/${i}`,
  }] : []));
}

/** Returns the tokens of the longest block; older documents tell them only of all blocks together. */
const lengthOf = (document) => document.longest_block ?? Math.floor(document.tokens / Math.max(document.blocks, 1));

/** Lists what the points can be taken from. */
function listSources() {
  const sources = [];
  if (METHODS) {
    const { kv, sinks, window } = METHODS;
    const points = pointsOf(METHODS.rows, 'inspect#/methods/rows', { source: 'verdict', kv, sinks, window, limits: METHODS.limits ?? { points: Infinity }, probed: Boolean(METHODS.probe) });
    sources.push({ id: 'verdict', label: 'text that nothing was fitted to', points, rows: METHODS.rows, pointer: 'inspect#/methods/rows' });
  }
  data.evals.forEach(({ file, document }, i) => {
    // The KV heads of a head plan may have caches of different types.
    if (document.kv === null) return;
    const [sinks, window] = [document.sinks ?? data.static_set[0], document.window ?? data.static_set[1]];
    const pointer = `eval${i}#/rows`;
    const points = pointsOf(document.rows, pointer, { source: file, kv: document.kv ?? 'bf16', sinks, window });
    const label = `${file} (blocks of ${count(lengthOf(document))} tokens)`;
    if (points.length) sources.push({ id: `eval${i}`, label, points, rows: document.rows, pointer });
  });
  if (sources.length > 1) {
    const points = sources.flatMap((of) => of.points);
    sources.push({ id: 'all', label: 'everything together', points });
  }
  return sources;
}

const sources = listSources();
const { contexts } = data.serving;
const state = { source: sources[0]?.id, limit: data.usual_kl, context: contexts.filter((n) => n <= 32768).at(-1) ?? contexts[0] };
const source = () => sources.find((of) => of.id === state.source);

/**
 * Finds, among the usable points that lost at most `limit`, the point that lost least at the smallest target of bytes
 * read: the rule of `inspect` and `run`. A point without a target counts with what it read.
 */
function within(points, limit) {
  const enough = points.filter((of) => !of.oracle && !isFull(of.method) && of.usable && of.most <= limit);
  const cost = (of) => of.target ?? of.read;
  return enough.reduce((a, b) => (a && (cost(a) < cost(b) || (cost(a) === cost(b) && a.kl <= b.kl)) ? a : b), null);
}

/** Finds the point that lost least. */
function leastLoss(points) {
  const own = points.filter((of) => !of.oracle && !isFull(of.method) && !of.dropped);
  return own.reduce((a, b) => (a && a.kl <= b.kl ? a : b), null);
}

/** Counts the positions that all layers see at the chosen context. */
const visible = () => data.serving.visible[contexts.indexOf(state.context)];

/** Returns the bytes of a run at the chosen context. */
function costs(point) {
  const cache = visible() * data.serving.position_bytes[point.kv];
  const index = (point.indexBits / 8) * visible() * sizes.n_kv_heads + point.constant;
  return { cache, index, read: cache * point.read };
}

/** Writes the command that runs a point. */
function runLine(point) {
  const usual = point.sinks === data.static_set[0] && point.window === data.static_set[1];
  return ['kvsmith run --model DIR', `--artifact ${data.argument}`, `--method ${bare(point.method)}`,
    point.method.endsWith('+tail') ? '--tail' : null, `--budget ${point.budget}`, `--kv ${point.kv}`,
    usual ? null : `--sinks ${point.sinks} --window ${point.window}`, '--prompt-file prompt.txt',
  ].filter(Boolean).join(' ');
}

/** Copies a text; where the browser does not allow that, it selects it. */
async function copy(text, node, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = 'Copied';
  } catch {
    getSelection().selectAllChildren(node);
    button.textContent = 'Selected: press Ctrl+C';
  }
  setTimeout(() => { button.textContent = 'Copy'; }, 2000);
}

/** Tells how far the loss may be from that of other text. */
function intervalText({ interval, pointer }) {
  const [name] = pointer.split('#');
  const steps = name === 'inspect' ? 'inspect#/methods' : `${name}#`;
  if (!interval) return [' (mean over ', things(`${steps}/steps`, 'step'), ' of ', things(`${steps}/blocks`, 'block'), ': too few blocks for an interval)'];
  return [' (95% interval up to ', shown(`${pointer}/intervals/kl/1`, nats), ')'];
}

/** Tells in how many of the measured steps the most probable token changes. */
function changesText({ pointer }) {
  const same = at(`${pointer}/top1_equal`);
  if (!isNumber(same)) return [];
  return ['. The most probable token changes in ', computed(1 - same, percent, '1 - top1_equal'), ' of the steps'];
}

/** Shows what to use for the chosen loss and context. */
function answer() {
  const { points } = source();
  const found = within(points, state.limit);
  const point = found ?? leastLoss(points);
  if (!point) return el('p', { id: 'answer-none' }, 'Only the oracle or full attention was measured here; neither can be recommended.');
  const { cache, index, read } = costs(point);
  const line = runLine(point);
  const code = el('code', { id: 'run-line' }, line);
  const button = el('button', { type: 'button', onclick: () => copy(line, code, button) }, 'Copy');
  const item = (term, ...value) => el('div', {}, el('dt', {}, term), el('dd', {}, ...value.flat()));
  return [
    el('p', { class: found ? 'verdict' : 'verdict warn', id: 'answer-text' }, found
      ? ['For a KL of at most ', computed(state.limit, nats, 'the slider'), ' nats, use ', el('strong', { id: 'answer-method' }, point.method), '.']
      : ['No method that was measured has a KL of at most ', computed(state.limit, nats, 'the slider'), ' nats. The one that loses least is ', el('strong', { id: 'answer-method' }, point.method), '.']),
    el('dl', { class: 'tiles' },
      item('Loss', shown(`${point.pointer}/kl`, nats), ' nats of KL', intervalText(point), changesText(point)),
      item('Bytes', shown(`${point.pointer}/bytes_read_fraction`, percent), ' of what full attention reads: ', computed(read, bytes, 'share of the bytes × bytes of the cache at this context', 'answer-read'),
        ' instead of ', computed(cache, bytes, 'bytes of the cache at this context', 'answer-full'), ' per token'),
      item('Time', data.timed.includes(point.method)
        ? ['depends on the machine: ', el('code', {}, `kvsmith bench decode --model DIR --context ${state.context} --kv ${point.kv} --methods full,${point.method} --budget ${point.budget}`), ' measures it']
        : 'is not known: no benchmark times this method')),
    el('dl', { class: 'facts' },
      item('Budget', shown(`${point.pointer}/budget`, budgetText), point.budget <= 1 ? ' of the context' : ''),
      point.probe ? item('Questions', shown(`${point.pointer}/probe/accuracy`, percent), ' answered, ', shown('inspect#/methods/probe/full_accuracy', percent), ' by full attention') : null,
      item('Memory', computed(cache, bytes, 'bytes of the cache at this context', 'answer-cache'), ` of cache (${point.kv}), `,
        computed(index, bytes, 'bits of the index × positions × KV heads + bytes of the section', 'answer-index'), ' of index')),
    el('div', { class: 'command' }, el('pre', {}, code), button),
    el('p', { class: 'note' }, 'DIR is the folder of the model. Bytes are those of attention in all layers; the weights come on top. ',
      'The share of the bytes is the measured one. In shorter contexts, the index is a larger share.'),
  ];
}

function refresh() {
  byId('answer').replaceChildren(...[answer()].flat());
  byId('limit-value').replaceChildren(computed(state.limit, nats, 'the slider', 'limit'));
  byId('front-chart').replaceChildren(front());
  byId('front-table').replaceChildren(...frontTables());
}

/** Returns the slider's place for a loss, and the loss for a place: two digits. */
const placeOf = (limit) => Math.log10(limit).toFixed(2);
const limitOf = (place) => +(10 ** place).toPrecision(2);

function decision() {
  const section = byId('decision');
  if (!sources.length) {
    section.append(missing('No loss was measured yet. This measures what each method loses on the held-out text:',
      `kvsmith verdict ${data.argument} --model DIR --text FILE -o ART2.safetensors`));
    return;
  }
  const largest = Math.max(...sources.flatMap((of) => of.points.map((point) => point.kl)), 1);
  const set = (limit) => { state.limit = limit; slider.value = placeOf(limit); refresh(); };
  const slider = el('input', {
    type: 'range', id: 'slider', min: -4, max: Math.min(2, Math.ceil(Math.log10(largest))), step: 0.01, value: placeOf(state.limit),
    'aria-describedby': 'slider-help', oninput: () => { state.limit = limitOf(+slider.value); refresh(); },
  });
  const preset = (limit) => el('button', { type: 'button', onclick: () => set(limit) }, `${limit}`);
  section.append(
    el('div', { class: 'controls' },
      el('label', { class: 'wide', for: 'slider' }, el('span', {}, 'Acceptable loss: a KL of at most ', el('output', { id: 'limit-value', for: 'slider' }), ' nats'), slider),
      el('p', { class: 'presets' }, 'Presets: ', data.losses.map((limit) => [preset(limit), ' '])),
      choice('context', 'Context', contexts.map((n) => [n, `${tokens(n)} tokens`]), state.context,
        (value) => { state.context = +value; refresh(); }),
      sources.length > 1 ? choice('source', 'Measured on', sources.map((of) => [of.id, of.label]), state.source,
        (value) => { state.source = value; refresh(); }) : null),
    el('p', { class: 'note', id: 'slider-help' },
      'KL measures how much the distribution of the next token changes compared with full attention: 0 is no change. By itself, ',
      el('code', {}, 'run'), ` accepts up to ${data.usual_kl} nats, at the upper end of the interval if there is one.`),
    el('div', { id: 'answer', class: 'answer', 'aria-live': 'polite' }));
}

/** Draws KL against the share of the bytes. */
function front() {
  const { points } = source();
  const found = within(points, state.limit);
  const named = (of) => (state.source === 'all' ? `${of.method}, ${of.source}` : of.method);
  const text = (of) => `KL ${nats(of.kl)} nats${of.interval ? ` (${nats(of.interval[0])} to ${nats(of.interval[1])})` : ''}, reads ${percent(of.read)}, budget ${budgetText(of.budget)}`;
  const own = points.filter((of) => !isFull(of.method));
  const series = unique(own.map(named)).map((name) => {
    const members = own.filter((of) => named(of) === name);
    const { oracle } = members[0];
    return {
      name: oracle ? `${name} (oracle)` : name, style: name, oracle, strong: members.includes(found),
      points: members.map((of) => ({ x: of.read, y: of.kl, low: of.interval?.[0], high: of.interval?.[1], text: text(of), chosen: of === found })),
    };
  });
  return chart({
    label: `KL against the share of the bytes read, for ${series.map((of) => of.name).join(', ')}; the numbers are in the table below`,
    height: 380, series, legend: true, ends: true,
    x: { title: 'share of the bytes read (log scale)', kind: 'log', format: (x) => `${+(100 * x).toPrecision(3)}%`, ticks: [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1] },
    y: { title: 'KL, nats (log scale)', kind: 'log', format: nats },
    guides: [{ y: state.limit, text: `your limit: ${nats(state.limit)}` }],
  });
}

/** Lists the numbers of a source. */
function frontTable(of) {
  const order = of.rows.map((row, i) => [row, i]).filter(([row]) => row && !isNumber(row.needle_accuracy));
  order.sort(([a], [b]) => (a.reads_target ?? 0) - (b.reads_target ?? 0) || (a.kl ?? Infinity) - (b.kl ?? Infinity));
  const line = ([row, i]) => {
    const cell = (key, format) => shown(`${of.pointer}/${i}/${key}`, format);
    const interval = row.intervals?.kl ? [cell('intervals/kl/0', nats), ' to ', cell('intervals/kl/1', nats)] : '–';
    const name = isOracle(row.method) ? `${row.method} (oracle)` : row.method;
    if (!isNumber(row.kl)) {
      const least = isNumber(row.reads_sample) ? cell('reads_sample', percent) : cell('bytes_read_fraction', percent);
      return [name, '–', ['at least ', least], ...Array(8).fill('–')];
    }
    return [name, cell('budget', budgetText), cell('bytes_read_fraction', percent), cell('kl', nats), interval,
      cell('kl_median', nats), cell('kl_p99', nats), cell('top1_equal', percent), cell('recall', percent), cell('mass', percent),
      cell('index_bits_per_token', bits)];
  };
  return table(`Measured on ${of.label}`, ['Method', 'Budget', 'Bytes read', 'KL, nats', '95% interval', 'KL median', 'KL 99th percentile',
    'Same top token', 'Recall', 'Attention covered', 'Index per key'], order.map(line));
}

/** Lists what full attention lost over caches of other types, and the bytes of such a cache at the chosen context. */
function cacheTable() {
  const line = ({ kv, kl, intervals }, i) => {
    const cell = (key, format) => shown(`inspect#/methods/formats/${i}/${key}`, format);
    const size = visible() * data.serving.position_bytes[kv];
    return [kv, cell('size_fraction', percent), computed(size, bytes, 'bytes of a position × positions in all layers'), cell('kl', nats),
      intervals ? [cell('intervals/kl/0', nats), ' to ', cell('intervals/kl/1', nats)] : '–', cell('kl_p99', nats), cell('top1_equal', percent)];
  };
  return table('Full attention over caches of other types (the verdict)', ['Type (--kv)', 'Share of bf16', `At ${tokens(state.context)} tokens`, 'KL, nats', '95% interval',
    'KL 99th percentile', 'Same top token'], METHODS.formats.map(line));
}

/** Lists the tables under the chart. */
function frontTables() {
  const losses = (state.source === 'all' ? sources.filter((of) => of.rows) : [source()]).map(frontTable);
  return METHODS?.formats ? [...losses, cacheTable()] : losses;
}

function frontSection() {
  if (!sources.length) return leaveOut('front');
  byId('front').append(
    el('p', { class: 'caption' }, 'Each mark is one method at one budget. Down: less loss. Left: fewer bytes read, index included. The thick line and the ring are the recommendation above; bars are 95% intervals, where there are enough blocks of text for them. More bytes can lose more where few steps were measured.'),
    el('div', { id: 'front-chart' }),
    folded('The same numbers as a table', el('div', { id: 'front-table' })));
}
