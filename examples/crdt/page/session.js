// The document of one page: what is on the screen, what the service has, and the way between them.
//
// `local` is on the screen. `server` has the operations 1 to `version`, in their order, and nothing else. An operation that was typed
// here waits in `pending` until the service has it. It carries the Yjs update, which needs no order to converge, and plain edits for
// those who have no Yjs: these are made on `server`, so whoever applies all edits in the order of the versions gets the same text.
import * as Y from 'yjs'

const batch = 200
const patience = [200, 500, 1000, 2000]

export class Session extends EventTarget {
  constructor(doc, actor) {
    super()
    this.doc = doc
    this.actor = actor
    this.local = new Y.Doc()
    this.server = new Y.Doc()
    this.text = this.local.getText('text')
    this.version = 0
    this.counter = 0
    this.pending = []
    this.typed = new Map() // when, by counter, until the feed brings it
    this.state = 'connecting'
    this.failures = 0
    this.kept = `crdt:${doc}`
    this.local.on('update', (update, origin) => {
      if (origin !== 'server') this.enqueue(update)
    })
  }

  url(tail) { return `/docs/${encodeURIComponent(this.doc)}/${tail}` }

  async open() {
    for (;;) {
      try {
        await this.pull()
        break
      } catch {
        this.become('offline')
        await pause(1000)
      }
    }
    this.restore()
    this.listen()
    this.push()
    window.addEventListener('online', () => this.listen())
    window.addEventListener('offline', () => this.lose())
  }

  // What was typed here.
  enqueue(update) {
    this.pending.push({ counter: ++this.counter, update })
    this.typed.set(this.counter, performance.now())
    this.keep()
    this.changed()
    this.push()
  }

  // What the service has not got yet survives a reload of the page.
  keep() {
    sessionStorage.setItem(this.kept, JSON.stringify(this.pending.map(p => encode(p.update))))
  }

  // The same update twice changes a Yjs document once, so it does no harm if the service had got it after all.
  restore() {
    const kept = JSON.parse(sessionStorage.getItem(this.kept) ?? '[]')
    for (const update of kept.map(decode)) {
      Y.applyUpdate(this.local, update, 'server')
      this.enqueue(update)
    }
  }

  // pull gets what the page lacks.
  async pull() {
    for (;;) {
      const answer = await fetch(this.url(`ops?since=${this.version}`))
      if (!answer.ok) throw new Error(`HTTP ${answer.status}`)
      const { version, ops } = await answer.json()
      for (const op of ops) this.confirm(op.version, op.actor, op.counter, decode(op.update))
      if (this.version >= version || ops.length === 0) return
    }
  }

  // confirm takes the document's next operation. It returns false if that is not the next one.
  confirm(version, actor, counter, update) {
    if (version <= this.version) return true
    if (version !== this.version + 1) return false
    Y.applyUpdate(this.server, update, 'server')
    Y.applyUpdate(this.local, update, 'server')
    this.version = version
    if (actor === this.actor) {
      this.stored = performance.now() - this.typed.get(counter)
      this.pending = this.pending.filter(p => p.counter > counter)
      this.keep()
    }
    this.changed()
    return true
  }

  // listen follows the live feed; whatever happens to it, it begins again behind the newest version.
  listen() {
    this.feed?.close()
    clearTimeout(this.again)
    const feed = this.feed = new EventSource(this.url(`feed?since=${this.version}`))
    feed.onopen = () => this.become('live')
    feed.onerror = () => this.lose()
    feed.addEventListener('op', e => {
      const op = JSON.parse(e.data)
      if (op.actor === this.actor && this.typed.has(op.counter)) {
        this.around = performance.now() - this.typed.get(op.counter)
        this.typed.delete(op.counter)
      }
      if (!this.confirm(op.version, op.actor, op.counter, decode(op.update))) this.pull().catch(() => this.lose())
      this.changed()
    })
    feed.addEventListener('presence', e => this.dispatchEvent(new CustomEvent('presence', { detail: JSON.parse(e.data) })))
  }

  // lose gives the feed up and tries again soon.
  lose() {
    this.feed.close()
    this.become('offline')
    clearTimeout(this.again)
    this.again = setTimeout(() => this.listen(), 700)
  }

  // push sends what waits, one request at a time.
  async push() {
    if (this.pushing) return
    this.pushing = true
    clearTimeout(this.later)
    try {
      while (this.pending.length > 0) await this.send()
      this.failures = 0
      if (this.feed?.readyState === EventSource.OPEN) this.become('live')
    } catch {
      this.become('offline')
      this.later = setTimeout(() => this.push(), patience[Math.min(this.failures++, patience.length - 1)])
    }
    this.pushing = false
  }

  async send() {
    const base = this.version
    const sent = this.pending.slice(0, batch)
    const edits = editsOn(this.server, sent.map(p => p.update))
    const ops = sent.map((p, i) => ({ actor: this.actor, counter: p.counter, update: encode(p.update), edits: edits[i] }))
    const answer = await fetch(this.url('ops'), {
      method: 'POST', headers: { 'Content-Type': 'application/json', 'If-Match': `"${base}"` }, body: JSON.stringify(ops),
    })
    if (answer.status === 412) return this.pull() // somebody was faster: make the edits anew on what there is now
    if (!answer.ok) throw new Error(`HTTP ${answer.status}`)
    const { stored } = await answer.json()
    const updates = new Map(sent.map(p => [p.counter, p.update]))
    const next = stored.toSorted((a, b) => a.version - b.version)
    if (!next.every(s => this.confirm(s.version, s.actor, s.counter, updates.get(s.counter)))) await this.pull()
  }

  become(state) {
    if (state === this.state) return
    this.state = state
    this.changed()
    if (state === 'live') this.push()
  }

  changed() { this.dispatchEvent(new Event('change')) }
}

// editsOn returns, for each update, the plain edits that it is to a document that has had those before it.
function editsOn(doc, updates) {
  const probe = new Y.Doc()
  Y.applyUpdate(probe, Y.encodeStateAsUpdate(doc))
  const text = probe.getText('text')
  let now = text.toString()
  let edits = []
  text.observe(event => {
    let at = 0
    for (const part of event.delta) {
      if (part.retain) {
        at += part.retain
        continue
      }
      const cut = part.delete ?? 0
      const ins = part.insert ?? ''
      edits.push({ pos: points(now.slice(0, at)), del: points(now.slice(at, at + cut)), ins })
      now = now.slice(0, at) + ins + now.slice(at + cut)
      at += ins.length
    }
  })
  return updates.map(update => {
    edits = []
    Y.applyUpdate(probe, update)
    return edits
  })
}

// points counts code points: strings here count UTF-16 units, the rest of the world does not.
function points(s) {
  let n = 0
  for (const _ of s) n++
  return n
}

function encode(bytes) {
  let s = ''
  for (const b of bytes) s += String.fromCharCode(b)
  return btoa(s)
}

function decode(text) {
  return Uint8Array.from(atob(text), c => c.charCodeAt(0))
}

function pause(ms) { return new Promise(done => setTimeout(done, ms)) }
