// One head: the spectrum of its queries, how its attention falls with distance, and how its codebook converged.

const hasHeads = ['a2ats', 'wpq', 'lfps'].some((section) => headRows[section]);

/** The eigenvalues of the second moment of the queries. */
function spectrum(layer, head) {
  const found = Object.keys(sectionNames).filter((section) => data.spectra[section]?.[layer][head]);
  if (!found.length) return null;
  const series = found.map((section) => ({
    name: sectionNames[section], style: section,
    points: data.spectra[section][layer][head].shares.map((y, i) => ({ x: i + 1, y, text: `eigenvalue ${i + 1} has ${percent(y)} of the sum` })).filter((of) => of.y > 0),
    bare: true,
  }));
  const held = (section, i) => computed(data.spectra[section][layer][head].held[i], count, `eigenvalues that make up ${[90, 99][i]}% of the sum`);
  return el('div', { class: 'part' }, el('h3', {}, 'Directions that queries use'),
    el('p', { class: 'caption' }, 'The eigenvalues of the second moment of the queries, as shares of their sum. A steep fall means that few directions of a key decide its score, so that a short code can tell keys apart.'),
    chart({ label: `Spectrum of the queries of layer ${layer}, KV head ${head}`, series, legend: true, height: 260,
      x: { title: 'eigenvalue, largest first', kind: 'linear' }, y: { title: 'share of the sum (log scale)', kind: 'log', format: axisPercent } }),
    table('Directions that hold most of the second moment', ['Section', 'for 90%', 'for 99%', 'of'],
      found.map((section) => [sectionNames[section], held(section, 0), held(section, 1), count(sizes.head_dim)])));
}

/** How attention falls with distance. */
function slash(layer, head) {
  const density = data.slash?.density[layer][head];
  if (!density?.length) return null;
  const { first } = data.slash;
  const points = density.map((y, i) => ({ x: first[i] + 1, y, text: `at ${count(first[i])} positions back a position gets ${nats(y)} of the attention` })).filter((of) => of.y > 0);
  return el('div', { class: 'part' }, el('h3', {}, 'Attention by distance'),
    el('p', { class: 'caption' }, 'The share of the attention that one position gets, by how far it lies behind the query (0 is the query’s own position); mean over the query heads, without the first four positions. A flat line means that far positions matter as much as near ones.'),
    chart({ label: `Attention by distance of layer ${layer}, KV head ${head}`, height: 260, series: [{ name: 'attention of one position', style: 'lfps', points, bare: true }],
      x: { title: 'distance to the query + 1, in positions (log scale)', kind: 'log', format: (x) => count(x) }, y: { title: 'share per position (log scale)', kind: 'log', format: axisPercent } }));
}

/** How the codebook converged. */
function convergence(layer, head) {
  const history = headRows.a2ats && headRow('a2ats', layer, head).inertia_history;
  if (!history?.length) return null;
  const pointer = (i) => `${headPointer('a2ats', layer, head)}/inertia_history/${i}`;
  return el('div', { class: 'part' }, el('h3', {}, 'Convergence of the codebook'),
    el('p', { class: 'caption' }, 'The mean squared distance of calibration keys to their codewords after each pass of k-means; pass 0 is the seeding. A line that is flat at its end means that more passes would not help.'),
    chart({ label: `Inertia by pass of layer ${layer}, KV head ${head}`, height: 240, x: { title: 'pass', kind: 'linear' }, y: { title: 'inertia', kind: 'linear' },
      series: [{ name: 'inertia', style: 'a2ats', points: history.map((y, i) => ({ x: i, y, text: `${plain(y)} after pass ${i}` })) }] }),
    folded('The same numbers as a table', table('Inertia by pass', ['Pass', 'Inertia'], history.map((_, i) => [String(i), shown(pointer(i))]))));
}

/** The numbers of the head's sections. */
function headFacts(layer, head) {
  const rows = [];
  for (const [section, name] of Object.entries(sectionNames)) {
    if (!headRows[section]) continue;
    const cell = (key, format) => shown(`${headPointer(section, layer, head)}/${key}`, format);
    const row = headRow(section, layer, head);
    rows.push([name, cell('inertia'), cell('held_out_inertia'), cell('variance'), computed(unexplained(row), percent, 'held_out_inertia / variance'), cell('unused_codewords', count), cell('iterations', count)]);
  }
  if (!rows.length) return null;
  return table('What the sections say about this head', ['Section', 'Inertia', 'held out', 'Variance of keys', 'Error left', 'Unused codewords', 'Passes'], rows);
}

function headSection() {
  const section = byId('head');
  if (!section) return;
  if (!hasHeads) {
    leaveOut('head');
    return;
  }
  const { layer, head } = chosenHead;
  const numbers = (n) => [...Array(n).keys()].map((i) => [i, String(i)]);
  const constant = Object.keys(headRows).some((name) => headRow(name, layer, head).constant);
  const box = section.querySelector('#head-box') ?? section.appendChild(el('div', { id: 'head-box' }));
  box.replaceChildren(
    el('div', { class: 'controls' },
      choice('head-layer', 'Layer', numbers(LAYERS), layer, (value) => selectHead(+value, head, false)),
      choice('head-head', 'KV head', numbers(HEADS), head, (value) => selectHead(layer, +value, false))),
    el('p', { class: 'lead', id: 'head-name' }, `Layer ${layer}, KV head ${head}`, constant ? ': all of its keys were equal, so that it is attended in full' : ''),
    headFacts(layer, head) ?? '',
    el('div', { class: 'columns' }, [spectrum(layer, head), slash(layer, head), convergence(layer, head)].filter(Boolean)));
}
