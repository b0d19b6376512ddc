// The page of a run. It begins here: unpack the run, work out what follows from it, draw.

import { measureAxes } from "./axis.js";
import { readColors } from "./canvas.js";
import { listenToControls } from "./controls.js";
import { $, root } from "./dom.js";
import { showHeadline } from "./headline.js";
import { assignLanes } from "./lanes.js";
import { build } from "./lives.js";
import { restore } from "./navigation.js";
import { paintAll } from "./paint.js";
import { measureUse } from "./panels.js";
import { listenToPointers } from "./pointers.js";
import { paintWith } from "./redraw.js";
import { unpack } from "./run.js";

async function main() {
  await unpack();
  build();
  assignLanes();
  measureAxes();
  measureUse();
  showHeadline();
  listenToControls();
  listenToPointers();
  paintWith(paintAll);
  readColors();
  restore();
  paintAll();
  root.dataset.drawn = performance.now().toFixed(0);
}

main().catch((error) => {
  root.dataset.failed = String(error);
  $("turn").textContent =
    `This page could not be shown (${error}). It needs a browser of 2023 or later.`;
});
