// Where the artifact comes from, what is different in another one, and the start of the page.

const hex = (text) => el('code', { class: 'digest' }, text);

/** Writes a setting. */
function settingText(value) {
  if (Array.isArray(value)) return value.length > 12 ? `${value.length} values` : value.map(settingText).join(', ');
  if (value === null) return 'none';
  return typeof value === 'object' ? JSON.stringify(value) : String(value);
}

const sectionBytes = (of, name) => computed(of[name], bytes, 'bytes of the tensors');

function pairs(caption, rows) {
  return table(caption, ['What', 'Value'], rows.filter(Boolean));
}

function provenance() {
  const { model, calibration, sections } = data.inspect;
  const number = (pointer, format = count) => shown(`inspect#/${pointer}`, format);
  const windows = model.windows.filter((window) => window !== null);
  const settings = (name) => {
    const { sha256, ...rest } = sections[name];
    return el('div', { class: 'part' }, el('h3', {}, `Section ${name}, `, sectionBytes(data.section_bytes, name)),
      folded('Settings and digests', pairs(`Settings of ${name}`, Object.entries(rest).map(([key, value]) => [key, isNumber(value) ? shown(`inspect#/sections/${name}/${key}`, String) : settingText(value)])),
        pairs(`Digests (sha256) of the tensors of ${name}`, Object.entries(sha256 ?? {}).map(([tensor, digest]) => [tensor, hex(digest)]))));
  };
  fill(byId('provenance'), {}, [
    el('p', { class: 'caption' }, 'The same inputs, seed and machine give the same bytes. Every digest below was checked when this page was made.'),
    pairs('Artifact, model and text', [
      ['File', data.file],
      ['Size', number('file_bytes', bytes)],
      ['Made by', `kvsmith ${data.inspect.tool_version}, on ${data.inspect.device}`],
      ...(model.name ? [['Model', model.name]] : []),
      ['Family', model.model_type],
      ['Layers', number('model/n_layers')],
      ['Query heads', number('model/n_heads')],
      ['KV heads', number('model/n_kv_heads')],
      ['Channels per head', number('model/head_dim')],
      ['Rotary embedding', `${model.rope.rope_type}, theta ${model.rope.theta}`],
      windows.length ? ['Layers with a sliding window', `${windows.length}, of ${unique(windows).map(count).join(', ')} positions`] : null,
      ['Fingerprint of the model', hex(model.fingerprint)],
      ['Calibration text', [things('inspect#/calibration/tokens', 'token'), ' in ', things('inspect#/calibration/blocks', 'block'), ' of at most ', number('calibration/seq_len')]],
      ['Held out', [number('calibration/held_out_tokens'), ' tokens']],
      ['Digest of the token ids', hex(calibration.ids_sha256)],
      ['Seed', number('calibration/seed', String)],
      METHODS ? ['Verdict', [things('inspect#/methods/blocks', 'block'), ' of text, ', things('inspect#/methods/steps', 'decode step'), `, ${METHODS.kv} cache, `, shown('inspect#/methods/sinks', count), ' sinks, a window of ', shown('inspect#/methods/window', count)]] : null,
    ]),
    Object.keys(sections).map(settings),
    data.evals.length ? table('Evaluations', ['File', 'Text', 'Cache', 'kvsmith', 'Device'], data.evals.map(({ file, document }, i) => [file,
      isNumber(document.needles) ? things(`eval${i}#/needles`, 'question') : [things(`eval${i}#/tokens`, 'token'), ' in ', things(`eval${i}#/blocks`, 'block'), ', ', things(`eval${i}#/steps`, 'decode step')],
      document.kv === null ? 'differs by KV head' : document.kv ?? 'not recorded; bf16 assumed', document.version ?? '–', document.device ?? '–'])) : null]);
}

/** Lists the settings that two artifacts do not share. */
function changedSettings(other) {
  const flat = (value, path = '') => (value && typeof value === 'object' && !Array.isArray(value)
    ? Object.entries(value).flatMap(([key, inner]) => (key === 'sha256' ? [] : flat(inner, path ? `${path}.${key}` : key))) : [[path, settingText(value)]]);
  const of = ({ calibration, sections, device, tool_version }) => new Map(flat({ calibration, sections, device, tool_version }));
  const [own, theirs] = [of(data.inspect), of(other)];
  const keys = unique([...own.keys(), ...theirs.keys()]).filter((key) => own.get(key) !== theirs.get(key));
  const short = (text) => (text === undefined ? 'none' : text.length > 40 ? `${text.slice(0, 12)}…` : text);
  return keys.map((key) => [key, short(own.get(key)), short(theirs.get(key))]);
}

