// Runs a model by onnxruntime-web's wasm build in Node:
// node run_web.mjs ORT MODEL INPUT OUTPUT BATCH TURNS, where INPUT and OUTPUT are raw float32.
// Prints the microseconds for one image on one thread: the least of TURNS medians.

import { readFileSync, writeFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const [folder, model, input, output, batch, turns] = process.argv.slice(2);
const ort = await import(pathToFileURL(`${folder}/ort.wasm.min.mjs`));
ort.env.wasm.numThreads = 1;
const session = await ort.InferenceSession.create(readFileSync(model));
const [name] = session.inputNames;
const bytes = readFileSync(input);
const images = new Float32Array(bytes.buffer, bytes.byteOffset, bytes.length / 4);
const pixels = 28 * 28;
const run = async (start, count) => {
  const part = images.slice(start * pixels, (start + count) * pixels);
  const tensor = new ort.Tensor("float32", part, [part.length / pixels, 1, 28, 28]);
  return (await session.run({ [name]: tensor })).logits.data;
};

const logits = [];
const count = images.length / pixels;
for (let start = 0; start < count; start += Number(batch)) {
  logits.push(...(await run(start, Number(batch))));
}
writeFileSync(output, Float32Array.from(logits));

const medians = [];
while (medians.length < Number(turns)) {
  const times = [];
  for (let index = 0; index < 100; index++) {
    const start = performance.now();
    await run(index % count, 1);
    times.push(1000 * (performance.now() - start));
  }
  medians.push(times.sort((a, b) => a - b)[times.length >> 1]);
}
console.log(Math.min(...medians));
