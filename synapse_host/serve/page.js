// The page of `synapse serve`. Everything that a worker, a model or a user wrote is put in as text, never as markup.
'use strict';

const POLL_MS = 2000;
const POINTS = 60;
const SAMPLES = {
  embed: 'The cat sat on the mat.\nA feline rested on a rug.\nRates rose on Tuesday.',
  rerank: 'Berlin has a population of 3,520,031 registered inhabitants.\nBerlin is a city.',
  generate: 'Name three rivers.',
};
const LABELS = { embed: 'Texts, one a line', rerank: 'Documents, one a line', generate: 'Message' };
const $ = (selector) => document.querySelector(selector);
let key = '';
let models = {};
let task = 'embed';
let placements = [];
let before = null;
const opened = new Set();
const history = {};

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  made.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return made;
}

async function ask(path, body) {
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const answer = await fetch(path, body === undefined
    ? { headers }
    : { method: 'POST', headers: { ...headers, 'content-type': 'application/json' }, body: JSON.stringify(body) });
  $('#key').hidden = answer.status !== 401;
  if (answer.ok) return answer;
  const failure = await answer.json().catch(() => null);
  throw new Error(failure ? failure.error.message : `status ${answer.status}`);
}

const asked = async (path, body) => (await ask(path, body)).json();

function age(seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h` : `${Math.floor(seconds / 86400)} d`;
}

// Answered requests and the seconds they took, by lane, out of the Prometheus text.
function traffic(text) {
  const found = {};
  for (const line of text.split('\n')) {
    const match = /^synapse_worker_request_duration_seconds_(count|sum)\{(.*)\} (\S+)$/.exec(line);
    const lane = match && /(?:^|,)lane="((?:[^"\\]|\\.)*)"/.exec(match[2]);
    if (!lane || /op="(ping|load)"/.test(match[2])) continue;
    const name = lane[1].replace(/\\(.)/g, (_, character) => (character === 'n' ? '\n' : character));
    found[name] ??= { count: 0, sum: 0 };
    found[name][match[1]] += Number(match[3]);
  }
  return { at: performance.now() / 1000, lanes: found };
}

function plot(title, unit, values) {
  const most = Math.max(...values, 0);
  const svg = document.createElementNS('http://www.w3.org/2000/svg', 'svg');
  svg.setAttribute('viewBox', `0 0 ${POINTS - 1} 40`);
  svg.setAttribute('preserveAspectRatio', 'none');
  const line = document.createElementNS('http://www.w3.org/2000/svg', 'polyline');
  const points = values.map((value, index) => `${POINTS - values.length + index},${39 - (most ? (value / most) * 37 : 0)}`);
  line.setAttribute('points', points.join(' '));
  svg.append(line);
  const now = values.length ? values[values.length - 1] : 0;
  return element('figure', {}, svg, element('figcaption', {}, `${title} ${now ? `${now.toFixed(1)} ${unit}` : '–'}`));
}

// A fold that stays open when the card around it is made anew.
function fold(name, summary, content) {
  const made = element('details', opened.has(name) ? { open: '' } : {}, element('summary', {}, summary), content);
  made.addEventListener('toggle', () => (made.open ? opened.add(name) : opened.delete(name)));
  return made;
}

function laneCard(id, lane, logs, considered) {
  const shown = history[id] ??= { rate: [], latency: [] };
  const worker = lane.worker_pid === null ? 'none' : `pid ${lane.worker_pid}, #${lane.generation}`;
  const rows = [
    ['Model', lane.model],
    ['Engine', lane.engine ? `${lane.engine} (${lane.device})` : 'none'],
    ['Why', considered.find((each) => each.verdict === 'yes')?.reason ?? '–'],
    ['Worker', worker],
    ['Memory', lane.rss_mb === null ? '–' : `${lane.rss_mb} MB`],
    ['Heard', lane.age_s === null ? '–' : `${age(lane.age_s)} ago`],
    ['Waiting', lane.waiting],
    ['Strikes', lane.strikes],
  ];
  if (lane.state === 'quarantined') {
    const left = lane.quarantine_remaining_s;
    rows.push(['Shut', left === null ? 'until a probe' : `for another ${left.toFixed(0)} s`]);
  }
  if (lane.reason) rows.push(['Reason', lane.reason]);
  const card = element('article', { 'data-lane': id },
    element('h3', {}, element('span', {}, id), element('span', { class: `state ${lane.state}` }, lane.state)),
    element('dl', {}, ...rows.flatMap(([name, value]) => [element('dt', {}, name), element('dd', {}, value)])),
    element('div', { class: 'plots' }, plot('requests', '/s', shown.rate), plot('latency', 'ms', shown.latency)));
  const over = considered.filter((each) => each.verdict === 'no');
  if (over.length) {
    const reasons = over.map((each) => element('div', {}, `${each.engine}: ${each.reason}`));
    card.append(fold(`${id} why`, `Passed over: ${over.map((each) => each.engine).join(', ')}`, element('div', {}, ...reasons)));
  }
  const fault = lane.last_fault;
  if (fault) {
    const what = `Last fault: ${fault.signal || fault.cause} during ${fault.stage} (generation ${fault.generation})`;
    const tail = logs ? logs.segments.map(([, text]) => text).join('').split('\n').slice(-40).join('\n') : '';
    card.append(fold(`${id} fault`, what, element('pre', {}, tail)));
  }
  return card;
}