/** Compares the losses at the same share of the bytes. */
function changedLosses(other) {
  if (!METHODS || !other.methods) return null;
  const lines = METHODS.rows.flatMap((row, i) => {
    const j = other.methods.rows.findIndex((of) => of.method === row.method && of.reads_target === row.reads_target);
    if (!isNumber(row.kl) || !isNumber(other.methods.rows[j]?.kl)) return [];
    const [a, b] = [`inspect#/methods/rows/${i}`, `against#/methods/rows/${j}`];
    return [[nameOf(row), shown(`${a}/reads_target`, percent), shown(`${a}/kl`, nats), shown(`${b}/kl`, nats), computed(row.kl - other.methods.rows[j].kl, nats, 'first KL − second KL')]];
  });
  return table('KL at equal bytes, nats', ['Method', 'Bytes', data.file, data.against.file, 'Difference'], lines);
}

/** Compares the held-out inertia of the sections that both have, and lists the heads that changed most. */
function changedInertia(other) {
  const rows = new Map(other.rows.map((row, i) => [`${row.section}/${row.layer}/${row.head}`, i]));
  const lines = [];
  const heads = [];
  for (const [section, name] of Object.entries(sectionNames)) {
    const found = data.inspect.rows.map((row, i) => [row, i, rows.get(`${row.section}/${row.layer}/${row.head}`)])
      .filter(([row, , j]) => row.section === section && isNumber(row.held_out_inertia) && isNumber(other.rows[j]?.held_out_inertia));
    if (!found.length) continue;
    const change = ([row, , j]) => (other.rows[j].held_out_inertia > 0 ? row.held_out_inertia / other.rows[j].held_out_inertia : 1);
    const text = 'mean of held_out_inertia over the heads';
    lines.push([name, computed(mean(found.map(([row]) => row.held_out_inertia)), plain, text), computed(mean(found.map(([, , j]) => other.rows[j].held_out_inertia)), plain, text),
      computed(mean(found.map(change)), ratio, 'mean of first / second over the heads')]);
    found.sort((a, b) => Math.abs(Math.log(change(b))) - Math.abs(Math.log(change(a))));
    heads.push(...found.slice(0, 5).map((of) => [`${name}, layer ${of[0].layer}, KV head ${of[0].head}`, shown(`inspect#/rows/${of[1]}/held_out_inertia`), shown(`against#/rows/${of[2]}/held_out_inertia`), computed(change(of), ratio, 'first / second')]));
  }
  if (!lines.length) return null;
  const files = [data.file, data.against.file, 'Ratio'];
  return [table('Held-out inertia, mean over the heads', ['Section', ...files], lines), table('Heads whose held-out inertia differs most', ['Head', ...files], heads)];
}

function differences() {
  if (!data.against) return leaveOut('differences');
  const other = data.against.inspect;
  const settings = changedSettings(other);
  const names = unique([...Object.keys(data.inspect.sections), ...Object.keys(other.sections)]);
  fill(byId('differences'), {}, [
    el('p', { class: 'caption' }, 'What is different in ', el('b', {}, data.against.file), `, beside this artifact, ${data.file}. Held-out numbers compare well only if both held out the same text.`),
    table('Settings that differ', ['Setting', data.file, data.against.file], settings.length ? settings : [['none', '–', '–']]),
    table('Sizes', ['', data.file, data.against.file], [
      ['File', shown('inspect#/file_bytes', bytes), shown('against#/file_bytes', bytes)],
      ...names.map((name) => [`Section ${name}`, sectionBytes(data.section_bytes, name), sectionBytes(data.against.section_bytes, name)])]),
    changedLosses(other) ?? missing('Both artifacts need a verdict, for their losses to be compared:', 'kvsmith verdict ART --model DIR --text FILE -o ART2.safetensors'),
    changedInertia(other)]);
}

/** Unfolds everything while the page is printed. */
function printWhole() {
  let opened = [];
  addEventListener('beforeprint', () => {
    opened = [...document.querySelectorAll('details:not([open])')];
    opened.forEach((of) => { of.open = true; });
  });
  addEventListener('afterprint', () => opened.forEach((of) => { of.open = false; }));
}

function start() {
  const { model } = data.inspect;
  document.title = `kvsmith report: ${model.name ? `${model.name}, ` : ''}${data.file}`;
  byId('subject').append(el('b', {}, data.file), `: ${model.name ? `${model.name}, ` : ''}${model.model_type}, ${count(model.n_layers)} layers, ${count(model.n_heads)} query and ${count(model.n_kv_heads)} KV heads of ${count(model.head_dim)} channels; calibrated on `, ...things('inspect#/calibration/tokens', 'token'));
  [METHODS?.rows.map((row) => row.method), data.evals.flatMap(({ document }) => document.rows.map((row) => row?.method))]
    .flat().filter(Boolean).filter((method) => !isOracle(method)).forEach(styleOf);
  decision();
  frontSection();
  if (sources.length) refresh();
  evaluations();
  mapSection(headSection);
  headSection();
  differences();
  provenance();
  const links = [...document.querySelectorAll('main > section')].map((of) => el('li', {}, el('a', { href: `#${of.id}` }, of.querySelector('h2').textContent)));
  byId('contents').append(...links);
  byId('footer').append(`Made by kvsmith ${data.version}. This file needs no network.`);
  printWhole();
  firstDraws.forEach((draw) => draw());
  document.body.dataset.ready = 'yes';
}

start();
