// A textarea as the view of a Yjs text, with the carets of the others in it.
import * as Y from 'yjs'

export class Editor extends EventTarget {
  constructor(area, mirror, text) {
    super()
    this.area = area
    this.mirror = mirror
    this.text = text
    this.shown = ''
    this.carets = []
    this.undo = new Y.UndoManager(text, { trackedOrigins: new Set(['editor']) })
    text.observe(event => { if (event.transaction.origin !== 'editor') this.show(event.delta) })
    area.addEventListener('input', () => this.read())
    area.addEventListener('compositionend', () => { this.read(); this.show([]) })
    area.addEventListener('keydown', e => this.key(e))
    area.addEventListener('scroll', () => { mirror.scrollTop = area.scrollTop })
    for (const name of ['select', 'click', 'keyup', 'focus', 'blur']) {
      area.addEventListener(name, () => this.dispatchEvent(new Event('caret')))
    }
    this.show([])
  }

  // read takes what the person has typed.
  read() {
    const next = this.area.value
    const change = difference(this.shown, next, this.area.selectionEnd)
    this.shown = next
    if (change.del > 0 || change.ins !== '') {
      this.text.doc.transact(() => {
        this.text.delete(change.at, change.del)
        this.text.insert(change.at, change.ins)
      }, 'editor')
    }
    this.drawCarets()
  }

  // show brings what others have typed, with the selection where it was in the text.
  show(delta) {
    if (this.area.matches(':disabled')) return
    const next = this.text.toString()
    const [from, to] = [moved(delta, this.area.selectionStart), moved(delta, this.area.selectionEnd)]
    this.carets = this.carets.map(c => ({ ...c, at: moved(delta, c.at) }))
    if (next !== this.shown) {
      const top = this.area.scrollTop
      this.area.value = this.shown = next
      this.area.setSelectionRange(from, to)
      this.area.scrollTop = top
    }
    this.drawCarets()
  }

  enable() {
    this.area.disabled = false
    this.show([])
  }

  key(e) {
    const z = e.key.toLowerCase() === 'z', y = e.key.toLowerCase() === 'y'
    if (!(e.ctrlKey || e.metaKey) || e.altKey || !(z || y)) return
    e.preventDefault()
    if (y || e.shiftKey) this.undo.redo()
    else this.undo.undo()
  }

  // others are [{name, color, at}].
  others(carets) {
    this.carets = carets
    this.drawCarets()
  }

  drawCarets() {
    const text = this.shown
    const parts = []
    let from = 0
    for (const c of this.carets.filter(c => c.at >= 0).toSorted((a, b) => a.at - b.at)) {
      const at = Math.min(c.at, text.length)
      parts.push(text.slice(from, at))
      const caret = document.createElement('span')
      caret.className = 'caret'
      caret.style.setProperty('--who', c.color)
      caret.dataset.name = c.name
      parts.push(caret)
      from = at
    }
    this.mirror.replaceChildren(...parts, `${text.slice(from)}\n`)
    this.mirror.scrollTop = this.area.scrollTop
  }
}

// difference finds the one splice that makes b of a; the caret is where b was typed last. No character of two units is cut apart.
function difference(a, b, caret) {
  let start = 0
  const most = Math.min(a.length, b.length, Math.max(caret, 0))
  while (start < most && a[start] === b[start]) start++
  let end = 0
  while (end < Math.min(a.length, b.length) - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++
  if (start > 0 && isHigh(a.charCodeAt(start - 1))) start--
  if (end > 0 && isLow(a.charCodeAt(a.length - end))) end--
  return { at: start, del: a.length - start - end, ins: b.slice(start, b.length - end) }
}

function isHigh(unit) { return unit >= 0xd800 && unit < 0xdc00 }
function isLow(unit) { return unit >= 0xdc00 && unit < 0xe000 }

// moved says where a place in the text is after a change.
function moved(delta, place) {
  let at = 0
  for (const part of delta) {
    if (part.retain) at += part.retain
    else if (part.insert) {
      if (at < place) place += part.insert.length
      at += part.insert.length
    } else if (part.delete && at < place) place = Math.max(at, place - part.delete)
  }
  return place
}
