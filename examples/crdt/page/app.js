// The page: ?doc= names the document, ?as= the person.
import { Session } from './session.js'
import { Editor } from './editor.js'
import { Panel, stage } from './panel.js'

const $ = id => document.getElementById(id)
const asked = new URLSearchParams(location.search)
const doc = asked.get('doc') || 'note'
const name = asked.get('as') || 'Ada'
const palette = ['#0b7a75', '#b3472c', '#6a4bc4', '#8a6100']
const color = name === 'Ada' ? palette[0] : name === 'Grace' ? palette[1] : palette[2 + name.length % 2]
const actor = `${name}~${crypto.getRandomValues(new Uint32Array(1))[0].toString(36)}`

document.title = `${doc}: ${name}`
$('title').textContent = doc
const second = name === 'Grace' ? 'Ada' : 'Grace'
$('other').href = `?doc=${encodeURIComponent(doc)}&as=${second}`
$('other').textContent = `Open as ${second}`

const session = new Session(doc, actor)
const editor = new Editor($('text'), $('mirror'), session.text)
window.page = { session, editor } // for the curious, and for the test

session.addEventListener('change', () => {
  $('link').dataset.state = session.state
  $('link').textContent = session.state === 'offline' ? 'offline: what you type is kept and sent later' : session.state
  $('version').textContent = `version ${session.version}`
  $('waiting').textContent = session.pending.length ? `${session.pending.length} waiting` : 'nothing waits'
  if (session.stored) $('stored').textContent = `stored in ${Math.round(session.stored)} ms`
  if (session.around) $('around').textContent = `at all in ${Math.round(session.around)} ms`
})

// Who is here.
const people = new Map([[actor, { actor, name, color, own: true }]])
session.addEventListener('presence', ({ detail: p }) => {
  if (p.actor === actor) return
  if (p.gone) people.delete(p.actor)
  else people.set(p.actor, { ...p, until: Date.now() + 12000 })
  drawPeople()
})

function drawPeople() {
  for (const p of people.values()) if (p.until < Date.now()) people.delete(p.actor)
  $('people').replaceChildren(...Array.from(people.values(), p => {
    const li = document.createElement('li')
    li.style.setProperty('--who', p.color)
    li.dataset.initial = p.name.slice(0, 1)
    li.textContent = p.own ? `${p.name} (you)` : p.name
    return li
  }))
  editor.others(Array.from(people.values()).filter(p => !p.own).map(p => ({ name: p.name, color: p.color, at: p.caret })))
}

function tell(gone) {
  const caret = document.activeElement === $('text') ? $('text').selectionEnd : -1
  const body = JSON.stringify({ actor, name, color, caret, gone })
  if (gone) navigator.sendBeacon(session.url('presence'), body)
  else fetch(session.url('presence'), { method: 'POST', body }).catch(() => {})
}

let telling
function tellSoon() {
  telling ??= setTimeout(() => { telling = undefined; tell(false) }, 120)
}

editor.addEventListener('caret', tellSoon)
session.addEventListener('change', tellSoon)
addEventListener('pagehide', () => tell(true))
setInterval(() => { tell(false); drawPeople() }, 4000)

drawPeople()
await session.open()
editor.enable()
tell(false)
new Panel(session)
stage().catch(() => {})
