// Connects the drawing and the answers to it.

import { request } from "./api.js";
import { Drawing } from "./drawing.js";
import { Panel } from "./panel.js";

const part = (id) => document.getElementById(id);
const drawing = new Drawing(part("drawing"));
let panel = null;
let version = 0;
let snapshot = { version, body: null };

drawing.addEventListener("change", () => {
  const empty = drawing.isEmpty;
  part("hint").hidden = !empty;
  part("clear").disabled = empty;
  part("undo").disabled = !drawing.canUndo;
  snapshot = { version: ++version, body: empty ? null : drawing.toGray() };
  document.body.dataset.version = version; // of the drawing; each answer names its own
  panel?.show(snapshot);
});
drawing.addEventListener("pen", ({ detail: down }) => {
  part("pen").textContent = down ? "Pen down" : "Pen up";
});
part("clear").addEventListener("click", () => drawing.clear());
part("undo").addEventListener("click", () => drawing.undo());
document.addEventListener("keydown", (event) => {
  if (event.target.closest("select") || event.altKey) return;
  const command = event.ctrlKey || event.metaKey;
  if (command && !event.shiftKey && event.key.toLowerCase() === "z") drawing.undo();
  else if (!command && event.key.toLowerCase() === "c") drawing.clear();
  else return;
  event.preventDefault();
});

try {
  panel = new Panel(document.querySelector(".panel"), await request("networks"));
  panel.show(snapshot);
  document.body.dataset.ready = "true";
} catch (error) {
  part("message").textContent = error.message;
}
