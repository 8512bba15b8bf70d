// The page: two tabs, each with its weights, which are fetched when the tab is opened first.

import { CurveTab } from "./curve.js";
import { DigitTab } from "./digit.js";
import { Kernels } from "./kernels.js";
import { CMANP } from "./model.js";
import { fetchWeights } from "./weights.js";

const TABS = {
  digit: { view: DigitTab, weights: "models/emnist", inputs: 2 },
  curve: { view: CurveTab, weights: "models/gp", inputs: 1 },
};
const status = document.getElementById("status"), alert = document.getElementById("alert");
const opened = {};
let kernels;

function say(text) { status.textContent = text; }

function fail(error) {
  alert.textContent = error instanceof Error ? error.message : String(error);
  alert.hidden = false;
  say("");
}

async function open(name) {
  alert.hidden = true;
  for (const button of document.querySelectorAll('[role="tab"]')) {
    const mine = button.id === `tab-${name}`;
    button.setAttribute("aria-selected", mine);
    button.tabIndex = mine ? 0 : -1;
    const panel = document.getElementById(button.getAttribute("aria-controls"));
    if (mine && panel.hidden && opened[name]) say("");  // what was said is of the other tab
    panel.hidden = !mine;
  }
  opened[name] ??= start(name);
  return opened[name];
}

async function start(name) {
  const panel = document.getElementById(`panel-${name}`), { view, weights, inputs } = TABS[name];
  try {
    say("Fetching the weights …");
    kernels ??= Kernels.load("kernels.wasm").catch((error) => {
      kernels = null;
      throw error;
    });
    const model = new CMANP(await fetchWeights(weights, await kernels)), { dim_x, dim_y } = model.config;
    if (dim_x !== inputs || dim_y !== 1) {
      throw new Error(`${weights} holds a model from ${dim_x} to ${dim_y} numbers, but this tab needs one from ${inputs} to 1. Write the page again with such weights.`);
    }
    const made = new view(panel, model, say);
    panel.removeAttribute("inert");
    panel.dataset.ready = "true";
    performance.mark(`ready-${name}`);
    say("Ready. Nothing you do here leaves this browser.");
    return made;
  } catch (error) {
    fail(error);
    opened[name] = null;  // opened again, it is tried again
    return null;
  }
}

for (const button of document.querySelectorAll('[role="tab"]')) {
  button.addEventListener("click", () => open(button.id.slice(4)));
  button.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    const other = document.querySelector('[role="tab"][aria-selected="false"]');
    other.focus();
    other.click();
  });
}
window.addEventListener("error", (event) => fail(event.error ?? event.message));
window.addEventListener("unhandledrejection", (event) => fail(event.reason));
window.constmem = { open };  // for whoever wants to look at it from the console
open("digit");
