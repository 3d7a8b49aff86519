// What `eval` measured: by length of context, by place in the turn, by block, by turn, and on questions.

/** Lists the rows that belong to this artifact, with their numbers. */
const rowsOf = (document) => document.rows.map((row, i) => [row, i]).filter(([row]) => row && isNumber(row.budget));

/** Names what rows of different methods have in common: a share of the bytes, or a budget. */
function setting(row) {
  if (isNumber(row.reads_target)) return `reads ${percent(row.reads_target)} of the bytes`;
  return `has a budget of ${budgetText(row.budget)}`;
}

/** Returns the name of a row's method; rows of one artifact can have several. */
const nameOf = (row) => (isOracle(row.method) ? `${row.method} (oracle)` : row.method);

/** Makes a chart and a table of the same numbers. `series` have points {x, label, pointer, low, high}, pointers to the numbers. */
function chartAndTable({ caption, label, first, format, x, y, series, height }) {
  const text = (of) => `${of.label}: ${format(at(of.pointer))}`;
  const point = (of) => ({ x: of.x, y: at(of.pointer), low: at(of.low ?? 'inspect#/none'), high: at(of.high ?? 'inspect#/none'), text: text(of) });
  const columns = [...new Map(series.flatMap((of) => of.points).sort((a, b) => a.x - b.x).map((of) => [of.x, of.label])).entries()];
  const cell = (of, x) => {
    const found = of.points.find((p) => p.x === x);
    return found ? shown(found.pointer, format) : '–';
  };
  return [
    el('p', { class: 'caption' }, caption),
    chart({ label, height: height ?? 280, legend: true, x, y,
      series: series.map((of) => ({ ...of, points: of.points.map(point) })) }),
    folded('The same numbers as a table', table(label, [first, ...columns.map(([, text]) => text)],
      series.map((of) => [of.name, ...columns.map(([x]) => cell(of, x))]))),
  ];
}

/** Makes a series per row of a document with a list; `points` turns the list into points. */
function listSeries(document, chosen, key, points) {
  const rows = rowsOf(document.content).filter(([row]) => setting(row) === chosen && row[key]?.length > 1);
  return rows.map(([row, i]) => ({
    name: nameOf(row), style: row.method, oracle: isOracle(row.method),
    points: points(row[key], `${document.name}#/rows/${i}/${key}`),
  }));
}

const klAxis = { title: 'KL, nats (log scale)', kind: 'log', format: nats };

/** Shows a part if it has data, else the command that would give them. */
function part(id, title, content, absent) {
  return el('div', { id, class: 'part' }, el('h3', {}, title), content ?? missing(...absent));
}

// Text that is longer than the model's context says little.
const blockOf = (length) => Math.min(length, data.inspect.model.max_position_embeddings ?? length);
const evalCommand = (flags) => `kvsmith eval --model DIR --artifact ${data.argument} --methods topk,wpq,selfindex ${flags} --json > EVAL.json`;
const again = (what) => `${what} Give the result of this with --eval:`;

/** KL by the length of the context: one document per length. */
function lengths(documents, chosen) {
  const found = documents.filter((of) => !isNumber(of.content.needles));
  const byMethod = new Map();
  for (const of of found) {
    for (const [row, i] of rowsOf(of.content).filter(([row]) => setting(row) === chosen && isNumber(row.kl))) {
      const pointer = `${of.name}#/rows/${i}`;
      const interval = row.intervals?.kl ? { low: `${pointer}/intervals/kl/0`, high: `${pointer}/intervals/kl/1` } : {};
      const length = lengthOf(of.content);
      if (!byMethod.has(row.method)) byMethod.set(row.method, []);
      byMethod.get(row.method).push({ x: length, label: `${count(length)} tokens`, pointer: `${pointer}/kl`, ...interval });
    }
  }
  const series = [...byMethod].map(([method, points]) => ({ name: nameOf({ method }), style: method, oracle: isOracle(method), points }));
  const xs = unique(series.flatMap((of) => of.points.map((p) => p.x)));
  const content = xs.length > 1 ? chartAndTable({
    caption: 'How the loss changes with the length of the context, at the same share of the bytes.',
    label: 'KL by length of the context', first: 'Method', format: nats, series, y: klAxis,
    x: { title: 'tokens per block (log scale)', kind: 'log', format: tokens, ticks: xs },
  }) : null;
  return part('lengths', 'By length of the context', content,
    [again('To see how the loss changes with the length of the context, measure several lengths.'), evalCommand(`--text FILE --seq-len ${blockOf(8192)} --reads 0.1`)]);
}

