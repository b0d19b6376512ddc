// Everything that is drawn.

import { measureWidth } from "./axis.js";
import { drawOverlay } from "./overlay.js";
import { drawBatch, drawOverview, drawPool } from "./panels.js";
import { drawRuler } from "./ruler.js";
import { drawTimeline } from "./timeline.js";

function draw() {
  drawOverview();
  drawRuler();
  drawTimeline();
  drawPool();
  drawBatch();
}

export function paintAll() {
  measureWidth();
  draw();
  drawOverlay();
}
