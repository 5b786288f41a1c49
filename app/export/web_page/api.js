// Answers the requests of the page in the page itself, by onnxruntime-web.

import { frame } from "./framing.js";

export const TAKES_PICTURES = false; // the framing is for drawings
let [network, ort, session] = [];

export async function request(path, query = {}, body = undefined) {
  return path === "networks" ? load() : predict(body);
}

// `network.json` says where everything is.
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
  const { file: id, dataset } = network;
  const [accuracy, parameters, started] = [null, null, ""];
  return [{ id, title: "Exported network", runtime: "ONNX", accuracy, parameters, started, dataset }];
}

async function predict(drawing) {
  const { classes, dataset, mean, std, raw } = network;
  const start = performance.now();
  const image = frame(drawing, dataset);
  const between = performance.now();
  let probabilities = null;
  if (image) {
    const values = raw ? image : Float32Array.from(image, (value) => (value / 255 - mean) / std);
    const tensor = new ort.Tensor(raw ? "uint8" : "float32", values, [1, 1, 28, 28]);
    const { logits } = await session.run({ [network.input]: tensor }, ["logits"]);
    const largest = Math.max(...logits.data);
    const exponents = Array.from(logits.data, (value) => Math.exp(value - largest));
    const sum = exponents.reduce((total, value) => total + value, 0);
    probabilities = exponents.map((value) => value / sum);
  }
  const milliseconds = { framing: between - start, network: performance.now() - between };
  return { classes, probabilities, image, milliseconds };
}

export function decode(image) {
  return image;
}
