// The side panel: what the three consumers hold, and the verdict.
const $ = id => document.getElementById(id)

export class Panel {
  constructor(session) {
    this.session = session
    this.behind = 0
    $('search').addEventListener('submit', e => { e.preventDefault(); this.find() })
    $('q').addEventListener('input', () => { clearTimeout(this.asking); this.asking = setTimeout(() => this.find(), 200) })
    $('rebuild').addEventListener('click', () => this.rebuild())
    this.refresh()
  }

  async refresh() {
    try {
      const answer = await fetch(this.session.url('projections'))
      if (answer.ok) await this.show(await answer.json())
      else throw new Error()
    } catch {
      state($('index'), 'wait', 'Out of reach at the moment.')
    }
    setTimeout(() => this.refresh(), document.hidden ? 3000 : 600)
  }

  async show({ search, audit, billing }) {
    const { session } = this
    this.behind = Math.max(0, session.version - search.events)
    const text = session.text.toString()
    if (this.behind === 0 && session.pending.length === 0) {
      const same = await sha256(text) === search.digest
      state($('index'), same ? 'good' : 'bad', same
        ? `Holds exactly what you see: ${count([...text].length, 'character')}, ${count(search.words, 'word')}.`
        : 'Holds another text than you see.')
    } else {
      state($('index'), 'wait', `${count(this.behind + session.pending.length, 'operation')} behind what you see.`)
    }
    $('behind').textContent = this.behind ? `${this.behind} behind` : 'level'
    $('audit').replaceChildren(...audit.map(e => item('li',
      item('span', `#${e.n}`, 'n'), item('span', e.actor.split('~')[0], 'who'), item('code', e.hash.slice(0, 16)))))
    if (audit.length === 0) $('audit').replaceChildren(item('li', 'No entry yet.', 'hint'))
    $('billing').tBodies[0].replaceChildren(
      ...billing.accounts.map(a => row(item('th', a.person), item('td', money(a.amount)))),
      row(item('th', 'turns'), item('td', String(billing.turns))))
  }

  async find() {
    const q = $('q').value.trim()
    if (!q) return $('hits').replaceChildren()
    try {
      const hits = await (await fetch(`/search?q=${encodeURIComponent(q)}`)).json()
      $('hits').replaceChildren(...hits.map(h => {
        const link = item('a', h.doc)
        link.href = `?doc=${encodeURIComponent(h.doc)}`
        return item('li', link, item('span', ...marked(h.excerpt)))
      }))
      if (hits.length === 0) $('hits').replaceChildren(item('li', 'Nothing found.', 'hint'))
    } catch {
      $('hits').replaceChildren(item('li', 'The service is away.', 'hint'))
    }
  }

  async rebuild() {
    $('rebuild').disabled = true
    state($('said'), 'wait', 'Rebuilding all three from the first event on …')
    try {
      const answer = await fetch('/verdict', { method: 'POST' })
      const v = await answer.json()
      if (!answer.ok) throw new Error(v.error)
      this.judge(v)
    } catch (e) {
      state($('said'), 'bad', `No verdict: ${e.message}`)
    }
    $('rebuild').disabled = false
  }

  judge(v) {
    const relay = v.relay_is_off ? ' The polling relay’s are not.' : ' The polling relay’s are, too, so far.'
    state($('said'), v.same ? 'good' : 'bad', (v.same
      ? `Byte for byte the same after ${count(v.live.events, 'event')}, rebuilt in ${(v.took / 1e9).toFixed(1)} s.`
      : 'Live and rebuilt differ.') + relay)
    const short = h => h.slice(0, 8)
    const rows = [
      ['events', s => String(s.events)], ['repeats', s => String(s.repeats)], ['inversions', s => String(s.inversions)],
      ['search text', s => short(s.text)], ['audit chain', s => short(s.chain)], ['billing', s => money(s.total)],
    ]
    $('verdict').tBodies[0].replaceChildren(...rows.map(([name, of]) => {
      const cells = [v.live, v.rebuilt, v.relayed].map(side => item('td', of(side)))
      if (of(v.relayed) !== of(v.live)) cells[2].className = 'off'
      if (of(v.rebuilt) !== of(v.live)) cells[1].className = 'off'
      return row(item('th', name), ...cells)
    }))
    $('verdict').hidden = false
  }
}

// stage connects the buttons that only a demo has.
export async function stage() {
  const { stage } = await (await fetch('/config')).json()
  if (!stage) return
  for (const name of ['play', 'kill']) {
    $(name).hidden = false
    $(name).addEventListener('click', async () => {
      $(name).disabled = true
      try {
        const { text, doc } = await (await fetch(`${stage}/${name}`, { method: 'POST' })).json()
        $('stage').replaceChildren(text)
        if (doc) {
          const link = item('a', doc)
          link.href = `?doc=${encodeURIComponent(doc)}`
          $('stage').append(link)
        }
      } catch {
        $('stage').textContent = 'The stage does not answer: is the demo still running?'
      }
      $(name).disabled = false
    })
  }
}

function state(node, value, text) {
  node.dataset.state = value
  node.textContent = text
}

function item(tag, ...content) {
  const node = document.createElement(tag)
  if (content.length === 2 && typeof content[0] === 'string' && typeof content[1] === 'string') node.className = content.pop()
  if (tag === 'th') node.scope = 'row'
  node.append(...content)
  return node
}

function row(...cells) { return item('tr', ...cells) }
function count(n, what) { return `${n.toLocaleString('en')} ${what}${n === 1 ? '' : 's'}` }
function money(tenths) { return `$${(tenths / 1000).toFixed(3)}` }

function marked(excerpt) {
  return excerpt.split(/\x02|\x03/).map((part, i) => i % 2 ? item('mark', part) : part)
}

async function sha256(text) {
  const sum = await crypto.subtle.digest('SHA-256', new TextEncoder().encode(text))
  return Array.from(new Uint8Array(sum), b => b.toString(16).padStart(2, '0')).join('')
}