function positions(document, chosen) {
  const series = document ? listSeries(document, chosen, 'by_position', (spans, pointer) => spans.map((span, i) => (
    { x: i, label: `steps ${span.first} to ${span.last}`, span, pointer: `${pointer}/${i}/kl` }))) : [];
  const spans = series[0]?.points.map((of) => of.span) ?? [];
  const content = series.length ? chartAndTable({
    caption: 'Whether the loss grows while a reply is written: the mean KL by the number of the decode step within its turn.',
    label: 'KL by decode step', first: 'Method', format: nats, series, y: klAxis,
    x: { title: 'decode step within the turn', kind: 'linear', ticks: spans.map((_, i) => i), format: (i) => (spans[i] ? `${spans[i].first}–${spans[i].last}` : '') },
  }) : null;
  return part('positions', 'By decode step', content,
    [again('More than 16 decode steps show whether the loss grows within a reply.'), evalCommand('--text FILE --decode 64 --reads 0.1')]);
}

function blocks(document, chosen) {
  const series = document ? listSeries(document, chosen, 'kl_by_block', (list, pointer) => list.map((_, i) => (
    { x: i, label: `block ${i}`, pointer: `${pointer}/${i}` }))) : [];
  const content = series.length ? chartAndTable({
    caption: 'How much the loss differs from one block of text to the next; blocks are in the order of the text.',
    label: 'KL by block of text', first: 'Method', format: nats, series, y: klAxis, x: { title: 'block of text', kind: 'linear' },
  }) : null;
  return part('blocks', 'By block of text', content,
    [again('Text of several blocks shows how much the loss differs between them.'), evalCommand(`--text FILE --seq-len ${blockOf(4096)} --reads 0.1`)]);
}

function turns(document, chosen) {
  const turn = (i) => ({ x: i + 1, label: `turn ${i + 1}` });
  const series = document ? listSeries(document, chosen, 'by_turn', (list, pointer) => list.map((_, i) => ({ ...turn(i), pointer: `${pointer}/${i}/kl` }))) : [];
  const content = series.length ? chartAndTable({
    caption: 'Whether the loss grows in a long conversation: the mean KL of each turn.',
    label: 'KL by turn', first: 'Method', format: nats, series, y: klAxis,
    x: { title: 'turn', kind: 'linear', ticks: series[0].points.map((of) => of.x) },
  }) : null;
  return part('turns', 'By turn', content,
    [again('Blocks that are cut into turns show whether the loss grows in a conversation.'), evalCommand('--text FILE --turns 4 --reads 0.1')]);
}

/** The score of full attention as a series, under a key of the document. */
const fullSeries = (points) => ({ name: 'full attention', style: 'full', points });

