// Runs the exported network in the page: drawing, framing, onnxruntime-web, answer.

import { showBars, showVerdict } from "./bars.js";
import { Drawing, isEmpty, paintGray, SIDE } from "./drawing.js";
import { frame } from "./framing.js";

const part = (id) => document.getElementById(id);
const drawing = new Drawing(part("drawing"));
const input = document.querySelector(".input canvas").getContext("2d");
let [network, ort, session] = [];
let version = 0;
let busy = false;

async function load() {
  network = await (await fetch("network.json")).json();
  try {
    ort = await import(new URL(`${network.runtime}ort.wasm.min.mjs`, location.href));
  } catch {
    throw new Error(`onnxruntime-web is not in ${network.runtime}: ${network.install.join("; ")}`);
  }
  ort.env.wasm.wasmPaths = new URL(network.runtime, location.href).href;
  ort.env.wasm.numThreads = 1; // more need headers that a plain static server does not send
  session = await ort.InferenceSession.create(network.file);
}

async function predict(image) {
  const { mean, std, raw } = network;
  const values = raw ? image : Float32Array.from(image, (value) => (value / 255 - mean) / std);
  const tensor = new ort.Tensor(raw ? "uint8" : "float32", values, [1, 1, 28, 28]);
  const { logits } = await session.run({ [network.input]: tensor }, ["logits"]);
  const largest = Math.max(...logits.data);
  const exponents = Array.from(logits.data, (value) => Math.exp(value - largest));
  const sum = exponents.reduce((total, value) => total + value, 0);
  return exponents.map((value) => value / sum);
}

// Answers the newest drawing; those made while the network runs are skipped.
async function answer() {
  if (busy || !session) return;
  busy = true;
  for (let answered = -1; answered !== version; part("digit").dataset.version = answered) {
    answered = version;
    const picture = { width: SIDE, height: SIDE, data: drawing.toGray() };
    let image = null;
    let probabilities = null;
    let problem = "";
    try {
      if (!isEmpty(drawing.state)) image = frame(picture, network.dataset);
      if (image) probabilities = await predict(image);
    } catch (error) {
      problem = error.message ?? `${error}`; // wasm throws numbers, too
    }
    part("message").textContent = problem;
    if (image) paintGray(input, image);
    else input.clearRect(0, 0, 28, 28);
    showVerdict(part("digit"), document.querySelector(".sure"), network.classes, probabilities);
    showBars(document.querySelector(".bars"), network.classes, probabilities);
  }
  busy = false;
}

drawing.addEventListener("change", () => {
  const empty = isEmpty(drawing.state);
  part("hint").hidden = !empty;
  part("clear").disabled = empty;
  part("undo").disabled = !drawing.canUndo;
  document.body.dataset.version = ++version;
  answer();
});
part("clear").addEventListener("click", () => drawing.clear());
part("undo").addEventListener("click", () => drawing.undo());

try {
  await load();
  document.body.dataset.ready = "true";
  answer();
} catch (error) {
  part("message").textContent = error.message;
}
