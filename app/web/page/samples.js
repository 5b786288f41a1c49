// The strip of test images: the network's mistakes first.

import { decode, request } from "./api.js";
import { paintGray } from "./drawing.js";

export class Samples extends EventTarget {
  #list = document.getElementById("samples");
  #note = document.getElementById("samples-note");
  #network = null;

  async load(network) {
    this.#network = network;
    let [images, note] = [[], ""];
    try {
      images = await request("samples", { network });
      const mistakes = images.filter((image) => image.mistake).length;
      note = mistakes ? "The surest mistakes come first." : "No mistake among them.";
    } catch (error) {
      note = error.message;
    }
    if (network !== this.#network) return; // another was chosen meanwhile
    this.#note.textContent = note;
    this.#list.replaceChildren(...images.map((image) => this.#item(image)));
  }

  #item({ label, answer, mistake, pixels }) {
    const item = document.createElement("li");
    const button = Object.assign(document.createElement("button"), { type: "button" });
    const canvas = Object.assign(document.createElement("canvas"), { width: 28, height: 28 });
    const caption = document.createElement("span");
    const gray = decode(pixels);
    paintGray(canvas.getContext("2d"), gray);
    canvas.setAttribute("aria-hidden", "true");
    caption.textContent = mistake ? `${label} → ${answer}` : label;
    const told = mistake ? `is ${label}, taken for ${answer}` : `${label}, recognised`;
    button.setAttribute("aria-label", `Test image: ${told}`);
    button.title = told;
    button.classList.toggle("mistake", mistake);
    button.dataset.label = label;
    button.dataset.answer = answer;
    button.append(canvas, caption);
    button.addEventListener("click", () => {
      this.dispatchEvent(new CustomEvent("choose", { detail: { pixels: gray, label } }));
    });
    item.append(button);
    return item;
  }
}