function questionScores(document) {
  const task = (of) => [of.task ?? 'questions', of.length ? `${tokens(of.length)} tokens` : null].filter(Boolean).join(', ');
  const groups = document.content.full_by_task ?? [];
  const score = (of, pointer) => (of ? shown(pointer, percent) : '–');
  const full = ['full attention', '–', '–', shown(`${document.name}#/full_needle_accuracy`, percent), '–',
    ...groups.map((_, i) => shown(`${document.name}#/full_by_task/${i}/accuracy`, percent))];
  const line = ([row, i]) => {
    const pointer = `${document.name}#/rows/${i}`;
    const interval = row.intervals?.needle_accuracy;
    const place = (group) => (row.by_task ?? []).findIndex((of) => of.task === group.task && of.length === group.length);
    return [nameOf(row), shown(`${pointer}/budget`, budgetText), shown(`${pointer}/bytes_read_fraction`, percent),
      shown(`${pointer}/needle_accuracy`, percent),
      interval ? [shown(`${pointer}/intervals/needle_accuracy/0`, percent), ' to ', shown(`${pointer}/intervals/needle_accuracy/1`, percent)] : '–',
      ...groups.map((group) => score(row.by_task?.[place(group)], `${pointer}/by_task/${place(group)}/accuracy`))];
  };
  return table(`Questions answered correctly, of ${count(document.content.needles)}: ${document.file}`,
    ['Method', 'Budget', 'Bytes read', 'Answered', '95% interval', ...groups.map(task)], [full, ...rowsOf(document.content).map(line)]);
}

function questionTurns(document) {
  const turn = (list, pointer) => list.map((_, i) => ({ x: i + 1, label: `turn ${i + 1}`, pointer: `${pointer}/${i}` }));
  const key = 'needle_accuracy_by_turn';
  const full = document.content[`full_${key}`] ?? [];
  if (full.length < 2) return null;
  const rows = rowsOf(document.content).filter(([row]) => row[key]?.length > 1);
  const several = unique(rows.map(([row]) => setting(row))).length > 1;
  const name = (row) => (several ? `${nameOf(row)}, ${setting(row)}` : nameOf(row));
  const series = rows.map(([row, i]) => ({ name: name(row), style: row.method, oracle: isOracle(row.method), points: turn(row[key], `${document.name}#/rows/${i}/${key}`) }));
  return chartAndTable({
    caption: 'The share of questions answered correctly in each turn of a conversation; full attention is what the model itself reaches.',
    label: 'Questions answered by turn', first: 'Method', format: percent, series: [fullSeries(turn(full, `${document.name}#/full_${key}`)), ...series],
    x: { title: 'turn', kind: 'linear', ticks: full.map((_, i) => i + 1) }, y: { title: 'answered correctly', kind: 'linear', low: 0, high: 1, ticks: [0, 0.25, 0.5, 0.75, 1], format: percent },
  });
}

function questions(documents) {
  const found = documents.filter((of) => isNumber(of.content.needles));
  const content = found.map((document) => [questionScores(document), questionTurns(document)]);
  return part('questions', 'Questions', content.length ? [el('p', { class: 'caption' }, 'How many questions about facts in a long text each method answers, beside full attention.'), content] : null,
    [again('Questions whose answer stands in a long text show what is lost in practice.'), evalCommand('--needles FILE.jsonl --reads 0.1')]);
}

function evaluations() {
  const documents = data.evals.map(({ file, document }, i) => ({ file, name: `eval${i}`, content: document }));
  const texts = documents.filter((of) => rowsOf(of.content).some(([row]) => isNumber(row.kl)));
  const box = el('div', {});
  const chosen = { file: texts[0]?.name };
  const settings = (of) => unique(rowsOf(of.content).map(([row]) => setting(row)));
  const update = () => {
    const document = texts.find((of) => of.name === chosen.file);
    const possible = document ? settings(document) : [];
    if (!possible.includes(chosen.setting)) chosen.setting = possible[0];
    const pick = (key) => (value) => { chosen[key] = value; update(); };
    box.replaceChildren(
      document ? el('div', { class: 'controls' },
        texts.length > 1 ? choice('file', 'File', texts.map((of) => [of.name, of.file]), chosen.file, pick('file')) : el('p', { class: 'choice' }, el('span', {}, 'File'), el('b', {}, document.file)),
        choice('setting', 'Compare methods at', possible.map((text) => [text, text]), chosen.setting, pick('setting'))) : '',
      lengths(texts, chosen.setting), positions(document, chosen.setting), blocks(document, chosen.setting),
      turns(document, chosen.setting), questions(documents));
  };
  byId('evaluations').append(box);
  update();
}