async function refresh() {
  try {
    const [state, metrics, logs] = await Promise.all([
      asked('/synapse/lanes'), ask('/metrics').then((answer) => answer.text()), asked('/synapse/logs', {})]);
    if (!Object.keys(models).length) await showModels();
    const now = traffic(metrics);
    for (const id of Object.keys(state.lanes)) {
      const shown = history[id] ??= { rate: [], latency: [] };
      const old = before?.lanes[id] ?? { count: 0, sum: 0 };
      const here = now.lanes[id] ?? old;
      const count = before ? here.count - old.count : 0;
      shown.rate.push(before ? count / (now.at - before.at) : 0);
      shown.latency.push(count ? ((here.sum - old.sum) / count) * 1000 : 0);
      for (const values of Object.values(shown)) values.splice(0, values.length - POINTS);
    }
    before = now;
    const host = state.host;
    $('#host').textContent = `${host.version} · pid ${host.pid} · up ${age(host.uptime_s)}${host.stopping ? ' · stopping' : ''}`;
    const why = Object.fromEntries(placements.map((one) => [one.lane, one.considered]));
    $('#lanes').replaceChildren(
      ...Object.entries(state.lanes).map(([id, lane]) => laneCard(id, lane, logs.logs[id], why[id] ?? [])));
  } catch (error) {
    $('#host').textContent = `no answer: ${error.message}`;
  }
  setTimeout(refresh, POLL_MS);
}

async function showModels() {
  const told = await asked('/synapse/models');
  models = told.models;
  placements = told.placements;
  choose(task);
  const { certificates } = await asked('/synapse/certificates');
  const table = element('table', {}, element('tr', {}, ...['Lane', 'Engine', 'Model', '', 'Age', ''].map((name) => element('th', {}, name))));
  for (const one of certificates) {
    const word = one.valid ? 'valid' : 'void';
    const cells = [one.lane ?? '', one.engine, one.model ?? '', element('span', { class: word }, word),
      one.age_s === null ? '' : age(Math.max(0, one.age_s)), one.why ?? ''];
    table.append(element('tr', {}, ...cells.map((cell) => element('td', {}, cell))));
  }
  $('#certificates').replaceChildren(certificates.length ? table : 'No lane is certified on this machine.');
}

function choose(wanted) {
  task = wanted;
  for (const button of document.querySelectorAll('nav button')) button.setAttribute('aria-pressed', button.dataset.task === task);
  const names = Object.entries(models).filter(([, model]) => model.task === task).map(([name]) => name);
  $('select').replaceChildren(...names.map((name) => element('option', {}, name)));
  $('#query').hidden = task !== 'rerank';
  $('#text span').textContent = LABELS[task];
  $('textarea').value = SAMPLES[task];
  $('#answer').replaceChildren();
}

const lines = () => $('textarea').value.split('\n').filter((line) => line.trim());

async function embed(model) {
  const { data } = await asked('/v1/embeddings', { model, input: lines() });
  const vectors = data.map((one) => one.embedding);
  const length = vectors.map((vector) => Math.hypot(...vector));
  const cosine = (a, b) => vectors[a].reduce((sum, value, index) => sum + value * vectors[b][index], 0) / (length[a] * length[b]);
  const rows = vectors.map((_, a) => element('tr', {}, element('th', {}, lines()[a]),
    ...vectors.map((__, b) => element('td', { class: 'n' }, cosine(a, b).toFixed(2)))));
  $('#answer').replaceChildren(element('table', {}, ...rows),
    element('p', { class: 'soft' }, `${vectors.length} × ${vectors[0].length}, cosine similarity`));
}

async function rerank(model) {
  const documents = lines();
  const { results } = await asked('/v1/rerank', { model, query: $('[name=query]').value, documents });
  $('#answer').replaceChildren(element('table', {}, ...results.map((one) => element('tr', {},
    element('td', { class: 'n' }, one.relevance_score.toFixed(4)), element('td', {}, documents[one.index])))));
}

async function generate(model) {
  const messages = [{ role: 'user', content: $('textarea').value }];
  const answer = await ask('/v1/chat/completions', { model, messages, stream: true, max_tokens: 256 });
  const shown = element('pre');
  $('#answer').replaceChildren(shown);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = '', part = await reader.read(); !part.done; part = await reader.read()) {
    const events = (rest + part.value).split('\n\n');
    rest = events.pop();
    for (const event of events.filter((one) => one !== 'data: [DONE]')) {
      const { error, choices } = JSON.parse(event.slice('data: '.length));
      if (error) throw new Error(error.message);
      shown.append(choices[0]?.delta.content ?? '');
    }
  }
}

$('#try form').addEventListener('submit', async (event) => {
  event.preventDefault();
  const button = $('#try form button');
  button.disabled = true;
  try {
    await { embed, rerank, generate }[task]($('select').value);
  } catch (error) {
    $('#answer').append(element('p', { class: 'error' }, error.message));
  }
  button.disabled = false;
});
for (const button of document.querySelectorAll('nav button')) button.addEventListener('click', () => choose(button.dataset.task));
$('#key').addEventListener('submit', (event) => {
  event.preventDefault();
  key = $('#key input').value;
});
refresh();
