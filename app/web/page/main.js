// Connects the drawing and the answers to it.

import { request } from "./api.js";
import { Drawing, isEmpty } from "./drawing.js";
import { Panel } from "./panel.js";

const LARGEST = 512; // pixels along a picture's longer side, as the server gets it

const part = (id) => document.getElementById(id);
const drawing = new Drawing(part("drawing"));
let panel = null;
let snapshot = { version: 0, body: null };

async function showPicture(file) {
  try {
    const whole = await createImageBitmap(file);
    const scale = Math.min(1, LARGEST / Math.max(whole.width, whole.height));
    const size = [whole.width, whole.height].map((length) => Math.max(1, Math.round(length * scale)));
    const canvas = new OffscreenCanvas(...size);
    canvas.getContext("2d").drawImage(whole, 0, 0, ...size);
    const png = await canvas.convertToBlob({ type: "image/png" });
    drawing.show({ picture: canvas, png });
  } catch {
    part("message").textContent = `${file.name || "That"} is not a picture that this browser reads.`;
  }
}

drawing.addEventListener("change", () => {
  const empty = isEmpty(drawing.state);
  part("hint").hidden = !empty;
  part("clear").disabled = empty;
  part("undo").disabled = !drawing.canUndo;
  part("message").textContent = "";
  const version = snapshot.version + 1; // each answer names that of its drawing
  snapshot = { version, body: empty ? null : (drawing.state.png ?? drawing.toGray()) };
  document.body.dataset.version = version;
  panel?.show(snapshot);
});
drawing.addEventListener("pen", ({ detail: down }) => {
  part("pen").textContent = down ? "Pen down" : "Pen up";
});
part("clear").addEventListener("click", () => drawing.clear());
part("undo").addEventListener("click", () => drawing.undo());
document.addEventListener("keydown", (event) => {
  if (event.target.closest("select, input") || event.altKey) return;
  const command = event.ctrlKey || event.metaKey;
  if (command && !event.shiftKey && event.key.toLowerCase() === "z") drawing.undo();
  else if (!command && event.key.toLowerCase() === "c") drawing.clear();
  else return;
  event.preventDefault();
});
const showFirst = ({ files }) => files.length && showPicture(files[0]);
part("picture").addEventListener("change", ({ target }) => {
  showFirst(target);
  target.value = ""; // so that the same file can be opened again
});
document.addEventListener("dragover", (event) => event.preventDefault());
document.addEventListener("drop", (event) => {
  event.preventDefault();
  showFirst(event.dataTransfer);
});
document.addEventListener("paste", ({ clipboardData }) => showFirst(clipboardData));
try {
  panel = new Panel(document.querySelector(".panel"), await request("networks"));
  panel.show(snapshot);
  document.body.dataset.ready = "true";
} catch (error) {
  part("message").textContent = error.message;
}
