// The pointer on the panels: click, drag, wheel.

import { GUTTER, edge, look, turnAt, valueAt, view, wide, zoom } from "./axis.js";
import { $ } from "./dom.js";
import { choose, go, save } from "./navigation.js";
import { refresh } from "./redraw.js";
import { followScroller, scrollRows } from "./rows.js";
import { turns } from "./run.js";
import { cursor } from "./selection.js";
import { hideTip, tip, under } from "./tip.js";

const STILL = 3; // pixels; what moves less is a click
const TALLEST = 60; // times the usual height of a row

export function listenToPointers() {
  for (const id of ["overview", "ruler", "timeline", "pool", "batch"]) listenOn(id);
  $("scroller").onscroll = followScroller;
}

function listenOn(id) {
  const canvas = $(id);
  let drag = null;
  canvas.onpointerdown = (event) => {
    canvas.setPointerCapture(event.pointerId);
    const { offsetX: x, offsetY: y } = event;
    drag = { x, y, from: view.from, top: view.top, moved: id === "overview" };
    dragged(id, event, drag);
  };
  canvas.onpointermove = (event) => {
    if (drag) dragged(id, event, drag);
    else if (id === "timeline") tip(event);
  };
  canvas.onpointerup = (event) => {
    if (drag && !drag.moved) clicked(id, event);
    drag = null;
    save();
  };
  canvas.onpointerleave = hideTip;
  canvas.addEventListener("wheel", (event) => turned(id, event), { passive: false });
}

function dragged(id, event, drag) {
  const half = (view.to - view.from) / 2;
  if (id === "ruler") {
    go(turnAt(valueAt(event.offsetX)), false);
    return;
  }
  if (id === "overview") {
    const middle = ((event.offsetX - GUTTER) / wide) * edge[turns];
    look(middle - half, middle + half);
    return;
  }
  const x = drag.x - event.offsetX;
  const y = drag.y - event.offsetY;
  drag.moved ||= Math.hypot(x, y) > STILL;
  if (drag.moved) {
    const from = drag.from + (x / wide) * half * 2;
    view.top = drag.top + y;
    look(from, from + half * 2);
  }
}

function clicked(id, { offsetX, offsetY }) {
  if (id === "timeline") choose(under(offsetX, offsetY));
  if (offsetX >= GUTTER) go(turnAt(valueAt(offsetX)), false);
}

function turned(id, event) {
  event.preventDefault();
  const { deltaX, deltaY, offsetX, shiftKey } = event;
  const by = (deltaX / wide) * (view.to - view.from);
  if (shiftKey) {
    view.tall = Math.min(view.tall * 1.002 ** -(deltaY || deltaX), TALLEST);
    refresh();
  } else if (id === "timeline" && offsetX < GUTTER) scrollRows(view.top + deltaY);
  else if (by) look(view.from + by, view.to + by);
  else zoom(1.0018 ** deltaY, id === "overview" ? edge[cursor] : valueAt(offsetX));
}
