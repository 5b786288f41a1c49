// The answer as text and as bars.

const percent = new Intl.NumberFormat("en", {
  style: "percent",
  minimumFractionDigits: 1,
  maximumFractionDigits: 1,
});

// `probabilities`: one a class; null: no answer
export function showVerdict(output, sure, classes, probabilities) {
  const best = probabilities ? Math.max(...probabilities) : null;
  const text = probabilities ? classes[probabilities.indexOf(best)] : "";
  if (output.textContent !== text) output.textContent = text; // or it is read aloud again
  output.classList.toggle("word", text.length > 1);
  sure.textContent = probabilities ? `${percent.format(best)} sure` : "";
}

export function showBars(list, classes, probabilities) {
  if ([...list.children].map((bar) => bar.dataset.class).join("\n") !== classes.join("\n")) {
    list.replaceChildren(...classes.map(makeBar));
  }
  const best = probabilities ? Math.max(...probabilities) : null;
  for (const [index, bar] of [...list.children].entries()) {
    const share = probabilities?.[index] ?? 0;
    const text = percent.format(share);
    bar.classList.toggle("best", share === best);
    if (bar.lastChild.textContent === text) continue; // or it would be laid out again
    bar.children[1].style.setProperty("--share", text);
    bar.lastChild.textContent = text;
  }
}

function makeBar(name) {
  const bar = document.createElement("li");
  bar.dataset.class = name;
  const parts = ["name", "track", "share"].map((className) =>
    Object.assign(document.createElement("span"), { className }),
  );
  parts[0].textContent = name;
  bar.append(...parts);
  return bar;
}
